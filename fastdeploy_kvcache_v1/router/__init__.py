"""The `router` command: one address for prefill servers and decode servers."""

from .command import add_arguments, run

__all__ = ["add_arguments", "run"]
