"""The twin of every native op, working everywhere: NumPy slice copies, which release the GIL while bytes move."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .rows import BlockRows, CopyRun, LayerRows


def swap_cache_per_layer(targets: LayerRows, sources: LayerRows, runs: Sequence[CopyRun], stream: int) -> None:
    assert not stream, "the twin runs on the calling thread, it has no queues"
    for target, source in zip(targets, sources, strict=True):
        _copy_rows(target, source, runs)


def swap_cache_all_layers(
    targets: Sequence[LayerRows], sources: Sequence[LayerRows], runs: Sequence[CopyRun], stream: int
) -> None:
    for layer_targets, layer_sources in zip(targets, sources, strict=True):
        swap_cache_per_layer(layer_targets, layer_sources, runs, stream)


def _copy_rows(target: BlockRows, source: BlockRows, runs: Sequence[CopyRun]) -> None:
    to, of = target.array, source.array
    for first_source, first_target, blocks in runs:
        np.copyto(to[first_target : first_target + blocks], of[first_source : first_source + blocks])
