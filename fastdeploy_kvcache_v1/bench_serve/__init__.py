"""Sends a workload or a scaled-down trace to servers and compares them: `fastdeploy-kvcache bench serve`."""

from .command import add_arguments, run

__all__ = ["add_arguments", "run"]
