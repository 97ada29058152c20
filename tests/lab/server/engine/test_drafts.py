"""Drafts change no token: where requests end, and where room or budget is short."""

from functools import cache

import pytest

from fastdeploy_kvcache_v1.config import KVCacheConfig
from fastdeploy_kvcache_v1.lab.model.sampler import SamplingParams
from tests.lab.server.engine.family_engine import FamilyEngine
from tests.lab.server.harness import Harness, Recorder

PROMPT = [40 + (7 * at) % 50 for at in range(30)]
LENGTH = 40


@pytest.fixture
def engine(request):
    def make(*, mtp=True, **options):
        made = FamilyEngine("gqa", mtp=mtp, **options)
        request.addfinalizer(made.close)
        return made

    return make


@cache
def output():
    """Without drafts and without a cache."""
    plain = FamilyEngine("gqa", num_device_blocks=60, caching=False)
    tokens = plain.ask(PROMPT, max_tokens=LENGTH)
    plain.close()
    return tokens


def test_a_step_gives_two_tokens_where_the_guess_was_right(engine):
    served = engine()
    assert served.ask(PROMPT, max_tokens=LENGTH) == output()
    verified, right = served.drafts
    counters = served.core.counters
    assert right > 3
    assert counters.generated_tokens == LENGTH
    # The first token comes with the prompt; each later step gives one, and one more for each guess that was right.
    assert counters.steps == LENGTH - right
    assert counters.computed_tokens == len(PROMPT) + (LENGTH - 1 - right) + verified
    assert right < verified


def test_a_request_may_end_at_any_token_of_a_step(engine):
    served = engine(num_device_blocks=40)
    for length in range(1, LENGTH, 3):
        assert served.ask(PROMPT, max_tokens=length) == output()[:length]
    for at in range(0, LENGTH, 3):
        stop = output()[at]
        tokens = served.ask(PROMPT, max_tokens=LENGTH, stop_token_ids=frozenset([stop]))
        assert tokens == output()[: output().index(stop) + 1]
    assert served.drafts[1] > 10
    served.manager.check_idle()


def test_tokens_that_are_sampled_otherwise_are_not_guessed(engine):
    """The first `min_tokens` have sampling parameters of their own, and the token behind them may be any."""
    early = SamplingParams(temperature=0.0, banned_tokens=tuple(set(output())))
    servers = [engine(mtp=mtp, num_device_blocks=60) for mtp in (False, True)]
    for least in range(1, 16, 3):
        options = {"min_tokens": least, "early_sampling": early}
        plain, drafted = (served.ask(PROMPT, max_tokens=24, **options) for served in servers)
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
    found = [(each.generation.request_id, each.num_tokens, each.drafts) for each in planned]
    assert found == [("a", 1, ()), ("b", 1, ())]
    assert harness.num_preemptions == 0
