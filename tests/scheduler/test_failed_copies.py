"""A copy failed in the worker: what it was to fill is forgotten, and nothing else."""

from __future__ import annotations

import pytest

from fastdeploy_kvcache_v1.contract.messages import BlockHash, CacheLevel
from fastdeploy_kvcache_v1.scheduler import copies_by_step

from .scenario import fail, play, play_law

SCENARIOS = {
    "a failed swap in names the requests and forgets the blocks": (
        "4+4: run abc; run 1234; start abc r; step late; fail late device 1 r; uses r Dxx; commit r 3; preempt r;"
        "see abc D; idle"
    ),
    "a failed backup forgets only the host copy": (
        "4+4 write_through: run ab; step late; fail late host all; see ab DD; count host_free_blocks 4;"
        "count failed_transfer_blocks 2"
    ),
    "a swap-in that failed loses no block that was computed again meanwhile": (
        "5+8: run ab; run vwxyz; see ab HH; start ab r; step late; finish r; start ab w/r; step; commit w/r 2;"
        "see ab DD; count duplicate_blocks 0; fail late device all; see ab DD; finish w/r; see ab DD; idle"
    ),
    "nothing is cached below a block that was lost": (
        "6+4: run abc; run 123456; start abcde r; step late; fail late device 2 r; commit r 5; see abcde DD; finish r"
    ),
    "a late report does not touch a block whose copy into that slot is still to be made": (
        "4+1 write_through: run a; step late; run b; fail late host all; see b o; step; copied b y"
    ),
    "a match that waits on a lost block becomes empty and is not named": (
        "4+4: run ab; start 1234; step late; commit 1234 4; finish 1234; match ab waits 2; fail late host all;"
        "uses waits -; grow waits 3; finish waits"
    ),
    "a match that became empty has made no block younger": (
        "3+4: run ab; start xy; step late; commit xy 2; finish xy; see ab DH; match ab waits 2; fail late host all;"
        "uses waits -; run 1; see xy DD; see ab H"
    ),
    "nor does it touch a copy of the same run that is still to be made": (
        "4+1 write_through: start a r; run a; step late; run b; step; commit r 1; see a o; fail late host all; see a o"
    ),
    "a backup that failed is forgotten after its run was joined with another": (
        "4+4 write_through: run a; step late; run ab; step; run ab joins; shape ab; fail late host all; see ab DD;"
        "copied a n"
    ),
    "a backup that failed is forgotten in all parts of a run that was cut": (
        "8+8 write_through: run abcde; step late; start abcx upper; start abcdy lower; fail late host all;"
        "copied abcde nnnnn; finish upper; finish lower; idle"
    ),
    "a swap in that failed is forgotten once after its runs were joined": (
        "2+4: run ab; push 1; push 2; step; shape a b; start ab r; step late; finish r; shape ab; fail late device all;"
        "see ab -; idle"
    ),
    "a copy that failed names every request that reads it after a reset": (
        "6+6: run ab; flush; start a upper; start ab lower; step late; reset; fail late device 0 upper lower;"
        "preempt upper; preempt lower; idle"
    ),
    "a copy that failed before a reset concerns nothing that is cached after it": (
        "4+4 write_through: run ab; step late; reset; fail late host all; run ab; step; fail late host all;"
        "copied ab yy; idle"
    ),
    "a run whose copy is open is not joined with one whose copy is done": (
        "8+4 write_through: start ab first; start ab second; step; commit first 2; finish first; step late;"
        "start a cuts; fail late host 0; release cuts; copied ab ny; commit second 2; finish second; step; out 1;"
        "copied ab yy"
    ),
    "nothing is appended to cells that a forgotten run still uses": (
        "5+1: run abc; run x; push 2; step late; run abc again; start abd r; step; push 1; step; push 2;"
        "fail late host all; commit r 3; finish r; see abd DDD; idle"
    ),
    "host blocks that become unreachable are counted as evicted": (
        "2+4 write_through: run pc; step late; match p cuts; fail late host 0; release cuts; start 12; see pc -;"
        "count device_evicted_blocks 2; count device_lost_blocks 1; count host_evicted_blocks 1;"
        "count host_free_blocks 4"
    ),
}


@pytest.mark.parametrize("law", SCENARIOS)
def test_law_of_a_failed_copy(law: str) -> None:
    play_law(SCENARIOS[law])


def test_a_planned_swap_in_whose_source_was_never_filled_is_lost() -> None:
    scene = play("run abc; start 123; step late; commit 123 3; finish 123; start abc r", 3, 6)
    cache, late = scene.cache, scene.steps["late"]
    cache.take_events()
    assert fail(cache, late, CacheLevel.HOST, late.swap_out.target_slots) == ["r"]
    (event,) = cache.take_events()  # its device copy had never been announced
    assert (event.kind, event.level, event.hashes[-1]) == ("removed", CacheLevel.HOST, BlockHash(b"abc"))
    cache.preempt("r")
    scene.play("step; into 0; see abc -; idle")


def test_report_without_failed_slots_affects_no_request() -> None:
    scene = play("run ab; step late; start abc r", 4, 4, "write_through")
    assert fail(scene.cache, scene.steps["late"], CacheLevel.HOST, ()) == []
    scene.copied("ab", "yy")


@pytest.mark.parametrize("age", [0, 1, 2, 3])
def test_a_copy_that_failed_too_long_ago_to_be_remembered_is_found(monkeypatch: pytest.MonkeyPatch, age: int) -> None:
    monkeypatch.setattr(copies_by_step, "REMEMBERED_STEPS", 2)
    events = "; ".join(f"run {text}; step {text}" for text in "abcd")
    copied = "; ".join(f"copied {text} {'n' if text == 'dcba'[age] else 'y'}" for text in "abcd")
    play(f"{events}; fail {'dcba'[age]} host all; {copied}", 8, 8, "write_through")


THEN = {
    # what happens before the report: events, who is named
    "runs": ("", "r"),
    "finished": ("finish r", ""),
    "left the device": ("finish r; lend 5; step; see abcde DDDHH", ""),
    "was hit": ("finish r; start abcdef other", "other"),
    "was matched": ("finish r; match abcdef other", ""),
}


@pytest.mark.parametrize("policy", ["write_back", "write_through", "auto"])
@pytest.mark.parametrize("failed", ["0", "2", "0,1,2"])
@pytest.mark.parametrize("then", THEN)
def test_after_a_report_that_comes_after_the_commit_nothing_of_it_is_found(policy: str, failed: str, then: str) -> None:
    """It comes too late for `r`, whose tokens were sampled from garbage; nobody else is to read that."""
    events, named = THEN[then]
    left = "D" * int(failed[0]) or "-"
    end = f"commit {named} 5; preempt {named};" if named else ""
    play(
        f"run abc; run 12345678; start abcde r; step late; commit r 5; {events or 'see abc DDD'};"
        f"fail late device {failed} {named}; see abcde {left}; step; {end} see abcde {left}",
        *(8, 16, policy),
    )
