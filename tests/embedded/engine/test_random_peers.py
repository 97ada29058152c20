"""Two engines that share requests under random faults, orders and delays: no token changes, and nothing is left."""

import random

import pytest

from tests.embedded.engine.cores import random_requests
from tests.embedded.engine.shadow_peers import Peers
from tests.embedded.shadow import expected_outputs


def some_rank(peers, rng):
    """None: all of them."""
    return rng.choice([None, *range(peers.num_ranks)])


def chaos(peers, rng, recorders):
    """One random thing happens."""
    names, fetches = list(recorders), list(peers.fetches)
    engine = rng.choice([peers.prefill, peers.decode])
    what = rng.randrange(15 if engine.store is None else 19)
    if what < 4:
        if engine.batch is not None:
            peers.end(engine)
        else:
            engine.begin()
    elif what == 4:
        engine.tell_news()
    elif what in (5, 6) and peers.asked:
        peers.answer(rng.choice(list(peers.asked)), error="it broke" if rng.random() < 0.1 else None)
    elif what in (7, 8) and fetches:
        peers.arrive(rng.choice(fetches), some_rank(peers, rng))
    elif what in (9, 10) and fetches:
        peers.scribble(rng.choice(fetches))
    elif what == 11 and fetches and rng.random() < 0.3:
        peers.fail_fetch(rng.choice(fetches), "the link broke", some_rank(peers, rng))
    elif what == 12 and rng.random() < 0.1:
        peers.decode.core.abort(rng.choice(names))
    elif what == 13 and rng.random() < 0.1:
        peers.clock.now += rng.choice([1.0, 20.0, 700.0])
    elif what == 14 and rng.random() < 0.1:
        engine.core.reset_cache()
    elif what > 14:
        engine.answer_store()


@pytest.mark.parametrize(("num_ranks", "has_storage"), [(1, False), (3, False), (1, True)])
@pytest.mark.parametrize("seed", range(6))
def test_a_thousand_requests_with_random_faults_change_no_token(seed, num_ranks, has_storage):
    """Six times 170. Copies between the tiers fail too, and slots that are being fetched hold anything."""
    rng = random.Random(seed)
    sizes = [(10, 10, 0), (9, 14, 8), (30, 30, 16)][seed % 3]
    peers = Peers(
        seed=seed,
        num_ranks=num_ranks,
        stored={} if has_storage else None,
        prefill_blocks=sizes[0],
        decode_blocks=sizes[1],
        host_blocks=sizes[2] or 10 * has_storage,
        fails=lambda result: rng.random() < 0.05,
        max_num_seqs=5,
        max_num_batched_tokens=12,
    )
    requests = random_requests(seed, 170)
    recorders = {}
    for name, prompt, output in requests:
        recorders[name] = peers.submit(name, prompt, output, remote=rng.random() < 0.9)
        for _ in range(rng.randrange(40)):
            chaos(peers, rng, recorders)
    peers.settle(turns=100_000)
    num_right = 0
    for name, prompt, output in requests:
        recorder, expected = recorders[name], expected_outputs(prompt, output)
        if recorder.ended and recorder.failure is None:
            assert recorder.tokens == expected, name
            num_right += 1
        else:
            assert recorder.tokens == expected[: len(recorder.tokens)], name
            assert recorder.failure is None or recorder.failure.status == 500
    totals = peers.remote.ledger.totals
    assert totals.started == totals.arrived + totals.failed + totals.cancelled + totals.overdue
    assert min(totals.arrived, totals.failed, totals.cancelled) > 0
    assert num_right > 140
    if has_storage:
        loaded = [engine.harness.storage.counters.load.blocks for engine in (peers.prefill, peers.decode)]
        assert min(loaded) > 0
    peers.check_idle()
