"""Engine core and storage tier against a store that answers late, fails, or brings half: no token changes."""

from fastdeploy_kvcache_v1.lab.server.engine.generation import Failure
from fastdeploy_kvcache_v1.storage.engine.fetches import LOOK_EVERY_S
from fastdeploy_kvcache_v1.storage.engine.tier import LOOK_AGAIN_S
from tests.lab.server.engine.storage_server import HostTierServer
from tests.lab.server.harness import expected_outputs

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


def stored_blocks(server):
    return sum(run.num_stored for run in server.manager.snapshot(stored=server.tier.known).runs)


def test_a_snapshot_counts_the_blocks_that_were_stored_or_loaded():
    first = HostTierServer()
    first.ask("first", PROMPT)
    second = HostTierServer(stored=first.store.values)
    second.ask("second", PROMPT)
    assert [stored_blocks(server) for server in (first, second)] == [7, 7]
    blocks = [block for _, block in first.store.values]
    assert all(block in first.tier.known for block in blocks)
    first.core.reset_cache(stored=True)
    assert not any(block in first.tier.known for block in blocks), "they have other names now"


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


def test_preempted_request_loads_what_left_the_cache_while_it_waits():
    server = HostTierServer(device=16, host=20, prefetch="wait_complete")
    first, second = list(range(1, 17)), list(range(101, 121))
    recorders = server.harness.submit("first", first, 44), server.harness.submit("second", second, 16)
    while not server.core.is_idle:
        server.send()
        while any(server.store.calls.values()):
            server.answer()
        server.work()
        server.clock.now += LOOK_EVERY_S + 0.01
        server.send()
    server.settle()
    counters = server.manager.stats().counters
    assert (counters.requests_preempted, counters.resumed_hit_tokens) == (1, 32)
    assert server.tier.counters.load.blocks >= 8
    for recorder, prompt, count in zip(recorders, (first, second), (44, 16), strict=True):
        assert recorder.tokens == expected_outputs(prompt, count)


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


def test_questions_that_are_not_answered_are_bounded():
    server = HostTierServer(stored=stored_by_a_first_server(), max_num_seqs=200)
    for number in range(200):
        server.harness.submit(f"r{number}", [number, *PROMPT], 1)
        server.send()
        server.core.abort(f"r{number}")
    assert len(server.store.questions) == 64
    server.settle()
