"""The debug pages: counts and seconds, bounded, and nothing of a prompt."""

import pytest

from fastdeploy_kvcache_v1.lab.server.engine.request_times import RequestReport
from tests.lab.server.harness import expected_outputs
from tests.lab.server.random_text import BOS
from tests.lab.server.served import error_of


def test_the_cache_page_lists_the_runs_of_a_prompt(server):
    server.complete(prompt="A sentence of more than one block.")
    cache = server.client.get("/debug/cache").json()
    assert cache["block_size"] == 4
    assert cache["device"]["cached"] == sum(len(run["device_slots"]) for run in cache["runs"]) > 8
    assert cache["device"]["size"] == 64
    assert (cache["num_requests"], cache["host"]["size"]) == (0, 16)
    assert cache["runs"][0]["parent"] is None


def test_the_cache_page_is_as_long_as_asked(server):
    server.complete(prompt="A sentence of more than one block.")
    server.complete(prompt="Something else.")
    cache = server.client.get("/debug/cache?blocks=3").json()
    listed = [slot for run in cache["runs"] for slot in run["device_slots"]]
    assert len(listed) == 3
    assert cache["device"]["unlisted"] == cache["device"]["cached"] - 3


@pytest.mark.parametrize("query", ["cache?blocks=-1", "cache?blocks=2049", "requests?limit=257", "requests?limit=x"])
def test_a_debug_page_refuses_a_wrong_limit(server, query):
    response = server.client.get(f"/debug/{query}")
    assert response.status_code == 400
    assert error_of(response)["param"] in ("query.blocks", "query.limit")


def test_the_requests_page_has_times_by_the_id_of_the_answer(server):
    answers = [server.complete(prompt="A sentence of more than one block.").json() for _ in range(2)]
    shown = server.client.get("/debug/requests").json()["requests"]
    assert [each["id"] for each in shown] == [answers[1]["id"], answers[0]["id"]]
    assert set(shown[0]) == set(RequestReport._fields)
    assert [each["cached_tokens"] for each in shown] == [32, 0]
    for each in shown:
        assert each["state"] == "finished"
        spent = each["queue_s"] + each["storage_s"] + each["copies_s"] + each["prefill_s"]
        assert 0 < spent <= each["first_token_s"] <= each["total_s"]
    assert len(server.client.get("/debug/requests?limit=1").json()["requests"]) == 1


def test_the_debug_pages_hold_no_text_and_no_token(server):
    prompt = "confidential words of a tenant"
    server.complete(prompt=prompt, cache_salt="a-secret-salt")
    text = bytes(expected_outputs([BOS, *prompt.encode()], 8)).decode()
    tokens = ", ".join(map(str, prompt.encode()[:4])), ",".join(map(str, prompt.encode()[:4]))
    for page in ("cache", "requests"):
        shown = server.client.get(f"/debug/{page}").text
        assert not [each for each in (prompt, "tenant", "salt", text, *tokens) if each in shown]


@pytest.mark.parametrize("page", ["cache", "requests"])
def test_a_debug_page_has_a_head(server, page):
    assert server.client.head(f"/debug/{page}").status_code == 200
