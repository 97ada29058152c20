"""Patch tables: one TOML file per FastDeploy release names every place in it that we touch, how, and why.

[fastdeploy]
release = "2.5"             matches FastDeploy's version by its first two numbers
commit = "f3fb7e032"        the tree the table was written against

[[patch]]
target = "package.module:Qualified.name"
kind = "wrap"               wrap: ours(wrapped, instance, args, kwargs) is called instead of the target
                            replace: ours(original) returns what takes the target's place
                            extend: ours(target) adds the names of `adds`, which must not be there yet
ours = "package.module:function"
signature = "(self, x, y=1)"  what FastDeploy's parameters must be, without annotations (wrap and replace);
                            of a class: those of its __init__; "value" for anything that is not callable
adds = ["name"]             attributes of a class, keys of a dictionary (extend)
where = "engine"            engine, worker, or both: the processes in which it has an effect
why = "one sentence"
"""

from __future__ import annotations

import enum
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...errors import OverlayError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

TABLE_NAME = "fastdeploy-{release}.toml"


class Kind(str, enum.Enum):
    """How a patch changes its target."""

    WRAP = "wrap"
    REPLACE = "replace"
    EXTEND = "extend"


class Where(str, enum.Enum):
    """The processes in which a patch has an effect."""

    ENGINE = "engine"
    WORKER = "worker"
    BOTH = "both"


@dataclass(frozen=True)
class PatchRow:
    """One touched place in FastDeploy."""

    target: str
    kind: Kind
    ours: str
    where: Where
    why: str
    signature: str = ""
    adds: tuple[str, ...] = ()

    @property
    def module(self) -> str:
        return self.target.partition(":")[0]

    @property
    def qualname(self) -> str:
        return self.target.partition(":")[2]


@dataclass(frozen=True)
class PatchTable:
    """All rows for one release of FastDeploy."""

    release: str
    commit: str
    rows: tuple[PatchRow, ...]


def table_directory() -> Path:
    """Where the tables are: inside the installed package, or `patches/` of a checkout."""
    inside = Path(__file__).parents[1] / "patches"
    return inside if inside.is_dir() else Path(__file__).parents[3] / "patches"


def known_releases() -> list[str]:
    prefix, suffix = TABLE_NAME.split("{release}")
    return sorted(path.name[len(prefix) : -len(suffix)] for path in table_directory().glob(prefix + "*" + suffix))


def table_for(release: str) -> PatchTable:
    """The table for `release`, for example "2.5". Raises `OverlayError` when there is none."""
    if release not in known_releases():
        known = ", ".join(known_releases()) or "none"
        raise OverlayError(
            f"FastDeploy {release} is not supported by this version of fastdeploy-kvcache-v1 (supported: {known}): "
            "install a supported FastDeploy, upgrade fastdeploy-kvcache-v1, or unset ENABLE_V1_KVCACHE_MANAGER"
        )
    return load_table(table_directory() / TABLE_NAME.format(release=release))


def load_table(path: Path) -> PatchTable:
    """Raises `OverlayError` naming the file and the row for anything missing, unknown or contradictory."""
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
        about = content["fastdeploy"]
        table = PatchTable(about["release"], about["commit"], tuple(_row(raw) for raw in content["patch"]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise OverlayError(f"patch table {path.name}: {_reason(error)}") from error
    targets = [row.target for row in table.rows]
    if doubled := sorted({target for target in targets if targets.count(target) > 1}):
        raise OverlayError(f"patch table {path.name}: two rows for {', '.join(doubled)}")
    return table


def _row(raw: dict[str, Any]) -> PatchRow:
    name = raw.get("target", "a row without target")
    if unknown := raw.keys() - PatchRow.__dataclass_fields__.keys():
        raise ValueError(f"{name}: unknown {', '.join(sorted(unknown))}")
    if missing := {"target", "kind", "ours", "where", "why"} - raw.keys():
        raise ValueError(f"{name}: no {', '.join(sorted(missing))}")
    fields = {**raw, "kind": Kind(raw["kind"]), "where": Where(raw["where"]), "adds": tuple(raw.get("adds", ()))}
    row = PatchRow(**fields)
    for reference in (row.target, row.ours):
        module, _, qualname = reference.partition(":")
        if not all(part.isidentifier() for part in [*module.split("."), *qualname.split(".")]):
            raise ValueError(f"{name}: {reference!r} is not of the form package.module:Qualified.name")
    if (row.kind is Kind.EXTEND) != bool(row.adds) or (row.kind is Kind.EXTEND) == bool(row.signature):
        raise ValueError(f"{name}: extend needs `adds`, wrap and replace need `signature`, and neither the other's")
    return row


def _reason(error: Exception) -> str:
    return f"no {error}" if isinstance(error, KeyError) else str(error)
