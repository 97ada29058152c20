"""What copies bytes: rows of memory, plans of copies, and the ways that a CPU and a GPU have to carry them out."""

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
