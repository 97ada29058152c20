"""Where sockets are."""

import tempfile
from pathlib import Path

from fastdeploy_kvcache_v1.link.place import MAX_SOCKET_PATH, socket_path


def test_engines_of_one_machine_have_directories_of_their_own(monkeypatch):
    assert socket_path(8001).parent != socket_path(8002).parent
    assert socket_path(8001).is_relative_to(tempfile.gettempdir())
    monkeypatch.setattr(tempfile, "tempdir", "/tmp/" + "x" * 100)
    assert len(str(socket_path(65535))) <= MAX_SOCKET_PATH
    assert socket_path(65535).is_relative_to(Path("/tmp"))
