"""Copies of bytes: rows of memory, plans of copies, and copy paths."""

from .host_memory import HostBuffer, host_alloc
from .rows import BlockRows, CopySpans, LayerRows, plan_spans, tensor_rows

__all__ = [
    "BlockRows",
    "CopySpans",
    "HostBuffer",
    "LayerRows",
    "host_alloc",
    "plan_spans",
    "tensor_rows",
]
