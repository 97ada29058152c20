"""What least recently used means, block by block: a slow, obvious model of both tiers under `write_through`, for
requests that come one at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

Block = str
"""Named by its whole prefix: block "AB" is the second one of every prompt that begins with "AB"."""


class LruReference:
    """A prompt is a string, one letter per full block; a request needs one more for its end and its answer."""

    def __init__(self, device_blocks: int, host_blocks: int) -> None:
        self._device_blocks, self._host_blocks = device_blocks, host_blocks
        self.forget()

    def forget(self) -> None:
        """Both tiers are empty, and nothing has been counted."""
        self._device: list[Block] = []
        """Least recently used first; a prompt's last block before its first."""
        self._host: list[Block] = []
        self._copies = 0
        """To the host, decided after a request was scheduled: they ride on the next one."""
        self.counts = dict.fromkeys(("device_evicted", "host_evicted", "swap_in", "swap_out"), 0)

    def ask(self, prompt: str) -> tuple[int, int]:
        """Serve one request. Returns how many of its blocks were on the device, and how many on the host only."""
        path = [prompt[:end] for end in range(1, len(prompt) + 1)]
        found = list(takewhile(lambda block: block in self._device or block in self._host, path))
        on_device = [block for block in found if block in self._device]
        self.counts["swap_out"] += self._copies
        missing = len(path) - len(on_device)
        self.counts["device_evicted"] += _evict(self._device, self._device_blocks - (missing + 1), keep=path)
        self._device = _used(self._device, path)
        if self._host_blocks:
            copied = [block for block in path if block not in self._host]
            self.counts["host_evicted"] += _evict(self._host, self._host_blocks - len(copied), keep=path)
            self._host = _used(self._host, path)
            self._copies = len(copied)
        self.counts["swap_in"] += len(found) - len(on_device)
        return len(on_device), len(found) - len(on_device)


def _evict(tier: list[Block], most: int, keep: Sequence[Block]) -> int:
    """Evict until `most` blocks are left. Returns how many went."""
    victims = [block for block in tier if block not in keep][: max(0, len(tier) - most)]
    for block in victims:
        tier.remove(block)
    assert len(tier) <= most, "the prompt does not fit"
    return len(victims)


def _used(tier: list[Block], path: Sequence[Block]) -> list[Block]:
    return [block for block in tier if block not in path] + list(reversed(path))
