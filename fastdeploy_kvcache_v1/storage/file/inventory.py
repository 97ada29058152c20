"""What a storage directory holds, namespace by namespace."""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from ...config import GIB, MIB
from .directory import MANIFEST
from .value_files import namespaces, values_of

__all__ = ["NamespaceContent", "amount", "inventory"]

SHOWN_CHARACTERS = 24
"""Of a text in a manifest."""


@dataclass(frozen=True)
class NamespaceContent:
    """One namespace of a directory."""

    digest: str
    manifest: dict[str, Any] | None
    """What its file says; None if that is missing or damaged."""
    num_values: int
    num_bytes: int
    last_used: datetime | None
    """None for an empty namespace."""
    num_future: int
    """Values whose time of use is in the future, which are the next to be evicted."""

    def as_json(self) -> dict[str, Any]:
        return {
            "digest": self.digest,
            "manifest": self.manifest,
            "values": self.num_values,
            "bytes": self.num_bytes,
            "last_used": None if self.last_used is None else self.last_used.isoformat(),
            "from_the_future": self.num_future,
        }

    def __str__(self) -> str:
        """Two lines: how much it is, and what the manifest says. Times are local."""
        content = "empty"
        if self.last_used is not None:
            content = (
                f"{amount(self.num_values, self.num_bytes)}, last used {self.last_used.astimezone():%Y-%m-%d %H:%M}"
            )
        if self.num_future:
            content += f", {self.num_future:,} from the future: check the clock"
        try:
            description = _description(self.manifest or {})
        except (KeyError, TypeError):
            description = f"{MANIFEST} is missing or damaged"
        return f"{self.digest}  {content}\n    {description}"


def inventory(directory: Path) -> list[NamespaceContent]:
    """In the order of the digests; O(values). Raises `OSError`."""
    found = []
    for path in namespaces(directory):
        files = list(values_of(path))
        last_used = datetime.fromtimestamp(max(files).used_ns // 10**9, tz=timezone.utc) if files else None
        num_bytes = sum(file.num_bytes for file in files)
        num_future = sum(not file.used_ns for file in files)
        found.append(NamespaceContent(path.name, _manifest(path), len(files), num_bytes, last_used, num_future))
    return found


def amount(num_values: int, num_bytes: int) -> str:
    """For people."""
    size = f"{num_bytes / GIB:.2f} GiB" if num_bytes >= GIB else f"{num_bytes / MIB:.1f} MiB"
    return f"{num_values:,} value{'' if num_values == 1 else 's'} ({size})"


def _manifest(namespace: Path) -> dict[str, Any] | None:
    try:
        manifest = json.loads((namespace / MANIFEST).read_text())
    except (OSError, ValueError):
        return None
    return manifest if isinstance(manifest, dict) else None


def _description(manifest: dict[str, Any]) -> str:
    layout = manifest["layout"]
    roles = [f"{role['role']} {_shape(role['block_shape'])} {role['dtype']}" for role in layout["roles"]]
    return ", ".join(
        (
            f"model {_short(manifest['model'])}",
            f"weights {_short(manifest['weight_epoch'])}",
            f"{manifest['block_size']} tokens a block",
            f"{layout['num_layers']} layers of {' + '.join(roles)}",
            f"tensor parallel {manifest['tensor_parallel_size']}",
            f"by {manifest['implementation']}",
        )
    )


def _shape(block_shape: list[int]) -> str:
    return "x".join(map(str, block_shape))


def _short(text: str) -> str:
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}..."
