"""Bodies are bounded: each, all together, and in time."""

import asyncio

from starlette.requests import Request

from fastdeploy_kvcache_v1.embedded.api_error import ApiError
from fastdeploy_kvcache_v1.embedded.http import request_bodies
from fastdeploy_kvcache_v1.embedded.http.request_bodies import BODIES_IN_ALL, FREE_BYTES, MIB, BodyRoom

CHUNK = 64 * 1024


class Client:
    """Sends what it is told to, and then waits."""

    def __init__(self, *sizes, declared=None, ends=True):
        self._messages = [{"type": "http.request", "body": b"x" * size, "more_body": True} for size in sizes]
        if ends:
            self._messages.append({"type": "http.request", "body": b"", "more_body": False})
        self.received = 0
        headers = [] if declared is None else [(b"content-length", str(declared).encode())]
        self.request = Request({"type": "http", "method": "POST", "path": "/", "headers": headers}, self._receive)

    async def _receive(self):
        if not self._messages:
            await asyncio.Event().wait()
        self.received += 1
        return self._messages.pop(0)


async def size_of(room, client):
    async with room.body(client.request) as body:
        return len(body)


def run(room, *clients):
    async def all_of_them():
        return await asyncio.gather(*(size_of(room, client) for client in clients), return_exceptions=True)

    return asyncio.run(all_of_them())


def status(answer):
    return answer.status if isinstance(answer, ApiError) else answer


def test_a_body_may_have_the_limit_and_no_byte_more():
    room = BodyRoom(1)
    assert [status(each) for each in run(room, Client(MIB), Client(MIB, 1))] == [MIB, 413]
    assert room.held == 0


def test_a_body_of_declared_length_is_refused_unread():
    client = Client(10, declared=MIB + 1)
    assert status(run(BodyRoom(1), client)[0]) == 413
    assert client.received == 0


def test_bodies_together_have_a_bound_and_short_ones_are_always_received():
    room = BodyRoom(1)
    large = [MIB // 2, MIB // 2]

    async def crowd():
        waiting = [asyncio.ensure_future(size_of(room, Client(*large, ends=False))) for _ in range(BODIES_IN_ALL)]
        await asyncio.sleep(0)
        while room.held < BODIES_IN_ALL * (MIB - FREE_BYTES):
            await asyncio.sleep(0)
        answers = await asyncio.gather(
            size_of(room, Client(MIB)), size_of(room, Client(FREE_BYTES)), return_exceptions=True
        )
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        return answers

    refused, short = asyncio.run(crowd())
    assert (status(refused), short) == (503, FREE_BYTES)
    assert room.held == 0, "a client that went away gives back what its body held"
    assert run(room, Client(MIB)) == [MIB]


def test_room_is_taken_until_the_body_was_used():
    room = BodyRoom(1)

    async def use():
        async with room.body(Client(MIB).request) as body:
            return room.held, len(body)

    assert asyncio.run(use()) == (MIB - FREE_BYTES, MIB)
    assert room.held == 0


def test_a_body_that_does_not_come_is_given_up(monkeypatch):
    monkeypatch.setattr(request_bodies, "BODY_TIMEOUT_S", 0.05)
    room = BodyRoom(1)
    (answer,) = run(room, Client(100, ends=False))
    assert status(answer) == 408
    assert room.held == 0


def test_a_large_body_has_more_time(monkeypatch):
    monkeypatch.setattr(request_bodies, "BODY_TIMEOUT_S", 0.0)
    monkeypatch.setattr(request_bodies, "LEAST_BYTES_PER_S", 1)
    assert [status(each) for each in run(BodyRoom(1), Client(CHUNK, CHUNK))] == [2 * CHUNK]
