"""Streams and events behind one interface: threads on a CPU; `worker/cuda` has those of a GPU."""

from .base import Event, Runtime, Stream
from .cpu import CpuRuntime

__all__ = ["CpuRuntime", "Event", "Runtime", "Stream"]
