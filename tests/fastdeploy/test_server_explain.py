"""What `explain` says of a running FastDeploy server after usual incidents."""

import argparse
from functools import partial

import pytest

from fastdeploy_kvcache_v1.explain import command
from fastdeploy_kvcache_v1.lab.model.directory import write_seed

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
