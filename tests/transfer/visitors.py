"""Owners and visitors of `Presence` in processes that a test kills."""

from fastdeploy_kvcache_v1.transfer.presence import Presence, Visit


def serve(connection, directory, path=None):
    """An owner, or with `path` a visitor, until it is killed."""
    kept = Presence(directory) if path is None else Visit(path)
    connection.send(getattr(kept, "path", None))
    connection.recv()
