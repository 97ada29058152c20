"""What `explain` says of a running FastDeploy server after usual incidents."""

import argparse
from functools import partial

import httpx2
import pytest

from fastdeploy_kvcache_v1.explain import command
from fastdeploy_kvcache_v1.lab.model.directory import write_seed
from fastdeploy_kvcache_v1.page.state import PAGE_PATH, STATE_PATH
from fastdeploy_kvcache_v1.page.state import document as html

from . import cpu_server
from .cpu_server import started
from .server_workload import NUM_DOCUMENTS, document

pytestmark = [pytest.mark.process, pytest.mark.fastdeploy, pytest.mark.timeout(600)]

FLAGS = ("--num-gpu-blocks-override", "24", "--swap-space", "0.001")


@pytest.fixture(scope="module")
def server(release, tmp_path_factory):
    with started(release, tmp_path_factory.mktemp("server"), *FLAGS) as (running, _):
        yield running


@pytest.fixture
def ask(client):
    return partial(cpu_server.ask, client, max_tokens=1)


@pytest.fixture
def explain(server, capsys):
    def asked(**wanted):
        given = {"url": server.url, "api_key": None, "request": None, "last": False, "top": None, "json": False}
        status = command.run(argparse.Namespace(**given | wanted))
        return status, capsys.readouterr().out

    return asked


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
    assert sum(state["missed_tokens"].values()) < state["prompt_tokens"]
    logs = [path for path in server.logs.rglob("*.log") if b"control-kvcache-" in path.read_bytes()]
    assert len(logs) == 2
    assert not [path for path in logs if b"device_evictable_blocks" in path.read_bytes()]


def test_key_guards_the_data_and_not_the_page(release, tmp_path):
    with started(release, tmp_path, *FLAGS, environment={"FD_API_KEY": "a-key"}) as (server, _):
        key = {"authorization": "Bearer a-key"}
        asked = ((PAGE_PATH, {}), (STATE_PATH, {}), (STATE_PATH, key))
        assert [httpx2.get(server.url + path, headers=sent).status_code for path, sent in asked] == [200, 401, 200]


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
