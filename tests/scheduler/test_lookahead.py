"""What the waiting requests will hit leaves last."""

from __future__ import annotations

import pytest

from fastdeploy_kvcache_v1.scheduler.lookahead import MOST_RUNS
from fastdeploy_kvcache_v1.scheduler.radix_tree import RadixTree

from .scenario import manager, play, prompt, run

SCENARIOS = {
    # law: events after three prompts fill the device, `ab` the oldest
    "without a line the oldest leaves": "run 12; see ab -; see cd DD; see ef DD",
    "what the line needs leaves last": "waiting ab; run 12; see ab DD; see cd -; see ef DD",
    "the head of the line is spared for longest": (
        "waiting ab cd ef; run 12; see ab DD; see cd DD; see ef -; waiting ab cd; run 3456; see ab DD; see cd -"
    ),
    "a prefix that the first and the last in line share is needed by the first": (
        "waiting ab cd ab; run 1234; see ab DD; see cd -"
    ),
    "the line cannot keep more than there is": "waiting ab cd ef; run 123456; see ab -; see cd -; see ef -",
    "a line that went away spares nothing": "waiting ab; waiting; run 12; see ab -",
    "a line is forgotten with its step": "waiting ab; run 12; run 34; run 56; run 78; see ab -",
    "a line told before a reset does no harm": "waiting ab cd; reset; run 123456; run ab; see ab DD",
}


@pytest.mark.parametrize("law", SCENARIOS)
def test_law_of_the_line(law: str) -> None:
    play(f"run ab; run cd; run ef; {SCENARIOS[law]}", 6)


def test_the_line_counts_for_the_host_tier_too() -> None:
    play("run ab; run cd; run ef; copied ab yy; copied cd yy; waiting ab; run 12; see ab HH; see cd -; see ef HH", 2, 4)


def test_only_as_many_requests_as_the_settings_say_are_looked_at() -> None:
    play("run ab; run cd; run ef; waiting ef ab; run 12; see ab -", 6, lookahead_requests=1)


@pytest.fixture
def looked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of runs of each prefix that was looked for."""
    lengths: list[int] = []
    plain = RadixTree.look

    def look(self: RadixTree, hashes):  # type: ignore[no-untyped-def]
        path = plain(self, hashes)
        lengths.append(len(path))
        return path

    monkeypatch.setattr(RadixTree, "look", look)
    return lengths


def test_a_step_looks_at_a_bounded_number_of_runs(looked: list[int]) -> None:
    """Prefixes that are many runs each, because others end at each of their blocks."""
    text = "".join(chr(ord("A") + number) for number in range(40))
    cache = manager(200)
    for end in range(1, len(text)):
        run(cache, text[:end] + "!", f"{end}")
        run(cache, text[:end] + "?x", f"branch {end}")
    cache.expect([prompt(text) for _ in range(16)])
    run(cache, "1" * 150 + "!")
    assert looked[0] > 20
    assert MOST_RUNS - max(looked) < sum(looked) <= MOST_RUNS + max(looked)
