"""A prefill server's endpoint over an engine without a model: whom it serves, and what it finds cached."""

import msgspec
import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from fastdeploy_kvcache_v1.config import KVCacheConfig
from fastdeploy_kvcache_v1.contract.sessions import UNTOLD, session_hint
from fastdeploy_kvcache_v1.lab.model.sampler import SamplingParams
from fastdeploy_kvcache_v1.lab.server.app import add_error_handlers
from fastdeploy_kvcache_v1.lab.server.disaggregation import endpoints
from fastdeploy_kvcache_v1.lab.server.disaggregation.endpoints import add_role_routes
from fastdeploy_kvcache_v1.lab.server.disaggregation.settings import Role, RoleSettings
from fastdeploy_kvcache_v1.lab.server.engine.engine import Engine
from fastdeploy_kvcache_v1.lab.server.engine.engine_core import EngineCore
from fastdeploy_kvcache_v1.lab.server.engine.offered_prefills import OfferedPrefills
from fastdeploy_kvcache_v1.lab.server.prefill_job import (
    PATH,
    PROOF_HEADER,
    PrefillAnswer,
    PrefillJob,
    PrefillLine,
    proof,
)
from fastdeploy_kvcache_v1.lab.server.settings import ServerConfig
from fastdeploy_kvcache_v1.lab.server.text import load_tokenizer
from fastdeploy_kvcache_v1.scheduler.cache_manager import CacheManager
from fastdeploy_kvcache_v1.transfer.role_info import RoleInfo
from fastdeploy_kvcache_v1.transfer.settings import PeerPort, TransferSettings
from tests.lab.server.harness import Worker, WorkerThread, expected_outputs

SECRET = b"sixteen bytes or more"
PROMPT = list(range(18))
"""Four blocks and two tokens."""


@pytest.fixture
def ask():
    """`ask(name, prompt, ...)`: the HTTP status, and the last line or the refusal."""
    cache = KVCacheConfig(40, block_size=4)
    transfer = TransferSettings(secret=SECRET)
    role = RoleSettings(role=Role.PREFILL, address=PeerPort("127.0.0.1", 0), plane="socket", transfer=transfer)
    config = ServerConfig(cache=cache, max_model_len=200, role=role)
    manager, worker = CacheManager(cache), WorkerThread(Worker(cache))
    sizes = {"max_num_seqs": 8, "max_num_batched_tokens": 64}
    core = EngineCore(manager, worker.send, offered=OfferedPrefills(), **sizes)
    engine = Engine(core, worker, on_fatal=pytest.fail)
    app = FastAPI()
    add_error_handlers(app)
    add_role_routes(app, config, role, engine, load_tokenizer(None), [])
    client = TestClient(app, "http://localhost")

    def send(name, prompt, *, secret=SECRET, raw=None, **options):
        job = PrefillJob(name, list(prompt), SamplingParams(), "127.0.0.1", [9], **options)
        body = msgspec.json.encode(job) if raw is None else raw
        response = client.post(PATH, content=body, headers={PROOF_HEADER: proof(secret, "job", body)})
        if response.status_code != 200:
            return response.status_code, response.json()["error"]["message"]
        first, *_, last = [msgspec.json.decode(line, type=PrefillLine) for line in response.text.splitlines()]
        assert first == PrefillLine(), "a sign of life comes before the answer"
        return 200, last.error or last.answer

    send.engine, send.worker = engine, worker
    send.submitted, submit = [], engine.submit
    engine.submit = lambda generation: (send.submitted.append(generation), submit(generation))
    assert msgspec.json.decode(client.get("/kvcache/role").content, type=RoleInfo).role == "prefill"
    engine.start()
    yield send
    engine.close()


def cached(answer):
    assert answer[1].token == expected_outputs(PROMPT, 1)[0]
    return answer[1].cached_tokens


def test_a_prompt_that_was_computed_before_is_found(ask):
    assert ask("first", PROMPT) == (200, PrefillAnswer(expected_outputs(PROMPT, 1)[0], 0))
    assert cached(ask("second", PROMPT)) == 16


def test_a_salt_and_the_limits_of_a_request_hold_here_too(ask):
    cached(ask("no writes", PROMPT, writes_cache=False))
    assert cached(ask("first", PROMPT)) == 0
    assert cached(ask("tenant", PROMPT, cache_salt="tenant")) == 0
    assert cached(ask("tenant again", PROMPT, cache_salt="tenant")) == 16
    assert cached(ask("no reads", PROMPT, reads_cache=False)) == 0


def test_session_of_a_job_is_that_of_its_request(ask):
    hint = session_hint("a", b"tenant", 2.5)
    cached(ask("named", PROMPT, session=hint))
    cached(ask("unnamed", PROMPT))
    assert [each.hasher.session for each in ask.submitted] == [hint, UNTOLD]


def test_a_job_that_is_known_is_an_error_in_its_last_line(ask):
    ask("r", PROMPT)
    assert ask("r", PROMPT) == (200, "request r is known already")


@pytest.mark.parametrize(
    ("prompt", "options", "status", "message"),
    [
        (PROMPT, {"secret": b"another"}, 403, "for decode servers with the same secret"),
        (PROMPT, {"raw": b"{}"}, 400, "cannot be read"),
        (range(200), {}, 400, "the prompt has 200 tokens, this server's --max-model-len is 200"),
        ([264], {}, 400, "token 264 is not in this server's vocabulary"),
        ([1] * 161, {}, 400, "the prompt needs 41 device blocks, this server has 40"),
    ],
)
def test_a_job_that_this_server_cannot_do_is_refused_in_one_line(ask, prompt, options, status, message):
    found, line = ask("r", prompt, **options)
    assert (found, message in line) == (status, True), line


@pytest.mark.parametrize("prompt", [[263], [1] * 160])
def test_what_just_fits_is_served(ask, prompt):
    assert ask("r", prompt)[0] == 200


def test_a_job_ends_when_the_worker_stands_still_and_the_next_is_refused(ask, monkeypatch):
    monkeypatch.setattr(endpoints, "SIGN_S", 0.01)
    ask.engine._patience_s = 0.05
    ask.worker.gate.clear()
    standstill = "the worker has computed no layer for 0 s"
    assert ask("stopped", PROMPT) == (200, standstill)
    assert ask("refused", PROMPT) == (503, standstill)
    ask.worker.gate.set()
    ask.engine._patience_s = 60
    assert ask("again", PROMPT)[0] == 200
