"""Two engines that share requests: the tokens of one, whatever fails between them, and nothing left behind."""

import pytest

from fastdeploy_kvcache_v1.embedded.engine.generation import Failure, State
from tests.embedded.engine.shadow_peers import Peers
from tests.embedded.shadow import expected_outputs

PROMPT = list(range(100, 118))
"""Four blocks and two tokens."""


def start(peers, name="r", prompt=PROMPT):
    """Up to where the decode engine fetches and the prefill engine has been asked."""
    recorder = peers.submit(name, prompt, 4)
    peers.step(peers.decode)
    assert name in peers.fetches
    assert name in peers.asked
    return recorder


def compute(peers):
    while peers.step(peers.prefill):
        pass


def generation_of(peers, name="r"):
    return peers.decode.core._generations[name]


def test_a_prompt_is_computed_on_one_engine_and_continued_on_the_other():
    peers = Peers()
    recorder = start(peers)
    compute(peers)
    peers.settle()
    assert recorder.tokens == expected_outputs(PROMPT, 4)
    assert peers.decode.core.counters.computed_tokens == 3, "only what was generated is computed"
    assert peers.prefill.core.counters.computed_tokens == len(PROMPT)
    assert peers.remote.ledger.totals.arrived == peers.offered.ledger.totals.arrived == 1
    # Both have it cached now: the decode engine needs nobody for the same prompt, the prefill engine finds it.
    assert peers.submit("again", PROMPT, 4).tokens == []
    peers.settle()
    assert peers.remote.counters.prompts_declined == 1
    assert peers.remote.ledger.totals.started == 1


def test_a_failed_fetch_is_computed_here_in_the_same_slots():
    peers = Peers()
    recorder = start(peers)
    table = peers.decode.core.manager.block_table("r")
    peers.scribble("r")
    peers.end_fetch("r", "the link broke")
    peers.tell_news(peers.decode)
    assert generation_of(peers).state is State.RUNNING
    assert peers.decode.core.manager.block_table("r") == table
    assert "r" in peers.dropped
    peers.settle()
    assert recorder.tokens == expected_outputs(PROMPT, 4)
    counters = peers.remote.counters
    assert (counters.prompts_recomputed, counters.recomputed_prompt_tokens) == (1, len(PROMPT))
    assert peers.remote.ledger.totals.failed == 1


def test_blocks_without_a_first_token_are_used_after_a_deadline():
    peers = Peers()
    recorder = start(peers)
    compute(peers)
    assert peers.arrive("r")
    peers.tell_news(peers.decode)
    assert peers.decode.core.seconds_to_next_deadline() == peers.settings.silence_s
    peers.clock.now += peers.settings.silence_s
    assert peers.step(peers.decode)
    assert recorder.tokens == expected_outputs(PROMPT, 1)
    assert peers.decode.core.counters.computed_tokens == 1, "the last token of the prompt, for its logits"
    peers.settle()
    assert recorder.tokens == expected_outputs(PROMPT, 4)


def test_a_fetch_that_never_ends_is_given_up():
    peers = Peers()
    recorder = start(peers)
    peers.clock.now += peers.decode.core.seconds_to_next_deadline()
    assert peers.step(peers.decode)
    assert not peers.fetches
    peers.settle()
    assert recorder.tokens == expected_outputs(PROMPT, 4)
    assert peers.remote.ledger.totals.overdue == 1


def test_slots_of_a_request_that_left_are_not_used_until_its_fetch_has_ended():
    peers = Peers(decode_blocks=6)
    start(peers)
    peers.decode.core.abort("r")
    other = peers.submit("other", list(range(500, 515)), 4, remote=False)
    assert peers.step(peers.decode), "the cancel goes to the worker"
    assert not peers.decode.harness.worker.batches[-1].requests, "there is no room for another one yet"
    peers.settle()
    assert other.tokens == expected_outputs(list(range(500, 515)), 4)


def test_a_prefill_that_is_dropped_withdraws_its_lease():
    peers = Peers(max_num_batched_tokens=8)
    start(peers)
    peers.step(peers.prefill)
    assert "r" in peers.leases
    peers.prefill.core.abort("r")
    peers.step(peers.prefill)
    assert not peers.leases


def test_a_fetching_request_that_lost_its_prefix_starts_again_when_no_byte_arrives_any_more():
    peers = Peers()
    start(peers)
    peers.settle()
    longer = PROMPT[:12] + list(range(300, 310))
    recorder = start(peers, "longer", longer)
    peers.decode.core.peers.lose(generation_of(peers, "longer"))
    assert generation_of(peers, "longer").state is State.FETCHING
    peers.settle()
    assert peers.decode.harness.num_preemptions == 1
    assert recorder.tokens == expected_outputs(longer, 4)


def test_a_lease_that_ends_early_fails_the_prefill_and_not_the_request():
    peers = Peers(max_num_batched_tokens=8)
    recorder = start(peers)
    peers.step(peers.prefill)
    assert not peers.asked["r"].ended
    peers.end_lease("r", "no link")
    peers.tell_news(peers.prefill)
    assert peers.asked["r"].failure == Failure(503, "its blocks cannot be read any more: no link")
    peers.settle()
    assert recorder.tokens == expected_outputs(PROMPT, 4)


def test_the_same_job_twice_is_refused_once():
    peers = Peers()
    recorder = start(peers)
    again = peers.prefill.harness.submit("r", PROMPT, 1)
    assert again.failure == Failure(409, "request r is known already")
    peers.settle()
    assert recorder.tokens == expected_outputs(PROMPT, 4)


def test_a_token_outside_the_vocabulary_is_no_answer():
    peers = Peers()
    recorder = start(peers)
    peers.remote._vocab_size = 50
    compute(peers)
    peers.answer("r")
    assert recorder.tokens == []
    peers.settle()
    assert recorder.tokens == expected_outputs(PROMPT, 4)


@pytest.mark.parametrize("phase", ["first chunk", "last chunk"])
def test_a_prompt_whose_blocks_are_taken_away_is_not_offered_from_other_blocks(phase):
    """The lease names the slots of before; a copy that failed has cost the request them."""
    peers = Peers(max_num_batched_tokens=8)
    recorder = start(peers)
    for _ in range(1 if phase == "first chunk" else 2):
        peers.step(peers.prefill)
    (generation,) = peers.prefill.harness.scheduler.running
    peers.prefill.harness.scheduler.preempt(generation)
    other = peers.prefill.harness.submit("other", list(range(700, 730)), 2)
    peers.settle()
    assert other.tokens == expected_outputs(list(range(700, 730)), 2)
    assert recorder.tokens == expected_outputs(PROMPT, 4)
    assert peers.remote.counters.prompts_recomputed == 1
    assert peers.remote.ledger.totals.arrived == 0
