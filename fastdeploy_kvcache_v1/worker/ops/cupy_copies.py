"""Copies on an explicit CUDA stream through CuPy: one cudaMemcpyAsync (or its 2D form) per coalesced run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .rows import BlockRows, CopyRun, LayerRows


def swap_cache_per_layer(targets: LayerRows, sources: LayerRows, runs: Sequence[CopyRun], stream: int) -> None:
    from cupy.cuda import runtime

    for target, source in zip(targets, sources, strict=True):
        _copy_rows(runtime, target, source, runs, stream)


def swap_cache_all_layers(
    targets: Sequence[LayerRows], sources: Sequence[LayerRows], runs: Sequence[CopyRun], stream: int
) -> None:
    for layer_targets, layer_sources in zip(targets, sources, strict=True):
        swap_cache_per_layer(layer_targets, layer_sources, runs, stream)


def _copy_rows(runtime: Any, target: BlockRows, source: BlockRows, runs: Sequence[CopyRun], stream: int) -> None:
    assert target.on_gpu != source.on_gpu, "a swap copies between GPU and host memory"
    kind = runtime.memcpyHostToDevice if target.on_gpu else runtime.memcpyDeviceToHost
    width = target.row_bytes
    for first_source, first_target, blocks in runs:
        to, of = target.row_address(first_target), source.row_address(first_source)
        if blocks == 1 or (target.is_dense and source.is_dense):
            runtime.memcpyAsync(to, of, blocks * width, kind, stream)
        else:  # the host pool is block-major: its rows of one layer are a block apart
            runtime.memcpy2DAsync(to, target.pitch, of, source.pitch, width, blocks, kind, stream)
