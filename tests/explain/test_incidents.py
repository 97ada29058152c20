"""What `explain` says first after each of the usual incidents, on the real embedded server."""

from __future__ import annotations

import argparse
import http.server
import json
import re
import threading
from contextlib import ExitStack
from types import SimpleNamespace

import pytest

from fastdeploy_kvcache_v1 import cli
from fastdeploy_kvcache_v1.config import KVCacheConfig
from fastdeploy_kvcache_v1.contract.messages import CopyPath
from fastdeploy_kvcache_v1.explain import command
from fastdeploy_kvcache_v1.scheduler import cache_manager
from tests.lab.server.served import running

URL = "http://cache.example:8188"
INSTRUCTIONS = "Answer in one short sentence, and say so where you are not sure."


@pytest.fixture
def explain(monkeypatch, capsys):
    """Exit status and output for these servers behind one address, which are asked in turn."""

    def asked(*servers, **wanted):
        number = 0

        def get(args, path):
            nonlocal number
            number += 1
            answer = servers[number % len(servers)].client.get(path)
            assert answer.status_code == 200
            return answer.content

        monkeypatch.setattr(command, "_get", get)
        given = {"url": URL, "api_key": None, "request": None, "last": False, "top": None, "plan": False, "json": False}
        status = command.run(argparse.Namespace(**given | wanted))
        return SimpleNamespace(status=status, text=capsys.readouterr().out)

    return asked


def first_cause(explained):
    """Name of the first cause on the page, or None."""
    line = next((line for line in explained.text.splitlines() if line.startswith("  1. ")), None)
    assert explained.status == (0 if line is None else 1)
    return None if line is None else line.split()[2].rstrip(":")


def complete(server, text, **fields):
    answer = server.complete(prompt=text, max_tokens=1, **fields)
    assert answer.status_code == 200, answer.text
    return answer.json()["id"]


def visit(server, visitors=4, rounds=3, **fields):
    """Visitors that come back with the same long prompt."""
    for _ in range(rounds):
        for number in range(visitors):
            complete(server, f"{number} {INSTRUCTIONS}", **fields)


def test_cache_that_hits_has_no_cause(explain):
    with running(KVCacheConfig(200, 50, block_size=4)) as server:
        visit(server, rounds=8)
        explained = explain(server)
        assert first_cause(explained) is None
        assert "\nNothing here is worth acting on.\n" in explained.text
        assert f"{URL} (server " in explained.text
        assert re.search(r"last 32 requests:\n  [78]\d\.\d% of [\d,]+ prompt tokens were hits\n", explained.text)


def test_server_without_requests_says_so(explain):
    with running() as server:
        assert explain(server).text == f"{URL}: no request has read the cache yet\n"


@pytest.mark.parametrize("num_host_blocks", [0, 8])
def test_host_tier_that_is_too_small_is_named_with_what_it_lacks(explain, num_host_blocks):
    with running(KVCacheConfig(40, num_host_blocks, block_size=4)) as server:
        visit(server)
        explained = explain(server)
        assert first_cause(explained) == "host_too_small"
        assert "\nWhat costs most hits:\n  1. " in explained.text
        assert "Raise --swap-space: " in explained.text
        assert "evicted 0 s before (median)" in " ".join(explained.text.split())
        assert ("There is no host tier" in explained.text) is not num_host_blocks


def test_host_tier_is_too_small_also_for_blocks_that_left_long_ago(explain):
    with running(KVCacheConfig(40, 8, block_size=4)) as server:
        visit(server, visitors=24, rounds=4)
        explained = explain(server)
        assert "not_seen_lately" in explained.text
        assert first_cause(explained) == "host_too_small"
        assert "`fastdeploy-kvcache explain --plan` tells" in " ".join(explained.text.split())


def test_weight_update_of_many_prompts_is_named_in_a_small_cache(explain):
    with running(KVCacheConfig(150, block_size=4)) as server:
        prompts = [f"{number:02d} is asked again" for number in range(24)]
        for prompt in prompts:
            complete(server, prompt)
        server.engine.call(lambda core: core.manager.reset_cache(new_weights=True)).result()
        for prompt in prompts:
            complete(server, prompt)
        assert first_cause(explain(server)) == "weights"


def test_time_behind_a_few_words_is_named(explain):
    with running(KVCacheConfig(400, block_size=4)) as server:
        for minute in range(12):
            complete(server, f"Your time: {minute:02d}:30. {INSTRUCTIONS}")
        explained = explain(server)
        assert first_cause(explained) == "changing_head"
        assert "within their first 16 tokens" in " ".join(explained.text.split())


def test_question_behind_common_instructions_is_no_cause(explain):
    with running(KVCacheConfig(400, block_size=4)) as server:
        for number in range(12):
            complete(server, f"{INSTRUCTIONS} {number:02d} apples and one more?")
        assert first_cause(explain(server)) is None


def test_time_at_the_head_of_prompts_is_named(explain):
    with running(KVCacheConfig(400, block_size=4)) as server:
        for minute in range(12):
            complete(server, f"{minute:02d}:30 is the time. {INSTRUCTIONS}")
        assert first_cause(explain(server)) == "changing_head"


def test_prompts_below_a_block_are_named(explain):
    with running(KVCacheConfig(20, block_size=64)) as server:
        for _ in range(6):
            complete(server, "hi")
        assert first_cause(explain(server)) == "short_prompts"


def test_tenant_that_scans_is_named_and_the_others_are_not(explain):
    with running(KVCacheConfig(60, block_size=4)) as server:
        for number in range(6):
            visit(server, visitors=2, rounds=1, cache_salt="ours")
            for page in range(3):
                complete(server, f"{number} {page} of a book that is read once. {INSTRUCTIONS}", cache_salt="theirs")
        explained = explain(server)
        assert first_cause(explained) == "scan"
        assert "theirs" not in explained.text


def test_prompts_that_are_read_once_are_named_without_tenants_too(explain):
    with running(KVCacheConfig(60, block_size=4)) as server:
        for number in range(6):
            visit(server, visitors=2, rounds=1)
            for page in range(3):
                complete(server, f"{number} {page} of a book that is read once. {INSTRUCTIONS}")
        assert first_cause(explain(server)) == "scan"


def test_tenant_whose_blocks_are_pushed_out_is_not_the_one_that_scans(explain):
    """Both never hit, and what is read has the same first words."""
    with running(KVCacheConfig(100, block_size=4)) as server:
        for number in range(6):
            visit(server, visitors=2, rounds=1, cache_salt="ours")
            for page in range(4):
                book = f"Read: {number} {page} of a book that is read once. {INSTRUCTIONS}"
                complete(server, book, cache_salt="theirs")
        explained = explain(server)
        assert first_cause(explained) == "scan"
        assert "One tenant sends 7" in " ".join(explained.text.split())


def test_copy_path_that_the_driver_refuses_is_named(explain):
    with running(KVCacheConfig(60, 20, block_size=4)) as server:
        visit(server)
        refused = CopyPath("in", "spans", "cuMemcpyBatchAsync: not supported")
        server.engine.core.counters.copies[0].paths = (refused,)
        explained = explain(server)
        assert first_cause(explained) == "copy_path_refused"
        assert "cuMemcpyBatchAsync: not supported" in " ".join(explained.text.split())


def test_two_servers_behind_one_address_are_named(explain):
    with ExitStack() as stack:
        servers = [stack.enter_context(running(KVCacheConfig(200, block_size=4))) for _ in range(2)]
        for number in range(8):
            complete(servers[number % 2], f"{number // 2} {INSTRUCTIONS}")
        assert first_cause(explain(*servers)) == "other_server"
        assert first_cause(explain(servers[0])) != "other_server"


def test_failures_of_long_ago_are_no_cause(explain, monkeypatch):
    with running(KVCacheConfig(200, 50, block_size=4)) as server:
        visit(server, rounds=8)
        old = {name: [({}, 3.0)] for name in ("transfer_failures_total", "storage_damaged_blocks_total")}
        old |= {f"storage_{name}_total": [({}, 3.0)] for name in ("failures", "query_failures")}
        monkeypatch.setattr(cache_manager, "samples_of", lambda parts: old)
        assert first_cause(explain(server)) is None


def test_prompt_that_two_servers_had_to_compute_once_is_no_cause(explain):
    with ExitStack() as stack:
        servers = [stack.enter_context(running(KVCacheConfig(400, block_size=4))) for _ in range(2)]
        for number, server in enumerate(servers):
            complete(server, INSTRUCTIONS)
            for visitor in range(4):
                for _ in range(12):
                    complete(server, f"{number} {visitor} {INSTRUCTIONS}")
        assert first_cause(explain(*servers)) is None


def test_reset_is_named(explain):
    with running(KVCacheConfig(200, block_size=4)) as server:
        visit(server, rounds=1)
        assert server.client.post("/reset_prefix_cache").status_code == 200
        visit(server, rounds=1)
        assert first_cause(explain(server)) == "reset"


def test_requests_that_do_not_read_are_named(explain):
    with running(KVCacheConfig(200, block_size=4)) as server:
        visit(server, skip_reading_prefix_cache=True)
        assert first_cause(explain(server)) == "skipped_by_request"


def test_request_is_explained_by_its_id_by_rank_and_as_the_last(explain):
    with running(KVCacheConfig(200, block_size=4)) as server:
        complete(server, INSTRUCTIONS)
        name = complete(server, INSTRUCTIONS)
        for wanted in ({"request": name}, {"last": True}):
            text = explain(server, **wanted).text
            assert text.startswith(name)
            assert text.endswith("was missed: partial_block.\n")
        both = explain(server, top=5, json=True)
        assert [row["request_id"].startswith(name) for row in json.loads(both.text)] == [False, True]


def test_json_has_the_causes_and_the_shares_of_all_reasons_largest_first(explain):
    with running(KVCacheConfig(40, block_size=4)) as server:
        visit(server)
        explained = explain(server, json=True)
    (told,) = json.loads(explained.text)
    assert explained.status == 1
    assert told["requests"] == 12
    assert [cause["name"] for cause in told["causes"]] == ["host_too_small"]
    shares = list(told["missed_share"].values())
    assert told["hit_share"] + sum(shares) == pytest.approx(1)
    assert len(shares) > 1
    assert shares == sorted(shares, reverse=True)


class Answers(http.server.BaseHTTPRequestHandler):
    """What the embedded server answers, with an API key as FastDeploy asks for one."""

    client = None

    def do_GET(self):
        answer = self.client.get(self.path)
        self.send_response(answer.status_code if self.headers["Authorization"] == "Bearer secret" else 401)
        self.end_headers()
        self.wfile.write(answer.content)

    def log_message(self, *words):
        """Prints nothing."""


def test_command_asks_over_http_with_the_key(capsys, monkeypatch):
    with running(KVCacheConfig(20, block_size=64)) as server:
        for _ in range(6):
            complete(server, "hi")
        monkeypatch.setattr(Answers, "client", server.client)
        with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answers) as served:
            threading.Thread(target=served.serve_forever, daemon=True).start()
            url = f"http://127.0.0.1:{served.server_port}"
            assert cli.main(["explain", "--url", f"{url}/", "--api-key", "secret"]) == 1
            assert "1. 100.0%  short_prompts: " in capsys.readouterr().out
            assert cli.main(["explain", "--url", url]) == 2
            assert capsys.readouterr().err.endswith(": it asks for a key: --api-key KEY\n")
            served.shutdown()


def test_command_asks_the_default_port_of_both_servers():
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    assert vars(parser.parse_args([])) == {
        "url": "http://localhost:8188",
        "api_key": None,
        "request": None,
        "last": False,
        "top": None,
        "plan": False,
        "json": False,
    }


def test_unknown_request_is_refused_in_one_line(explain):
    with running() as server, pytest.raises(command.ConfigError, match="nobody is not among the latest requests"):
        explain(server, request="nobody")


@pytest.mark.process
def test_plan_is_waited_for_and_says_what_is_not_known_yet(explain):
    with running() as server:
        complete(server, "hello")
        explained = explain(server, plan=True)
        assert explained.status == 0
        assert explained.text == f"{URL}:\n  Not known yet (1 of 2,000 requests).\n"
        told = json.loads(explain(server, plan=True, json=True).text)
        assert (told["num_requests"], told["sizes"], told["failure"]) == (1, [], "")


@pytest.mark.parametrize("plan", [False, True])
def test_server_that_does_not_answer_is_unreachable(capsys, plan):
    given = {"url": "http://127.0.0.1:9", "api_key": None, "request": None, "last": False, "top": None, "json": False}
    given["plan"] = plan
    assert command.run(argparse.Namespace(**given)) == 2
    assert capsys.readouterr().err.startswith("fastdeploy-kvcache explain: no answer from http://127.0.0.1:9: ")
