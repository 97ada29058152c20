"""Drives the CacheManager alone with a request trace: `fastdeploy-kvcache replay TRACE`."""

from .command import add_arguments, run

__all__ = ["add_arguments", "run"]
