"""What `explain` says of a running FastDeploy server after usual incidents."""

import json
from argparse import Namespace
from functools import partial
from itertools import cycle
from pathlib import Path
from types import SimpleNamespace

import httpx2
import pytest

from fastdeploy_kvcache_v1.explain import command
from fastdeploy_kvcache_v1.lab.fastdeploy_cpu.settings import free_ports
from fastdeploy_kvcache_v1.lab.model.directory import write_seed
from fastdeploy_kvcache_v1.page.state import PAGE_PATH, STATE_PATH
from fastdeploy_kvcache_v1.page.state import document as html
from tests.sizing import restarts
from tests.storage.attention_store.stand_in import environment, set_faults

from . import cpu_server
from .cpu_server import started, wait_until
from .server_workload import DOCUMENT_LENGTH, NUM_DOCUMENTS, document, noise

pytestmark = [pytest.mark.process, pytest.mark.fastdeploy, pytest.mark.timeout(600)]

KEY = "a-key"
REFUSED_COPIES = Path(__file__).with_name("refused_copies")
FLAGS = ("--num-gpu-blocks-override", "24", "--swap-space", "0.001")


@pytest.fixture(scope="module")
def server(release, tmp_path_factory):
    with started(release, tmp_path_factory.mktemp("server"), *FLAGS) as (running, _):
        yield running


@pytest.fixture(scope="module")
def other(release, tmp_path_factory):
    """A second server, which asks for a key and has its metrics at another port. A copy path is refused there, and all
    copies to the host fail.
    """
    faults = {"fail": {"swap_out": "all"}}
    variables = {"FASTDEPLOY_KVCACHE_COPY_FAULTS": json.dumps(faults), "PYTHONPATH": str(REFUSED_COPIES)}
    variables["FD_API_KEY"] = KEY
    flags = *FLAGS, "--metrics-port", str(*free_ports("127.0.0.1", 0))
    with started(release, tmp_path_factory.mktemp("other"), *flags, environment=variables) as (running, client):
        client.api_key = KEY
        yield SimpleNamespace(url=running.url, ask=partial(cpu_server.ask, client, max_tokens=1))


@pytest.fixture
def ask(client):
    return partial(cpu_server.ask, client, max_tokens=1)


@pytest.fixture
def explain(server, capsys):
    def asked(**wanted):
        given = {"url": server.url, "api_key": KEY, "request": None, "last": False, "top": None, "plan": False}
        given["json"] = False
        status = command.run(Namespace(**given | wanted))
        return status, capsys.readouterr().out

    return asked


def first_cause(explained):
    status, text = explained
    assert status == 1
    return next(line for line in text.splitlines() if line.startswith("  1. ")).split()[2].rstrip(":")


def test_incidents_are_named_one_after_the_other(server, ask, explain):
    status, text = explain()
    assert (status, text) == (0, f"{server.url}: no request has read the cache yet\n")
    for _ in range(6):
        ask("hi")
    status, text = explain()
    assert status == 1
    assert "  1. 100.0%  short_prompts: " in text
    for number in range(3 * NUM_DOCUMENTS):
        ask(document(number % NUM_DOCUMENTS))
    status, text = explain()
    assert status == 1
    assert "%  host_too_small: 24 device blocks and " in text
    assert "Raise --swap-space: " in text


def test_request_is_explained_as_the_last_and_by_its_clients_id(ask, explain):
    for _ in range(2):
        ask(document(1))
    status, last = explain(last=True)
    assert status == 0
    name = last.split(":")[0]
    assert name.endswith("_0")
    assert explain(request=name.removesuffix("_0")) == (0, last)
    assert last.endswith(("was missed: partial_block.\n", "was missed: never_seen.\n"))


def test_page_is_served_and_its_data_stays_out_of_the_logs(server, ask):
    for _ in range(2):
        ask(document(3))
    page, answer = (httpx2.get(server.url + path) for path in (PAGE_PATH, STATE_PATH))
    assert page.text == html()
    state = answer.json()
    ((_, num_blocks),) = state["metrics"]["device_blocks"]
    assert num_blocks == state["cache"]["device"]["size"] == 24
    assert state["cache"]["runs"][0]["device_slots"]
    assert state["metrics"]["swap_blocks_total"][0][0] == {"direction": "in", "rank": "0"}
    size, blocks = (sum(value for _, value in state["metrics"][f"swap_{name}_total"]) for name in ("bytes", "blocks"))
    assert state["block_bytes"] == size / blocks
    assert sum(state["missed_tokens"].values()) < state["prompt_tokens"]
    logs = [path for path in server.logs.rglob("*.log") if b"control-kvcache-" in path.read_bytes()]
    assert len(logs) == 2
    assert not [path for path in logs if b"device_evictable_blocks" in path.read_bytes()]


def test_tenant_that_scans_is_named(ask, explain):
    for number in range(6):
        for visitor in range(2):
            ask(document(visitor), extra_body={"cache_salt": "ours"})
        for page in range(3):
            ask(document(100 + 3 * number + page), extra_body={"cache_salt": "theirs"})
    assert first_cause(explain()) == "scan"
    assert "One tenant sends " in explain()[1]


def test_time_at_the_head_is_named(other, explain):
    for minute in range(12):
        other.ask(f"{minute:02d}:30 is the time. {noise(0, DOCUMENT_LENGTH)}")
    assert "%  changing_head: 12 of 12 long prompts differ" in explain(url=other.url)[1]


def test_refused_copy_path_and_copies_that_fail_are_named(other, explain):
    for number in range(4 * NUM_DOCUMENTS):
        other.ask(document(number % NUM_DOCUMENTS))
    explained = explain(url=other.url)
    assert first_cause(explained) == "copy_path_refused"
    words = " ".join(explained[1].split())
    assert "do not use c (undefined symbol: copy_rows). " in words
    assert " copies failed since the start; " in words


def test_servers_behind_one_address_are_named(server, other, explain, monkeypatch):
    urls, get = cycle((server.url, other.url)), command._get
    monkeypatch.setattr(command, "_get", lambda args, path: get(Namespace(**vars(args) | {"url": next(urls)}), path))
    text = explain()[1]
    assert text.count("other_server: Another server behind this address computed the same blocks") == 2


def test_key_guards_the_data_and_not_the_page(other):
    asked = ((PAGE_PATH, {}), (STATE_PATH, {}), (STATE_PATH, {"authorization": f"Bearer {KEY}"}))
    assert [httpx2.get(other.url + path, headers=sent).status_code for path, sent in asked] == [200, 401, 200]


def test_store_that_is_down_is_named(release, explain, tmp_path):
    store, flags = tmp_path / "store", ("--kvcache-storage-backend", "attention_store")
    with started(release, tmp_path, *flags, environment=environment(store)) as (server, client):
        set_faults(store, match={"error": "no route to host"})
        for number in range(4):
            cpu_server.ask(client, document(number), max_tokens=1)
        wait_until(lambda: server.metrics()["storage_is_left_alone"] == 1, "a store that is left alone")
        assert first_cause(explain(url=server.url)) == "store_down"


def test_weight_update_is_named(server, ask, explain):
    for _ in range(4):
        ask(document(2))
    server.control("pause")
    write_seed(server.model, 1)
    server.control("update_weights")
    server.control("resume")
    ask(document(2))
    _, text = explain(top=512)
    assert text.count("was missed: weights.") == 1


def test_plan_counts_the_requests_of_the_engine(server, ask, explain):
    ask("hello")
    status, text = explain(plan=True)
    assert status == 0
    assert "  Not known yet (" in text
    assert " of 2,000 requests)." in text


def test_plan_is_near_what_a_restart_with_twice_the_host_tier_hits(release, tmp_path):
    def live(gib):
        flags = ("--num-gpu-blocks-override", "40", "--swap-space", str(gib), "--write-policy", "write_through")
        with started(release, tmp_path / str(gib), *flags) as (running, client):

            def ask(number):
                answer = cpu_server.ask(client, f"{number}: {noise(number, 200)}", max_tokens=1)
                return answer.cached_tokens, len(answer.prompt)

            return restarts.live(running, ask)

    restarts.check(live(0.004), live(0.008))
