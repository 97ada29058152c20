"""Each token that is not a hit has a reason, the reasons add up, and they are those of an oracle that keeps all."""

from __future__ import annotations

import json
from collections import Counter
from hashlib import sha256
from itertools import islice
from pathlib import Path
from sys import getsizeof

import pytest

from fastdeploy_kvcache_v1.config import KVCacheConfig
from fastdeploy_kvcache_v1.contract.messages import BlockHash, CacheLevel
from fastdeploy_kvcache_v1.contract.misses import Miss, MissReason
from fastdeploy_kvcache_v1.errors import InvariantError
from fastdeploy_kvcache_v1.lab.replay.driver import Replay, ReplayedRequest, ReplayOptions
from fastdeploy_kvcache_v1.lab.replay.trace import read_trace
from fastdeploy_kvcache_v1.lab.traffic import KINDS, Source
from fastdeploy_kvcache_v1.scheduler.block_hashing import BlockHasher
from fastdeploy_kvcache_v1.scheduler.cache_manager import CacheManager
from fastdeploy_kvcache_v1.scheduler.run import Run
from fastdeploy_kvcache_v1.scheduler.traffic import evicted_pieces
from fastdeploy_kvcache_v1.scheduler.traffic.evicted_pieces import EVICTED_DEVICE, EvictedPieces
from fastdeploy_kvcache_v1.scheduler.traffic.misses import MOST_KEPT

from .scenario import manager, play_law, run

SCENARIOS = {
    "a prompt that nobody sent before was never seen": (
        "8+0: run abc; missed abc never_seen 0 4 None None; reasons never_seen=4; idle"
    ),
    "of a full hit only the last token is missed: it fills no block": (
        "8+0: run abc; run abc again; missed again partial_block 3 1; reasons never_seen=4 partial_block=1; idle"
    ),
    "behind a hit new blocks were never seen": (
        "8+0: run abc; run abxy; missed abxy never_seen 2 3; reasons never_seen=7; idle"
    ),
    "an evicted block names its tier and how many blocks were too few": (
        "4+0: run abcd; run xy; run abcd again; missed again evicted_device 2 3 device 2; idle"
    ),
    "a block that left the host was last there": (
        "2+2: run ab; flush; run xy; flush; run ab again; missed again evicted_host 0 3 host 2; idle"
    ),
    "a prompt goes on from an evicted piece to what was never seen": (
        "6+0: run abcd; run uvwxyz; run abcde longer; missed longer evicted_device 0 6 device;"
        "reasons never_seen=14 evicted_device=4; idle"
    ),
    "the rest of a piece is found when another prompt has computed its beginning": (
        "8+0: run abcdef; run 12345678; run abc short; run abcdef again; missed again evicted_device 3 4 device; idle"
    ),
    "a prompt that ends before a piece does may have left it": (
        "8+0: run abcdef; run 12345678; run abc short; run abcx other; missed other never_seen 3 2; idle"
    ),
    "a block on its way to the host is in flight": (
        "4+8: run abcd; push 2; start abcd two 2+0; step; missed two in_flight 2 3; commit two 4; finish two; idle"
    ),
    "another request computes the block": (
        "12+0: start abcd one; step; start abcxy two; step; missed two in_flight 0 6;"
        "reasons never_seen=8 in_flight=3; commit one 4; finish one; finish two; idle"
    ),
    "a request that computed its prompt in parts holds up the rest": (
        "12+0: match abcdef one; grow one 2; step; commit one 2; grow one 6; start abcdef two; step;"
        "missed two in_flight 2 5; commit one 6; finish one; finish two; idle"
    ),
    "a reset is the reason of what was cached": ("8+0: run abcd; reset; run abcx; missed abcx reset 0 5; idle"),
    "new weights are a reason of their own": (
        "8+0: run abcd; reset weights; run abcd again; missed again weights 0 5; reasons never_seen=5 weights=5; idle"
    ),
    "a reset for weights that are told later is blamed on them": (
        "8+0: run abcd; reset; weights; run abcd again; missed again weights 0 5; run wxyz; reset;"
        "run wxyz last; missed last reset 0 5; idle"
    ),
    "what was in use at the reset was lost by it too": (
        "8+0: start abcd one; step; commit one 4; reset; finish one; run abcd two; missed two reset 0 5; idle"
    ),
    "a failed copy is the reason of the blocks that it should have filled": (
        "4+4: run abcd; flush; start abcd one; step copied; fail copied device 2 one; preempt one;"
        "run abcd two; missed two copy_failed 2 3; idle"
    ),
    "a request that does not read is no question and says why": (
        "8+0: run abc; start abc w/r; step; missed w/r skipped_by_request 0 4; reasons never_seen=4;"
        "commit w/r 3; finish w/r; idle"
    ),
    "a request that is taken back is not counted": "8+0: start abc; release abc; step; reasons; idle",
    "a preempted request keeps the miss of its first admission": (
        "8+0: start abc one; step; commit one 3; preempt one; match abc one 3; release one;"
        "missed one never_seen 0 4; reasons never_seen=4; idle"
    ),
    "what the store has was late, and what it lacks was evicted": (
        "4+0: run abcd; run wxyz; stored again 2 store_late store_absent; run abcd again;"
        "missed again store_late 0 5; reasons never_seen=10 store_late=2 store_absent=3; idle"
    ),
    "a block that the store no longer has was evicted there": (
        "4+0: run abcd; run wxyz; stored again 0 - evicted_storage; run abcd again;"
        "missed again evicted_storage 0 5 storage; idle"
    ),
    "what was never seen the store is not blamed for": (
        "8+0: stored abcd 0 - store_absent; run abcd; missed abcd never_seen 0 5; idle"
    ),
}


@pytest.mark.parametrize("law", SCENARIOS)
def test_law_of_a_miss(law: str) -> None:
    play_law(SCENARIOS[law])


class Oracle(Replay):
    """Knows from which tier each block left last, from the events that any outside index gets. It forgets nothing."""

    def __init__(self, options: ReplayOptions) -> None:
        super().__init__(options)
        self.manager.take_events()
        self.last_held: dict[BlockHash, CacheLevel] = {}
        self.expected: dict[str, MissReason] = {}
        self.first: dict[str, BlockHash] = {}
        """The first missing block of each request of the open step."""
        self.copied: set[BlockHash] = set()
        self.answers: Counter[tuple[MissReason, MissReason]] = Counter()

    def _take_events(self) -> None:
        for event in self.manager.take_events():
            if event.kind == "removed" and event.level is not None:
                self.last_held.update(dict.fromkeys(event.hashes, event.level))
            elif event.level is CacheLevel.HOST:
                self.copied.update(event.hashes)

    def _run_step(self, members: list[ReplayedRequest]) -> None:
        self._take_events()
        self.copied.clear()
        super()._run_step(members)
        self._take_events()
        for opened in members:  # on its way to the host: the copy was decided in this step
            if self.first.get(opened.request_id) in self.copied:
                self.expected[opened.request_id] = MissReason.IN_FLIGHT
        self.first.clear()

    def _try_admit(self, opened: ReplayedRequest) -> bool:
        self._take_events()
        hashes = opened.sequence.hashes
        at = self.manager.count_cached(hashes)
        block = hashes[at] if at < (opened.sequence.num_tokens - 1) // self.options.config.block_size else None
        if block is None:
            reason = MissReason.PARTIAL_BLOCK
        elif any(other.step == self.num_steps and block in other.sequence.hashes for other in self._open.values()):
            reason = MissReason.IN_FLIGHT
        else:
            reason = LEFT[self.last_held.get(block)]
        self.expected[opened.request_id] = reason
        if block is not None:
            self.first[opened.request_id] = block
        return super()._try_admit(opened)

    def _finish(self, opened: ReplayedRequest) -> None:
        miss = self.manager.miss(opened.request_id)
        assert miss is not None
        self.answers[self.expected[opened.request_id], miss.reason] += 1
        super()._finish(opened)


LEFT = {
    None: MissReason.NEVER_SEEN,
    CacheLevel.DEVICE: MissReason.EVICTED_DEVICE,
    CacheLevel.HOST: MissReason.EVICTED_HOST,
}


@pytest.mark.parametrize("kind", ["chat", "agents", "sessions", "batch"])
def test_reasons_are_those_of_an_oracle_that_keeps_everything(kind: str, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    lines = KINDS[kind].lines(Source(7), KINDS[kind].shape)
    trace.write_text("".join(json.dumps(line) + "\n" for line in islice(lines, 1500)))
    oracle = Oracle(ReplayOptions(KVCacheConfig(10_000, 10_000, block_size=16)))
    oracle.run(read_trace(trace))
    right = sum(count for (expected, found), count in oracle.answers.items() if expected is found)
    wrong = {pair: n for pair, n in oracle.answers.items() if pair[0] is not pair[1]}
    assert right >= 0.99 * sum(oracle.answers.values()), [(a.value, b.value, n) for (a, b), n in wrong.items()]
    assert {expected for expected, _ in oracle.answers} >= {MissReason.NEVER_SEEN, MissReason.EVICTED_HOST}


def test_a_piece_forgotten_by_the_table_was_not_seen_lately(monkeypatch: pytest.MonkeyPatch) -> None:
    """The table of this cache has two generations of 16 pieces. Few of the bytes that are left fall on one place."""
    monkeypatch.setattr(evicted_pieces, "FEWEST_BLOCKS", 16 * evicted_pieces.BLOCKS_PER_PIECE)
    cache = manager(192)
    for number in range(100):
        run(cache, chr(200 + number) * 65)
    reasons = []
    for number in range(50):
        run(cache, chr(200 + number) * 65, f"again {number}")
        miss = cache.miss(f"again {number}")
        assert miss is not None
        reasons.append(miss.reason)
    assert set(reasons) <= {MissReason.NOT_SEEN_LATELY, MissReason.NEVER_SEEN}
    assert reasons.count(MissReason.NOT_SEEN_LATELY) > 25
    run(cache, chr(249) * 65, "full")
    assert_reason(cache, "full", MissReason.PARTIAL_BLOCK)
    run(cache, chr(240) * 65, "young")
    assert_reason(cache, "young", MissReason.EVICTED_DEVICE)


def assert_reason(cache: CacheManager, name: str, reason: MissReason) -> None:
    miss = cache.miss(name)
    assert miss is not None
    assert miss.reason is reason


@pytest.mark.parametrize("num_blocks", [1_000, 4_000, 20_000, 300_000])
def test_the_table_takes_at_most_24_bytes_for_each_block_of_the_cache(num_blocks: int) -> None:
    pieces, number, most = EvictedPieces(lambda: 1e6, num_blocks), 0, 0
    for _ in range(4):
        for _ in range(num_blocks // 12):
            number += 1
            pieces.add(Run.of([BlockHash(sha256(b"%d" % number).digest())], [0]), 0, EVICTED_DEVICE)
            if not number % (num_blocks // 50):
                most = max(most, getsizeof(pieces))
    assert most <= 24 * num_blocks, most / num_blocks


def test_a_token_without_a_reason_breaks_a_law() -> None:
    cache = manager(8)
    run(cache, "abc!")
    cache.misses.tokens.never_seen -= 1
    with pytest.raises(InvariantError, match="misses: 4 tokens were missed, 3 have a reason"):
        cache.check()


def test_another_tenants_prefix_was_never_seen() -> None:
    cache = manager(8)
    for name, salt in (("one", b"a"), ("two", b"b"), ("three", b"a")):
        hasher = BlockHasher(1, salt=salt)
        hasher.extend([1, 2, 3, 4])
        cache.match_prefix(name, hasher)
        cache.allocate(name, 3)
        cache.take_swap_step()
        cache.commit(name, 3)
        cache.finish(name)
    assert_reason(cache, "two", MissReason.NEVER_SEEN)
    assert_reason(cache, "three", MissReason.PARTIAL_BLOCK)


def test_right_after_a_large_reset_runs_not_swept_yet_have_a_reason() -> None:
    cache = manager(20_000)
    for number in range(1500):
        run(cache, chr(1000 + number) + "ab!", str(number))
    cache.reset_cache()
    for number in (0, 700, 1499):
        run(cache, chr(1000 + number) + "ab!", f"again {number}")
        miss = cache.miss(f"again {number}")
        assert miss == Miss(MissReason.RESET, 0, 4)


def test_seconds_since_an_eviction_are_those_of_the_clock() -> None:
    now = [100.0]
    cache = CacheManager(KVCacheConfig(4, 0, block_size=1, eviction_policy="lru"), lambda: now[0])
    observed: list[float] = []
    cache.misses.observe_next_use = observed.append
    run(cache, "abcd!")
    now[0] = 160.0
    run(cache, "wxyz!")
    now[0] = 172.5
    run(cache, "abcd!", "again")
    miss = cache.miss("again")
    assert miss == Miss(MissReason.EVICTED_DEVICE, 0, 5, CacheLevel.DEVICE, 12.5, 4)
    assert observed == [12.5]


def test_misses_of_old_requests_are_forgotten() -> None:
    cache = manager(8)
    for number in range(3 * MOST_KEPT):
        run(cache, "abc!", str(number))
    assert cache.miss("0") is None
    known = [number for number in range(3 * MOST_KEPT) if cache.miss(str(number)) is not None]
    assert known == list(range(3 * MOST_KEPT - len(known), 3 * MOST_KEPT))
    assert MOST_KEPT <= len(known) <= 2 * MOST_KEPT
