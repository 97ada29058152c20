"""What the demo and benchmarks measure: an answer is whole, or an error."""

import json

import httpx2
import pytest

from fastdeploy_kvcache_v1.errors import WorkerDiedError
from fastdeploy_kvcache_v1.lab.server.client import ask, complete


@pytest.fixture
def server(monkeypatch):
    """`server(status, *chunks)` answers so; the bodies that it was sent."""
    bodies = []

    def answer(status, *chunks):
        def handle(request):
            bodies.append(json.loads(request.content))
            return httpx2.Response(status, text="".join(f"data: {chunk}\n\n" for chunk in chunks))

        client = httpx2.Client(transport=httpx2.MockTransport(handle))
        monkeypatch.setattr("httpx2.stream", client.stream)
        return bodies

    return answer


def chunk(**fields):
    return json.dumps({"choices": [fields]})


USAGE = json.dumps({"choices": [], "usage": {"prompt_tokens": 3, "prompt_tokens_details": {"cached_tokens": 2}}})


def test_a_completion_is_its_tokens_and_where_its_prompt_came_from(server):
    bodies = server(200, chunk(text="a", token_ids=[5]), chunk(text="b", token_ids=[6, 7]), USAGE, "[DONE]")
    answer = complete("http://server", (1, 2, 3), 3)
    assert (answer.token_ids, answer.text, answer.prompt_tokens, answer.cached_tokens) == ([5, 6, 7], "ab", 3, 2)
    assert 0 < answer.first_token_s <= answer.total_s
    assert (bodies[0]["prompt"], bodies[0]["max_tokens"], bodies[0]["ignore_eos"]) == ([1, 2, 3], 3, True)


def test_the_tokens_of_a_chat_are_found_under_fastdeploys_name_too(server):
    server(200, chunk(delta={"content": "a", "completion_token_ids": [5]}), chunk(delta={"role": "assistant"}), USAGE)
    answer = ask("http://server", {})
    assert (answer.token_ids, answer.text) == ([5], "a")


@pytest.mark.parametrize(
    ("status", "chunks", "message"),
    [
        (400, ["no"], "the server answered HTTP 400: data: no"),
        (200, [chunk(token_ids=[1])], "the server answered 1 tokens instead of 2"),
        (200, ['{"error": {"message": "no"}}'], "the server answered an error: .*no"),
        (200, ["{"], "the server did not answer: JSONDecodeError"),
    ],
)
def test_what_is_no_whole_answer_is_an_error(server, status, chunks, message):
    server(status, *chunks)
    with pytest.raises(WorkerDiedError, match=message):
        complete("http://server", (1,), 2)


def test_nobody_there_is_an_error():
    with pytest.raises(WorkerDiedError, match="the server did not answer: ConnectError"):
        ask("http://127.0.0.1:9", {})
