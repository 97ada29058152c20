"""`replay --compare`: its rows are the replays that they name, and its bounds are bounds."""

import json
from contextlib import redirect_stdout
from io import StringIO

import pytest

from fastdeploy_kvcache_v1.cli import main
from fastdeploy_kvcache_v1.config import WritePolicy
from fastdeploy_kvcache_v1.lab.replay.compare import comparison_table
from fastdeploy_kvcache_v1.scheduler.policies.eviction import EVICTION_POLICIES

SIZES = ("--device-blocks", "60,600", "--host-blocks", "0,400")


def result_of(*words: str) -> dict:
    with redirect_stdout(StringIO()) as out:
        assert main(["replay", *words, "--json"]) == 0
    return json.loads(out.getvalue())


@pytest.fixture(scope="module")
def comparison(synthetic_trace):
    """The whole comparison, once for all tests."""
    trace = str(synthetic_trace)
    return trace, result_of(trace, *SIZES, "--compare")["capacities"]


def test_every_policy_is_played_at_every_size(comparison):
    _, capacities = comparison
    assert [(at["device_blocks"], at["host_blocks"]) for at in capacities] == [(60, 0), (60, 400), (600, 0), (600, 400)]
    for at in capacities:
        played = [(run["options"]["write_policy"], run["options"]["eviction_policy"]) for run in at["runs"]]
        wanted = [(write.value, name) for write in WritePolicy for name in EVICTION_POLICIES]
        assert played == (wanted if at["host_blocks"] else played[: len(EVICTION_POLICIES)])
        sizes = {(run["options"]["device_blocks"], run["options"]["host_blocks"]) for run in at["runs"]}
        assert sizes == {(at["device_blocks"], at["host_blocks"])}


def test_all_rows_are_about_the_same_requests(comparison):
    _, capacities = comparison
    for at in capacities:
        assert {(run["requests"], run["requests_too_long"]) for run in at["runs"]} == {
            (at["requests"], at["requests_too_long"])
        }
        assert len({run["input_tokens"] for run in at["runs"]}) == 1
    assert capacities[0]["requests_too_long"] > 0


def test_a_row_is_what_replay_finds_alone(comparison):
    trace, capacities = comparison
    row = next(run for run in capacities[1]["runs"] if run["options"]["write_policy"] == "write_back")
    words = ("--device-blocks", "60", "--host-blocks", "400", "--write-policy", "write_back")
    eviction = ("--eviction-policy", row["options"]["eviction_policy"])
    alone = result_of(trace, *words, *eviction)
    for name in ("requests", "hit_rate", "steps", "blocks_swapped_out", "swapped_out_per_host_hit", "manager"):
        assert row[name] == alone[name], name
    hits = alone["manager"]["counters"]["host_hit_tokens"] // 64
    assert alone["swapped_out_per_host_hit"] == alone["blocks_swapped_out"] / hits > 1


def test_no_row_passes_the_bound_and_one_lru_tier_is_a_row_of_the_sum(comparison):
    trace, capacities = comparison
    for at in capacities:
        assert max(run["hit_rate"]["total"] for run in at["runs"]) < at["clairvoyant"]
        assert at["one_lru_tier"] < at["clairvoyant"]
    one = result_of(trace, "--device-blocks", "1000", "--host-blocks", "0", "--eviction-policy", "lru")
    assert capacities[3]["one_lru_tier"] == one["hit_rate"]["total"]
    lru = next(run for run in capacities[0]["runs"] if run["options"]["eviction_policy"] == "lru")
    assert capacities[0]["one_lru_tier"] == lru["hit_rate"]["total"]


def test_the_table_has_a_line_per_run_below_the_bounds(comparison):
    _, capacities = comparison
    for at, section in zip(capacities, comparison_table({"capacities": capacities}).split("\n\n"), strict=True):
        sizes, bounds, _, *rows = section.splitlines()
        assert sizes.startswith(f"{at['device_blocks']} device + {at['host_blocks']} host blocks, {at['requests']} req")
        assert ("longer than the device tier" in sizes) == (at["requests_too_long"] > 0)
        assert f"hits {at['one_lru_tier']:.1%}, a clairvoyant one {at['clairvoyant']:.1%}" in bounds
        runs = [(run["options"], f"{run['hit_rate']['total']:.1%}") for run in at["runs"]]
        first = [
            [own["write_policy"] if at["host_blocks"] else "-", own["eviction_policy"], own["told"], hit]
            for own, hit in runs
        ]
        assert [row.split()[:4] for row in rows] == first


def test_adaptive_is_played_for_each_told_name_and_lru_once(synthetic_trace):
    words = ("--compare", "--limit", "50", "--policies", "auto,adaptive,lru", "--told", "none,all", *SIZES)
    for at in result_of(str(synthetic_trace), *words)["capacities"]:
        played = [(run["options"]["eviction_policy"], run["options"]["told"]) for run in at["runs"]]
        assert sorted(played) == [("adaptive", "all"), ("adaptive", "none"), ("lru", "none")]


def test_a_closed_loop_has_no_bound(tmp_path):
    path = tmp_path / "trace.jsonl"
    known = {"session_id": 1, "delay": 3, "tokens_per_id": 64, "output_length": 2}
    turns = [{**known, "input_length": 64 * count, "hash_ids": list(range(count))} for count in (70, 4)]
    path.write_text("".join(json.dumps(turn) + "\n" for turn in turns))
    words = "--compare --closed-loop --device-blocks 50 --host-blocks 50"
    (at,) = result_of(str(path), *words.split())["capacities"]
    assert at["clairvoyant"] is None
    assert {run["requests"] for run in at["runs"]} == {1}  # the second turn comes although the first was refused
