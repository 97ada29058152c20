"""The text keeps the rules that a script can hold, and the script finds what breaks each of them and nothing else."""

from pathlib import Path

import pytest

from . import text_rules
from .text_rules import PACKAGE, ROOT, WORDS_OF_CHANGELOG, WORDS_OF_PAGES, files, hits, words_of_pages, written_by_hand

NOT_YET = {
    "fastdeploy_kvcache_v1/fastdeploy_integration/disaggregation",
    "fastdeploy_kvcache_v1/fastdeploy_integration/engine",
    "fastdeploy_kvcache_v1/storage",
    "fastdeploy_kvcache_v1/transfer",
    "tests/fastdeploy_integration",
}
"""Pages and folders that break a rule today. An entry goes when its last hit goes; none is added."""


@pytest.fixture(scope="module")
def by_file() -> dict[Path, list[str]]:
    return {path: [str(hit) for hit in hits(path) if hit.certain] for path in files()}


def test_text_outside_the_list_keeps_every_rule(by_file):
    exempt = {ROOT / name for name in NOT_YET}
    held = [path for path in by_file if exempt.isdisjoint((path, *path.parents))]
    assert len(held) > 50
    assert [hit for path in held for hit in by_file[path]] == []


@pytest.mark.parametrize("name", sorted(NOT_YET))
def test_place_on_the_list_still_breaks_a_rule(name, by_file):
    below = [path for path in by_file if ROOT / name in (path, *path.parents)]
    assert any(map(by_file.get, below)), f"{name} keeps every rule: take it off the list"


def test_pages_have_at_most_as_many_words_as_people_read():
    assert words_of_pages() <= WORDS_OF_PAGES


def test_changelog_has_at_most_as_many_words_as_people_read():
    assert len(written_by_hand(ROOT / "CHANGELOG.md").split()) <= WORDS_OF_CHANGELOG


LONG = " ".join(["word"] * 31)


@pytest.fixture
def page(tmp_path, monkeypatch):
    """The certain hits in a page of this text: their lines and rules."""
    text_rules._folders()  # cached: of the repository, not of the folder that takes its place
    monkeypatch.setattr(text_rules, "ROOT", tmp_path)

    def found(text: str) -> list[tuple[int, str]]:
        path = tmp_path / "page.md"
        path.write_text(text)
        return [(hit.line, hit.rule.split(",")[0]) for hit in hits(path) if hit.certain]

    return found


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("x" * 50 + " " + "y" * 50, [(1, "line of 101 characters")]),
        (f"# Title\n\nShort. W{LONG[1:90]}\n{LONG[90:]}.", [(3, "sentence of 31 words")]),
        (f"- Short.\n- {LONG[:95]}\n  {LONG[95:]}", [(2, "sentence of 31 words")]),
        (f"| a | b |\n|---|---|\n| Short. | {LONG} |", [(3, "sentence of 31 words")]),
        ("First.\nWhoever looks\nat it.", [(2, "word 'Whoever'")]),
        ("- One.\n\n    Whoever reads.", [(3, "word 'Whoever'")]),
        ("One `scheduler/nowhere/` here.", [(1, "stale name")]),
        ("One `cache_manager.no_such_name()` here.", [(1, "stale name")]),
        ("| a | b | c | d |\n" + "| " + "x" * 90 + " | b | c | d |", [(2, "line of 106 characters")]),
    ],
)
def test_page_that_breaks_a_rule_is_found_with_its_line(page, text, expected):
    assert page(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        f"```\n{LONG} whatever\n```",
        f"Run:\n\n    {LONG[:95]}\n    {LONG[95:]} whatever\n",
        f"{LONG[:90]} e.g.\n`CUDA` {LONG[:30]}.".replace("word word word word word word", "word", 2),
        f"{LONG[:80]} `one word of code`\n[and one\nlink](page.md) {LONG[:50]}",
        f"<!-- table: written by ./scripts/docs-tables -->\n{LONG}\n<!-- end of table -->",
        f"<!-- table: begin -->\n{LONG}\n<!-- table: end -->",
        "| a | `b|c` | c |\n" + "| " + "x" * 90 + r" | `b|c` \| d | c |",
        f"{LONG[:95]}\n| a | b |\n{LONG[:95]}",
        f"1. Table:\n\n   | {LONG[:65]} | {LONG[:65]} |",
        "- [" + "x" * 60 + "](" + "y" * 60 + ")",
        "[name]: https://" + "x" * 90,
        "`worker/cuda/`, `dist/`, `cache_manager.CacheManager`",
        "`router.log`, `block_pool.py`, `numpy.nowhere`",
        "[Nobody](page.md) and `whatever`",
    ],
)
def test_page_that_keeps_the_rules_has_no_hit(page, text):
    assert page(text) == []


def test_texts_and_test_names_are_found_with_their_lines(tmp_path, monkeypatch):
    monkeypatch.setattr(text_rules, "ROOT", tmp_path)
    monkeypatch.setattr(text_rules, "PACKAGE", tmp_path / "package")
    (tmp_path / "package").mkdir()
    module, test = tmp_path / "package" / "module.py", tmp_path / "test_module.py"
    docstring = f'"""Nobody.\n\n    whatever code\n\nWord {LONG}.\n"""\n'
    module.write_text(f'x = 1  # whoever\n\n{docstring}y = "theirs"\nz = f"of {{y}} theirs"\n')
    test.write_text(f"def test_{'x' * 65}(): ...\ndef test_{'x' * 66}(): ...\n")
    found = sorted((hit.line, hit.rule.split(",")[0]) for path in (module, test) for hit in hits(path))
    assert found == [
        (1, "word 'whoever'"),
        (2, "test name of 71 characters"),
        (3, "word 'Nobody'"),
        (7, "sentence of 32 words"),
        (10, "word 'theirs'"),
    ]


def test_rules_print_each_hit_and_fail_for_the_certain_ones(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(text_rules, "ROOT", tmp_path)
    for name in ("README.md", "CHANGELOG.md"):
        (tmp_path / name).write_text("What is short is good.\n")
    assert text_rules.main([]) == 0
    (tmp_path / "README.md").write_text("Nobody reads it.\n")
    assert text_rules.main([str(tmp_path / "README.md")]) == 1
    printed = capsys.readouterr().out
    assert "CHANGELOG.md:1: subject 'What' (read): What is short is good." in printed
    assert "README.md:1: word 'Nobody': Nobody reads it." in printed
    assert "1 hits, 0 to read; 3 words of pages (at most 20000), 5 of CHANGELOG.md (900)" in printed


def test_package_is_read():
    assert PACKAGE / "scheduler" / "cache_manager.py" in files()
