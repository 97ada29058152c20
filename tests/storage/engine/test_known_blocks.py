"""Blocks that a server has lately stored or loaded."""

from fastdeploy_kvcache_v1.storage.engine import known_blocks
from fastdeploy_kvcache_v1.storage.engine.known_blocks import KnownBlocks


def test_known_blocks_keep_the_latest_and_forget_all(monkeypatch):
    monkeypatch.setattr(known_blocks, "MOST_KNOWN", 3)
    known = KnownBlocks()
    known.add([b"a", b"b", b"c"])
    known.add([b"a", b"d", b"e"])
    assert [block in known for block in (b"a", b"b", b"c", b"d", b"e")] == [True, False, False, True, True]
    known.add([b"1", b"2", b"3", b"4"])
    assert [block in known for block in (b"1", b"2", b"3", b"4", b"a")] == [False, True, True, True, False]
    known.forget()
    assert b"4" not in known
