"""What the system's limits leave: the control group of this process and every one above it, of either version."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")


_Names = tuple[str, str, str]
_V1: _Names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
_V2: _Names = ("memory.max", "memory.current", "")
"""How a version of control groups calls limit and use, and what stands before the names in `memory.stat`."""


def room() -> int | None:
    """Bytes this process can still get before a limit kills it; None where none is set or can be read."""
    rooms = [left for group, names in _groups() if (left := _room(group, names)) is not None]
    return min(rooms, default=None)


def _groups() -> Iterator[tuple[Path, _Names]]:
    """From that of this process to the root, which in a container is the container's own, whatever the paths say."""
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
        # File cache, which the kernel gives back before it kills. The weights of a model that several ranks have read
        # are active there.
        cached = sum(int(stat[f"{prefix}{kind}_file"]) for kind in ("inactive", "active"))
        return None if most == "max" else max(0, int(most) - int((group / used).read_text()) + cached)
    except (OSError, ValueError, KeyError):
        return None
