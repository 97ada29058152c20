"""Check patch targets in FastDeploy's source without importing it: existence and signature."""

from __future__ import annotations

import ast
import copy
import inspect
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from .table import Kind, PatchRow, PatchTable

VALUE = "value"
"""Signature of a target that is not callable."""


@dataclass(frozen=True)
class Definition:
    signature: str
    names: frozenset[str]
    """Attributes of a class body, or keys of a dictionary display."""


def check_row(root: Path, row: PatchRow) -> str | None:
    """The reason why `row` does not fit, or None. `root` is FastDeploy's package directory."""
    found = find(root, row.module, row.qualname)
    if found is None:
        return "missing"
    if row.kind is Kind.EXTEND:
        taken = sorted(found.names.intersection(row.adds).difference(row.optional))
        return f"drifted: FastDeploy has {', '.join(taken)} itself" if taken else None
    if found.signature != row.signature:
        return f"drifted: expected {row.signature}, FastDeploy has {found.signature}"
    return None


def lost_settings(root: Path, table: PatchTable) -> list[str]:
    """Settings in the `not_in_names` of `table` that FastDeploy's source lacks."""
    lost = []
    for place, names in table.not_in_names.items():
        module, _, qualname = place.partition(":")
        path, found = module_path(root, module), find(root, module, qualname)
        there = set() if path is None or found is None else set(_stored_names(path)) | found.names
        ours = {name for row in table.rows if row.target == place for name in row.adds}
        lost += [f"{place}.{name}" for name in sorted(names - there - ours)]
    return lost


def find(root: Path, module: str, qualname: str) -> Definition | None:
    """`root`: directory of the top-level package of `module`."""
    match find_node(root, module, qualname):
        case ast.ClassDef() as node:
            return Definition(_class_signature(node), frozenset(_body_names(node.body)))
        case ast.FunctionDef() | ast.AsyncFunctionDef() as node:
            return Definition(_signature(node.args), frozenset())
        case ast.Assign(value=value) | ast.AnnAssign(value=value):
            return Definition(VALUE, frozenset(_keys(value)))
    return None


def find_node(root: Path, module: str, qualname: str) -> ast.stmt | None:
    """The class, function or assignment where it is defined. Callers must not change it."""
    path = module_path(root, module)
    return None if path is None else _find(root, path, qualname.split("."))


def module_path(root: Path, module: str) -> Path | None:
    base = root.joinpath(*module.split(".")[1:])
    return next((path for path in (base.with_suffix(".py"), base / "__init__.py") if path.is_file()), None)


def _find(root: Path, path: Path, names: list[str]) -> ast.stmt | None:
    body: Iterable[ast.stmt] = _parse(path).body
    for position, name in enumerate(names):
        node = next((each for each in _statements(body) if name in _bound_names(each)), None)
        last = position == len(names) - 1
        match node:
            case ast.ClassDef() if not last:
                body = node.body
            case ast.ClassDef() | ast.FunctionDef() | ast.AsyncFunctionDef() | ast.Assign() | ast.AnnAssign() if last:
                return node
            case ast.ImportFrom(module=str(source), level=0) if source.split(".")[0] == root.name:
                origin = next(alias.name for alias in node.names if (alias.asname or alias.name) == name)
                target = module_path(root, source)
                return None if target is None else _find(root, target, [origin, *names[position + 1 :]])
            case _:
                return None
    return None


@lru_cache(maxsize=64)
def _parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def _statements(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements of a body, with those inside `if` and `try`."""
    for node in body:
        yield node
        match node:
            case ast.If():
                yield from _statements([*node.body, *node.orelse])
            case ast.Try():
                handlers = [each for handler in node.handlers for each in handler.body]
                yield from _statements([*node.body, *handlers, *node.orelse, *node.finalbody])


def _bound_names(node: ast.stmt) -> list[str]:
    match node:
        case ast.ClassDef(name=name) | ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
            return [name]
        case ast.ImportFrom(names=aliases) | ast.Import(names=aliases):
            return [alias.asname or alias.name for alias in aliases]
        case ast.Assign(targets=targets):
            return [target.id for target in targets if isinstance(target, ast.Name)]
        case ast.AnnAssign(target=ast.Name(id=name)):
            return [name]
    return []


def _body_names(body: Iterable[ast.stmt]) -> Iterator[str]:
    for node in _statements(body):
        yield from _bound_names(node)


def _stored_names(path: Path) -> Iterator[str]:
    """Attributes set in a module, and keys of its dictionary displays, for `setattr` may set these."""
    for node in ast.walk(_parse(path)):
        match node:
            case ast.Attribute(attr=name, ctx=ast.Store()):
                yield name
            case ast.Dict():
                yield from _keys(node)


def _keys(value: ast.expr | None) -> Iterator[str]:
    for key in value.keys if isinstance(value, ast.Dict) else ():
        if isinstance(key, ast.Constant):
            yield str(key.value)


def _class_signature(node: ast.ClassDef) -> str:
    for each in _statements(node.body):
        if isinstance(each, ast.FunctionDef) and each.name == "__init__":
            return _signature(each.args)
    return VALUE


def _signature(arguments: ast.arguments) -> str:
    bare = copy.deepcopy(arguments)
    for argument in ast.walk(bare):
        if isinstance(argument, ast.arg):
            argument.annotation = None
    return f"({ast.unparse(bare)})"


def runtime_parameters(target: object) -> list[str] | None:
    """Parameter names of a live function or of a class's `__init__`; None if `target` is not callable."""
    if isinstance(target, type):
        target = inspect.getattr_static(target, "__init__")
    if isinstance(target, (staticmethod, classmethod)):
        target = target.__func__
    if not callable(target):
        return None
    return list(inspect.signature(target).parameters)


def expected_parameters(signature: str) -> list[str] | None:
    if signature == VALUE:
        return None
    expression = ast.parse(f"lambda {signature[1:-1]}: None", mode="eval").body
    assert isinstance(expression, ast.Lambda)
    arguments = expression.args
    named = [*arguments.posonlyargs, *arguments.args, arguments.vararg, *arguments.kwonlyargs, arguments.kwarg]
    return [argument.arg for argument in named if argument is not None]
