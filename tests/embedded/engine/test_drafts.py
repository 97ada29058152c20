"""Drafts change no token: where requests end, where room or budget is short, and when copies fail under them."""

import random
from functools import cache

import pytest

from fastdeploy_kvcache_v1.config import KVCacheConfig, WritePolicy
from fastdeploy_kvcache_v1.model.sampler import SamplingParams
from tests.embedded.engine.family_engine import FamilyEngine
from tests.embedded.shadow import Harness, Recorder
from tests.worker.chosen_runtime import ChosenRuntime

GREEDY = SamplingParams(temperature=0.0)
PROMPT = [40 + (7 * at) % 50 for at in range(30)]
LENGTH = 40


@pytest.fixture
def engine():
    opened = []

    def make(*, mtp=True, **options):
        opened.append(FamilyEngine("gqa", mtp=mtp, **options))
        return opened[-1]

    yield make
    for each in opened:
        each.close()


@cache
def output(length=LENGTH):
    """Without drafts and without a cache."""
    plain = FamilyEngine("gqa", mtp=False, num_device_blocks=60, caching=False)
    tokens = plain.ask(PROMPT, max_tokens=length)[0]
    plain.close()
    return tokens


def run(engine, recorder):
    while not recorder.ended:
        engine.step()
    assert recorder.failure is None
    return recorder.tokens


def test_a_step_gives_two_tokens_where_the_guess_was_right(engine):
    served = engine()
    assert served.ask(PROMPT, max_tokens=LENGTH) == [output()]
    verified, right = served.drafts
    counters = served.harness.core.counters
    assert right > 3
    assert counters.generated_tokens == LENGTH
    # The first token comes with the prompt; each later step gives one, and one more for each guess that was right.
    assert counters.steps == LENGTH - right
    assert counters.computed_tokens == len(PROMPT) + (LENGTH - 1 - right) + verified
    assert right < verified


def test_a_request_may_end_at_any_token_of_a_step(engine):
    served = engine(num_device_blocks=40)
    for length in range(1, LENGTH, 3):
        assert served.ask(PROMPT, max_tokens=length) == [output()[:length]]
    for at in range(0, LENGTH, 3):
        stop = output()[at]
        recorder = served.harness.submit(f"stop{at}", PROMPT, LENGTH, GREEDY, stop_token_ids=frozenset([stop]))
        assert run(served, recorder) == output()[: output().index(stop) + 1]
    assert served.drafts[1] > 10
    served.harness.manager.check_idle()


def test_tokens_that_are_sampled_otherwise_are_not_guessed(engine):
    """The first `min_tokens` have sampling parameters of their own, and the token behind them may be any."""
    early = SamplingParams(temperature=0.0, banned_tokens=tuple(set(output())))
    servers = [engine(mtp=mtp, num_device_blocks=60) for mtp in (False, True)]
    for least in range(1, 16, 3):
        options = {"min_tokens": least, "early_sampling": early}
        plain, drafted = (
            run(served, served.harness.submit(f"early{least}", PROMPT, 24, GREEDY, **options)) for served in servers
        )
        assert plain == drafted, least
        assert not set(plain[:least]) & set(output())
    assert servers[1].drafts[1] > 10


def test_guesses_are_used_once_the_first_tokens_are_there():
    generation = Harness(KVCacheConfig(4, 0, block_size=4)).generation("g", [1, 2], 9, Recorder(), min_tokens=2)
    used = []
    for token in (65, 66, 67):
        generation.drafts = (70,)
        used.append(generation.usable_drafts)
        generation.append(token)
    assert used == [(), (), (70,)]


def test_a_budget_of_one_token_leaves_no_room_for_guesses(engine):
    served = engine(max_num_batched_tokens=1)
    assert served.ask(PROMPT, max_tokens=LENGTH) == [output()]
    assert served.drafts == (0, 0)


def test_behind_the_last_token_nothing_is_guessed(engine):
    """The position of a guess could be beyond the model's last one."""
    served = engine()
    assert served.ask(PROMPT, max_tokens=2) == [output()[:2]]
    assert served.drafts == (0, 0)


def test_a_guess_pushes_nobody_out():
    """Both requests have filled their blocks but for one token, and no block is left for a guess behind it."""
    harness = Harness(KVCacheConfig(4, 0, block_size=4))
    for name, prompt in (("a", [1, 2, 3]), ("b", [4, 5, 6])):
        harness.submit(name, prompt, 9)
    while harness.scheduler.num_waiting or harness.scheduler.running[0].num_computed < 7:
        harness.step()
    first, second = harness.scheduler.running
    assert (first.num_computed, second.num_computed, harness.num_preemptions) == (7, 7, 0)
    first.drafts = second.drafts = (65,)
    planned = harness.scheduler.schedule()
    assert [(item.generation.request_id, item.num_tokens, item.drafts) for item in planned] == [
        ("a", 1, ()),
        ("b", 1, ()),
    ]
    assert harness.num_preemptions == 0


@cache
def prompts(seed):
    """Prompts and output lengths; many begin alike, some continue others."""
    rng = random.Random(seed)
    beginnings = [[rng.randrange(32, 127) for _ in range(rng.randrange(10, 40))] for _ in range(3)]
    made = []
    for _ in range(36):
        prompt = rng.choice(beginnings) + [rng.randrange(32, 127) for _ in range(rng.randrange(1, 20))]
        made.append((prompt, rng.randrange(1, 16)))
        if len(prompt) < 70:
            beginnings.append(prompt)
    return made


@cache
def expected(seed):
    plain = FamilyEngine("gqa", mtp=False, num_device_blocks=80, caching=False)
    outputs = [plain.ask(prompt, max_tokens=length)[0] for prompt, length in prompts(seed)]
    plain.close()
    return outputs


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("policy", WritePolicy)
def test_no_overlap_of_events_changes_a_token(policy, size):
    """Failed, late and slow copies, aborts, resets and preemptions, under requests that are drafted for. With two
    ranks, each has faults of its own.
    """
    seed = list(WritePolicy).index(policy)
    rng = random.Random(seed)
    served = FamilyEngine(
        "gqa",
        mtp=True,
        policy=policy,
        num_device_blocks=14,
        num_host_blocks=60,
        runtimes=[ChosenRuntime(seed + 100 * rank, fail=0.03, late=0.02) for rank in range(size)],
        size=size,
    )
    waiting = dict(enumerate(prompts(seed)))
    recorders, gone = {}, set()
    while waiting or not served.harness.core.is_idle:
        for _ in range(min(len(waiting), rng.randrange(3))):
            name, (prompt, length) = waiting.popitem()
            recorders[name] = served.harness.submit(str(name), prompt, length, GREEDY)
        if rng.random() < 0.02:
            served.harness.core.reset_cache()
        served.step_with(lambda: abort_one(served, recorders, gone) if rng.random() < 0.03 else None)
    for name, recorder in recorders.items():
        if name in gone:
            continue
        if recorder.failure is None:
            assert recorder.tokens == expected(seed)[name], name
        else:
            assert "gave up after 3 more attempts" in recorder.failure.message
    assert served.drafts[1] > 0
    assert served.harness.core.counters.copies[0].swap_in.blocks > 0
    served.close()


def abort_one(served, recorders, gone):
    """While its batch is with the worker."""
    name = next((name for name, recorder in recorders.items() if not recorder.ended and name not in gone), None)
    if name is not None:
        gone.add(name)
        served.harness.core.abort(str(name))
