"""A client that is still sending must be able to read its answer."""

import asyncio

import pytest

from fastdeploy_kvcache_v1.embedded.http import linger
from fastdeploy_kvcache_v1.embedded.http.linger import Linger

CHUNK = 1000


def answer(num_chunks, *, reads=0, headers=((b"transfer-encoding", b"chunked"),), ends=True):
    """What is sent, in order with what is received."""
    log = []
    left = [*([True] * num_chunks), *([False] if ends else [])]

    async def receive():
        if not left:
            await asyncio.Event().wait()
        log.append("receive")
        return {"type": "http.request", "body": b"x" * CHUNK, "more_body": left.pop(0)}

    async def send(message):
        names = [name for name, _ in message.get("headers", ())]
        log.append((message["type"].rpartition(".")[2], message.get("more_body", False), b"connection" in names))

    async def app(scope, receive, send):
        for _ in range(reads):
            await receive()
        await send({"type": "http.response.start", "status": 413, "headers": []})
        await send({"type": "http.response.body", "body": b"no"})

    asyncio.run(Linger(app)({"type": "http", "headers": list(headers)}, receive, send))
    return log


def test_the_answer_goes_out_first_and_the_rest_of_the_body_is_discarded():
    assert answer(3) == [("start", False, True), ("body", True, False), *["receive"] * 4, ("body", False, False)]


def test_a_body_that_was_read_is_not_waited_for():
    assert answer(1, reads=2) == ["receive", "receive", ("start", False, False), ("body", False, False)]


@pytest.mark.parametrize("headers", [(), ((b"content-length", b"0"),)])
def test_a_request_without_a_body_keeps_its_connection(headers):
    assert answer(0, headers=headers) == [("start", False, False), ("body", False, False)]


def test_the_rest_is_bounded_in_bytes(monkeypatch):
    monkeypatch.setattr(linger, "MAX_BYTES", 5 * CHUNK)
    assert answer(100).count("receive") == 5


def test_the_rest_is_bounded_in_time(monkeypatch):
    monkeypatch.setattr(linger, "MAX_S", 0.05)
    assert answer(2, ends=False)[-1] == ("body", False, False)
