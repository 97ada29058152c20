"""Every cache layout between two engines: checksum models, real worker halves, real sockets, equal tokens."""

import random
import time

import pytest

from fastdeploy_kvcache_v1.lab.model.sampler import SamplingParams
from fastdeploy_kvcache_v1.lab.server.disaggregation.settings import Role, RoleSettings
from fastdeploy_kvcache_v1.lab.server.engine.offered_prefills import OfferedPrefills
from fastdeploy_kvcache_v1.lab.server.engine.remote_prefills import RemotePrefills
from fastdeploy_kvcache_v1.lab.server.prefill_job import PrefillAnswer
from fastdeploy_kvcache_v1.lab.server.worker.outside import make_transfers
from fastdeploy_kvcache_v1.transfer.settings import PeerPort, TransferSettings
from tests.lab.server.engine.family_engine import BLOCK, FAMILIES, FamilyEngine
from tests.lab.server.harness import Recorder

SECRET = b"sixteen bytes or more"
HERE = PeerPort("127.0.0.1", 0)
SETTINGS = TransferSettings(secret=SECRET)


class Side:
    """A server without its processes."""

    def __init__(self, family, role, settings, **options):
        self.engine = FamilyEngine(family, **options)
        role = RoleSettings(role=role, address=HERE, plane="socket", transfer=settings)
        self.transfers = make_transfers(
            role, self.engine.controllers[0], block_size=BLOCK, model=family, num_kv_heads=None
        )
        self.engine.runners[0]._transfers = self.transfers
        self.core = self.engine.core

    def turn(self):
        self.engine.results()
        self.transfers.turn()
        self.transfers.check()
        self.core.on_transfer_news(self.transfers.take_news())

    def close(self):
        self.transfers.close()
        self.transfers.check_idle()
        assert self.core.peers.is_idle
        self.engine.close()


class Pair:
    """A prefill and a decode server; the answer over HTTP is a call."""

    def __init__(self, family, *, settings=SETTINGS, **options):
        self.offered = OfferedPrefills()
        self.remote = RemotePrefills(self, [HERE], settings, block_size=BLOCK, vocab_size=10**6)
        self.prefill = Side(family, Role.PREFILL, settings, offered=self.offered, **options)
        self.decode = Side(family, Role.DECODE, settings, remote=self.remote, **options)
        self.remote._addresses = [PeerPort("127.0.0.1", self.decode.transfers.port)]
        self.asked = {}

    def ask(self, url, job):
        recorder = self.asked[job.request_id] = Recorder()
        peers = tuple(PeerPort(job.decode_host, port) for port in job.decode_ports)
        generation = self.prefill.engine.generation(
            job.request_id, job.prompt_ids, 1, recorder, job.sampling, offered_to=peers
        )
        self.prefill.core.submit(generation)

    def drop(self, request_id):
        self.prefill.core.abort(request_id)
        self.asked.pop(request_id, None)

    def run(self, prompts, *, max_tokens=10, temperature=0.0):
        recorders = []
        for number, prompt in enumerate(prompts):
            recorder = Recorder()
            generation = self.decode.engine.generation(
                f"r{number} {random.random()}", prompt, max_tokens, recorder, SamplingParams(temperature, seed=5)
            )
            generation.prefill_url = "http://prefill"
            self.decode.core.submit(generation)
            recorders.append(recorder)
        deadline = time.monotonic() + 100
        while not all(each.ended for each in recorders) or not self.is_idle:
            self.prefill.turn()
            self.decode.turn()
            for name, recorder in list(self.asked.items()):
                if recorder.ended:
                    del self.asked[name]
                    answer = recorder.failure.message if recorder.failure else PrefillAnswer(recorder.tokens[0], 0)
                    self.decode.core.on_prefill_answer(name, answer)
            assert time.monotonic() < deadline, "the requests never ended"
        return [each.tokens for each in recorders]

    @property
    def is_idle(self):
        return all(side.core.is_idle and side.core.peers.is_idle for side in (self.prefill, self.decode))

    def close(self):
        self.prefill.close()
        self.decode.close()


def prompts_of(seed):
    """Shared prefixes, ends inside blocks and at their ends."""
    rng = random.Random(seed)
    prefix = [rng.randrange(200) for _ in range(2 * BLOCK + 3)]
    lengths = [BLOCK + 1, 2 * BLOCK, 2 * BLOCK + 5, 4 * BLOCK - 1]
    return [prefix[: length // 2] + [rng.randrange(200) for _ in range(length - length // 2)] for length in lengths]


@pytest.mark.parametrize(("family", "mtp"), [(family, number % 2 == 0) for number, family in enumerate(FAMILIES)])
def test_tokens_are_those_of_one_engine(family, mtp):
    temperature = 0.0 if mtp and family == "gqa" else 0.9
    alone = FamilyEngine(family, mtp=mtp, num_device_blocks=40)
    prompts = prompts_of(3)
    expected = [alone.ask(prompt, temperature=temperature) for prompt in prompts]
    alone.close()
    pair = Pair(family, mtp=mtp, num_device_blocks=24, num_host_blocks=20, max_num_batched_tokens=24)
    assert pair.run(prompts, temperature=temperature) == expected
    assert pair.remote.ledger.totals.arrived == len(prompts)
    assert pair.run([prompt + [7, 8, 9] * 4 for prompt in prompts[:2]], temperature=temperature)
    assert pair.run(prompts, temperature=temperature) == expected, "from what was fetched and cached"
    assert pair.remote.ledger.totals.failed == 0
    assert pair.remote.counters.prompts_recomputed == 0
    pair.close()


def test_a_lease_whose_offer_comes_after_the_abort_ends_by_an_event():
    """No lease ends by time here."""
    pair = Pair("gqa", settings=TransferSettings(secret=SECRET, lease_s=1e6))
    generation = pair.decode.engine.generation("r", list(range(1, 40)), 4, Recorder(), SamplingParams(0.0))
    generation.prefill_url = "http://prefill"
    pair.decode.core.submit(generation)
    while not pair.asked:
        pair.decode.turn()
    while not pair.asked["r"].ended:
        pair.prefill.turn()
    assert not pair.prefill.core.peers.is_idle, "a lease is open"
    pair.decode.core.abort("r")
    deadline = time.monotonic() + 20
    while not pair.is_idle:
        pair.prefill.turn()
        pair.decode.turn()
        assert time.monotonic() < deadline, "the lease stays open"
    pair.close()
