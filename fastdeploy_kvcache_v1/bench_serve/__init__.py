"""Sends a scaled-down request trace to servers and compares them: `fastdeploy-kvcache bench serve --trace TRACE`."""

from .command import add_arguments, run

__all__ = ["add_arguments", "run"]
