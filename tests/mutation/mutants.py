"""Small changes of a module's source, each of which some test should notice."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import NamedTuple

OPERATORS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.And: ast.Or,
    ast.Or: ast.And,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
    ast.BitOr: ast.BitAnd,
    ast.BitAnd: ast.BitOr,
}


class Mutant(NamedTuple):
    """One change. `source` is the whole changed module."""

    line: int
    was: str
    now: str
    source: str


def mutants(source: str) -> Iterator[Mutant]:
    """Every change of `source` that this module knows, in the order of the lines.

    Left alone: annotations, messages (`raise`, `assert`), docstrings, imports, and the module's own constants.
    """
    lines = [line.encode() for line in source.splitlines(keepends=True)]
    starts = [sum(map(len, lines[:number])) for number in range(len(lines))]
    whole = source.encode()
    changes = sorted(_changes(ast.parse(source)), key=lambda change: (change[0].lineno, change[0].col_offset))
    for node, now in changes:
        begin = starts[node.lineno - 1] + node.col_offset
        end = starts[node.end_lineno - 1] + node.end_col_offset
        changed = whole[:begin] + now.encode() + whole[end:]
        yield Mutant(node.lineno, whole[begin:end].decode(), now, changed.decode())


def _changes(tree: ast.Module) -> Iterator[tuple[ast.expr | ast.stmt, str]]:
    """Nodes, and the text that takes their place."""
    functions = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))
    inner = {id(child) for node in functions for child in ast.walk(node) if child is not node}
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and id(node) not in inner:
            for statement in node.body:
                yield from _of(statement)


def _of(node: ast.AST) -> Iterator[tuple[ast.expr | ast.stmt, str]]:
    """The changes of a node and of what is in it."""
    if isinstance(node, ast.Raise | ast.Assert):
        return
    if isinstance(node, ast.expr | ast.stmt):
        now = _changed(node)
        if now is not None:
            yield node, now
    for field, value in ast.iter_fields(node):
        if field not in {"annotation", "returns"}:
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from _of(child)


def _changed(node: ast.expr | ast.stmt) -> str | None:
    """What `node` becomes; None where there is nothing to change."""
    match node:
        case ast.Compare(ops=[operator, *rest]) if type(operator) in OPERATORS:
            changed: ast.AST = ast.Compare(node.left, [OPERATORS[type(operator)](), *rest], node.comparators)
        case ast.BoolOp():
            changed = ast.BoolOp(OPERATORS[type(node.op)](), node.values)
        case ast.BinOp() if type(node.op) in OPERATORS:
            changed = ast.BinOp(node.left, OPERATORS[type(node.op)](), node.right)
        case ast.AugAssign() if type(node.op) in OPERATORS:
            changed = ast.AugAssign(node.target, OPERATORS[type(node.op)](), node.value)
        case ast.UnaryOp(op=ast.Not()):
            changed = node.operand
        case ast.Constant(value=bool()):
            changed = ast.Constant(not node.value)
        case ast.Constant(value=int()):
            changed = ast.Constant(node.value + 1)
        case ast.IfExp():
            changed = ast.IfExp(node.test, node.orelse, node.body)
        case ast.Expr(value=ast.Call()):
            return "pass"
        case ast.Return(value=ast.expr()) if not _is_none(node.value):
            return "return None"
        case ast.Break():
            return "continue"
        case ast.Continue():
            return "break"
        case _:
            return None
    text = ast.unparse(ast.fix_missing_locations(changed))
    return f"({text})" if isinstance(node, ast.expr) and not isinstance(node, ast.Constant) else text


def _is_none(node: ast.expr | None) -> bool:
    return isinstance(node, ast.Constant) and node.value is None
