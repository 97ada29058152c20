"""The storage tier over host and over device blocks: what is asked, loaded, stored, waited for, and given up."""

from dataclasses import replace

import pytest

from fastdeploy_kvcache_v1.config import WritePolicy
from fastdeploy_kvcache_v1.contract.messages import (
    SWAP_IN,
    SWAP_OUT,
    BlockCopies,
    CacheAccess,
    CopyResult,
    SwapStep,
    WorkerReport,
)
from fastdeploy_kvcache_v1.scheduler.costs import FEWEST_TOKENS
from fastdeploy_kvcache_v1.storage.attention_store.tasks import MatchTask, WriteDone, WriteStorageTask
from fastdeploy_kvcache_v1.storage.engine import fetches, stores
from fastdeploy_kvcache_v1.storage.engine.fetches import LOOK_EVERY_S, TOUCH_EVERY_S
from fastdeploy_kvcache_v1.storage.engine.open_passes import OpenPasses
from fastdeploy_kvcache_v1.storage.engine.store_costs import PROBE_EVERY
from fastdeploy_kvcache_v1.storage.engine.tier import HELD_S, LOOK_AGAIN_S
from fastdeploy_kvcache_v1.storage.messages import Failing, RankDone, TouchDone, UseNamespace
from fastdeploy_kvcache_v1.storage.settings import Prefetch
from tests.storage.engines import Engine, Prompt

LONG = "".join(chr(300 + number) for number in range(200))
LATER = "".join(chr(600 + number) for number in range(200))


@pytest.fixture(params=["host", "device"])
def engine(request):
    """`engine(...)` makes one."""
    return lambda **options: Engine(request.param, **options)


def host(**options):
    return Engine("host", **options)


def device(**options):
    return Engine("device", **options)


# ---- loads


def test_the_namespace_is_named_first_and_a_new_one_to_all(engine):
    made = engine()
    other = replace(made.namespace, weight_epoch="1")
    made.tier.cache_reset()
    made.tier.use_namespace(other)
    assert made.link.sent == [UseNamespace(made.namespace), UseNamespace(other)]


@pytest.mark.parametrize(("arrived", "cached"), [((3, 3), 3), ((3, 1), 1), ((0, 3), 0)])
def test_a_loaded_block_is_there_when_it_is_on_all_ranks(arrived, cached):
    made = device()
    made.arrive("r", "abc!", 3)
    (load,) = made.loads
    assert (load.path, len(load.slots)) == ("abc", 3)
    made.loaded(load, arrived[0])
    assert made.cached("abc") == 0
    assert not made.tier.may_start("r")
    made.loaded(load, arrived[1], rank=1)
    assert made.cached("abc") == cached
    assert made.tier.may_start("r")
    made.check_idle()


def test_only_what_is_missing_is_asked_for_and_loaded(engine):
    made = engine()
    made.report(made.compute("abc!"))
    for store in made.stores:
        made.stored(store)
    made.arrive("r", "abcdef!", 2)
    (load,) = made.loads
    assert (load.path, len(load.slots)) == ("abcde", 2)
    if made.kind == "host":
        assert ["abcd", "abcde", "abcdef"] in made.link.sent
    else:
        assert made.link.all(MatchTask)[0].first_block_idx == 3
    assert made.tier.counters.queried_blocks == 3
    assert made.tier.counters.found_blocks == 2


@pytest.mark.parametrize(
    # Tokens of the prompt, how many of its blocks are stored, and how many questions and loads that makes.
    ("num_tokens", "stored", "num_queries", "num_loads"),
    [(10, None, 0, 0), (11, 10, 1, 1), (20, 9, 1, 0), (20, 10, 1, 1)],
)
def test_what_is_too_short_is_neither_asked_for_nor_loaded(engine, num_tokens, stored, num_queries, num_loads):
    made = engine(min_tokens=10)
    made.arrive("r", LONG[:num_tokens], stored)
    assert (len(made.link.queries), len(made.loads)) == (num_queries, num_loads)
    assert made.tier.may_start("r") == (not num_loads)


def test_nothing_is_fetched_without_a_namespace_or_without_read_access(engine):
    made = engine()
    made.tier.forget_namespace()
    made.arrive("r", "abc!")
    made.tier.use_namespace(made.namespace)
    prompt = Prompt("abc!")
    prompt.access = CacheAccess(reads=False)
    made.tier.request_arrived("s", prompt, (1, 2, 3, 4))
    assert made.link.queries == []


def test_two_pieces_load_at_once_and_none_behind_a_missing_block(engine):
    made = engine(host=1024, device=1024)
    made.arrive("r", LONG, 199)
    first, second = made.loads
    assert (len(first.slots), len(second.slots), second.path) == (32, 32, LONG[:64])
    made.loaded(first, *[31] * (1 if made.kind == "host" else 2))
    assert not made.tier.may_start("r"), "a piece is under way still"
    made.loaded(second)
    assert made.tier.may_start("r")
    assert made.loads == [first, second]
    assert made.cached(LONG) == 31
    made.check_idle()


def test_after_a_reset_nothing_more_is_loaded(engine):
    made = engine(host=1024, device=1024)
    made.arrive("r", LONG, 199)
    made.manager.reset_cache()
    made.tier.cache_reset()
    assert made.tier.may_start("r")
    for load in made.loads:
        made.loaded(load)
    assert len(made.loads) == 2
    assert made.cached(LONG) == 0
    made.check_idle()


def look(made, after_s=LOOK_EVERY_S):
    made.now += after_s
    made.tier.look_again()


@pytest.mark.parametrize("were", ["cached", "loaded"])
def test_stored_blocks_that_left_while_a_request_waits_are_fetched_again(were):
    made = host(device=16, host=16, min_tokens=4)
    if were == "cached":
        made.report(made.compute(LONG[:11]))
    made.arrive("r", LONG[:11], None if were == "cached" else 10)
    for load in made.loads:
        made.loaded(load)
    assert made.cached(LONG[:10]) == 10
    before = len(made.link.queries)
    if were == "cached":
        look(made)
        assert len(made.link.queries) == before
    num_stored = 0
    for begin in (0, 40, 80):
        made.report(made.compute(LATER[begin : begin + 16]))
        while num_stored < len(made.stores):
            made.stored(made.stores[num_stored])
            num_stored += 1
    gone = 10 - made.cached(LONG[:10])
    assert gone >= 4
    look(made, after_s=0.0)
    assert len(made.link.queries) == before, "not in each schedule"
    look(made)
    look(made)
    assert len(made.link.queries) == before + 1
    assert not made.tier.may_start("r")
    made.answer(gone)
    assert made.tier.counters.found_blocks == gone + (10 if were == "loaded" else 0)
    assert made.tier.expects("r")
    made.tier.request_left("r")
    assert not made.tier.expects("r")


def test_request_that_waits_across_a_reset_is_asked_for_anew(engine):
    made = engine()
    made.arrive("r", "abc!", 3)
    made.manager.reset_cache()
    made.tier.cache_reset()
    made.tier.forget_namespace()
    look(made)
    assert len(made.link.queries) == 1
    made.tier.use_namespace(made.namespace)
    made.tier.request_passes("r")
    look(made)
    assert (len(made.link.queries), made.tier.num_waiting_requests) == (2, 0), "it starts when there is room"
    made.loaded(made.loads[0])
    made.answer(3)
    made.loaded(made.loads[1])
    assert made.cached("abc") == 3
    made.check_idle()


def test_a_quarter_of_the_tier_is_filled_at_a_time(engine):
    made = engine(host=256)
    for name, text in (("r", LONG), ("s", LATER)):
        made.arrive(name, text, 199)
    assert sum(len(load.slots) for load in made.loads) == 64


def test_arrived_blocks_of_a_waiting_request_are_not_evicted_for_another():
    """Each prefix has 12 blocks, and 24 of the host tier's 32 are filled ahead."""
    made = host(host=32)
    for name in "abc":
        made.arrive(name, name * 13, 12)
    for load in made.loads:
        made.loaded(load)
    assert [load.path for load in made.loads] == ["a" * 12, "b" * 12]
    assert [made.cached(name * 12) for name in "abc"] == [12, 12, 0]
    made.tier.request_left("a")
    made.tier.go_on()
    assert [load.path[0] for load in made.loads] == ["a", "b", "c"]


def test_requests_with_one_prefix_that_just_fits_do_not_wait_in_turn():
    made = host(host=32)
    for name in "rst":
        made.arrive(name, "a" * 25, 24)
    (load,) = made.loads
    made.loaded(load)
    assert [made.tier.may_start(name) for name in "rst"] == [True] * 3


def test_requests_whose_prefix_has_arrived_make_way_for_others(engine):
    made = engine(host=4096)
    for number in range(6):
        made.arrive(f"{number}", f"{number}abc!", 4)
    assert len(made.loads) == 4
    for load in made.loads[:2]:
        made.loaded(load)
    assert len(made.loads) == 6


def test_a_load_waits_for_copies_that_use_its_slots():
    """All 16 host slots are filled by a copy that no rank has reported; a load takes some of them."""
    made = host(host=16)
    step = made.compute("abcdefghijklmnop!")
    made.arrive("r", "xyz!", 3)
    assert made.loads == []
    made.report(step, 0)
    assert made.loads == []
    made.report(step, 1)
    (load,), (store,) = made.loads, made.stores
    assert load.path == "xyz"
    assert set(load.slots) <= set(step.swap_out.target_slots)
    assert not set(store.slots) & set(load.slots), "what the load takes is not stored any more"
    assert made.tier.counters.skipped_store_blocks == 3


def test_nobody_waits_for_a_failing_load_whose_slots_stay():
    made = device()
    made.arrive("r", LONG[:8], 7)
    (load,) = made.loads
    assert not made.tier.may_start("r")
    for _ in range(made.ranks):
        made.tier.answered(Failing(load.id, "reset"))
    assert made.tier.may_start("r")
    made.tier.request_left("r")
    made.loaded(load, 0, error="reset")
    assert not made.tier.is_idle
    assert made.manager.stats().device_loading_blocks == 7
    made.loaded(load, 7, rank=1)
    assert made.cached(LONG[:8]) == 0
    made.check_idle()


def test_nothing_more_is_loaded_behind_a_failing_load():
    made = device(device=4096)
    made.arrive("r", LONG[:101], 100)
    arriving, failing = made.loads
    made.tier.answered(Failing(failing.id, "reset"))
    made.loaded(arriving)
    assert made.loads == [arriving, failing]


def test_a_load_that_fails_on_two_ranks_has_failed_once():
    made = device()
    for number in range(3):
        assert not made.tier.is_left_alone
        made.arrive(f"{number}", f"{number}bc!", 3)
        load = made.loads[-1]
        for _ in range(made.ranks):
            made.tier.answered(Failing(load.id, "reset"))
        made.loaded(load, 0, 0, error="reset")
    assert made.tier.is_left_alone


def test_running_requests_keep_an_eighth_of_the_device_tier_to_grow_into():
    made = device(device=16)
    made.manager.match_prefix("runs", Prompt(LONG[:15]))
    made.manager.allocate("runs", 14)
    made.tier.step_taken(made.manager.take_swap_step())
    made.arrive("r", "xyz!", 3)
    assert made.loads == []
    assert not made.tier.may_start("r")
    made.manager.finish("runs")
    made.tier.go_on()
    assert len(made.loads) == 1


@pytest.mark.parametrize(
    # Tokens that a request waits for; whether the slots, which wait for a batch that needs them, are given back.
    ("wanted", "given_back"),
    [(11, False), (12, True)],
)
def test_slots_that_wait_for_a_batch_go_back_to_a_request_short_of_them(wanted, given_back):
    """16 slots: 2 are kept to grow into, 3 are lent once the workers are told of the step that used them."""
    made = device(device=16)
    made.manager.match_prefix("runs", Prompt(LONG[:16]))
    made.manager.allocate("runs", 16)
    step = made.manager.take_swap_step()
    made.manager.finish("runs")
    made.arrive("r", "xyz!", 3)
    assert made.loads == []
    assert made.manager.num_available_device_blocks == 13
    made.tier.tokens_wanted(wanted)
    made.tier.go_on()
    assert made.manager.num_available_device_blocks == (16 if given_back else 13)
    assert made.tier.may_start("r") == given_back
    made.tier.tokens_wanted(0)
    made.tier.step_taken(step)
    made.report(step)
    assert len(made.loads) == (not given_back)
    if given_back:
        made.check_idle()
        made.arrive("s", "xyz!", 3)
        assert [load.path for load in made.loads] == ["xyz"], "nothing is left of the first one"


def test_loads_that_wait_for_a_batch_hold_up_no_request_after_a_lost_one(monkeypatch):
    made = device(device=16)
    made.manager.match_prefix("runs", Prompt(LONG[:4]))
    made.manager.allocate("runs", 4)
    step = made.manager.take_swap_step()
    made.tier.step_taken(step, computes=True)
    made.manager.finish("runs")
    made.arrive("r", "xyz!", 3)
    assert made.loads == []
    assert made.tier.holds_device_blocks
    monkeypatch.setattr(OpenPasses, "are_doubted", True)
    assert not made.tier.holds_device_blocks
    made.tier.tokens_wanted(14)
    made.tier.go_on()
    assert made.manager.num_available_device_blocks == 16
    assert made.tier.may_start("r")


def test_stores_that_wait_for_a_batch_begin_again_after_a_lost_one(monkeypatch):
    """What the store reads already goes on."""
    made = device(device=16)
    made.report(made.compute(LONG[:2]))
    step = made.compute(LATER[:2])
    assert made.manager.num_available_device_blocks == 14
    monkeypatch.setattr(OpenPasses, "are_doubted", True)
    made.tier.go_on()
    assert made.manager.num_available_device_blocks == 15
    made.stored(made.stores[0])
    assert not made.tier.holds_device_blocks
    monkeypatch.undo()
    made.report(step)
    assert [store.path for store in made.stores] == [LONG[:1], LATER[:1]]
    made.stored(made.stores[1])
    made.check_idle()


# ---- who waits, and how long


@pytest.mark.parametrize(
    # The policy; seconds after which a request of 1,000 tokens whose last 500 are stored starts all the same.
    ("prefetch", "seconds"),
    [(Prefetch.BEST_EFFORT, 0), (Prefetch.TIMEOUT, 0.75), (Prefetch.WAIT_COMPLETE, 10.0)],
)
def test_a_request_waits_as_its_policy_says(engine, prefetch, seconds):
    made = engine(prefetch=prefetch, host=4096, device=4096)
    text = "".join(chr(1000 + number) for number in range(1001))
    made.report(made.compute(text[:501]))
    made.arrive("r", text, 500)
    made.tier.request_arrived("other", Prompt("!"), (1,))
    for now, may_start in ((0.0, not seconds), (seconds - 0.01, not seconds), (seconds, True)):
        made.now = now
        assert made.tier.may_start("r") == may_start
        assert made.tier.num_waiting_requests == (not may_start)
    assert made.tier.may_start("unknown")
    made.tier.request_left("r")
    assert made.tier.counters.late_requests == (prefetch is not Prefetch.BEST_EFFORT)


@pytest.mark.parametrize(
    # How many of its 10 evicted blocks the store has, and the reasons of these, of the next ones, and of the last two.
    ("stored", "expected"),
    [
        (None, {"store_late": 10, "never_seen": 3}),
        (0, {"store_absent": 10, "never_seen": 3}),
        (2, {"below_threshold": 2, "store_absent": 8, "never_seen": 3}),
        (6, {"store_late": 6, "store_absent": 4, "never_seen": 3}),
        ("damaged", {"store_damaged": 13}),
        ("known", {"evicted_storage": 10, "never_seen": 3}),
        ("short", {"below_threshold": 3}),
    ],
)
def test_a_missed_block_is_blamed_on_what_the_store_did_for_it(stored, expected):
    made = host(device=16, host=16, min_tokens=4)
    text = LONG[:2] if stored == "short" else LONG[:10]
    made.compute(text + "!")
    step = made.compute(LATER[:17])
    if stored == "damaged":
        made.report(step)
        for store in made.stores:
            made.stored(store)
    if stored == "known":
        made.tier.known.add([Prompt(text).hashes[0]])
    prompt = text + ("!" if stored == "short" else "new")
    made.arrive("r", prompt, {"damaged": 12, "known": 0, "short": None}.get(stored, stored))
    if stored == "damaged":
        made.loaded(made.loads[0], 0, is_damaged=True)
    before = dict(vars(made.manager.misses.tokens))
    made.manager.match_prefix("r", Prompt(prompt))
    made.manager.allocate("r", len(prompt))
    made.manager.take_swap_step()
    tokens = vars(made.manager.misses.tokens)
    assert {name: tokens[name] - count for name, count in before.items() if tokens[name] > count} == expected
    assert made.manager.miss("r").reason.value == next(iter(expected))


def test_after_its_deadline_the_caller_looks_again_at_leisure(engine):
    made = engine(prefetch=Prefetch.TIMEOUT)
    made.arrive("r", "abc!", 3)
    left = made.tier.seconds_to_next_deadline()
    assert left == pytest.approx(0.5 + 0.5 * 3 / 1000)
    made.now = left
    assert made.tier.seconds_to_next_deadline() == LOOK_AGAIN_S, "not at once, again and again"


def measured(made, num_blocks, seconds):
    """Loads take so long, as far as the tier has seen."""
    for number in range(40):
        text, before = chr(5000 + number) * (2 if number % 2 else num_blocks + 1), len(made.loads)
        made.arrive(text, text, len(text) - 1)
        for load in made.loads[before:]:  # now and then there is none: what computing costs is tried
            made.loaded(load, seconds=seconds * len(load.slots) / num_blocks)
        made.tier.request_left(text)


def test_request_computes_what_is_sooner_computed_and_some_probe_the_store(engine):
    made = engine(host=4096, device=4096)
    measured(made, 32, 32.0)
    asked = iter(range(1000))

    def waits(saved_s):
        """Whether a request does that saves so much for each of its 10 blocks."""
        made.tier.weigh(lambda start, end: (end - start) / made.manager.config.block_size * saved_s)
        text = chr(9000 + next(asked)) * 11
        made.arrive(text, text, 10)
        is_waiting = not made.tier.may_start(text)
        for load in made.loads[-1:]:
            made.loaded(load, seconds=10.0)
        made.tier.request_left(text)
        return is_waiting

    assert [waits(0.5) for _ in range(PROBE_EVERY)] == [False] * (PROBE_EVERY - 1) + [True]
    assert not any(waits(0.5) for _ in range(PROBE_EVERY - 1))
    assert waits(2.0)
    assert not waits(0.5), "it is counted from there on"
    assert made.tier.counters.declined_requests == 2 * PROBE_EVERY - 1
    assert made.tier.counters.late_requests == 0


@pytest.mark.parametrize(("prefetch", "num_computed"), [("timeout", FEWEST_TOKENS - 1), ("wait_complete", 0)])
def test_now_and_then_the_end_of_a_stored_prompt_is_computed_to_learn(engine, prefetch, num_computed):
    made = engine(host=4096, device=4096, prefetch=prefetch)
    loaded = []
    for number in range(PROBE_EVERY):
        text, before = chr(5000 + number) * 65, len(made.loads)
        made.arrive(text, text, 64)
        loaded.append(sum(len(load.slots) for load in made.loads[before:]))
        for load in made.loads[before:]:
            made.loaded(load)
        made.tier.request_left(text)
    assert loaded == [64] * (PROBE_EVERY - 1) + [64 - num_computed]


def test_a_request_waits_for_a_late_load_as_long_as_computing_takes(engine):
    made = engine(host=4096, device=4096)
    measured(made, 32, 8.0)
    made.tier.weigh(lambda start, end: (end - start) / made.manager.config.block_size)
    asked_at = made.now
    made.arrive("r", LONG[:11], 10)
    for seconds, may_start in ((9.99, False), (10.0, True)):
        made.now = asked_at + seconds
        assert made.tier.may_start("r") == may_start


def test_a_request_that_probes_a_slow_store_waits_no_longer_than_before(engine):
    made = engine(host=4096, device=4096)
    measured(made, 32, 64.0)
    made.tier.weigh(lambda start, end: (end - start) / made.manager.config.block_size)
    for number in range(PROBE_EVERY):
        text = chr(9000 + number) * 11
        made.arrive(text, text, 10)
        if number < PROBE_EVERY - 1:
            assert made.tier.may_start(text)
            made.tier.request_left(text)
    asked_at = made.now
    for seconds, may_start in ((0.5, False), (0.51, True)):
        made.now = asked_at + seconds
        assert made.tier.may_start(text) == may_start


def test_blocks_that_are_in_use_are_touched_now_and_then(engine):
    made = engine()
    made.report(made.compute("abcd!"))
    for now in (0.0, TOUCH_EVERY_S - 1, TOUCH_EVERY_S):
        made.now = now
        made.arrive(f"{now}", "abcd!")
    assert made.link.touched == (["abcd", "abcd"] if made.kind == "host" else [])


def test_what_is_counted(engine):
    made = engine(ranks=1)
    made.tier.observe_latency = lambda operation, seconds: told.append((operation, seconds))
    told = []
    for number, options in enumerate(({"is_damaged": True, "num_bytes": 10, "seconds": 0.5}, {"error": "reset"})):
        made.arrive(f"{number}", f"{number}abc!", 3)
        made.loaded(made.loads[-1], 1 - number, **options)
    counters = made.tier.counters
    assert (counters.load.blocks, counters.load.bytes, counters.load.seconds, counters.load.failures) == (1, 10, 0.5, 1)
    assert (counters.damaged_blocks, counters.queries, counters.query_failures) == (1, 2, 0)
    made.arrive("s", "abc!")
    made.answer(0, error="reset")
    assert (counters.queries, counters.query_failures, counters.load.failures) == (3, 1, 1)
    assert told == [("query", 0.0), ("load", 0.5), ("query", 0.0)], "of what did not fail"


# ---- stores


def test_blocks_are_stored_when_all_ranks_have_them(engine):
    made = engine()
    step = made.compute("abc!")
    assert made.stores == []
    made.report(step, 0)
    if made.kind == "host":
        assert made.stores == []
        made.report(step, 1)
    (store,) = made.stores
    assert store.path == "abc"
    assert not made.tier.is_idle
    made.stored(store)
    assert made.tier.counters.store.blocks == 3
    made.check_idle()


def test_pieces_that_wait_at_a_reset_are_never_loaded():
    made = host(host=16)
    step = made.compute("abcdefghijklmnop!")
    made.arrive("r", "xyz!", 3)
    made.arrive("s", "uvw!", 3)
    assert made.loads == []
    made.report(step)
    (store,) = made.stores
    assert made.loads
    waits = made.compute("klmnopq!")
    made.arrive("t", "12345!", 5)
    num_loads = len(made.loads)
    made.manager.reset_cache()
    made.tier.cache_reset()
    made.tier.use_namespace(replace(made.namespace, weight_epoch="1"))
    made.report(waits)
    assert len(made.loads) == num_loads, "it would be of the new namespace"
    assert not made.tier.is_idle
    for each in made.loads:
        made.loaded(each)
    made.stored(store)
    assert made.cached("xyz") == 0
    assert not [block for block in Prompt("xyz").hashes if block in made.tier.known]
    made.check_idle()


def test_late_failures_of_before_a_reset_open_no_breaker():
    made = host()
    moves = [(begin(made, "load", 2 * number), begin(made, "store", 2 * number + 1)) for number in range(2)]
    loads, stores = zip(*moves, strict=True)
    made.manager.reset_cache()
    made.tier.cache_reset()
    for load, store in zip(loads, stores, strict=True):
        made.loaded(load, 0, error="the host tier has lost its memory")
        made.stored(store, 0, error="the host tier has lost its memory")
    for what in ("load", "store"):
        for number in (8, 9):
            move = begin(made, what, number)
            (made.loaded if what == "load" else made.stored)(move, 0, error="no route")
    assert not made.tier.is_left_alone
    made.check_idle()


@pytest.mark.parametrize("why", ["fails", "is full", "loses blocks"])
def test_hit_blocks_that_are_missing_in_the_store_are_stored_again(why):
    made = host()
    made.report(made.compute("abcd!"))
    made.stored(made.stores[0], **{"fails": {"error": "disk full"}, "is full": {"num_refused": 2}}.get(why, {}))
    assert made.tier.counters.refused_store_blocks == 2 * (why == "is full")
    made.arrive("r", "abcd!")
    assert len(made.stores) == 1
    made.touched(2)
    assert [store.path for store in made.stores] == ["abcd", "abcd"]
    assert made.stores[1].slots == made.stores[0].slots[2:], "from the first missing one on"
    made.stored(made.stores[1])
    assert not made.tier.is_left_alone
    made.now = TOUCH_EVERY_S
    made.arrive("s", "abcd!")
    made.touched(4)
    assert len(made.stores) == 2
    made.check_idle()


def test_tail_behind_a_block_that_is_not_stored_is_not_stored_before_it():
    made = host()
    made.report(made.compute("abc!"))
    made.stored(made.stores[0], error="disk full")
    for text in ("abcde!", "abcdefg!"):
        made.report(made.compute(text))
    assert len(made.stores) == 1
    assert made.tier.counters.skipped_store_blocks == 4
    made.report(made.compute("xyz!"))
    assert made.stores[-1].path == "xyz", "another prompt is"
    made.stored(made.stores[-1])
    made.arrive("r", "abcdefg!")
    made.touched(0)
    assert (made.stores[-1].path, len(made.stores[-1].slots)) == ("abcdefg", 7)
    made.report(made.compute("abcdefghi!"))
    assert made.stores[-1].path == "abcdefghi", "its hole is being closed"
    for store in made.stores[2:]:
        made.stored(store)
    made.check_idle()


def test_failed_blocks_that_are_computed_again_are_stored_as_a_whole():
    made = host()
    made.report(made.compute("abc!"))
    made.stored(made.stores[0], error="disk full")
    made.manager.reset_cache()
    made.tier.cache_reset()
    made.report(made.compute("abc!"))
    assert [(store.path, len(store.slots)) for store in made.stores] == [("abc", 3)] * 2
    made.stored(made.stores[1])
    made.check_idle()


def test_tail_that_leaves_the_device_before_its_prefix_is_stored_before_it():
    """With `write_back`, leaves go first: the prefix, which is missing in the store, follows."""
    made = host(device=6, policy=WritePolicy.WRITE_BACK)
    made.compute("abcdef!")
    made.arrive("r", "abcdef!")
    made.touched(0)
    assert made.stores == []
    made.report(made.compute("xyz!"))
    made.report(made.compute("uvw!"))
    assert [(store.path, len(store.slots)) for store in made.stores] == [("abcdef", 3), ("abc", 3)]
    for store in made.stores:
        made.stored(store)
    made.check_idle()


@pytest.mark.parametrize("what", ["a copy that may have failed", "a copy under way", "blocks on the device alone"])
def test_hit_blocks_whose_bytes_are_not_on_the_host_are_not_stored(what):
    made = host(host=0 if what == "blocks on the device alone" else 64)
    step = made.compute("abcd!")
    if what == "a copy that may have failed":
        made.tier.copies_doubted(step.step)
        made.report(step)
    made.arrive("r", "abcd!")
    made.touched(0)
    assert made.stores == []
    made.report(step)
    assert len(made.stores) == (what == "a copy under way")
    for store in made.stores:
        made.stored(store)
    made.check_idle()


def test_hit_blocks_that_are_being_stored_are_not_stored_twice():
    made = host(host=256)
    made.report(made.compute(LONG))
    made.arrive("r", LONG)
    made.touched(0)
    number = 0
    while not made.tier.is_idle:
        made.stored(made.stores[number])
        number += 1
    assert [len(store.slots) for store in made.stores] == [32, 32, 32, 32, 32, 32, 7]
    assert made.tier.counters.skipped_store_blocks == 0
    made.check_idle()


def test_blocks_of_a_prompt_follow_once_a_store_that_was_left_alone_works():
    """One piece tries it; while it does, the others wait."""
    made = host(host=256)
    made.report(made.compute(LONG[:101]))
    for number in range(4):
        made.stored(made.stores[number], error="disk full")
    assert made.tier.is_left_alone
    made.arrive("r", LONG[:101])
    made.touched(0)
    assert len(made.stores) == 4, "its pause is not over"
    made.now = TOUCH_EVERY_S
    made.arrive("s", LONG[:101])
    made.touched(0)
    assert len(made.stores) == 5
    for number in range(4, 8):
        made.stored(made.stores[number])
        assert not made.tier.is_left_alone
    assert [store.path for store in made.stores[4:]] == [LONG[:32], LONG[:64], LONG[:96], LONG[:100]]
    made.check_idle()


def test_tail_of_blocks_that_a_failing_store_was_not_given_is_not_stored():
    made = host()
    for number in range(3):
        made.stored(begin(made, "store", number), error="no route")
    made.report(made.compute("abc!"))
    made.now = TOUCH_EVERY_S
    made.report(made.compute("abcde!"))
    assert len(made.stores) == 3
    made.report(made.compute("xyz!"))
    assert made.stores[3].path == "xyz", "nothing else has tried whether the store works"
    made.stored(made.stores[3])
    assert not made.tier.is_left_alone
    made.check_idle()


def test_answers_of_before_a_reset_say_nothing_of_the_new_namespace():
    made = host()
    for text in ("abc!", "xyz!"):
        made.report(made.compute(text))
    made.arrive("r", "abc!")
    made.manager.reset_cache()
    made.tier.cache_reset()
    made.tier.use_namespace(replace(made.namespace, weight_epoch="1"))
    made.touched(3)
    for store in made.stores[:2]:
        made.stored(store)
    assert not [block for text in ("abc", "xyz") for block in Prompt(text).hashes if block in made.tier.known]
    made.report(made.compute("abc!"))
    made.stored(made.stores[-1])
    assert [block in made.tier.known for block in Prompt("abc").hashes] == [True] * 3
    made.check_idle()


@pytest.mark.parametrize(("kind", "num_blocks", "sizes"), [("host", 256, [32, 32]), ("device", 256, [32])])
def test_two_pieces_are_stored_at_a_time(kind, num_blocks, sizes):
    made = Engine(kind, host=256, device=256)
    made.report(made.compute(LONG))
    assert [len(store.slots) for store in made.stores] == sizes
    number = 0
    while not made.tier.is_idle:
        made.stored(made.stores[number])
        number += 1
    assert sum(len(store.slots) for store in made.stores) == 199
    assert made.tier.counters.store.blocks == 199
    made.check_idle()


def test_pieces_of_a_path_go_in_turn_by_an_eighth_of_the_device_tier():
    made = device(device=64)
    made.report(made.compute(LONG[:41]))
    while not made.tier.is_idle:
        made.stored(made.stores[-1])
    assert [store.path for store in made.stores] == [LONG[:end] for end in (8, 16, 24, 32, 40)]
    made.check_idle()


def test_a_store_gets_at_most_four_times_the_tokens_of_a_long_prompt():
    made, num_blocks = device(device=16_384), 2000
    made.report(made.compute("".join(map(chr, range(num_blocks + 1)))))
    while not made.tier.is_idle:
        made.stored(made.stores[-1])
    tasks = made.link.all(WriteStorageTask)
    assert [len(task.gpu_block_ids) for task in tasks] == [32, 64, 128, 256, 512, 1008]
    assert [task.timeout for task in tasks] == [30.0, 30.0, 30.0, 60.0, 120.0, 236.25]
    assert [task.is_continued for task in tasks] == [False, True, True, True, True, True]
    asked, written = num_blocks, sum(task.start_write_block_idx + len(task.gpu_block_ids) for task in tasks)
    assert asked + written <= 4 * num_blocks
    assert sum(len(task.token_ids) for task in tasks) <= 4 * num_blocks


def test_what_was_stored_before_a_reset_is_stored_again_after_it():
    made = device(device=64)
    for _ in range(2):
        made.report(made.compute(LONG[:5]))
        made.stored(made.stores[-1])
        made.manager.reset_cache(new_weights=True)
        made.tier.cache_reset()
    assert len(made.stores) == 2


def test_what_the_store_has_beyond_a_piece_is_not_stored_again():
    made = device(device=512)
    made.report(made.compute("".join(map(chr, range(201)))))
    made.tier.answered(RankDone(0, WriteDone(made.stores[0].id, 0, num_stored=100)))
    made.tier.answered(RankDone(1, WriteDone(made.stores[0].id, 0, num_stored=90)))
    assert made.link.all(WriteStorageTask)[-1].start_write_block_idx == 90


def test_what_one_rank_could_not_store_is_not_gone_on_with():
    made = device(device=64)
    made.report(made.compute(LONG[:41]))
    made.stored(made.stores[0], 8, 5)
    assert made.tier.is_idle
    assert made.tier.counters.skipped_store_blocks == 35
    made.report(made.compute(LONG[:41]))
    assert made.stores[-1].path == LONG[:13], "five are known"


def test_blocks_that_left_the_store_are_stored_again_at_the_next_chance():
    made = device(device=64)
    made.report(made.compute(LONG[:9]))
    made.stored(made.stores[-1])
    for length, count in ((12, 0), (8, 8)):
        made.report(made.compute(LONG[:13]))
        assert made.stores[-1].path == LONG[:length]
        made.stored(made.stores[-1], count, count)
    assert made.stores[-1].path == LONG[:12]


def test_a_store_that_keeps_device_slots_for_a_minute_is_not_counted_on():
    made = device(device=64)
    made.report(made.compute(LONG[:5]))
    made.now = HELD_S - 0.5
    assert made.tier.holds_device_blocks
    assert made.tier.seconds_to_next_deadline() == 0.5
    made.now = HELD_S
    assert not made.tier.holds_device_blocks
    made.stored(made.stores[0])
    made.check_idle()


def test_of_too_many_pieces_that_wait_the_oldest_is_given_up(monkeypatch):
    monkeypatch.setattr(stores, "MOST_WAITING", 2)
    made = host(host=256)
    made.report(made.compute(LONG))
    assert made.tier.counters.skipped_store_blocks == 5 * 32, "of 7 pieces two are left"
    assert [store.path for store in made.stores] == [LONG[:192], LONG[:199]]


def test_slot_filled_again_while_it_waits_is_not_stored_by_its_old_name():
    made = host(host=256)
    filling = made.compute(LONG[:71])
    made.report(filling)
    again = BlockCopies(*SWAP_OUT, (0,), filling.swap_out.target_slots[-1:])
    made.tier.step_taken(SwapStep(filling.step + 1, (again,)))
    for store in made.stores:
        made.stored(store)
    assert [store.path for store in made.stores] == [LONG[:32], LONG[:64], LONG[:69]]
    assert made.tier.counters.skipped_store_blocks == 1


def test_nothing_is_stored_while_a_request_waits_for_nearly_the_whole_tier():
    made = device(device=64)
    made.tier.tokens_wanted(57)
    made.report(made.compute("abc!"))
    assert made.stores == []
    made.tier.tokens_wanted(56)
    made.tier.go_on()
    assert len(made.stores) == 1


@pytest.mark.parametrize("what", ["failed", "doubted", "reset", "elsewhere"])
def test_what_a_copy_did_not_bring_is_not_stored(what):
    made = device(device=64)
    step = made.compute(LONG[:5])
    if what in ("failed", "elsewhere"):
        slots = (0,) if what == "failed" else (63,)
        result = CopyResult(step.step, *SWAP_IN, 1, 0, 0.0, slots, "injected")
        made.tier.copies_reported(0, WorkerReport((result,)))
    elif what == "doubted":
        made.tier.copies_doubted(step.step)
    else:
        made.manager.reset_cache()
        made.tier.cache_reset()
    made.report(step)
    assert len(made.stores) == (what == "elsewhere")
    assert made.tier.counters.skipped_store_blocks == (0 if what == "elsewhere" else 4)
    if what != "elsewhere":
        made.check_idle()


# ---- a store that fails


@pytest.mark.parametrize("others_first", [False, True])
@pytest.mark.parametrize(("num_ranks", "rank"), [(1, 0), (2, 0), (2, 1), (4, 2)])
@pytest.mark.parametrize("what", ["load", "store"])
def test_three_moves_in_a_row_that_one_rank_fails_open_the_breaker(caplog, what, num_ranks, rank, others_first):
    made = device(ranks=num_ranks)
    opened = []
    for number, failing in enumerate([rank, rank, None, rank, rank, rank]):
        move = begin(made, what, number)
        for each in sorted(range(num_ranks), key=lambda each: (each == rank) == others_first):
            error = "no route" if each == failing else None
            (made.loaded if what == "load" else made.stored)(move, 0 if error else 3, rank=each, error=error)
        opened.append(made.tier.is_left_alone)
        made.tier.request_left(f"{number}")
    assert opened == [False] * 5 + [True]
    assert caplog.messages == [f"the store is not used for 1 s: rank {rank}: no route"]
    made.arrive("next", "next!")
    assert len(made.link.queries) == (6 if what == "load" else 1), "what loads fail, questions need not ask"


def begin(made, what, number):
    if what == "load":
        made.arrive(f"{number}", f"{number}bc!", 3)
        return made.loads[-1]
    made.report(made.compute(f"{number}bc!"))
    return made.stores[-1]


@pytest.mark.parametrize("what", ["load", "store"])
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_move_that_every_rank_fails_is_one_failure_with_counted_blocks(engine, what, num_ranks):
    made = engine(ranks=num_ranks)
    for number in range(3):
        assert not made.tier.is_left_alone
        move = begin(made, what, number)
        counts = [0] * (1 if made.kind == "host" else num_ranks)
        (made.loaded if what == "load" else made.stored)(move, *counts, error="no route")
    assert made.tier.is_left_alone
    assert (made.tier.counters.load.failures, made.tier.counters.store.failures) == (
        (3, 0) if what == "load" else (0, 3)
    )
    before = made.tier.counters.skipped_store_blocks
    made.report(made.compute("xyz!"))
    assert made.tier.counters.skipped_store_blocks == before + 3 * (what == "store")
    assert len(made.stores) == (3 if what == "store" else 1)


def test_touches_are_no_questions_and_close_no_breaker():
    made = host()
    told = []
    made.tier.observe_latency = lambda operation, seconds: told.append(operation)
    made.arrive("first", "xyz!")
    made.answer(0, seconds=1.0)
    for number in range(3):
        made.arrive(f"{number}", f"{number}bc!")
        made.answer(0, error="no route")
    assert made.tier.is_left_alone
    for answer in (TouchDone("t", 3), TouchDone("u", 0, "no route")):
        made.tier.answered(answer)
    assert made.tier.is_left_alone
    assert (told, made.tier.counters.query_failures) == (["query"], 3)


def test_only_a_load_with_a_result_tries_whether_loads_work_again(engine):
    """Requests without stored blocks prove nothing, and take the try from no other one."""
    made = engine(ranks=1, host=256)
    for number in range(3):
        made.loaded(begin(made, "load", number), 0, error="no route")
        made.tier.request_left(f"{number}")
    made.arrive("at once", "nothing!")
    assert len(made.link.queries) == 3
    made.now = 1.0
    for name in "rst":
        made.arrive(name, f"{name}nothing!", 0)
        assert made.tier.may_start(name)
    assert made.tier.is_left_alone
    made.arrive("u", LONG[:70], 69)
    made.arrive("v", "vbc!")
    (load,) = made.loads[3:]
    assert (load.path, len(load.slots)) == (LONG[:32], 32), "what follows waits for its result"
    assert made.tier.may_start("v")
    made.loaded(load)
    assert not made.tier.is_left_alone
    assert [each.path for each in made.loads[4:]] == [LONG[:64], LONG[:69]]
    for each in made.loads[4:]:
        made.loaded(each)
    made.check_idle()


def test_a_try_that_fails_lets_no_request_wait(engine):
    made = engine(ranks=1, host=256)
    for number in range(3):
        made.loaded(begin(made, "load", number), 0, error="no route")
        made.tier.request_left(f"{number}")
    made.now = 1.0
    made.arrive("u", LONG[:70], 69)
    made.loaded(made.loads[3], 0, error="no route")
    assert made.tier.is_left_alone
    assert len(made.loads) == 4
    assert made.tier.may_start("u")
    for made.now, num_queries in ((2.9, 4), (3.0, 5)):
        made.arrive(f"{made.now}", "wbc!")
        assert len(made.link.queries) == num_queries, "the pause has doubled"
    made.check_idle()


def test_nothing_is_asked_while_no_store_serves_and_stores_follow():
    made = host()
    made.link.is_serving = False
    made.arrive("r", "abc!")
    assert made.link.queries == []
    assert made.tier.may_start("r")
    assert made.tier.is_left_alone
    made.report(made.compute("xyz!"))
    assert made.stores == []
    made.link.is_serving = True
    made.tier.go_on()
    assert [store.path for store in made.stores] == ["xyz"]
    made.stored(made.stores[0])
    made.arrive("s", "abc!")
    assert len(made.link.queries) == 1
    assert made.tier.counters.skipped_store_blocks == 0


def test_so_many_questions_are_asked_at_once_and_no_more(engine, monkeypatch):
    monkeypatch.setattr(fetches, "MOST_QUESTIONS", 2)
    made = engine()
    for name in "abc":
        made.arrive(name, name * 4)
    assert len(made.link.queries) == 2
    assert made.tier.may_start("c")


def test_three_questions_that_fail_end_the_questions(engine):
    made = engine()
    for number in range(3):
        made.arrive(f"{number}", f"{number}bc!")
        made.answer(0, error="no route")
    assert made.tier.is_left_alone
    made.arrive("r", "abc!")
    assert len(made.link.queries) == 3
    made.now = 1.0
    made.arrive("s", "abc!", 3)
    assert len(made.loads) == 1
    assert not made.tier.is_left_alone


@pytest.mark.parametrize(("what", "limit_s"), [("question", 15.0), ("load", 35.0)])
def test_an_sdk_that_keeps_to_no_time_is_left_alone_until_it_answers(what, limit_s):
    made = device(ranks=1, prefetch="wait_complete", stall_s=100.0)
    made.arrive("r", "abc!", 3 if what == "load" else None)
    assert made.tier.seconds_to_next_deadline() == limit_s
    made.now = limit_s - 0.1
    assert not made.tier.is_left_alone
    assert not made.tier.may_start("r")
    made.now = limit_s
    assert made.tier.is_left_alone
    assert made.tier.may_start("r"), "nobody waits for a silent store"
    made.tier.request_left("r")
    left = made.tier.seconds_to_next_deadline()
    assert left == (None if what == "question" else HELD_S - limit_s), "what is past wakes nobody again and again"
    made.arrive("s", "xyz!")
    assert len(made.link.queries) == 1
    if what == "question":
        made.answer(3)
    else:
        made.loaded(made.loads[0])
    assert not made.tier.is_left_alone, "it was slow, and has succeeded"
