"""Shows what the cache is worth, by one play against four set-ups of the server: `fastdeploy-kvcache demo`."""

from .command import add_arguments, run

__all__ = ["add_arguments", "run"]
