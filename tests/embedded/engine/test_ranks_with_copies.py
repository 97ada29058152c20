"""Two ranks whose copies go differently: what became of a copy is seen by both before either samples a token."""

import threading
from collections.abc import Callable
from dataclasses import replace

import pytest

from fastdeploy_kvcache_v1.config import WritePolicy
from fastdeploy_kvcache_v1.errors import RanksDisagreeError
from fastdeploy_kvcache_v1.metadata import SWAP_IN, SwapStep
from fastdeploy_kvcache_v1.model.sampler import SamplingParams
from fastdeploy_kvcache_v1.worker.runtime import CpuRuntime
from tests.embedded.engine.family_engine import FamilyEngine
from tests.model.test_ranks import on_all

PROMPT = [40 + (7 * at) % 50 for at in range(60)]
GREEDY = SamplingParams(temperature=0.0)


class Link:
    """A rank's copies. `on_swap_in` is called before each layer that comes from the host, `on_eviction` before all that
    go there.
    """

    def __init__(self):
        self.on_swap_in: Callable[[], None] = lambda: None
        self.on_eviction: Callable[[], None] = lambda: None

    def __call__(self, stream):
        self.on_swap_in() if "input" in stream else self.on_eviction()


def fail():
    raise RuntimeError("torn")


@pytest.fixture
def links():
    return [Link(), Link()]


def serve(links, family="gqa", **options):
    runtimes = [CpuRuntime(delay=link) for link in links]
    options = {"mtp": False, "num_host_blocks": 80, "policy": WritePolicy.WRITE_BACK} | options
    return FamilyEngine(family, size=2, runtimes=runtimes, **options)


def cached_on_the_host(engine):
    """The answer to `PROMPT`, whose blocks are on the host alone afterwards."""
    expected = engine.ask(PROMPT)
    for number in range(4):
        engine.ask([50 + number] * 60, max_tokens=1)
    engine.settle()
    return expected


def totals(engine):
    """Blocks that came from the host, and failed copies, by rank."""
    copies = [rank.swap_in for rank in engine.harness.core.counters.copies]
    return [each.blocks for each in copies], [each.failures for each in copies]


@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize(("family", "mtp"), [("gqa", True), ("mla", False)])
def test_a_swap_in_that_fails_on_one_rank_has_failed_on_all(links, family, mtp, failing):
    engine = serve(links, family, mtp=mtp)
    expected = cached_on_the_host(engine)
    before = totals(engine)[1]
    results = []
    for runner in engine.runners:
        keep_results(runner, results)
    links[failing].on_swap_in = fail
    recorder = engine.harness.submit("again", PROMPT, 10, GREEDY)
    engine.step()
    assert [list(result.retry) for result in results] == [["again"], ["again"]], "both ranks say so, in the same step"
    assert [result.tokens for result in results] == [{}, {}]
    assert all(f"rank {failing}: " in result.retry["again"] for result in results)
    links[failing].on_swap_in = lambda: None
    while not recorder.ended:
        engine.step()
    assert [recorder.tokens] == expected
    engine.settle()
    assert [now - then for now, then in zip(totals(engine)[1], before, strict=True)] == [failing == 0, failing == 1]
    engine.close()


def keep_results(runner, results):
    run = runner.run

    def keep(batch):
        results.append(run(batch))
        return results[-1]

    runner.run = keep


@pytest.mark.parametrize("slow", [0, 1])
def test_no_rank_samples_before_the_slowest_rank_has_its_blocks(links, slow):
    engine = serve(links)
    expected = cached_on_the_host(engine)
    arrives, others_wait = threading.Event(), threading.Event()
    links[slow].on_swap_in = lambda: arrives.wait(60)
    fast = 1 - slow
    engine.runners[fast]._ranks._on_wait = lambda waits: others_wait.set() if waits else None
    answered = []
    for rank, runner in enumerate(engine.runners):
        keep_results(runner, answered)
        assert rank == runner._ranks.rank
    recorder = engine.harness.submit("again", PROMPT, 10, GREEDY)
    step = threading.Thread(target=engine.step)
    step.start()
    assert others_wait.wait(60), "the rank that has its blocks waits for the other one"
    assert answered == []
    assert recorder.tokens == []
    arrives.set()
    step.join(60)
    links[slow].on_swap_in = lambda: None
    while not recorder.ended:
        engine.step()
    engine.runners[fast]._ranks._on_wait = lambda waits: None
    assert [recorder.tokens] == expected
    engine.settle()
    blocks, failures = totals(engine)
    assert blocks[0] == blocks[1] > 0
    assert failures == [0, 0]
    engine.close()


@pytest.mark.parametrize("late", [0, 1])
def test_a_swap_in_that_one_rank_gives_up_has_failed_on_all(links, late):
    engine = serve(links, layer_timeout_s=0.2)
    expected = cached_on_the_host(engine)
    arrives = threading.Event()
    links[late].on_swap_in = lambda: arrives.wait(60)
    recorder = engine.harness.submit("again", PROMPT, 10, GREEDY)
    engine.step()
    assert recorder.tokens == []
    assert engine.counters.requests_preempted == 1
    assert totals(engine)[1] == [late == 0, late == 1]
    arrives.set()
    links[late].on_swap_in = lambda: None
    while not recorder.ended:
        engine.step()
    assert [recorder.tokens] == expected
    engine.close()


def test_a_shared_host_copy_that_rank_0_could_not_make_is_on_no_rank(links):
    engine = serve(links, "mla")
    links[0].on_eviction = fail
    links[1].on_eviction = pytest.fail  # it copies nothing out
    expected = cached_on_the_host(engine)
    links[0].on_eviction = lambda: None
    counters = [rank.swap_out for rank in engine.harness.core.counters.copies]
    assert [each.failures > 0 for each in counters] == [True, False]
    assert engine.counters.failed_transfer_blocks > 0
    assert engine.ask(PROMPT) == expected, "computed again"
    assert totals(engine) == ([0, 0], [0, 0])
    engine.close()


@pytest.mark.parametrize("broken", [0, 1])
def test_a_rank_that_cannot_compute_costs_the_requests_of_that_step_only(links, broken):
    engine = serve(links)
    expected = cached_on_the_host(engine)
    runner = engine.runners[broken]
    forward = runner._forward

    def fail_once(sequences, caches, before_layer):
        runner._forward = forward
        raise MemoryError("no room")

    runner._forward = fail_once
    core = engine.harness.core
    recorder = engine.harness.submit("unlucky", PROMPT[:20], 4)
    core.step()
    batch = engine.harness.sent.pop()
    for rank, result in enumerate(engine._threads.map(lambda each: each.run(batch), engine.runners)):
        assert list(result.errors) == ["unlucky"], "on every rank"
        core.on_step_result(result, rank)
    assert f"rank {broken}: MemoryError('no room')" in recorder.failure.message
    assert engine.ask(PROMPT) == expected
    engine.close()


def use_other_ids(runner):
    """The rank reads other host blocks than it was told. The order of blocks alone would not matter: keys know their
    positions.
    """
    submit = runner._controller.submit_swap_tasks

    def elsewhere(step: SwapStep, **options):
        moved = tuple(
            replace(each, source_slots=tuple(79 - slot for slot in each.source_slots)) if each.kind == SWAP_IN else each
            for each in step.transfers
        )
        return submit(replace(step, transfers=moved), **options)

    runner._controller.submit_swap_tasks = elsewhere


def test_other_block_ids_on_one_rank_would_change_tokens():
    """So the tests that compare tokens can fail."""
    engine = serve([Link(), Link()])
    expected = cached_on_the_host(engine)
    use_other_ids(engine.runners[1])
    assert engine.ask(PROMPT) != expected
    engine.close()


def test_ranks_that_sample_other_tokens_serve_none(links):
    engine = serve(links)
    runner = engine.runners[1]
    take_forward = runner._forward

    def other_logits(*arguments):
        return [None if row is None else -row for row in take_forward(*arguments)]

    runner._forward = other_logits
    recorder = engine.harness.submit("r", PROMPT[:20], 4)
    engine.harness.core.step()
    batch = engine.harness.sent.pop()
    for outcome in on_all(engine.runners, lambda each: each.run(batch)):
        assert isinstance(outcome, RanksDisagreeError), "no rank answers"
    assert recorder.tokens == []
    for controller, runtime in zip(engine.controllers, engine.runtimes, strict=True):
        controller.free()
        runtime.close()
