"""Patch tables: one TOML file per FastDeploy release lists every patch and its reason.

    [fastdeploy]
    release = "2.6"             as `FastDeployTree.release`; the file's name ends with it
    commit = "7198b5883"        the tree that the table was written against
    inherits = "2.5"            optional: the file has only the differences to that release
    removes = ["module:name"]   targets of inherited rows, bodies and settings (module:Class.field) that are missing

    [capabilities]              inherited; see `Capabilities`
    name = true

    [not_in_names]              inherited; settings that do not decide the bytes of a block and are left out of the
                                names of stored blocks. All others are in them
    "package.module:Class" = ["field"]   for `fastdeploy.envs:environment_variables`: names of variables

    [[patch]]
    target = "package.module:Qualified.name"   replaces an inherited row with this target
    kind = "wrap"               wrap: ours(wrapped, instance, args, kwargs) is called instead of the target
                                replace: ours(original) returns the object that takes the target's place
                                extend: ours(target) adds the names of `adds`, which FastDeploy must not have
    ours = "package.module:function"
    signature = "(self, x, y=1)"  FastDeploy's parameters without annotations (wrap and replace);
                                for a class those of its __init__; "value" for a target that is not callable
    adds = ["name"]             attributes of a class or keys of a dictionary (extend)
                                "<flags>" in any list stands for the names of `ADDED_FLAGS`,
                                "<request fields>" for those of `cache_identity.FIELDS`
    optional = ["name"]         names of `adds` that FastDeploy may have with the same meaning: ours leaves them
    where = "engine"            engine, worker or both: the processes in which it has an effect
    why = "one sentence"

    [[body]]                    inherited; a function or class whose body our code relies on. Targets of replace rows
                                are bodies that must hold, without a [[body]]
    target = "package.module:Qualified.name"
    why = "one sentence"
    must_hold = true            a server does not start with another body; default: it warns
    may_change = ["name"]       locals whose assignments may change

`table_for` reads the table of a release.
"""

from __future__ import annotations

import enum
import re
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from ...errors import OverlayError
from ...switch import SWITCH
from ..cache_identity import FIELDS
from ..settings import ADDED_FLAGS

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

TABLE_NAME = "fastdeploy-{release}.toml"


class Kind(str, enum.Enum):
    WRAP = "wrap"
    REPLACE = "replace"
    EXTEND = "extend"


class Where(str, enum.Enum):
    """The processes in which a patch has an effect."""

    ENGINE = "engine"
    WORKER = "worker"
    BOTH = "both"


class Capabilities(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Facts about a release that our code depends on and no signature shows. Code asks for these, never for a release.

    A capability that no table of the release's chain names is False.
    """

    flash_block_wise_fp8: bool = False
    """With `block_wise_fp8`, flash attention keeps its scales in the cache, as append attention always does."""

    counts_preallocated: bool = False
    """A gauge counts the requests of a decode server between their blocks and their first token."""

    acknowledged_cache_info: bool = False
    """A prefill server schedules a request only after its messager has acknowledged the transfer."""

    reschedules: bool = False
    """A request that fails after its first token may be answered with its tokens so far, and the router continues it.
    The router retries requests whose error contains "PD Error".
    """


class PatchRow(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One patch. Raises `ValueError` for contradictory fields."""

    target: str
    kind: Kind
    ours: str
    where: Where
    why: str
    signature: str = ""
    adds: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if unknown := {*self.optional} - {*self.adds}:
            raise ValueError(f"`optional` has {', '.join(sorted(unknown))}, which `adds` lacks")
        for reference in (self.target, self.ours):
            module, _, qualname = reference.partition(":")
            if not all(part.isidentifier() for part in [*module.split("."), *qualname.split(".")]):
                raise ValueError(f"got {reference!r}, expected package.module:Qualified.name")
        if (self.kind is Kind.EXTEND) != bool(self.adds) or (self.kind is Kind.EXTEND) == bool(self.signature):
            raise ValueError("extend needs `adds` and no `signature`; wrap and replace need `signature` and no `adds`")

    @property
    def module(self) -> str:
        return self.target.partition(":")[0]

    @property
    def qualname(self) -> str:
        return self.target.partition(":")[2]


class Body(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A function or class of FastDeploy whose body our code relies on; fields as in `[[body]]`."""

    target: str
    why: str
    must_hold: bool = False
    may_change: tuple[str, ...] = ()


class PatchTable(msgspec.Struct, frozen=True):
    release: str = ""
    commit: str = ""
    rows: tuple[PatchRow, ...] = ()
    capabilities: Capabilities = Capabilities()
    not_in_names: Mapping[str, frozenset[str]] = {}
    bodies: Mapping[str, Body] = {}
    """By target."""


class _About(msgspec.Struct, forbid_unknown_fields=True):
    release: str
    commit: str
    inherits: str = ""
    removes: tuple[str, ...] = ()


class _File(msgspec.Struct, forbid_unknown_fields=True):
    fastdeploy: _About
    capabilities: Capabilities = Capabilities()
    not_in_names: dict[str, tuple[str, ...]] = {}
    patch: tuple[PatchRow, ...] = ()
    body: tuple[Body, ...] = ()


def table_directory() -> Path:
    """Inside the installed package, or `patches/` of a checkout."""
    inside = Path(__file__).parents[1] / "patches"
    return inside if inside.is_dir() else Path(__file__).parents[3] / "patches"


def known_releases(name: str = TABLE_NAME) -> list[str]:
    """Releases that have a table called `name`."""
    prefix, suffix = name.split("{release}")
    return sorted(path.name[len(prefix) : -len(suffix)] for path in table_directory().glob(prefix + "*" + suffix))


def checkout_variable(release: str) -> str:
    """Environment variable with a checkout of `release` for tests and benchmarks, `FASTDEPLOY_26_DEV` for example."""
    return "FASTDEPLOY_" + release.replace(".", "").replace("-", "_").upper()


def read_toml(path: Path) -> dict[str, Any]:
    """Raises `OSError`, and `ValueError` for invalid TOML."""
    text = path.read_text(encoding="utf-8")
    for mark, names in (("<flags>", [flag.name for flag in ADDED_FLAGS]), ("<request fields>", FIELDS)):
        text = text.replace(f'"{mark}"', ", ".join(f'"{name}"' for name in names))
    return tomllib.loads(text)


def table_for(release: str) -> PatchTable:
    """The table for `release`, for example "2.5". Raises `OverlayError` without one."""
    if release not in known_releases():
        known = ", ".join(known_releases()) or "none"
        raise OverlayError(
            f"FastDeploy {release} is not supported by this version of fastdeploy-kvcache-v1 (supported: {known}): "
            f"install a supported FastDeploy, upgrade fastdeploy-kvcache-v1, or unset {SWITCH}"
        )
    return load_table(table_directory() / TABLE_NAME.format(release=release))


def load_table(path: Path) -> PatchTable:
    """The table in `path` over the tables beside it that it inherits. Raises `OverlayError` with file and row."""
    return _load(path, ())


def _load(path: Path, heirs: tuple[str, ...]) -> PatchTable:
    """`heirs`: releases that inherit from this file, the nearest last."""
    try:
        content = read_toml(path)
        file = _decoded(content)
        about = file.fastdeploy
        if not path.name.endswith(f"-{about.release}.toml"):
            raise ValueError(f"its release is {about.release!r}, so its name must end with -{about.release}.toml")
        parent, chain = PatchTable(), (*heirs, about.release)
        if about.inherits:
            parent = _load(_parent_path(path, about.inherits, chain), chain)
        kept = {target: body for target, body in parent.bodies.items() if target not in about.removes}
        return PatchTable(
            about.release,
            about.commit,
            _merged(parent, file.patch, about.removes),
            msgspec.structs.replace(parent.capabilities, **content.get("capabilities", {})),
            _united(parent.not_in_names, file.not_in_names, about.removes),
            kept | {body.target: body for body in file.body},
        )
    except (OSError, ValueError, msgspec.ValidationError) as error:
        raise OverlayError(f"patch table {path.name}: {error}") from error


def _decoded(content: dict[str, Any]) -> _File:
    """Raises `ValueError` with the target of the wrong row."""
    try:
        return msgspec.convert(content, _File)
    except msgspec.ValidationError as error:
        where = re.search(r"\$\.(patch|body)\[(\d+)\]", str(error))
        if where is None:
            raise
        name = content[where[1]][int(where[2])].get("target", "a row without target")
        raise ValueError(f"{name}: {str(error).replace(where[0], '$')}") from None


def _parent_path(path: Path, inherits: str, chain: tuple[str, ...]) -> Path:
    """The file of the release `inherits`, beside `path`. `chain` ends with the release of `path`."""
    if inherits in chain:
        raise ValueError(f"it inherits from itself: {' -> '.join([*chain, inherits])}")
    parent = path.with_name(path.name.removesuffix(f"{chain[-1]}.toml") + f"{inherits}.toml")
    if not parent.is_file():
        raise ValueError(f"it inherits {inherits!r}, but there is no {parent.name} beside it")
    return parent


def _merged(parent: PatchTable, rows: Sequence[PatchRow], removes: Sequence[str]) -> tuple[PatchRow, ...]:
    """Inherited rows in their order, replaced where `rows` has their target; then new rows."""
    inherited = {row.target: row for row in parent.rows}
    own = {row.target: row for row in rows}
    if doubled := sorted(target for target, times in Counter(row.target for row in rows).items() if times > 1):
        raise ValueError(f"two rows for {', '.join(doubled)}")
    settings = {f"{place}.{name}" for place, names in parent.not_in_names.items() for name in names}
    if absent := [each for each in removes if each not in inherited.keys() | parent.bodies.keys() | settings]:
        raise ValueError(f"it removes {', '.join(absent)}, which it does not inherit")
    if both := [target for target in removes if target in own]:
        raise ValueError(f"it removes {', '.join(both)} and has a row for it: the row is enough, drop the removal")
    if same := [target for target, row in own.items() if inherited.get(target) == row]:
        raise ValueError(f"it repeats the row of {parent.release} for {', '.join(same)}: leave the row out")
    merged = {target: row for target, row in inherited.items() if target not in removes} | own
    if not merged:
        raise ValueError("no rows")
    return tuple(merged.values())


def _united(
    inherited: Mapping[str, frozenset[str]], own: Mapping[str, Sequence[str]], removes: Sequence[str]
) -> dict[str, frozenset[str]]:
    """Settings by place, without those of `removes`."""
    for place, names in own.items():
        if doubled := sorted({name for name in names if names.count(name) > 1 or name in inherited.get(place, ())}):
            raise ValueError(f"not_in_names: {place} has {', '.join(doubled)} twice, here or inherited: keep one")
    kept = {
        place: frozenset(name for name in names if f"{place}.{name}" not in removes)
        for place, names in inherited.items()
    }
    return {place: kept.get(place, frozenset()) | frozenset(own.get(place, ())) for place in {**kept, **own}}
