"""Puts a changed function into the modules that are loaded, and the changed module into those that will be."""

from __future__ import annotations

import ast
import gc
from collections import defaultdict
from collections.abc import Iterator
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType, FunctionType

Where = tuple[str, int, str]
"""File, line of the `def` or of its first decorator, name."""


class LoadedFunctions:
    """All functions of a folder's modules that this process has loaded, by their place in the source."""

    def __init__(self, folder: Path) -> None:
        self._functions: defaultdict[Where, list[FunctionType]] = defaultdict(list)
        for thing in gc.get_objects():
            if type(thing) is FunctionType and thing.__code__.co_filename.startswith(f"{folder}/"):
                self._functions[_where(thing.__code__)].append(thing)

    def replace(self, path: Path, first: int, name: str, source: str) -> None:
        """Raises `SyntaxError` where the changed source is no program."""
        where = (str(path), first, name.rpartition(".")[2])
        load_from(path, source)
        for function in self._functions[where]:
            function.__code__ = _with_free_names(source, where, function.__code__.co_freevars)


def load_from(path: Path, source: str) -> None:
    """From now on the module at `path` is loaded from `source`."""
    code = compile(source, str(path), "exec", dont_inherit=True)
    loaded = SourceFileLoader.get_code

    def get_code(self: SourceFileLoader, fullname: str) -> CodeType | None:
        return code if self.path == str(path) else loaded(self, fullname)

    SourceFileLoader.get_code = get_code  # type: ignore[method-assign]


def _where(code: CodeType) -> Where:
    return code.co_filename, code.co_firstlineno, code.co_name


def _with_free_names(source: str, where: Where, free: tuple[str, ...]) -> CodeType:
    """The function's code. It names all of `free`, as the one whose place it takes: Python wants as many."""
    tree = ast.parse(source)
    code = _compiled(tree, where)
    if code.co_freevars == free:
        return code
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == where[2]:
            names = [ast.Expr(ast.Name(name, ast.Load())) for name in free]
            node.body.append(ast.If(ast.Constant(False), names, []))
    return _compiled(ast.fix_missing_locations(tree), where)


def _compiled(tree: ast.Module, where: Where) -> CodeType:
    return next(
        code for code in _all_codes(compile(tree, where[0], "exec", dont_inherit=True)) if _where(code) == where
    )


def _all_codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _all_codes(constant)
