"""Small changes of a module's source, each of which some test should notice."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

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
CONSTRUCTORS = {"__init__", "__post_init__", "__new__"}


@dataclass(frozen=True)
class Mutant:
    """One change of a module's text: bytes `begin` to `end`, which are `was`, become `now`."""

    line: int
    was: str
    now: str
    function: str
    """Its dotted name: of a module's function, or of a class's method. What is inside it belongs to it."""
    first: int
    """The line of its `def`, or of its first decorator."""
    statement: tuple[int, int]
    """The lines of the statement around the place: a test that runs one of these reaches it."""
    begin: int
    end: int

    def applied_to(self, source: str) -> str:
        whole = source.encode()
        return (whole[: self.begin] + self.now.encode() + whole[self.end :]).decode()


def mutants(source: str) -> Iterator[Mutant]:
    """Every change of `source` that this module knows, in the order of the lines.

    Left alone: annotations, messages (`raise`, `assert`, log lines, texts with values in them), docstrings, imports,
    and the module's own constants.
    """
    lines = [line.encode() for line in source.splitlines(keepends=True)]
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line))
    whole = source.encode()
    found = []
    for name, function in _functions(ast.parse(source).body):
        first = min([function.lineno, *(decorator.lineno for decorator in function.decorator_list)])
        for node, now, statement in _of_all(function.body, function.name in CONSTRUCTORS):
            begin = starts[node.lineno - 1] + node.col_offset
            end = starts[node.end_lineno - 1] + node.end_col_offset
            was = whole[begin:end].decode()
            found.append(Mutant(node.lineno, was, now, name, first, statement, begin, end))
    return iter(sorted(found, key=lambda mutant: mutant.begin))


def _functions(body: list[ast.stmt], prefix: str = "") -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """The functions of a module and the methods of its classes, with their dotted names."""
    for statement in body:
        match statement:
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                yield prefix + statement.name, statement
            case ast.ClassDef():
                yield from _functions(statement.body, f"{prefix}{statement.name}.")
            case ast.If() | ast.Try():
                yield from _functions([*statement.body, *statement.orelse], prefix)


Place = tuple["ast.expr | ast.stmt", str, tuple[int, int]]


def _of_all(body: list[ast.stmt], constructs: bool) -> Iterator[Place]:
    for statement in body:
        yield from _of(statement, statement, constructs)


def _of(node: ast.AST, statement: ast.stmt, constructs: bool) -> Iterator[Place]:
    """The changes of a node and of what is in it."""
    if isinstance(node, ast.Raise | ast.Assert | ast.JoinedStr) or _is_log_line(node):
        return
    if isinstance(node, ast.stmt):
        statement = node
    if isinstance(node, ast.expr | ast.stmt):
        now = _changed(node, constructs)
        if now is not None:
            yield node, now, (statement.lineno, (node if hasattr(statement, "body") else statement).end_lineno)
    for field, value in ast.iter_fields(node):
        if field not in {"annotation", "returns"}:
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from _of(child, statement, constructs)


def _changed(node: ast.expr | ast.stmt, constructs: bool) -> str | None:
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
        case ast.Slice(upper=ast.expr()):
            return ast.unparse(ast.Slice(node.lower, None, node.step))
        case ast.Slice(lower=ast.expr()):
            return ast.unparse(ast.Slice(None, None, node.step))
        case ast.Expr(value=ast.Call() | ast.Await()) | ast.Delete():
            return "pass"
        case ast.Assign(targets=[ast.Attribute()]) if not constructs:
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


def _is_log_line(node: ast.AST) -> bool:
    match node:
        case ast.Expr(value=ast.Call(func=ast.Attribute(value=ast.Name(id="logger")))):
            return True
    return False
