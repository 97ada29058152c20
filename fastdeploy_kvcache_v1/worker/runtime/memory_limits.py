"""Memory that control groups leave to this process: its own group and all parents, version 1 and 2."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")

_Names = tuple[str, str, str]
_V1: _Names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
_V2: _Names = ("memory.max", "memory.current", "")
"""File of the limit, file of the use, prefix of the names in `memory.stat`."""


def room() -> int | None:
    """Bytes that this process can still get before a limit kills it; None without a readable limit."""
    rooms = [left for group, names in _groups() if (left := _room(group, names)) is not None]
    return min(rooms, default=None)


def _groups() -> Iterator[tuple[Path, _Names]]:
    """Yield the process's group and its parents up to the root, which in a container is the container's own."""
    try:
        lines = MEMBERSHIP.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        lines = []
    for line in lines or ["0::/"]:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        root, names = (CGROUP / "memory", _V1) if controllers else (CGROUP, _V2)
        group = root / path.lstrip("/")
        yield group, names
        for parent in group.relative_to(root).parents:
            yield root / parent, names


def _room(group: Path, names: _Names) -> int | None:
    limit, used, prefix = names
    try:
        most = (group / limit).read_text().strip()
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        # The kernel frees file cache before it kills. Weights that several ranks read are active there.
        cached = sum(int(stat[f"{prefix}{kind}_file"]) for kind in ("inactive", "active"))
        return None if most == "max" else max(0, int(most) - int((group / used).read_text()) + cached)
    except (OSError, ValueError, KeyError):
        return None
