"""The live page and its data: counts and seconds, bounded, and nothing of a prompt."""

from collections import defaultdict

import pytest
from prometheus_client.parser import text_string_to_metric_families

from fastdeploy_kvcache_v1.lab.server.engine.request_times import RequestReport
from fastdeploy_kvcache_v1.page.state import SHOWN
from fastdeploy_kvcache_v1.telemetry.metrics import PREFIX
from tests.lab.server.harness import expected_outputs
from tests.lab.server.random_text import BOS

PROMPT = "A sentence of more than one block."


def state_of(server):
    answer = server.client.get("/v1/cache/state")
    assert answer.status_code == 200
    return answer.json()


def test_page_is_one_document_that_may_fetch_from_its_server_alone(server):
    answer = server.client.get("/debug/cache")
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    policy = dict(each.strip().split(" ", 1) for each in answer.headers["content-security-policy"].split(";"))
    assert (policy["default-src"], policy["connect-src"]) == ("'none'", "'self'")


def test_state_lists_the_runs_of_a_prompt(server):
    server.complete(prompt=PROMPT)
    state = state_of(server)
    cache = state["cache"]
    assert cache["block_size"] == 4
    assert cache["device"]["cached"] == sum(len(run["device_slots"]) for run in cache["runs"]) > 8
    assert cache["device"]["size"] == 64
    assert state["block_bytes"] == 0, "not known"
    assert (cache["num_requests"], cache["host"]["size"]) == (0, 16)
    assert cache["runs"][0]["parent"] is None


def test_state_has_times_by_the_id_of_the_answer_newest_first(server):
    answers = [server.complete(prompt=PROMPT).json() for _ in range(2)]
    state = state_of(server)
    times = state["times"]
    assert [each["id"] for each in times] == [answers[1]["id"], answers[0]["id"]]
    assert [row["request_id"] for row in state["report"]["requests"]] == [answers[0]["id"], answers[1]["id"]]
    assert set(times[0]) == set(RequestReport._fields)
    assert [each["cached_tokens"] for each in times] == [32, 0]
    for each in times:
        assert each["state"] == "finished"
        spent = each["queue_s"] + each["storage_s"] + each["copies_s"] + each["prefill_s"]
        assert 0 < spent <= each["first_token_s"] <= each["total_s"]


def test_state_adds_up_more_requests_than_it_lists(server):
    for _ in range(SHOWN + 8):
        server.complete(prompt=PROMPT, max_tokens=1)
    state = state_of(server)
    assert (len(state["times"]), len(state["report"]["requests"])) == (SHOWN, SHOWN)
    assert state["num_requests"] == SHOWN + 8
    ((_, hits),) = state["metrics"]["device_hit_tokens_total"]
    assert state["prompt_tokens"] - sum(state["missed_tokens"].values()) == hits > 0


def test_state_has_the_numbers_of_the_metrics(server):
    server.complete(prompt=PROMPT)
    shown = {name: [*map(tuple, each)] for name, each in state_of(server)["metrics"].items()}
    families = text_string_to_metric_families(server.client.get("/metrics").text)
    metrics = defaultdict(list)
    for sample in (sample for family in families for sample in family.samples):
        metrics[sample.name.removeprefix(PREFIX)].append((sample.labels, sample.value))
    assert shown == {name: metrics[name] for name in shown}
    left_out = {name for name in metrics.keys() - shown.keys() if name.endswith("_total")}
    assert left_out == {"unknown_request_fields_total"}


def test_state_holds_no_text_and_no_token(server):
    prompt = "confidential words of a tenant"
    server.complete(prompt=prompt, cache_salt="a-secret-salt")
    text = bytes(expected_outputs([BOS, *prompt.encode()], 8)).decode()
    tokens = ", ".join(map(str, prompt.encode()[:4])), ",".join(map(str, prompt.encode()[:4]))
    shown = server.client.get("/v1/cache/state").text
    assert not [each for each in (prompt, "words of a tenant", "salt", text, *tokens) if each in shown]


@pytest.mark.parametrize("path", ["/debug/cache", "/v1/cache/state"])
def test_page_and_state_have_a_head(server, path):
    assert server.client.head(path).status_code == 200
