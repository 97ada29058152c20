"""What releases of FastDeploy can do, by name: code of ours asks for a capability, never for a release."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """Of one release, as `[capabilities]` of its patch table says. What no table of its chain names is False.

    A capability belongs here when code of ours depends on it and no signature shows it.
    """

    flash_block_wise_fp8: bool = False
    """With `block_wise_fp8`, flash attention keeps its scales in the cache, as append attention does everywhere."""

    counts_preallocated: bool = False
    """A gauge counts the requests of a decode server between their blocks and their first token."""

    acknowledged_cache_info: bool = False
    """A prefill server schedules a request once its messager has said that it knows of the transfer."""

    reschedules: bool = False
    """A request that fails after its first token may be answered with the tokens that it has, and a router goes on from
    there. It tries one again whose error contains "PD Error".
    """

    def with_changes(self, changes: Mapping[str, object]) -> Capabilities:
        """These, with `changes` instead of the values they name. Raises `ValueError` for an unknown name or value."""
        known = asdict(self)
        if unknown := sorted(changes.keys() - known.keys()):
            raise ValueError(f"unknown capability {', '.join(unknown)}: choose from {', '.join(known)}")
        if bad := [f"{name} = {value!r}" for name, value in changes.items() if not isinstance(value, bool)]:
            raise ValueError(f"a capability is true or false, got {', '.join(bad)}")
        return Capabilities(**{**known, **changes})
