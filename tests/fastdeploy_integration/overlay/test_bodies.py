"""A changed body of a FAKE FastDeploy is found by its digests, with the place; what no program sees is no change."""

import pytest

from fastdeploy_kvcache_v1.errors import OverlayError
from fastdeploy_kvcache_v1.fastdeploy_integration.checks import body_findings
from fastdeploy_kvcache_v1.fastdeploy_integration.overlay import bodies, overlay
from fastdeploy_kvcache_v1.fastdeploy_integration.overlay.overlay import Overlay
from fastdeploy_kvcache_v1.fastdeploy_integration.overlay.release import FastDeployTree
from fastdeploy_kvcache_v1.fastdeploy_integration.overlay.table import Body, load_table
from tests.fastdeploy_integration import fake_fastdeploy

BODY = '''
    class Kinds:
        FIRST = 1
        SECOND = 2

    class Engine:
        def schedule(self, tasks=(), *, most: int = 4):
            """Which tasks run."""
            batch = []
            for task in tasks:
                if task.fits(f"{most}%"):
                    batch.append(task)
                else:
                    task.wait()
            try:
                self.send(batch)
            except OSError as error:
                llm_logger.warning("lost %s", error)
                raise
            return batch, [lambda: most]
'''
SCHEDULE, KINDS = "fakehost.engine:Engine.schedule", "fakehost.engine:Kinds"
OF_EVERY_PYTHON = "c159 8b2d 4711 c245 f9e5 7193 c280 c406 3f0d 3719 76f1 7ca9 c1af"


def tree(directory, engine=BODY):
    return fake_fastdeploy.write(directory, "fakehost", engine=engine)


def digests(root, target=SCHEDULE, **given):
    return " ".join(each.digest for each in bodies.statements_of(root, Body(target, "a test", **given)))


def table(directory, *more):
    row = fake_fastdeploy.row("fakehost", "Engine", "wrap_schedule", signature="value")
    relied_on = [{"target": SCHEDULE, "why": "a test"}, {"target": KINDS, "why": "a test", "must_hold": True}]
    return load_table(fake_fastdeploy.write_table(directory, [row, *more], bodies=relied_on))


@pytest.fixture
def known(tmp_path, monkeypatch):
    """What was written of the tree as it is above."""
    monkeypatch.setattr(bodies, "table_directory", lambda: tmp_path)
    (tmp_path / "old").mkdir()
    text = bodies.to_toml(tree(tmp_path / "old"), table(tmp_path), {})
    (tmp_path / "bodies-9.1.toml").write_text(text, encoding="utf-8")
    return bodies.known_digests("9.1")


def test_digests_are_those_of_every_python(tmp_path):
    assert digests(tree(tmp_path)) == OF_EVERY_PYTHON


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("batch = []", "batch = []  # a comment"),
        ('"""Which tasks run."""', '"""Which tasks run, and why."""'),
        ("most: int = 4", "most: float = 4"),
        ("tasks=(), *", "tasks=(),\n                *"),
        ('llm_logger.warning("lost %s", error)', 'llm_logger.error("gone %s", error)'),
        ("            for task", "\n\n            for task"),
    ],
)
def test_what_no_program_sees_is_no_change(tmp_path, old, new):
    assert old in BODY
    assert digests(tree(tmp_path, BODY.replace(old, new))) == OF_EVERY_PYTHON


@pytest.mark.parametrize(
    ("old", "new", "line", "how"),
    [
        ("batch", "tasks_now", 9, "1 new of 13 statements), and in 3 more places"),
        ("most: int = 4", "most: int = 5", 7, "1 new of 13 statements)"),
        ("task.wait()", "task.wait(1)", 14, "1 new of 13 statements)"),
        ("                else:\n    ", "", 13, "1 new of 12 statements)"),
        ("except OSError", "except ValueError", 17, "1 new of 13 statements)"),
        ("    batch.append(task)", "    pass", 12, "1 new of 13 statements)"),
        ("[lambda: most]", "[lambda: -most]", 20, "1 new of 13 statements)"),
        ('f"{most}%"', 'f"{most:>3}%"', 11, "1 new of 13 statements)"),
        ("                raise\n", "", 19, "1 gone of 12 statements)"),
    ],
)
def test_a_changed_body_is_named_with_the_place(tmp_path, known, old, new, line, how):
    assert old in BODY
    (change,) = bodies.changes(tree(tmp_path, BODY.replace(old, new)), table(tmp_path), known)
    assert change[:3] == (SCHEDULE, False, f"changed at line {line} ({how}")


def test_bodies_that_are_as_they_were_gone_or_unknown(tmp_path, known):
    gone = fake_fastdeploy.row("fakehost", "Engine.gone", "wrap_schedule", signature="()")
    for more, expected in (([], []), ([gone], []), ([gone | {"kind": "replace"}], [gone["target"]])):
        found = bodies.changes(tmp_path / "old" / "fakehost", table(tmp_path, *more), known)
        assert [each.target for each in found] == expected, "what is replaced is watched, too"
    root = tree(tmp_path, "class Kinds:\n    FIRST = 1\n    SECOND = 3\n")
    assert [str(each) for each in bodies.changes(root, table(tmp_path), known)] == [
        f"{SCHEDULE}: missing",
        f"{KINDS}: changed at line 3 (1 new of 3 statements)",
    ]
    (unknown, _) = bodies.changes(root, table(tmp_path), {})
    assert "its digests are missing" in unknown.where
    with pytest.raises(OverlayError, match=f"{SCHEDULE} is missing: correct the table first"):
        bodies.to_toml(root, table(tmp_path), {})


def test_point_releases_share_a_table_and_each_may_have_bodies_of_its_own(tmp_path, known):
    olds, news = tmp_path / "old" / "fakehost", tree(tmp_path, BODY.replace("task.wait()", "task.wait(1)"))
    for _ in range(2):  # once more says nothing new
        text = bodies.to_toml(news, table(tmp_path), bodies.known_digests("9.1"))
        (tmp_path / "bodies-9.1.toml").write_text(text, encoding="utf-8")
    both = bodies.known_digests("9.1")
    assert both[SCHEDULE] == f"{digests(olds)} | {digests(news)}"
    assert both[KINDS] == known[KINDS]
    assert [bodies.changes(root, table(tmp_path), both) for root in (olds, news)] == [[], []]
    (tmp_path / "later").mkdir()
    later = tree(tmp_path / "later", BODY.replace("task.wait()", "task.wait(2)"))
    assert [each.where for each in bodies.changes(later, table(tmp_path), both)] == [
        "changed at line 14 (1 new of 13 statements)"
    ]


@pytest.mark.parametrize("content", [None, "[bodies", "[other]"])
def test_a_release_without_digests_says_how_to_write_them(tmp_path, monkeypatch, content):
    monkeypatch.setattr(bodies, "table_directory", lambda: tmp_path)
    if content is not None:
        (tmp_path / "bodies-9.1.toml").write_text(content, encoding="utf-8")
    with pytest.raises(
        OverlayError, match=r"bodies-9\.1\.toml: .*: write it with `fastdeploy-kvcache doctor --write-bod"
    ):
        bodies.known_digests("9.1")


def test_a_start_warns_once_of_changed_bodies_and_refuses_some(tmp_path, known, monkeypatch, caplog):
    host = Overlay(table(tmp_path), tree(tmp_path, BODY.replace("task.wait()", "task.wait(1)")))
    monkeypatch.setattr(overlay.wrapt, "register_post_import_hook", lambda *_: None)
    host.start()
    assert host.num_changed_bodies == 1
    assert [each.replace(str(host._root), "ROOT") for each in caplog.messages] == [
        "changed functions: FastDeploy at ROOT differs from the 9.1 (abc) of the patch table in 1: "
        "`fastdeploy-kvcache doctor` names them"
    ]
    (tmp_path / "worse").mkdir()
    host = Overlay(table(tmp_path), tree(tmp_path / "worse", BODY.replace("SECOND = 2", "SECOND = 3")))
    told = rf"^changed functions: .* differs from the 9\.1.*{KINDS}: changed at line 4"
    with pytest.raises(OverlayError, match=told):
        host.start()
    accepts = f"{overlay.UNKNOWN_BODIES}={bodies.acceptance(host.changed_bodies())}"
    findings = body_findings(host, FastDeployTree(tmp_path / "worse", "9.1"))
    (found,) = (each for each in findings if each.ok is None)
    assert str(found).startswith(f"   -  bodies that must hold: {accepts} starts a server with these 1")
    monkeypatch.setenv(*accepts.split("="))
    host.start()
    assert len(caplog.messages) == 2
    (tmp_path / "other").mkdir()
    host = Overlay(table(tmp_path), tree(tmp_path / "other", BODY.replace("SECOND = 2", "SECOND = 4")))
    accepts = f"{overlay.UNKNOWN_BODIES}={bodies.acceptance(host.changed_bodies())}"
    with pytest.raises(OverlayError, match=f"{accepts} starts"):  # who accepts one change has not accepted another
        host.start()


@pytest.mark.parametrize(
    ("new", "is_change"),
    [("batch = list(tasks)", False), ("batch: list = []", False), ("batch = last = []", True), ("batch += []", True)],
)
def test_what_a_local_that_may_change_is_assigned_is_no_change(tmp_path, new, is_change):
    (tmp_path / "old").mkdir()
    before = digests(tree(tmp_path / "old"), may_change=("batch",))
    after = tree(tmp_path, BODY.replace("batch = []", new))
    assert digests(tmp_path / "old" / "fakehost") == OF_EVERY_PYTHON
    assert (digests(after, may_change=("batch",)) != before) == is_change


def test_the_difference_of_two_trees_is_shown_in_words(tmp_path, known):
    new = tree(tmp_path, BODY.replace("task.wait()", "task.wait(1)").replace("batch = []", "batch = []  # now"))
    lines = bodies.difference_in_words(tmp_path / "old" / "fakehost", new, SCHEDULE)
    assert [line.strip() for line in lines[3:]] == [
        "else:",
        "-            task.wait()",
        "+            task.wait(1)",
        "try:",
    ]
    assert bodies.difference_in_words(tmp_path / "old" / "fakehost", new, KINDS) == []


def test_members_that_fastdeploys_engine_takes_of_its_cache_manager(tmp_path):
    root = tree(tmp_path)
    (root / "output").mkdir()
    takes = "self.cache_manager.recycle_gpu_blocks([1])\nself.cache_manager.new_member\n"
    (root / "output" / "processor.py").write_text(takes, encoding="utf-8")
    assert bodies.members_lacking(root) == ["new_member"]
