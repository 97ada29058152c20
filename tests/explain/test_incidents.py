"""What `explain` says first after each of the usual incidents, on the real embedded server."""

from __future__ import annotations

import argparse
import json
from contextlib import ExitStack
from types import SimpleNamespace

import pytest

from fastdeploy_kvcache_v1.config import KVCacheConfig
from fastdeploy_kvcache_v1.contract.messages import CopyPath
from fastdeploy_kvcache_v1.explain import command
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
        given = {"url": URL, "api_key": None, "request": None, "last": False, "top": None, "json": False}
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
        assert first_cause(explain(server)) is None


def test_server_without_requests_says_so(explain):
    with running() as server:
        assert explain(server).text == f"{URL}: no request has read the cache yet\n"


@pytest.mark.parametrize("num_host_blocks", [0, 8])
def test_host_tier_that_is_too_small_is_named_with_what_it_lacks(explain, num_host_blocks):
    with running(KVCacheConfig(40, num_host_blocks, block_size=4)) as server:
        visit(server)
        explained = explain(server)
        assert first_cause(explained) == "host_too_small"
        assert "Raise --swap-space: " in explained.text
        assert ("There is no host tier" in explained.text) is not num_host_blocks


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


def test_unknown_request_is_refused_in_one_line(explain):
    with running() as server, pytest.raises(command.ConfigError, match="nobody is not among the latest requests"):
        explain(server, request="nobody")


def test_server_that_does_not_answer_is_unreachable(capsys):
    given = {"url": "http://127.0.0.1:9", "api_key": None, "request": None, "last": False, "top": None, "json": False}
    assert command.run(argparse.Namespace(**given)) == 2
    assert capsys.readouterr().err.startswith("fastdeploy-kvcache explain: no answer from http://127.0.0.1:9: ")
