"""Find changes in the bodies of FastDeploy's functions that our code relies on, which signatures do not show.

`patches/bodies-RELEASE.toml` has a digest of each of their statements in the table's release. Comments, formatting,
docstrings, annotations and calls of a logger are left out. Digests are equal under every supported Python.
"""

from __future__ import annotations

import ast
import copy
import difflib
import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from ...errors import OverlayError
from .source import find_node
from .table import Body, Kind, PatchTable, read_toml, table_directory

FILE = "bodies-{release}.toml"
IGNORED_FIELDS = {"annotation", "returns", "type_comment", "ctx", "kind", "decorator_list"}
LOGGERS = ("logger", "log")

OURS = ("adapter.py", "patches.py")
HOSTS = ("engine", "output", "splitwise")
V0_ONLY = frozenset({"free_block_ids_async", "release_block_ids_async", "request_block_ids"})
"""Members of FastDeploy's cache manager that only the V0 scheduler uses, which is refused."""

Digests = Mapping[str, str]
"""By target: digests of its statements, four hexadecimal digits each, separated by spaces. Other bodies that fit too
(of point releases) follow after `OR`, the newest last.
"""
OR = " | "


class Statement(NamedTuple):
    digest: str
    line: int


class Change(NamedTuple):
    """A body that differs from the known one."""

    target: str
    must_hold: bool
    """Our code replaces or copies the body: a server must not start with a changed one."""
    where: str
    digests: str
    """Of its present statements; empty if it is missing."""

    def __str__(self) -> str:
        return f"{self.target}: {self.where}"


def acceptance(changes: Iterable[Change]) -> str:
    """The value of `UNKNOWN_BODIES` that accepts exactly these changes."""
    text = "".join(sorted(f"{each.target} {each.digests}\n" for each in changes))
    return hashlib.blake2s(text.encode(), digest_size=4).hexdigest()


def watched(table: PatchTable) -> Mapping[str, Body]:
    """By target: the bodies that the table names, and the functions that it replaces."""
    replaced = [row for row in table.rows if row.kind is Kind.REPLACE and "." in row.qualname]
    return {**{row.target: Body(row.target, row.why, must_hold=True) for row in replaced}, **table.bodies}


def digests_file(release: str) -> Path:
    return table_directory() / FILE.format(release=release)


def known_digests(release: str) -> Digests:
    """Digests of the tree of `release`. Raises `OverlayError` without the file."""
    path = digests_file(release)
    try:
        known: dict[str, str] = read_toml(path)["bodies"]
    except (OSError, ValueError, KeyError) as error:
        raise OverlayError(f"{path.name}: {error}: write it with `fastdeploy-kvcache doctor --write-bodies`") from error
    return known


def changes(root: Path, table: PatchTable, known: Digests) -> list[Change]:
    found = []
    for body in watched(table).values():
        statements = statements_of(root, body)
        if (where := _difference(statements, known.get(body.target))) is not None:
            digests = " ".join(each.digest for each in statements or ())
            found.append(Change(body.target, body.must_hold, where, digests))
    return found


def _difference(statements: list[Statement] | None, known: str | None) -> str | None:
    if known is None:
        return "its digests are missing: write them with `fastdeploy-kvcache doctor --write-bodies`"
    if statements is None:
        return "missing"
    new, bodies = [each.digest for each in statements], known.split(OR)
    if " ".join(new) in bodies:
        return None
    old = bodies[-1].split()
    matcher = difflib.SequenceMatcher(a=old, b=new, autojunk=False)
    blocks = [block for block in matcher.get_opcodes() if block[0] != "equal"]
    _, first_old, end_old, first, end = blocks[0]
    at = statements[min(first, len(statements) - 1)].line
    what = f"{end - first} new" if end > first else f"{end_old - first_old} gone"
    more = f", and in {len(blocks) - 1} more places" if len(blocks) > 1 else ""
    return f"changed at line {at} ({what} of {len(new)} statements){more}"


def to_toml(root: Path, table: PatchTable, known: Digests) -> str:
    """Text of the digests file, with the `known` alternatives. Raises `OverlayError` for a missing body."""
    lines = [f"# Bodies of FastDeploy {table.release} ({table.commit}) that we rely on: a digest of each statement."]
    lines += ["# Written by `fastdeploy-kvcache doctor --source DIR --write-bodies`; docs/develop/porting.md."]
    lines += ["", "[bodies]"]
    for target, body in watched(table).items():
        statements = statements_of(root, body)
        if statements is None:
            raise OverlayError(f"{target} is missing: correct the table first")
        new = " ".join(each.digest for each in statements)
        bodies = [body for body in known.get(target, new).split(OR) if body != new]
        lines.append(f'"{target}" = "{OR.join([*bodies, new])}"')
    return "\n".join([*lines, ""])


def difference_in_words(old: Path, new: Path, target: str) -> list[str]:
    """A unified diff of one body in two trees, without the parts that digests leave out."""
    nodes = _node(old, target), _node(new, target)
    before, after = ([] if node is None else _bare_text(node).splitlines() for node in nodes)
    return list(difflib.unified_diff(before, after, "old", "new", lineterm="", n=1))


def _bare_text(node: ast.stmt) -> str:
    return ast.unparse(_Bare().visit(copy.deepcopy(node)))


def statements_of(root: Path, body: Body) -> list[Statement] | None:
    """Statements of a function or class in the FastDeploy at `root`; None if it is missing."""
    node = _node(root, body.target)
    return None if node is None else list(_statements([node], 0, body.may_change))


def _node(root: Path, target: str) -> ast.stmt | None:
    module, _, qualname = target.partition(":")
    return find_node(root, module, qualname)


def _statements(nodes: Iterable[ast.AST], depth: int, may_change: Sequence[str]) -> Iterator[Statement]:
    """Statements in text order; a compound one comes before its body, without it. An assignment to a local of
    `may_change` counts by the name alone.
    """
    for node in nodes:
        if _is_ignored(node):
            continue
        text = f"{depth} {_dump(node)}"
        match node:
            case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
                text = f"{depth} {name} =" if name in may_change else text
        yield Statement(_digest(text), getattr(node, "lineno", 0))
        for name, part in ast.iter_fields(node):
            if _is_block(part):
                if name != "body":  # an `else` is not its `if`
                    yield Statement(_digest(f"{depth} {name}"), part[0].lineno)
                yield from _statements(part, depth + 1, may_change)


def _digest(text: str) -> str:
    return hashlib.blake2s(text.encode(), digest_size=2).hexdigest()


def _is_block(value: object) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], (ast.stmt, ast.ExceptHandler))


def _is_ignored(node: ast.AST) -> bool:
    match node:
        case ast.Expr(value=ast.Constant(value=str())):
            return True
        case ast.Expr(value=ast.Call(func=ast.Attribute(value=ast.Name(id=name)))):
            return name.endswith(LOGGERS)
    return False


def _dump(value: object) -> str:
    """A node without its blocks, ignored fields and empty fields, of which newer Pythons have more."""
    if isinstance(value, ast.AST):
        fields = [(name, each) for name, each in ast.iter_fields(value) if name not in IGNORED_FIELDS]
        fields = [(name, each) for name, each in fields if each not in (None, []) and not _is_block(each)]
        inside = [f"{name}={_dump(each)}" for name, each in fields]
        return f"{type(value).__name__}({', '.join(inside)})"
    if isinstance(value, list):
        return f"[{', '.join(map(_dump, value))}]"
    return repr(value)


class _Bare(ast.NodeTransformer):
    """Removes the parts that digests leave out."""

    def generic_visit(self, node: ast.AST) -> ast.AST:
        for name in ("annotation", "returns"):
            if getattr(node, name, None) is not None and not isinstance(node, ast.AnnAssign):
                setattr(node, name, None)
        for name, value in ast.iter_fields(node):
            if _is_block(value):
                setattr(node, name, [each for each in value if not _is_ignored(each)] or [ast.Pass()])
        return super().generic_visit(node)


def members_lacking(root: Path) -> list[str]:
    """Members of `cache_manager` that FastDeploy's engine uses and our adapter lacks, by the sources of both."""
    ours = Path(__file__).parents[1] / "engine"
    has = {name for file in OURS for name in _members(ast.parse((ours / file).read_text(encoding="utf-8")))}
    takes: set[str] = set()
    for path in sorted(path for folder in HOSTS for path in (root / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            match node:
                case ast.Attribute(attr=name, value=ast.Attribute(attr="cache_manager")):
                    takes.add(name)
    return sorted(takes - has - V0_ONLY)


def _members(tree: ast.AST) -> Iterator[str]:
    """Names of functions and of assigned attributes."""
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name):
                yield name
            case ast.Attribute(attr=name, ctx=ast.Store()) | ast.Name(id=name, ctx=ast.Store()):
                yield name
