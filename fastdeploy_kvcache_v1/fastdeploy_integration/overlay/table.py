"""Patch tables: one TOML file per FastDeploy release names every place in it that we touch, how, and why.

[fastdeploy]
release = "2.6"             the release as `FastDeployTree.release` names it; the file's name ends with it
commit = "7198b5883"        the tree the table was written against
inherits = "2.5"            optional: this file says only what differs from that release's
removes = ["module:name"]   targets of inherited rows, bodies and settings (module:Class.field) that this release lacks

[capabilities]
name = true                 what the release can do, where our code depends on it: see `Capabilities`; inherited as well

[not_in_names]
"package.module:Class" = ["field"]  settings known not to decide the bytes of a block, left out of the name of stored
                            blocks, as all others are in it; inherited. The keys of
                            `fastdeploy.envs:environment_variables` are variables

[[patch]]
target = "package.module:Qualified.name"   a target of an inherited row: this row replaces that one
kind = "wrap"               wrap: ours(wrapped, instance, args, kwargs) is called instead of the target
                            replace: ours(original) returns what takes the target's place
                            extend: ours(target) adds the names of `adds`, which must not be there yet unless `optional`
                            has them too
ours = "package.module:function"
signature = "(self, x, y=1)"  what FastDeploy's parameters must be, without annotations (wrap and replace);
                            of a class: the parameters of its __init__; "value" for anything that is not callable
adds = ["name"]             attributes of a class, keys of a dictionary (extend)
optional = ["name"]         those of `adds` that FastDeploy may have itself, with the same meaning: ours leaves them
where = "engine"            engine, worker, or both: the processes in which it has an effect
why = "one sentence"

[[body]]                    a function or class whose inside we rely on; inherited. What a row replaces is one of them,
                            and must hold, without being named
target = "package.module:Qualified.name"
why = "one sentence"
must_hold = true            with another body a server does not start; default: it warns
may_change = ["name"]       locals whose assignments are no change, whatever they say: ours does not ask for them
"""

from __future__ import annotations

import enum
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...errors import OverlayError
from ...switch import SWITCH
from .capabilities import Capabilities

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
    optional: tuple[str, ...] = ()

    @property
    def module(self) -> str:
        return self.target.partition(":")[0]

    @property
    def qualname(self) -> str:
        return self.target.partition(":")[2]


@dataclass(frozen=True)
class Body:
    """A function or class of FastDeploy's whose inside our code relies on."""

    target: str
    why: str
    must_hold: bool = False
    """With another one, a server must not start."""
    may_change: tuple[str, ...] = ()
    """Locals that may be assigned anything."""


@dataclass(frozen=True)
class PatchTable:
    """All rows for one release of FastDeploy, inherited ones included."""

    release: str
    commit: str
    rows: tuple[PatchRow, ...]
    capabilities: Capabilities
    not_in_names: Mapping[str, frozenset[str]]
    bodies: Mapping[str, Body]
    """By target."""


NOTHING = PatchTable("", "", (), Capabilities(), {}, {})
"""What a table inherits that names no release to inherit from."""


def table_directory() -> Path:
    """Where the tables are: inside the installed package, or `patches/` of a checkout."""
    inside = Path(__file__).parents[1] / "patches"
    return inside if inside.is_dir() else Path(__file__).parents[3] / "patches"


def known_releases(name: str = TABLE_NAME) -> list[str]:
    """Releases that have a table called `name`."""
    prefix, suffix = name.split("{release}")
    return sorted(path.name[len(prefix) : -len(suffix)] for path in table_directory().glob(prefix + "*" + suffix))


def checkout_variable(release: str) -> str:
    """Environment variable that names a checkout of `release` for tests and benchmarks: `FASTDEPLOY_26_DEV`."""
    return "FASTDEPLOY_" + release.replace(".", "").replace("-", "_").upper()


def read_toml(path: Path) -> dict[str, Any]:
    """Raises `OSError`, or `ValueError` for what is no TOML."""
    return tomllib.loads(path.read_text(encoding="utf-8"))


def table_for(release: str) -> PatchTable:
    """The table for `release`, for example "2.5". Raises `OverlayError` when there is none."""
    if release not in known_releases():
        known = ", ".join(known_releases()) or "none"
        raise OverlayError(
            f"FastDeploy {release} is not supported by this version of fastdeploy-kvcache-v1 (supported: {known}): "
            f"install a supported FastDeploy, upgrade fastdeploy-kvcache-v1, or unset {SWITCH}"
        )
    return load_table(table_directory() / TABLE_NAME.format(release=release))


def load_table(path: Path) -> PatchTable:
    """The table in `path`, on top of those it inherits from, which lie beside it.

    Raises `OverlayError` naming the file, and the row, for anything missing, unknown or contradictory.
    """
    return _load(path, ())


def _load(path: Path, heirs: tuple[str, ...]) -> PatchTable:
    """`heirs`: the releases that inherit from this file, the nearest one last."""
    try:
        content = read_toml(path)
        about = content["fastdeploy"]
        _require_known(content, {"fastdeploy", "capabilities", "not_in_names", "patch", "body"})
        _require_known(about, {"release", "commit", "inherits", "removes"})
        release = about["release"]
        if not path.name.endswith(f"-{release}.toml"):
            raise ValueError(f"its name must end with -{release}.toml, because it says release {release!r}")
        parent = NOTHING
        if "inherits" in about:
            parent = _load(_parent_path(path, about["inherits"], (*heirs, release)), (*heirs, release))
        removes = about.get("removes", ())
        rows = _merged(parent, [_row(raw) for raw in content.get("patch", ())], removes)
        own_bodies = {raw["target"]: _body(raw) for raw in content.get("body", ())}
        bodies = {target: body for target, body in parent.bodies.items() if target not in removes} | own_bodies
        capabilities = parent.capabilities.with_changes(content.get("capabilities", {}))
        not_in_names = _united(parent.not_in_names, content.get("not_in_names", {}), removes)
        return PatchTable(release, about["commit"], rows, capabilities, not_in_names, bodies)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise OverlayError(f"patch table {path.name}: {_reason(error)}") from error


def _parent_path(path: Path, inherits: str, chain: tuple[str, ...]) -> Path:
    """The file of the release `inherits`, beside `path`. `chain` ends with the release of `path`."""
    if inherits in chain:
        raise ValueError(f"it inherits from itself: {' -> '.join([*chain, inherits])}")
    parent = path.with_name(path.name.removesuffix(f"{chain[-1]}.toml") + f"{inherits}.toml")
    if not parent.is_file():
        raise ValueError(f"it inherits {inherits!r}, but there is no {parent.name} beside it")
    return parent


def _merged(parent: PatchTable, rows: Sequence[PatchRow], removes: Sequence[str]) -> tuple[PatchRow, ...]:
    """Inherited rows in their order, replaced where `rows` has their target; then what `rows` adds."""
    inherited = {row.target: row for row in parent.rows}
    own = {row.target: row for row in rows}
    if doubled := sorted(target for target, times in Counter(row.target for row in rows).items() if times > 1):
        raise ValueError(f"two rows for {', '.join(doubled)}")
    settings = {f"{place}.{name}" for place, names in parent.not_in_names.items() for name in names}
    if absent := [each for each in removes if each not in inherited.keys() | parent.bodies.keys() | settings]:
        raise ValueError(f"it removes {', '.join(absent)}, which it does not inherit")
    if both := [target for target in removes if target in own]:
        raise ValueError(f"it removes {', '.join(both)} and has a row for it: the row alone replaces the inherited one")
    if same := [target for target, row in own.items() if inherited.get(target) == row]:
        raise ValueError(f"it repeats the row of {parent.release} for {', '.join(same)}: leave the row out")
    merged = {target: row for target, row in inherited.items() if target not in removes} | own
    if not merged:
        raise ValueError("no rows")
    return tuple(merged.values())


def _united(
    inherited: Mapping[str, frozenset[str]], own: Mapping[str, Sequence[str]], removes: Sequence[str]
) -> dict[str, frozenset[str]]:
    """Both lists of settings, by where they are."""
    for place, names in own.items():
        if doubled := sorted({name for name in names if names.count(name) > 1 or name in inherited.get(place, ())}):
            raise ValueError(f"not_in_names: {place} has {', '.join(doubled)} twice, here or inherited")
    kept = {
        place: frozenset(name for name in names if f"{place}.{name}" not in removes)
        for place, names in inherited.items()
    }
    return {place: kept.get(place, frozenset()) | frozenset(own.get(place, ())) for place in {**kept, **own}}


def _require_known(section: Mapping[str, object], known: set[str]) -> None:
    if unknown := section.keys() - known:
        raise ValueError(f"unknown {', '.join(sorted(unknown))}")


def _row(raw: dict[str, Any]) -> PatchRow:
    name = raw.get("target", "a row without target")
    if unknown := raw.keys() - PatchRow.__dataclass_fields__.keys():
        raise ValueError(f"{name}: unknown {', '.join(sorted(unknown))}")
    if missing := {"target", "kind", "ours", "where", "why"} - raw.keys():
        raise ValueError(f"{name}: no {', '.join(sorted(missing))}")
    names = {field: tuple(raw.get(field, ())) for field in ("adds", "optional")}
    row = PatchRow(**{**raw, "kind": Kind(raw["kind"]), "where": Where(raw["where"]), **names})
    if unknown := {*row.optional} - {*row.adds}:
        raise ValueError(f"{name}: `optional` has {', '.join(sorted(unknown))}, and `adds` does not")
    for reference in (row.target, row.ours):
        module, _, qualname = reference.partition(":")
        if not all(part.isidentifier() for part in [*module.split("."), *qualname.split(".")]):
            raise ValueError(f"{name}: {reference!r} is not of the form package.module:Qualified.name")
    if (row.kind is Kind.EXTEND) != bool(row.adds) or (row.kind is Kind.EXTEND) == bool(row.signature):
        raise ValueError(f"{name}: extend needs `adds`, wrap and replace need `signature`, and neither the other's")
    return row


def _body(raw: dict[str, Any]) -> Body:
    return Body(**{**raw, "may_change": tuple(raw.get("may_change", ()))})


def _reason(error: Exception) -> str:
    return f"no {error}" if isinstance(error, KeyError) else str(error)
