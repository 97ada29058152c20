"""Rules of English that a script can hold, over the pages, the text in the package, and the names of tests.

    python -m tests.packaging.text_rules [PATH...]

prints each hit as FILE:LINE: RULE: TEXT, of all files or of those at and below the paths. Hits marked `(read)` are
often right: a person decides. Code in backticks and a link count as one word.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "fastdeploy_kvcache_v1"
WORDS_OF_PAGES, WORDS_OF_CHANGELOG = 20_000, 900
LINE, SENTENCE, TEST_NAME = 100, 30, 70

NEVER = re.compile(r"\b(whoever|nobody|somebody|anyone|everybody|whatever|theirs|as ever)\b", re.IGNORECASE)
OFTEN_WRONG = re.compile(r"\b(is none|are none|has not|have not|for so long|so moves|any more than)\b")
NO_SUBJECT = re.compile(r"(What|Who|Whose|Those|That one|One of|One that)\b")
GENERATED = re.compile(
    r"<!-- (?P<name>[^\n]*?): (?:begin|written by[^\n]*) -->.*?<!-- (?:(?P=name): end|end of (?P=name)) -->", re.DOTALL
)
CODE_BLOCK = re.compile(r"^ *```.*?^ *```$", re.DOTALL | re.MULTILINE)
ONE_WORD = re.compile(r"``[^`]+``|`[^`]+`|!?\[[^\]]*\]\([^)]*\)|https?://\S+|<!--.*?-->", re.DOTALL)
SENTENCES = re.compile(r"\S.*?(?:(?<!e\.g)(?<!i\.e)(?<!vs)[.!?][)\"']?(?=\s+[A-Z0-9\"'(*])|\Z)", re.DOTALL)
ITEM = re.compile(r"\s*(?:[-*]|\d+\.)\s+")
REFERENCE = re.compile(r"\[[^\]]*\]: ")
SPAN = re.compile(r"`([^`\n]+)`")
OF_A_RUN = ("dist/", "build/", "log/", "tmp/", "copies/")
SUFFIXES = ("py", "log", "pth", "md", "toml", "json", "txt", "h", "cc", "cu", "so", "svg", "html", "yaml")


class Hit(NamedTuple):
    path: Path
    line: int
    rule: str
    text: str
    certain: bool = True

    def __str__(self) -> str:
        text = self.text if len(self.text) <= 160 else f"{self.text[:157]}..."
        return f"{self.path.relative_to(ROOT)}:{self.line}: {self.rule}{'' if self.certain else ' (read)'}: {text}"


def pages() -> list[Path]:
    """Hand-written Markdown: pages that are generated as a whole are left out."""
    below = [path for name in ("docs", "tests", ".github") for path in (ROOT / name).rglob("*.md")]
    return sorted(path for path in [*ROOT.glob("*.md"), *below] if ROOT / "docs" / "reference" not in path.parents)


def written_by_hand(page: Path) -> str:
    """The page's text without its generated parts, whose lines stay as empty ones."""
    return GENERATED.sub(_empty_lines, page.read_text(encoding="utf-8"))


def _empty_lines(match: re.Match[str]) -> str:
    return "\n" * match.group().count("\n")


def words_of_pages() -> int:
    """As `wc -w` counts: docs, README and CONTRIBUTING without generated parts."""
    counted = [path for path in pages() if path.is_relative_to(ROOT / "docs")]
    counted += [path for path in (ROOT / "README.md", ROOT / "CONTRIBUTING.md") if path.exists()]
    return sum(len(written_by_hand(path).split()) for path in counted)


def hits(path: Path) -> Iterator[Hit]:
    if path.suffix == ".md":
        yield from _page(path)
    elif PACKAGE in path.parents:
        yield from _source(path)
    else:
        yield from _test_names(path)


def files() -> list[Path]:
    return [*pages(), *sorted(PACKAGE.rglob("*.py")), *sorted((ROOT / "tests").rglob("*.py"))]


def _page(path: Path) -> Iterator[Hit]:
    text = CODE_BLOCK.sub(_empty_lines, written_by_hand(path))
    for number, line in enumerate(text.splitlines(), 1):
        if len(line) > LINE and not _cannot_be_broken(line):
            yield Hit(path, number, f"line of {len(line)} characters, at most {LINE}", line)
    yield from _prose(path, 1, text)


def _cannot_be_broken(line: str) -> bool:
    """A row of a table of at most three columns, or a link alone."""
    if line.lstrip().startswith("|"):
        return len(re.findall(r"(?<!\\)\|", SPAN.sub("", line))) <= 4
    return " " not in REFERENCE.sub("", ONE_WORD.sub("X", ITEM.sub("", line)))


def _source(path: Path) -> Iterator[Hit]:
    source = path.read_text(encoding="utf-8")
    docstrings = set()
    others = [(token.start[0], token.string) for token in _tokens(source) if token.type == tokenize.COMMENT]
    for node in ast.walk(ast.parse(source)):  # a docstring comes before the string in it
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            docstrings.add(node.value)
            text = re.sub(rf"^ {{{node.col_offset}}}", "", node.value.value, flags=re.MULTILINE)
            yield from _prose(path, node.lineno, text)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in docstrings:
            others.append((node.lineno, node.value))
    for line, text in others:
        if " " in text and (word := NEVER.search(text)):
            yield Hit(path, line, f"word '{word.group()}'", text)


def _tokens(source: str) -> Iterator[tokenize.TokenInfo]:
    return tokenize.generate_tokens(io.StringIO(source).readline)


def _test_names(path: Path) -> Iterator[Hit]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_") and len(node.name) > TEST_NAME:
            yield Hit(path, node.lineno, f"test name of {len(node.name)} characters, at most {TEST_NAME}", node.name)


def _prose(path: Path, first: int, text: str) -> Iterator[Hit]:
    for number, paragraph in _paragraphs(text):
        for name in SPAN.findall(paragraph):
            if _is_stale(name):
                yield Hit(path, first + number, "stale name", name)
        plain = ONE_WORD.sub(lambda match: f"X{_empty_lines(match)}", paragraph)
        for match in SENTENCES.finditer(plain):
            sentence = " ".join(match.group().split())
            line = first + number + plain.count("\n", 0, match.start())
            if (count := len(sentence.split())) > SENTENCE:
                yield Hit(path, line, f"sentence of {count} words, at most {SENTENCE}", sentence)
            if word := NEVER.search(sentence):
                yield Hit(path, line, f"word '{word.group()}'", sentence)
            if word := OFTEN_WRONG.search(sentence):
                yield Hit(path, line, f"idiom '{word.group()}'", sentence, certain=False)
            if (word := NO_SUBJECT.match(sentence)) and not sentence.endswith("?"):
                yield Hit(path, line, f"subject '{word.group()}'", sentence, certain=False)


def _paragraphs(text: str) -> Iterator[tuple[int, str]]:
    """Each paragraph, item of a list and cell of a table, without code blocks, and the number of its line from 0."""
    lines: list[str] = []
    start, indented, listed = 0, False, False
    for number, line in enumerate([*text.splitlines(), ""]):
        item = ITEM.match(line)
        empty = not line.strip() or line.startswith(("#", "<"))
        indented = line.startswith("    ") and not listed and (indented or not lines)
        row = line.strip() if line.lstrip().startswith("|") else ""
        if lines and (empty or indented or item or row):
            yield start, "\n".join(lines)
            lines = []
        if row:
            yield from ((number, cell.strip()) for cell in row.strip("|").split("|"))
        elif not (empty or indented):
            start = start if lines else number
            listed = bool(item) or (listed and line.startswith(" "))
            lines.append(line[item.end() :] if item else line)


@cache
def _folders() -> str:
    names = ("fastdeploy_kvcache_v1", "tests", "docs", "patches", "benchmarks", "custom_ops", "scripts", "locks")
    below = [path for name in names for path in [ROOT / name, *(ROOT / name).rglob("*")] if path.is_dir()]
    return "".join(f"/{path.relative_to(ROOT)}/\n" for path in below)


@cache
def _modules() -> dict[str, str]:
    """By name: the text of each module of the package, and of each folder with the names of its files."""
    texts: dict[str, str] = {}
    for path in PACKAGE.rglob("*.py"):
        texts[path.stem] = texts.get(path.stem, "") + path.read_text(encoding="utf-8")
        folder = path.parent.name
        texts[folder] = f"{texts.get(folder, '')} {path.stem} {path.parent.parent.name}"
        if path.stem == "__init__":
            texts[folder] += path.read_text(encoding="utf-8")
    return texts


def _is_stale(name: str) -> bool:
    """A folder (`name/`), or a name in a module (`module.name`), that is not there."""
    if re.fullmatch(r"[\w-]+(/[\w-]+)*/", name):
        return name not in OF_A_RUN and f"/{name}\n" not in _folders()
    match = re.fullmatch(r"(\w+)\.(\w+)(?:\(\))?", name)
    if match is None or match[2] in SUFFIXES or match[1] not in _modules():
        return False
    return not re.search(rf"\b{match[2]}\b", _modules()[match[1]])


def main(arguments: list[str]) -> int:
    chosen = [Path(each).resolve() for each in arguments] or [ROOT]
    found = [hit for path in files() if any(each in (path, *path.parents) for each in chosen) for hit in hits(path)]
    print(*found, sep="\n")
    print(f"{sum(hit.certain for hit in found)} hits, {sum(not hit.certain for hit in found)} to read;", end=" ")
    print(f"{words_of_pages()} words of pages (at most {WORDS_OF_PAGES}),", end=" ")
    print(f"{len(written_by_hand(ROOT / 'CHANGELOG.md').split())} of CHANGELOG.md ({WORDS_OF_CHANGELOG})")
    return any(hit.certain for hit in found)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
