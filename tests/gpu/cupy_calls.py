"""Every call of CuPy in the package against the signatures of the CuPy that this Python has; needs no GPU.

`scripts/test-cupy` runs it with the oldest and the newest CuPy that we support. Exit status 1 for a call that does not
fit, and when so few calls are found that the search must be broken.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import cupy

PACKAGE = Path(__file__).resolve().parents[2] / "fastdeploy_kvcache_v1"
CUDA = PACKAGE / "worker" / "cuda"
FILES = [CUDA / f"{name}.py" for name in ("runtime", "trial_process", "copies", "trial")]
FEWEST = 20
METHODS = {"wait_event": cupy.cuda.Stream, "synchronize": cupy.cuda.Stream, "record": cupy.cuda.Event}
"""Methods of CuPy's objects, by names that nothing else in these files has."""

DEPRECATED = {"ExternalStream"}


class Call(NamedTuple):
    place: str
    name: str
    target: Any
    arguments: list[ast.expr]
    keywords: list[str]
    is_method: bool


def dotted(node: ast.expr) -> list[str]:
    """`a.b.c` as its parts, without a leading `self`."""
    if isinstance(node, ast.Attribute):
        return [*dotted(node.value), node.attr]
    return [node.id] if isinstance(node, ast.Name) else []


def calls(file: Path) -> Iterator[Call]:
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.Call):
            continue
        *owners, name = dotted(node.func) or [""]
        place = f"{file.name}:{node.lineno}"
        keywords = [keyword.arg or "**" for keyword in node.keywords]
        owner = owners[-1].lstrip("_") if owners else ""
        if owner == "runtime":
            yield Call(place, name, getattr(cupy.cuda.runtime, name, None), node.args, keywords, False)
        elif owner == "cuda" and owners[0] != "paddle":
            yield Call(place, name, getattr(cupy.cuda, name, None), node.args, keywords, False)
        elif owner in ("stream", "event") and name in METHODS:
            yield Call(place, name, getattr(METHODS[name], name, None), node.args, keywords, True)


def problem(call: Call) -> str | None:
    if call.target is None:
        return "is not there"
    if call.name in DEPRECATED:
        return "is deprecated: CuPy 14 warns at its first use"
    try:
        signature = inspect.signature(call.target)
    except ValueError:
        return problem_of_cython(call)
    try:
        signature.bind(*[None] * (len(call.arguments) + call.is_method), **dict.fromkeys(call.keywords))
    except TypeError as error:
        return f"is called wrongly: {error}"
    return None


def problem_of_cython(call: Call) -> str | None:
    """Compiled functions say their signature in the first line of their docstring."""
    found = re.match(r"\w+\((.*?)\)", (call.target.__doc__ or "").strip())
    if found is None:
        return "has no signature"
    parameters = [each for each in found[1].split(",") if each.strip() and each.strip() != "self"]
    least = sum("=" not in each for each in parameters)
    if call.keywords or not least <= len(call.arguments) <= len(parameters):
        return f"takes ({found[1]}), is given {len(call.arguments)} arguments"
    return None


def main() -> int:
    warnings.simplefilter("error")
    found = [call for file in FILES for call in calls(file)]
    problems = [f"{call.place}: {call.name} {why}" for call in found if (why := problem(call)) is not None]
    for each in problems:
        print(each)
    if len(found) < FEWEST:
        print(f"only {len(found)} calls were found")
        return 1
    print(f"CuPy {cupy.__version__}: {len(found)} calls, {len(problems)} wrong")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
