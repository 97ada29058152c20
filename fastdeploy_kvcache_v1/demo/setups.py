"""The four set-ups of the server that the demo compares."""

from __future__ import annotations

from dataclasses import dataclass

BLOCK_SIZE = 64
"""Tokens; FastDeploy's default."""

HOST_GIB = "0.5"

LARGE_OVER_SMALL = 4
"""Device blocks of the set-up that has enough, over those of the small one."""

COMPUTED, SMALL, LARGE, HOST = "cache off", "small device", "large device", "small device + host"
"""Names of the set-ups."""


@dataclass(frozen=True)
class Setup:
    name: str
    explanation: str
    flags: tuple[str, ...]
    """Of `fastdeploy-kvcache serve`."""
    caches: bool = True


def setups(num_tokens: int, reserved_blocks: int = 0) -> tuple[Setup, ...]:
    """For requests of at most `num_tokens` tokens, output included. `reserved_blocks`: what the server wants on the
    device beside those of the longest request.
    """
    longest = -(-num_tokens // BLOCK_SIZE) + 1
    small = longest + reserved_blocks

    def tiers(num_blocks: int, swap_space: str = "0") -> tuple[str, ...]:
        sizes = ("--num-gpu-blocks-override", str(num_blocks), "--swap-space", swap_space)
        limits = ("--block-size", str(BLOCK_SIZE), "--max-model-len", str(longest * BLOCK_SIZE))
        return (*sizes, *limits, "--max-num-batched-tokens", str(longest * BLOCK_SIZE))

    large = LARGE_OVER_SMALL * small
    return (
        Setup(
            COMPUTED,
            "every prompt is computed from its first token",
            (*tiers(large), "--no-enable-prefix-caching"),
            caches=False,
        ),
        Setup(
            SMALL,
            f"a device tier of {small} blocks, which holds the document or the chat, not both",
            tiers(small),
        ),
        Setup(LARGE, f"a device tier of {large} blocks, which holds both", tiers(large)),
        Setup(
            HOST,
            f"{small} device blocks again, and {HOST_GIB} GiB of host memory behind them",
            (*tiers(small, HOST_GIB), "--write-policy", "write_through"),
        ),
    )
