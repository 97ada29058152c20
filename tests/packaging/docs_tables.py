"""What is generated in the docs: tables between marks, made from those of the package, and a picture of the rooms."""

from __future__ import annotations

import inspect
import json
import re
import sys
import textwrap
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from fastdeploy_kvcache_v1.attention.layouts import FAMILIES
from fastdeploy_kvcache_v1.config import MIB
from fastdeploy_kvcache_v1.fastdeploy_integration.backends import BLOCK_WISE_FP8, make_backend
from fastdeploy_kvcache_v1.fastdeploy_integration.overlay.table import known_releases, table_for
from fastdeploy_kvcache_v1.fastdeploy_integration.refusals import FOREIGN, OF_ROLES, REFUSALS
from fastdeploy_kvcache_v1.fastdeploy_integration.swap_space import num_host_blocks
from fastdeploy_kvcache_v1.lab.fastdeploy_cpu import activation
from fastdeploy_kvcache_v1.lab.server.field_names import IGNORED
from fastdeploy_kvcache_v1.lab.server.request_fields import REFUSED, ChatBody, CompletionBody
from fastdeploy_kvcache_v1.lab.server.settings import FLAGS
from tests.telemetry.metrics_page import metrics

from .house import PICTURE, drawn

DOCS = Path(__file__).parents[2] / "docs"
COMMAND = "./scripts/docs-tables"


def releases() -> Iterator[str]:
    yield "| FastDeploy | patch table | checked against |"
    yield "|---|---|---|"
    with_cpu_worker = known_releases(activation.TABLE_NAME)
    for release in known_releases():
        table = table_for(release)
        file = f"[`fastdeploy-{release}.toml`](../../patches/fastdeploy-{release}.toml)"
        without = "" if release in with_cpu_worker else ", no CPU worker"
        yield f"| {release} | {file}, {len(table.rows)} patches{without} | {table.commit} |"


def sizes() -> Iterator[str]:
    yield "| model, ranks | bytes of a block on all ranks | `--swap-space 64` holds |"
    yield "|---|---|---|"
    for name, num_ranks, layers, family, numbers, quant_type in SIZED_MODELS:
        numbers = {key: value // num_ranks if key == "num_kv_heads" else value for key, value in numbers.items()}
        made = make_backend(
            family,
            numbers,
            num_layers=layers,
            block_size=64,
            dtype="bfloat16",
            quant_type=quant_type,
            scale_dtype="bfloat16",
        )
        num_bytes = made.layout.block_bytes
        blocks = num_host_blocks(64, num_bytes, num_ranks)
        tokens = f"{blocks * 64 / 1e6:.2f} million tokens"
        yield f"| {name}, {num_ranks} | {num_bytes * num_ranks / MIB:.4g} MiB | {blocks:,} blocks, {tokens} |"


LATENT = {"kv_lora_rank": 512, "qk_rope_head_dim": 64}
SIZED_MODELS = (
    ("ERNIE-4.5-0.3B", 1, 18, "gqa", {"num_kv_heads": 2, "head_dim": 128}, None),
    ("ERNIE-4.5-21B-A3B", 1, 28, "gqa", {"num_kv_heads": 4, "head_dim": 128}, None),
    ("Qwen3-8B", 1, 36, "gqa", {"num_kv_heads": 8, "head_dim": 128}, None),
    ("Qwen3-8B with `block_wise_fp8`", 1, 36, "gqa", {"num_kv_heads": 8, "head_dim": 128}, BLOCK_WISE_FP8),
    ("Qwen2.5-72B", 4, 80, "gqa", {"num_kv_heads": 8, "head_dim": 128}, None),
    ("ERNIE-4.5-300B-A47B", 8, 54, "gqa", {"num_kv_heads": 8, "head_dim": 128}, None),
    ("DeepSeek-V3 (MLA)", 8, 61, "mla", LATENT, None),
)
"""Name, ranks, layers, family and numbers of a model as its configuration has them; quantization of the cache."""


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


def read_fields() -> Iterator[str]:
    yield "| field | type and default | meaning |"
    yield "|---|---|---|"
    fields = CompletionBody.model_json_schema()["properties"] | ChatBody.model_json_schema()["properties"]
    for name, schema in sorted(fields.items()):
        default = schema.get("default")
        given = "" if default is None or isinstance(default, dict) else f", {json.dumps(default)}"
        only = [kind for kind in (CompletionBody, ChatBody) if name in kind.model_fields]
        where = "" if len(only) == 2 else "Completions only. " if only[0] is CompletionBody else "Chats only. "
        meaning = f"{where}{' '.join(schema.get('description', '').split())}".strip()
        yield f"| `{name}` | {_type(schema)}{given} | {meaning} |"


def _type(schema: dict[str, Any]) -> str:
    """Of a JSON schema, with its bounds."""
    kinds = schema.get("anyOf", [schema])
    names = []
    for kind in kinds:
        if "enum" in kind:
            names.append(", ".join(map(str, kind["enum"])))
        elif kind.get("type") == "array":
            names.append(f"list of {_type(kind['items'])}s")
        elif kind.get("type") != "null":
            least, most = kind.get("minimum"), kind.get("maximum")
            bounds = "" if least is None else f" from {least:g}" if most is None else f" from {least:g} to {most:g}"
            names.append(kind.get("type", "object") + bounds)
    return " or ".join(names)


def refused_fields() -> Iterator[str]:
    yield "| field | allowed values | instead |"
    yield "|---|---|---|"
    for name, (neutral, advice) in REFUSED.items():
        allowed = ", ".join(f"`{json.dumps(value)}`" for value in (None, *neutral))
        yield f"| `{name}` | {allowed} | {advice} |"


def ignored_fields() -> Iterator[str]:
    yield from textwrap.wrap(", ".join(f"`{name}`" for name in sorted(IGNORED)), 100)


GROUPS_OF_FLAGS = ("cache", "storage", "prefill and decode", "server", "model")

PARTS: dict[str, tuple[str, Callable[[], Iterator[str]]]] = {
    "releases": ("operate/fastdeploy.md", releases),
    "sizes": ("operate/memory.md", sizes),
    "refusals": ("reference/refusals.md", refusals),
    "metrics": ("reference/metrics.md", metrics),
    "families": ("lab/server.md", families),
    "fields": ("reference/request-fields.md", read_fields),
    "refused fields": ("reference/request-fields.md", refused_fields),
    "ignored fields": ("reference/request-fields.md", ignored_fields),
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
