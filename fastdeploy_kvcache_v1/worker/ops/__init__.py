"""What copies bytes: rows of memory, plans of copies, and the ways that a CPU and a GPU have to carry them out."""

from .host_memory import HostBuffer, host_alloc, host_alloc_shared, keep_to_this_process
from .rows import BlockRows, CopyRun, CopyRuns, LayerRows, plan_runs, tensor_rows

__all__ = [
    "BlockRows",
    "CopyRun",
    "CopyRuns",
    "HostBuffer",
    "LayerRows",
    "host_alloc",
    "host_alloc_shared",
    "keep_to_this_process",
    "plan_runs",
    "tensor_rows",
]
