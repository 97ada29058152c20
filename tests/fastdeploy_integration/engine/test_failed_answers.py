"""What comes back for a request, before FastDeploy makes an answer of it. FAKE queue and outputs."""

import asyncio
import contextlib
from types import SimpleNamespace

import pytest

from fastdeploy_kvcache_v1.fastdeploy_integration.engine import failed_answers
from fastdeploy_kvcache_v1.fastdeploy_integration.overlay import overlay


def says(*tokens, name="r_0"):
    return {"request_id": name, "error_code": 200, "error_msg": None, "outputs": {"token_ids": list(tokens)}}


def fails(name="r_0"):
    return {"request_id": name, "error_code": 502, "error_msg": "it broke", "outputs": None}


@pytest.fixture(params=[True, False])
def reschedules(monkeypatch, request):
    table = SimpleNamespace(capabilities=SimpleNamespace(reschedules=request.param))
    monkeypatch.setattr(overlay, "active", lambda: SimpleNamespace(table=table))
    return request.param


def connection(*batches):
    async def connect(request_id, num_choices=1):
        queue = asyncio.Queue()
        for batch in batches:
            queue.put_nowait(batch)
        return "dealer", queue

    return failed_answers.get_connection(connect, None, ("r",), {})


async def take(*batches):
    """Batches that do not raise."""
    dealer, queue = await connection(*batches)
    assert dealer == "dealer"
    taken = []
    for _ in batches:
        with contextlib.suppress(ValueError):
            taken.append(await asyncio.wait_for(queue.get(), 10))
    return taken


def test_an_error_is_raised_unless_there_are_tokens_that_can_be_answered(reschedules):
    assert asyncio.run(take([fails()])) == []
    assert asyncio.run(take([says()], [fails()])) == [[says()]], "no token"
    begun = [says(5)], [fails()]
    assert len(asyncio.run(take(*begun))) == (2 if reschedules else 1)
    assert asyncio.run(take([says(5, name="r_1")], [fails()])) == [[says(5, name="r_1")]], "of another choice"


def test_what_is_no_output_of_a_request_is_passed_on(reschedules):
    control = {"request_id": "r", "error_code": 500, "error_message": "no"}
    others = [[control], [SimpleNamespace(error_code=500)]]
    assert asyncio.run(take(*others)) == others


@pytest.mark.parametrize(
    ("batch", "made", "reason"),
    [
        ([fails()], None, "it broke"),
        ([says(5)], None, "the log of the API server says why"),
        ([says(5)], "an answer", None),
    ],
)
def test_a_completion_that_was_only_logged_fails_with_its_reason(reschedules, batch, made, reason):
    async def generate(**named):
        _, queue = await connection(batch)
        with contextlib.suppress(ValueError):
            await asyncio.wait_for(queue.get(), 10)  # FastDeploy asks in a task of its own, before Python 3.12
        return made and (made, named)

    answer = failed_answers.completion_full_generator(generate, None, (), {"request_id": "r"})
    if reason is None:
        assert asyncio.run(answer) == (made, {"request_id": "r"})
    else:
        with pytest.raises(ValueError, match=reason):
            asyncio.run(answer)
