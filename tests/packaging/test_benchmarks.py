"""Benchmarks: every program works, every result says how it was measured, and the page shows both.

Ages of results depend on the commit from which they are looked at. So the page is compared without them, and with them
only where git knows the commit that the page names.
"""

import ast
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from fastdeploy_kvcache_v1.worker.ops import copies
from tests.lab.model.model_dirs import BASE, random_tensors, write_model

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "benchmarks"
sys.path.insert(0, str(FOLDER))
import _support  # noqa: E402
import programs  # noqa: E402
import rows  # noqa: E402
import run as bench  # noqa: E402
import tables  # noqa: E402

sys.path.remove(str(FOLDER))

FACTS = {"benchmark", "command", "when", "commit", "clean", "machine", "load"}
HAND_WRITTEN_WORDS = 500


def hand_written(text):
    return text.partition(tables.BEGIN)[0] + text.partition(tables.END)[2]


def test_every_file_is_a_known_benchmark_or_a_helper():
    files = {path.stem for path in FOLDER.glob("*.py")}
    assert files == programs.PROGRAMS.keys() | programs.HELPERS
    assert not programs.PROGRAMS.keys() & programs.HELPERS


def test_measured_paths_exist():
    measured = (path for program in programs.PROGRAMS.values() for path in program.measures)
    paths = {path.removeprefix(":(exclude)") for path in measured}
    assert [path for path in sorted(paths) if not (ROOT / path).exists()] == []


@pytest.mark.parametrize("program", programs.PROGRAMS.values(), ids=lambda program: program.name)
def test_a_docstring_begins_with_two_sentences_at_most(program):
    text = program.about()
    assert 1 <= len(re.findall(r"[.](?: |$)", text)) <= 2, text


def test_every_result_states_how_it_was_measured():
    results = {path.stem: json.loads(path.read_text()) for path in _support.RESULTS.glob("*.json")}
    keeping = {program.name for program in programs.PROGRAMS.values() if program.keeps}
    assert results.keys() <= keeping == rows.ROWS.keys()
    assert {name: FACTS - result.keys() for name, result in results.items() if FACTS - result.keys()} == {}
    assert [name for name, result in results.items() if result["benchmark"] != name] == []


def test_the_page_is_written_from_the_results():
    text = tables.PAGE.read_text()
    (until,) = tables.AS_OF.findall(text)
    assert tables.without_ages(text) == tables.without_ages(tables.page(text, until, ages=False))


@pytest.mark.process
def test_the_page_has_the_ages_of_the_commit_that_it_names():
    text = tables.PAGE.read_text()
    (until,) = tables.AS_OF.findall(text)
    if _support.git("merge-base", "--is-ancestor", until, "HEAD") is None:
        pytest.skip(f"the history has no commit {until}: ./scripts/bench writes the page for HEAD")
    assert text == tables.page(text, until)


def test_the_page_has_at_most_500_hand_written_words():
    assert len(hand_written(tables.PAGE.read_text()).split()) <= HAND_WRITTEN_WORDS


def test_the_page_names_the_public_trace_and_its_checksum():
    text = hand_written(tables.PAGE.read_text())
    assert _support.PUBLIC_TRACE_SHA256 in text
    assert _support.PUBLIC_TRACE.rpartition("/")[2] in text


@pytest.mark.parametrize(
    ("target", "number", "met"),
    [
        (rows.at_most(1.1), 1.1, True),
        (rows.at_most(1.1), 1.18, False),
        (rows.below(1.2), 1.2, False),
        (rows.at_least(0.9), 0.79, False),
        (rows.at_least(0.95, "%"), 0.946, False),
    ],
)
def test_a_missed_target_is_marked(target, number, met):
    row = str(rows.Row("what", "value", number, target))
    assert row == f"| what | value | {target}: {'met' if met else '**missed**'} |"


def test_a_device_tier_that_fastdeploy_cannot_have_is_marked():
    marked = [rows.TOO_LARGE in str(rows.Row("what", "value", device_blocks=size)) for size in (40_000, 40_001)]
    assert marked == [False, True]


@pytest.mark.parametrize(
    ("clean", "before", "after", "marks"),
    [
        (True, 0.4, 2.0, []),
        (False, 0.4, 2.0, ["dirty tree"]),
        (True, 1.1, 1.1, ["busy machine"]),
        (True, None, 2.0, []),
        (True, None, 2.1, ["busy machine"]),
        (None, None, None, ["unknown whether the tree was clean", "unknown load"]),
    ],
)
def test_a_result_is_marked_by_its_tree_and_its_load(clean, before, after, marks):
    result = {"clean": clean, "load": {"before": before, "after": after}, "machine": {"cores": 2}}
    assert programs.other_marks(result) == marks


# ---- refusals


class Machine:
    """Stands for git and the load average of this machine."""

    def __init__(self, monkeypatch, tmp_path):
        self.changes, self.load = "", 0.5
        monkeypatch.setattr(_support, "git", lambda *words, **_: self.changes if words[0] == "status" else "0" * 40)
        monkeypatch.setattr(_support.os, "getloadavg", lambda: (self.load, 0, 0))
        monkeypatch.setattr(_support, "QUICK", False)
        monkeypatch.setattr(_support, "RESULTS", tmp_path)
        self._argv = lambda name, *words: monkeypatch.setattr(sys, "argv", [str(FOLDER / f"{name}.py"), *words])

    def begin(self, *words, program="hashing"):
        self._argv(program, *words)
        return _support.begin()


@pytest.fixture
def machine(monkeypatch, tmp_path):
    return Machine(monkeypatch, tmp_path)


def test_a_changed_tree_is_refused_with_the_remedy(machine):
    machine.changes = " M benchmarks/hashing.py"
    with pytest.raises(SystemExit, match=r"^error: .*\(benchmarks/hashing.py\): commit or stash .* --anyway"):
        machine.begin()


def test_a_busy_machine_is_refused_with_the_remedy(machine):
    machine.load = 1.01
    with pytest.raises(SystemExit, match=r"^error: the load average is 1.01, expected at most 1: wait, .* --anyway"):
        machine.begin()


def test_a_busy_machine_runs_what_times_nothing(machine, tmp_path):
    machine.load = 3.0
    machine.begin(program="hits").save({})
    result = json.loads((tmp_path / "hits.json").read_text())
    assert (result["load"], programs.other_marks(result)) == (None, [])


def test_anyway_runs_and_its_result_is_marked(machine, tmp_path):
    machine.changes, machine.load = " M benchmarks/hashing.py", 3.0
    machine.begin("--anyway").save({"prompt_ms": 1.23456})
    result = json.loads((tmp_path / "hashing.json").read_text())
    assert result.keys() == FACTS | {"prompt_ms"}
    assert result["command"] == "./scripts/bench hashing --anyway"
    assert (result["clean"], result["load"]["before"], result["prompt_ms"]) == (False, 3.0, 1.235)
    assert programs.other_marks(result) == ["dirty tree", "busy machine"]


def test_a_quiet_run_in_a_clean_tree_has_no_marks(machine, tmp_path):
    machine.begin().save({})
    result = json.loads((tmp_path / "hashing.json").read_text())
    assert (result["commit"], result["clean"]) == ("0" * 40, True)
    assert programs.other_marks(result) == []


def test_an_unknown_benchmark_is_an_error_that_names_the_list(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["run.py", "hash"])
    assert bench.main() == 2
    assert capsys.readouterr().err == "error: no benchmark named hash: ./scripts/bench --list names them\n"


# ---- ages


@pytest.fixture
def history(tmp_path):
    """A repository of three commits, of which the last changes `a/x.py`, and a git command in it."""

    def git(*words):
        names = ("-c", "user.name=n", "-c", "user.email=e@x")
        done = subprocess.run(["git", "-C", tmp_path, *names, *words], capture_output=True, text=True, check=True)
        return done.stdout.strip()

    git("init", "-q")
    for number, name in enumerate(("a/x.py", "b/y.py", "a/x.py")):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(str(number))
        git("add", ".")
        git("commit", "-qm", str(number))
    return git


@pytest.mark.process
def test_files_changed_since_a_commit_are_those_measured(history, tmp_path):
    first, second, third = history("rev-list", "--reverse", "HEAD").split()
    asked = [(first, ["a"]), (first, ["b", "a"]), (second, ["b"]), (third, ["a", "b"])]
    found = [programs.changed_since(commit, paths, root=tmp_path) for commit, paths in asked]
    assert found == [["a/x.py"], ["a/x.py", "b/y.py"], [], []]
    assert programs.changed_since(first, ["a"], until=second, root=tmp_path) == []


@pytest.mark.process
@pytest.mark.parametrize(
    ("was", "now", "is_older"),
    [
        ('"""Doc."""\nx = 1\n"""Of x."""', 'x = 1  # why\n"""Of it."""\n"""Doc."""', True),
        ('"""Doc."""\nx = 1\n"""Of x."""', '"""Another."""\n\nx = 1  # why\n"""Of it."""', False),
        ('x = "text"', 'x = "another"', True),
        ("x = 1", "x = ", True),
    ],
)
def test_a_file_has_changed_in_more_than_its_texts(history, tmp_path, was, now, is_older):
    for text in (was, now):
        (tmp_path / "a/x.py").write_text(text)
        history("commit", "-qam", text)
    assert programs.changed_since(history("rev-parse", "HEAD~1"), ["a"], root=tmp_path) == ["a/x.py"] * is_older


@pytest.mark.process
def test_a_commit_outside_the_history_is_unknown(history, tmp_path):
    second = history("rev-parse", "HEAD~1")
    aside = history("commit-tree", "HEAD^{tree}", "-m", "aside")
    assert [programs.changed_since(each, ["a"], root=tmp_path) for each in (None, "0" * 40, aside)] == [None] * 3
    shallow = tmp_path / "shallow"
    history("clone", "-q", "--depth", "1", f"file://{tmp_path}", str(shallow))
    assert programs.changed_since(second, ["a"], root=shallow) is None


@pytest.mark.process
def test_a_tree_without_git_has_no_commits(tmp_path):
    assert programs.changed_since("0" * 40, ["a"], root=tmp_path) is None


# ---- every program, at tiny sizes


SPECIAL = {"overlay_scheduler": "needs a FastDeploy checkout", "copy_gpu": "needs the report of a GPU"}
"""Programs that cannot run here, and the reason. They are compiled only."""

MOONCAKE = {"storage_mooncake", "transfer"}


def arguments(name, tmp_path):
    if name == "against":
        return [str(ROOT)]
    if name == "peers":
        return ["--only", "ours"]
    if name == "peers_store":
        return [str(tmp_path), "--only", "ours"]
    if name == "cpu_model":
        return [str(write_model(tmp_path / "model", random_tensors(BASE), BASE))]
    return [str(tmp_path)] if name in ("storage", "storage_large") else []


@pytest.mark.process
@pytest.mark.parametrize("name", sorted(programs.PROGRAMS.keys() - SPECIAL.keys()))
def test_every_benchmark_runs_at_tiny_sizes_and_gives_rows(name, tmp_path):
    if name in MOONCAKE:
        pytest.importorskip("mooncake.engine")
    if name == "copy_ops" and copies.library() is None:
        pytest.skip("the copies in C are not built")
    command = [sys.executable, FOLDER / f"{name}.py", *arguments(name, tmp_path), "--quick", "--results", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=300)
    assert done.returncode == 0, done.stderr
    if programs.PROGRAMS[name].keeps:
        result = json.loads((tmp_path / f"{name}.json").read_text())
        assert all(table.rows for table in rows.tables_of(name, result))


@pytest.mark.parametrize("name", SPECIAL)
def test_a_benchmark_that_cannot_run_here_still_compiles(name):
    ast.parse(programs.PROGRAMS[name].file.read_text())
