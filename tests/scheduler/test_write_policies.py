"""What is copied to the host when, under which policy, with exact slots."""

from __future__ import annotations

import pytest

from fastdeploy_kvcache_v1.config import WritePolicy

from .scenario import play, play_law

SCENARIOS = {
    "an eviction reads the slots its blocks had although they are used again": (
        "3+4: run abc; push 2; lend 1; lend 2; step; out 0>2 1>0 2>1; count backup_skipped_blocks 0"
    ),
    "an eviction of a block that is computed again meanwhile reads the new slot": (
        "4+4: start a r; run a other; lend 3; back; stuck 1; commit r 1; resize 1; step; out 0>0; finish r; idle"
    ),
    "a block on its way to the host is found only once the worker knows": (
        "2+2: run ab; start 12; see ab -; step; see ab HH"
    ),
    "a run that fits the host only in part is counted once": (
        "4+1: run abcd; run 12; see abcd DDH; count device_evicted_blocks 2; count device_lost_blocks 1;"
        "count backup_skipped_blocks 1"
    ),
    "write back copies nothing that stays": "8+8: run ab 1; out 0; run ab 2; out 0; run ab 3; out 0; step; out 0",
    # ---- write through
    "write through copies complete blocks once": (
        "4+8 write_through: run ab; out 0; run 12; out 0>0 1>1; run ab; out 2; run wxyz; out 0; see ab HH; see 12 HH"
    ),
    "write through into too little room saves the first blocks and tries the rest again": (
        "8+3 write_through: run x; step; match x holds; match abcd r; grow r 3; step; commit r 3;"
        "count backup_skipped_blocks 1; release holds; grow r 4; step; commit r 4; step; copied abcd yyyn; see x D;"
        "count backup_skipped_blocks 2; finish r"
    ),
    "a hit that wants a copy without room is counted under write through": (
        "8+1 write_through: run ab; count backup_skipped_blocks 1; start ab; step; count backup_skipped_blocks 2"
    ),
    "and under write through selective": (
        "8+1 write_through_selective: run ab; count backup_skipped_blocks 0; start ab; step;"
        "count backup_skipped_blocks 1"
    ),
    # ---- auto: write back, ahead of time
    "auto copies what leaves next before it must": "16+64 auto: crowd; see ab HH; copied cd yy; copied ef nn",
    "an eviction that was prepared can be undone in the same step": "16+64 auto: crowd; start 34; see cd HH",
    "one that was not is lost until the step is taken": "16+64: crowd; start 34; see cd -",
    "the copy of an eviction that was prepared is not made again": (
        "16+64 auto: crowd; start 34; step; out 2; copied ef yy; count device_lost_blocks 0"
    ),
    "nothing is copied ahead while nothing leaves": (
        "8+16 auto: run ab; out 0; run cd; out 0; run ef; out 0; run gh; out 0"
    ),
    "nothing is copied ahead of slots that are free": "16+64 auto: crowd; push 4; step; out 2",
    "a rush is forgotten": "16+64 auto: crowd; step; step; step; step; step; step; step; step; run cd used; out 0",
    "what is in use is not copied ahead": (
        "4+16 auto: run b; run a; run c; run d; start a used; run 1; copied a n; copied c y; copied d n"
    ),
    "a long run is cut for what is copied ahead": (
        "32+64 auto: run abcdefghijklmnopqrst; run 123456789012; run x; out 2;"
        "see abcdefghijklmnopqrst DDDDDDDDDDDDDDDDDDDH; copied abcdefghijklmnopqrst nnnnnnnnnnnnnnnnnnyy"
    ),
    "without room on the host nothing is copied ahead": "2+1 auto: run a; run b; run c; run d; idle",
}


@pytest.mark.parametrize("law", SCENARIOS)
def test_law_of_a_backup(law: str) -> None:
    full = "; ".join(f"run {text}" for text in ("ab", "cd", "ef", "gh", "ij", "kl", "mn", "op", "12"))
    play_law(SCENARIOS[law].replace("crowd", full), write_through_threshold=1)


@pytest.mark.parametrize("policy", [policy.value for policy in WritePolicy])
def test_without_a_host_tier_nothing_is_copied_and_no_backup_is_skipped(policy: str) -> None:
    play(
        "run ab; out 0; run cd; out 0; run cd; out 0; run cd; out 0; run ab; out 0; count backup_skipped_blocks 0",
        *(2, 0, policy),
        write_through_threshold=1,
    )


@pytest.mark.parametrize("threshold", [1, 2, 3])
def test_selective_copies_at_the_threshold(threshold: int) -> None:
    hits = "; ".join(f"run {'abc' if hit == 1 else 'ab'}; out {2 if hit == threshold else 0}" for hit in range(1, 5))
    play(
        f"run ab; {hits}; run 12345678; see ab HH; see abc HH",  # `c` was never hit: gone with its eviction
        *(8, 8, "write_through_selective"),
        write_through_threshold=threshold,
    )


def test_a_backup_without_room_is_counted_once_not_at_every_commit() -> None:
    grown = "; ".join(f"grow r {tokens}; step; commit r {tokens}" for tokens in range(1, 11))
    play(f"match abcdefghij r; {grown}; count backup_skipped_blocks 8; finish r", 20, 2, "write_through")


@pytest.mark.parametrize(("host", "ahead"), [(256, 32 // 8), (64, 64 // 32)])
def test_copies_ahead_are_bounded_by_a_share_of_each_tier(host: int, ahead: int) -> None:
    full = "; ".join(f"run {chr(256 + number)}" for number in range(32))
    play(f"{full}; run {'x' * 16}; out {16 + ahead}", 32, host, "auto")
