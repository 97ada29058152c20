"""Streams and events behind one interface: threads on a CPU, CuPy on a GPU (imported only when one is made)."""

from .base import Event, Runtime, Stream
from .cpu import CpuRuntime
from .cuda import CudaRuntime

__all__ = ["CpuRuntime", "CudaRuntime", "Event", "Runtime", "Stream"]
