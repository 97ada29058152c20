"""Engine core and storage tier against a store that answers late, fails, or brings half: no token changes."""

import pytest

from fastdeploy_kvcache_v1.embedded.engine.generation import Failure
from fastdeploy_kvcache_v1.storage.engine.tier import LOOK_AGAIN_S
from tests.embedded.engine.storage_server import BLOCK, HostTierServer
from tests.embedded.shadow import expected_outputs

PROMPT = list(range(30))


def stored_by_a_first_server():
    first = HostTierServer()
    assert first.ask("first", PROMPT) == 0
    assert len(first.store.values) == 7
    return first.store.values


def test_another_server_starts_from_what_was_stored():
    second = HostTierServer(stored=stored_by_a_first_server())
    assert second.ask("second", PROMPT) == 28
    assert second.tier.counters.load.blocks == 7
    assert second.ask("third", [*PROMPT[:16], 99, 98]) == 16
    assert second.tier.counters.load.blocks == 7, "what is cached is not loaded again"
    assert [len(hashes) for hashes in second.store.touched] == [4], "and the store is told that it is in use"


@pytest.mark.parametrize("prefetch", ["timeout", "wait_complete"])
def test_a_prefix_that_is_longer_than_the_host_tier_is_loaded_once_and_as_far_as_it_fits(prefetch):
    long = list(range(4 * 60 + 1))
    first = HostTierServer(device=64, host=64)
    first.ask("first", long)
    second = HostTierServer(device=64, host=16, stored=first.store.values, prefetch=prefetch)
    assert second.ask("second", long) == 4 * 12
    assert second.tier.counters.load.blocks == 12
    assert second.clock.now == 0.0, "nothing waited for a deadline"


def test_others_pass_a_request_that_waits_for_the_store():
    server = HostTierServer(stored=stored_by_a_first_server())
    waits = server.harness.submit("waits", PROMPT, 2)
    other = server.harness.submit("other", [50, 51, 52], 2)
    for _ in range(2):
        server.harness.step()
    assert other.tokens == expected_outputs([50, 51, 52], 2)
    assert waits.events == []
    server.settle()
    assert waits.cached == 28


def test_a_request_waits_no_longer_than_its_deadline():
    server = HostTierServer(stored=stored_by_a_first_server())
    recorder = server.harness.submit("late", PROMPT, 2)
    assert server.harness.step() is None
    left = server.core.seconds_to_next_deadline()
    assert 0.5 <= left < 0.6
    server.clock.now += left - 0.01
    assert server.harness.step() is None
    server.clock.now += 0.02
    assert server.core.seconds_to_next_deadline() == LOOK_AGAIN_S, "it may have passed since the last step"
    while server.harness.step() is not None:
        pass
    assert recorder.tokens == expected_outputs(PROMPT, 2)
    assert recorder.cached == 0
    assert server.tier.counters.late_requests == 1
    server.settle()


@pytest.mark.parametrize("hangs", ["question", "load"])
def test_a_store_that_hangs_is_left_alone_after_three_requests(hangs):
    server = HostTierServer(stored=stored_by_a_first_server(), min_tokens=8, device=40, host=40)
    waited = []
    for number in range(5):
        recorder = server.harness.submit(f"r{number}", [*PROMPT[:28], number, 1, 2], 1)
        server.send()
        if hangs == "load" and server.store.questions:
            server.answer_question()
        waited.append(server.harness.step() is None)
        server.clock.now += 3.1
        while server.harness.step() is not None:
            pass
        assert recorder.tokens == expected_outputs([*PROMPT[:28], number, 1, 2], 1)
        server.core.reset_cache()
    assert waited == [True, True, True, False, False]
    assert server.tier.is_left_alone
    server.settle()


def test_what_has_arrived_by_the_deadline_is_used():
    stored = stored_by_a_first_server()
    long = list(range(400))
    first = HostTierServer(device=110, host=110)
    first.ask("first", long)
    server = HostTierServer(device=110, host=110, stored=first.store.values | stored)
    recorder = server.harness.submit("late", long, 1)
    server.send()
    server.answer()  # the question
    server.answer()  # the first piece
    server.clock.now = 10.0
    while server.harness.step() is not None:
        pass
    assert recorder.cached == 32 * BLOCK
    assert recorder.tokens == expected_outputs(long, 1)
    server.settle()


def test_wait_complete_ends_when_the_store_stands_still():
    server = HostTierServer(stored=stored_by_a_first_server(), prefetch="wait_complete")
    server.harness.submit("waits", PROMPT, 2)
    server.clock.now = 9.9
    assert server.harness.step() is None
    server.answer()
    server.clock.now = 19.8
    assert server.harness.step() is None
    server.clock.now = 20.0
    assert server.harness.step() is not None
    server.settle()


def test_a_deadline_that_passes_inside_a_step_fails_nobody():
    """Every look at the clock is a little later than the one before."""
    server = HostTierServer(stored=stored_by_a_first_server())
    recorder = server.harness.submit("late", PROMPT, 2)
    server.send()
    step, server.tier._fetches._clock = 1e-4, lambda: advance(server.clock, step)
    server.clock.now = server.core.seconds_to_next_deadline() - 3 * step
    for _ in range(50):
        if server.harness.step() is not None:
            break
    while server.harness.step() is not None:
        pass
    assert recorder.failure is None
    assert recorder.tokens == expected_outputs(PROMPT, 2)


def advance(clock, seconds):
    clock.now += seconds
    return clock.now


def test_after_the_engine_is_closed_the_store_is_not_asked():
    server = HostTierServer(stored=stored_by_a_first_server())
    server.harness.submit("r", PROMPT, 2)
    server.send()
    server.core.close(Failure(503, "the worker is gone"))
    server.answer()
    server.core.step()
    assert not server.store.loads
    assert server.core.seconds_to_next_deadline() is None


def test_equal_prefixes_are_loaded_once():
    server = HostTierServer(device=64, host=64, stored=stored_by_a_first_server(), max_num_seqs=20)
    recorders = [server.harness.submit(f"r{number}", [*PROMPT[:28], number, 1], 1) for number in range(12)]
    server.send()
    while server.store.questions:
        server.answer_question()
    assert len(server.store.loads) == 1
    server.settle()
    assert server.tier.counters.load.blocks == 7
    assert [recorder.cached for recorder in recorders] == [28] * 12


def test_many_requests_that_wait_their_turn_are_no_failures_of_the_store():
    server = HostTierServer(device=200, host=400)
    long = {name: [1000 * name + token for token in range(40)] for name in range(30)}
    for name, prompt in long.items():
        server.ask(f"store{name}", prompt, 1)
    second = HostTierServer(device=200, host=400, stored=server.store.values, max_num_seqs=30)
    for name, prompt in long.items():
        second.harness.submit(f"r{name}", prompt, 1)
    second.send()
    while not second.store.is_idle:
        second.clock.now += 1.0  # each answer takes that long
        second.answer()
        second.send()
        second.work()
    second.settle()
    assert not second.tier.is_left_alone
    assert second.tier.counters.late_requests > 0


def test_requests_that_wait_already_start_when_the_store_turns_out_to_hang():
    server = HostTierServer(stored=stored_by_a_first_server(), prefetch="wait_complete")
    recorder = server.harness.submit("r", PROMPT, 1)
    for _ in range(3):
        assert server.harness.step() is None
        server.clock.now += 3.1
    assert server.harness.step() is not None, "before the ten seconds of wait_complete"
    assert recorder.tokens == expected_outputs(PROMPT, 1)
    server.settle()


def test_questions_that_are_not_answered_are_bounded():
    server = HostTierServer(stored=stored_by_a_first_server(), max_num_seqs=200)
    for number in range(200):
        server.harness.submit(f"r{number}", [number, *PROMPT], 1)
        server.send()
        server.core.abort(f"r{number}")
    assert len(server.store.questions) == 64
    server.settle()
