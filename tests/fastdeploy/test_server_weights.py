"""Weight updates of FastDeploy's legacy API (clear_load_weight, update_model_weight) while the cache is in use.

Any number of them while requests come all the time: the scenario "real updates" of `inside/world.py`.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import httpx2
import openai
import pytest

from fastdeploy_kvcache_v1.lab.model.directory import write_seed

from .cpu_server import ask, started, wait_until
from .models import OTHER_WEIGHTS, PLAIN
from .server_workload import NUM_DOCUMENTS, Workload, document, expected_of

pytestmark = [pytest.mark.process, pytest.mark.fastdeploy, pytest.mark.timeout(600)]

NUM_BLOCKS, DOCUMENTS = 24, range(NUM_DOCUMENTS)
FLAGS = ("--num-gpu-blocks-override", str(NUM_BLOCKS), "--swap-space", "0.02", "--write-policy", "write_through")
LONG = 300
"""Tokens of an answer that takes a while."""
REFUSED, ENDED = 304, 500
"""What the API says while weights are not there: to new requests, and to those whose next token it waits for."""


@pytest.fixture(scope="module")
def expected(release):
    """By seed of the weights: the answers of servers that had no other ones, and no cache."""
    workloads = [expected_of(release, model, Workload.documents) for model in (PLAIN, OTHER_WEIGHTS)]
    answers = [[each.answers[f"document {index} round 0"].tokens for index in DOCUMENTS] for each in workloads]
    assert answers[0] != answers[1]
    return answers


def all_documents(client):
    return [ask(client, document(index)) for index in DOCUMENTS]


def tokens(answers):
    return [answer.tokens for answer in answers]


@pytest.fixture(scope="module")
def server(release, expected, tmp_path_factory):
    """Starts when the others have ended: each looks for files that it left behind."""
    environment = {"FD_ENABLE_V1_UPDATE_WEIGHTS": "0"}
    flags = (*FLAGS, "--dynamic-load-weight")
    with started(release, tmp_path_factory.mktemp("server"), *flags, environment=environment) as (running, _):
        yield running


@pytest.fixture(autouse=True)
def old_weights(server):
    """Each test begins with those of seed 0, and leaves a server that is well."""
    update_to(server, 0)
    yield
    assert httpx2.get(f"{server.url}/health", timeout=30).status_code == httpx2.codes.OK
    wait_until(lambda: is_idle(server), "all device blocks to be free or evictable")


def is_idle(server):
    metrics = server.metrics()
    return metrics["device_free_blocks"] + metrics["device_evictable_blocks"] == NUM_BLOCKS


def legacy(server, name):
    reply = httpx2.get(f"{server.url}/{name}", timeout=120)
    assert reply.status_code == httpx2.codes.OK, reply.text


def update_to(server, seed):
    legacy(server, "clear_load_weight")
    write_seed(server.model, seed)
    legacy(server, "update_model_weight")


def test_nothing_computed_with_old_weights_is_used_with_new_ones(server, client, expected):
    for _ in range(2):
        assert tokens(all_documents(client)) == expected[0]
    before = server.worker_copies()
    assert min(before.swap_out.blocks, before.swap_in.blocks) > 0
    update_to(server, 1)
    new, again = all_documents(client), all_documents(client)
    assert [answer.cached_tokens for answer in new] == [0] * NUM_DOCUMENTS
    assert min(answer.cached_tokens for answer in again) > 0
    assert tokens(new) == tokens(again) == expected[1]


def test_requests_without_weights_are_refused_and_the_server_stays_up(server, client, expected):
    for _ in range(2):
        legacy(server, "clear_load_weight")
    with pytest.raises(openai.APIStatusError) as refused:
        ask(client, document(0))
    assert refused.value.status_code == REFUSED
    write_seed(server.model, 1)
    for _ in range(2):
        legacy(server, "update_model_weight")
    assert ask(client, document(0)).tokens == expected[1][0]


def ask_long(client, messages, max_tokens=LONG, **options):
    """Its prompt and its tokens: what it takes to continue it from anywhere."""
    extra = {"min_tokens": max_tokens, **options}
    return ask(client, messages, max_tokens=max_tokens, extra_body=extra)


def test_requests_that_run_end(server, client, expected):
    """The API ends those that it looks at while weights are away; others go on, from some token on with new weights.
    That all of them end in the scheduler is looked at after each test.
    """
    indices = range(4)
    old = [ask_long(client, document(index)) for index in indices]
    with ThreadPoolExecutor(len(indices)) as pool:
        answers = [pool.submit(ask_long, client, document(index)) for index in indices]
        wait_until(lambda: not is_idle(server), "requests to run")
        update_to(server, 1)
        assert tokens(all_documents(client)) == expected[1]
        for before, answer in zip(old, answers, strict=True):
            if (error := answer.exception()) is not None:
                assert isinstance(error, openai.APIStatusError)
                assert error.status_code == ENDED
            else:
                assert_continues(client, before, answer.result())


def assert_continues(client, old, mixed):
    """From where it differs, it is what the weights of now say."""
    pairs = zip(old.tokens, mixed.tokens, strict=True)
    same = next((index for index, (one, other) in enumerate(pairs) if one != other), LONG - 1)
    rest = ask_long(client, [], max_tokens=LONG - same, prompt_token_ids=[*old.prompt, *mixed.tokens[:same]])
    assert rest.tokens == mixed.tokens[same:]
