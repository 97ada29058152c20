"""Generators of request traces: `fastdeploy-kvcache traffic KIND`, one file per kind, named in `kinds.py`."""

from .command import add_arguments, run

__all__ = ["add_arguments", "run"]
