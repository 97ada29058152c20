"""What is generated in the docs: tables between marks, made from those of the package, and a picture of the rooms."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from fastdeploy_kvcache_v1.attention.layouts import FAMILIES
from fastdeploy_kvcache_v1.fastdeploy_integration.overlay.table import known_releases, table_for
from fastdeploy_kvcache_v1.fastdeploy_integration.refusals import FOREIGN, OF_ROLES, REFUSALS
from fastdeploy_kvcache_v1.lab.fastdeploy_cpu import activation
from fastdeploy_kvcache_v1.lab.server.settings import FLAGS
from tests.telemetry.metrics_page import metrics

from .house import PICTURE, drawn

DOCS = Path(__file__).parents[2] / "docs"
COMMAND = "./scripts/docs-tables"


def releases() -> Iterator[str]:
    yield "| FastDeploy | table | written for | places that it touches | CPU worker |"
    yield "|---|---|---|---|---|"
    with_cpu_worker = known_releases(activation.TABLE_NAME)
    for release in known_releases():
        table = table_for(release)
        file = f"[`fastdeploy-{release}.toml`](../../patches/fastdeploy-{release}.toml)"
        has_one = "yes" if release in with_cpu_worker else "no"
        yield f"| {release} | {file} | {table.commit} | {len(table.rows)} | {has_one} |"


class Placeholder:
    """Stands for the facts in the text of a row: a fact is written as `WORDS` say, else as its name in capitals."""

    def __init__(self, name: str = "") -> None:
        self._name = name

    def __getattr__(self, name: str) -> Placeholder:
        return Placeholder(name)

    def __format__(self, spec: str) -> str:
        return WORDS.get(self._name, self._name.upper())


WORDS = {
    "platform": f"{', '.join(FOREIGN[:-1])} or {FOREIGN[-1]}",
    "graph_level": "above 0",
    "name": "other than local",
    "release": " and ".join(each for each in known_releases() if not table_for(each).capabilities.flash_block_wise_fp8),
}


def refusals() -> Iterator[str]:
    yield "| refused | why | what to do |"
    yield "|---|---|---|"
    roles = [row._replace(setting=f"prefill and decode roles {row.setting}") for row in OF_ROLES]
    for row in [*REFUSALS, *roles]:
        yield f"| {row.setting.format(Placeholder())} | {row.reason} | {row.instead} |"


def families() -> Iterator[str]:
    yield "| `--model-family` | one token in one layer of the cache |"
    yield "|---|---|"
    for name, family in FAMILIES.items():
        first, _, _ = (inspect.getdoc(family) or "").partition("\n\n")
        yield f"| `{name}` | {' '.join(first.split())} |"


def flags(group: str) -> Iterator[str]:
    yield "| flag | meaning | in FastDeploy |"
    yield "|---|---|---|"
    for flag in FLAGS:
        if flag.group == group:
            value = "" if flag.type is bool else f" {flag.unit or flag.name.upper()}"
            name = f"--[no-]{flag.option[2:]}" if flag.default is True else flag.option
            yield f"| `{name}{value}` | {flag.full_help} | {flag.fastdeploy} |"


GROUPS_OF_FLAGS = ("cache", "storage", "prefill and decode", "server", "model")

PARTS: dict[str, tuple[str, Callable[[], Iterator[str]]]] = {
    "releases": ("operate/fastdeploy.md", releases),
    "refusals": ("reference/refusals.md", refusals),
    "metrics": ("reference/metrics.md", metrics),
    "families": ("lab/server.md", families),
    **{f"flags of {group}": ("reference/flags.md", partial(flags, group)) for group in GROUPS_OF_FLAGS},
}
"""By the name in the marks: the page, and the lines."""


def written(page: str, text: str) -> str:
    """`text` with every part of this page as it should be. Raises `ValueError` where marks are missing."""
    for name, (where, lines) in PARTS.items():
        if where == page:
            begin, end = f"<!-- {name}: written by {COMMAND} -->\n", f"<!-- end of {name} -->"
            part = f"(?s)(?<={re.escape(begin)}).*?(?={re.escape(end)})"
            new = "".join(f"{line}\n" for line in lines())
            text, found = re.subn(part, new.replace("\\", r"\\"), text)
            if found != 1:
                raise ValueError(f"{page} has {found} parts between {begin!r} and {end!r}, expected 1")
    return text


def pages() -> list[str]:
    return sorted({page for page, _ in PARTS.values()})


def main() -> int:
    for path in [*(DOCS / page for page in pages()), PICTURE]:
        old = path.read_text(encoding="utf-8") if path.exists() else ""
        if (new := drawn() if path == PICTURE else written(str(path.relative_to(DOCS)), old)) != old:
            path.write_text(new, encoding="utf-8")
            print(f"{path.name}: written anew")
    return 0


if __name__ == "__main__":
    sys.exit(main())
