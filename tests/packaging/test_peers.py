"""The comparison with other engines: turns are fair, a wrong table is caught, and a contender that dies is a row."""

import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"
sys.path[:0] = [str(FOLDER), str(FOLDER / "peers")]
import driver  # noqa: E402
import environments  # noqa: E402
import ours  # noqa: E402
import peers  # noqa: E402
import player  # noqa: E402
import prompts  # noqa: E402
import rows  # noqa: E402
import shadow  # noqa: E402

del sys.path[:2]

NAMES = np.array([7, 8, 9], np.uint32)


@pytest.fixture
def plane():
    """A plane on which an ended request has computed `NAMES` in slots 4, 5 and 6."""
    plane = shadow.ShadowPlane()
    plane.start(NAMES, [4, 5, 6], 0)
    plane.commit(NAMES, [4, 5, 6])
    plane.finish([4, 5, 6])
    return plane


def test_the_plane_accepts_what_was_computed(plane):
    plane.start(NAMES, [4, 5, 6, 2], 3)
    plane.start(NAMES, [4, 5, 3], 2)


@pytest.mark.parametrize(
    ("names", "table", "matched"),
    [
        ([7, 8, 9], [4, 6, 5], 3),  # not in the order of the prompt
        ([1, 8, 9], [4, 5, 6], 1),  # another prefix
        ([7, 8, 9], [4, 5, 2], 3),  # never computed
        ([7, 8, 9], [4, 5, 6, 2], 4),  # a block that is not full
        ([7, 8, 9], [4, 3, 3], 1),  # one slot for two blocks
    ],
)
def test_the_plane_refuses_a_table_that_lies(plane, names, table, matched):
    with pytest.raises(shadow.Lie):
        plane.start(np.array(names, np.uint32), table, matched)


def test_the_plane_refuses_a_slot_that_an_open_request_uses(plane):
    plane.start(NAMES, [4, 5, 6], 3)
    with pytest.raises(shadow.Lie, match="another request uses"):
        plane.start(np.array([1], np.uint32), [5], 0)


def test_a_slot_that_was_given_away_holds_its_old_prefix_no_more(plane):
    plane.start(np.array([1], np.uint32), [4], 0)
    plane.finish([4])
    with pytest.raises(shadow.Lie):
        plane.start(NAMES, [4, 5, 6], 1)


def test_the_plane_follows_a_prefix_to_the_host_and_back(plane):
    plane.copy(True, [4, 5], [9, 8])
    plane.start(np.array([1], np.uint32), [4], 0)
    plane.finish([4])
    plane.copy(False, [9], [2000])
    plane.start(NAMES, [2000, 5, 6], 3)


def test_the_plane_refuses_a_load_of_another_block(plane):
    plane.copy(True, [4, 5], [9, 8])
    plane.copy(False, [8], [4])
    with pytest.raises(shadow.Lie, match="block 0 of 3"):
        plane.start(NAMES, [4, 5, 6], 3)


@pytest.mark.parametrize(
    ("sources", "targets", "why"),
    [([7], [2], "never computed"), ([9, 8], [2, 2], "into one slot"), ([9], [3], "an open request uses")],
)
def test_the_plane_refuses_a_load_that_cannot_be(plane, sources, targets, why):
    plane.copy(True, [4, 5], [9, 8])
    plane.start(np.array([1], np.uint32), [3], 0)
    with pytest.raises(shadow.Lie, match=why):
        plane.copy(False, sources, targets)


def test_the_plane_refuses_to_store_what_is_not_computed_yet(plane):
    plane.start(np.array([1], np.uint32), [4], 0)
    with pytest.raises(shadow.Lie, match="never computed"):
        plane.copy(True, [4], [9])


def test_each_contender_plays_each_block_and_begins_equally_often():
    played = list(driver.turns(["a", "b", "c"], 55, 10))
    rounds = [played[at : at + 3] for at in range(0, len(played), 3)]
    assert [{turn[1:] for turn in each} for each in rounds] == [{(at, min(at + 10, 55))} for at in range(0, 55, 10)]
    assert all(sorted(name for name, *_ in each) == ["a", "b", "c"] for each in rounds)
    assert Counter(each[0][0] for each in rounds) == {"a": 2, "b": 2, "c": 2}


def test_tokens_are_equal_exactly_where_names_are(tmp_path):
    prompts.write(tmp_path / "p.npz", [("ab", 9, 0.5), ("ac", 11, 2), ("x", 4, 2)])
    read = prompts.Prompts(tmp_path / "p.npz")
    first, second, third = (read.tokens(number, 4) for number in range(3))
    assert [len(each) for each in (first, second, third)] == [9, 11, 4]
    assert [list(read.names(number)) for number in range(3)] == [[1, 2], [1, 3], [4]]
    assert list(first[:4]) == list(second[:4])
    assert len({tuple(each) for each in (first[:4], first[4:8], second[4:8], third)}) == 4
    assert first[8] != second[8]
    assert [read.arrival(number) for number in range(3)] == [0.5, 2, 2]


def test_our_manager_has_the_time_of_the_trace(tmp_path):
    prompts.write(tmp_path / "p.npz", [("ab", 9, 0.5), ("ac", 9, 2.0), ("ab", 9, 7.0)])
    contender = ours.Ours(20, 0, 4, "adaptive")
    played = player.Player(contender, prompts.Prompts(tmp_path / "p.npz"), 4, 1)
    for number in range(3):
        played.play(number)
    assert [(row.started_s, row.ended_s) for row in contender.manager.traffic().rows] == [(0.5, 2), (2, 7)]


def test_a_request_counts_its_least_time(monkeypatch):
    monkeypatch.setattr(peers, "WARM_UP", 0.5)
    counts = [64, 128, 3, 1]
    first = [[9.0, 9.0, 9.0, 9.0, *counts], [1.0, 4.0, 3.0, 2.0, *counts], [5.0, 1.0, 1.0, 1.0, *counts]]
    second = [[9.0, 9.0, 9.0, 9.0, *counts], [2.0, 2.0, 4.0, 3.0, *counts], [3.0, 3.0, 2.0, 2.0, *counts]]
    told = peers.row([driver.Play("1", "", "", first), driver.Play("1", "", "a lie", second)])
    assert told["lie"] == "a lie"
    names = ("mean_us", "cpu_us", "hash_us", "hash_cpu_us", "hit_share", "blocks_out", "requests")
    assert [told[name] for name in names] == pytest.approx([2e6, 1.5e6, 2e6, 1.5e6, 0.5, 3, 2])


def test_a_case_in_which_all_have_failed_is_not_played_again(tmp_path):
    past = {"a": [driver.Play("", "died", "", [])]}
    peers.play_once({"a": None}, driver.Case(tmp_path / "p.npz", 10, 200), past)
    assert len(past["a"]) == 1
    assert peers.row(past["a"]) == {"why": "died"}


# ---- contenders in processes


def played(tmp_path, *kinds, requests=40, conversations=1, tiers=(200,)):
    """Each turn of a conversation is a request; all kinds of the liar play them in turns of ten."""
    turns = [divmod(number, conversations) for number in range(requests)]
    asked = [([(each, block) for block in range(turn + 1)], 8 * turn + 9, 2.0 * turn) for turn, each in turns]
    prompts.write(tmp_path / "p.npz", asked)
    entries = [driver.Entry(kind, "dev", "tests.packaging.liar", kind) for kind in kinds]
    processes = {entry.name: driver.Process(entry) for entry in entries}
    driver.play(processes, driver.Case(tmp_path / "p.npz", requests, *tiers), 8, 10)
    return processes


def close(processes):
    for process in processes.values():
        process.close()


@pytest.mark.process
def test_a_liar_stays_in_the_table_with_its_mark(tmp_path):
    processes = played(tmp_path, "honest", "early", "swapped")
    close(processes)
    assert {name: bool(process.lie) for name, process in processes.items()} == {
        "honest": False, "early": True, "swapped": True,
    }  # fmt: skip
    assert {len(process.played) for process in processes.values()} == {40}


@pytest.mark.process
def test_a_lie_about_the_host_tier_is_caught(tmp_path):
    processes = played(tmp_path, "honest", "unloaded", "crossed", conversations=4, tiers=(12, 60))
    close(processes)
    assert {name: bool(process.lie) for name, process in processes.items()} == {
        "honest": False, "unloaded": True, "crossed": True,
    }  # fmt: skip
    # Of 4 conversations in turn, 12 slots hold less than two: all but the newest turns come back from the host.
    told = peers.row([processes["honest"].result()])
    assert min(told["blocks_out"], told["blocks_in"]) > 0


def test_each_engine_has_a_row_for_one_tier_and_for_two():
    one, two = ({entry.name.split(",")[0] for entry in peers.ENTRIES if tiers in entry.tiers} for tiers in (1, 2))
    assert one == two


@pytest.mark.process
def test_a_contender_that_dies_is_a_row_and_others_play_on(tmp_path):
    processes = played(tmp_path, "honest", "dies")
    assert [len(process.played) for process in processes.values()] == [40, 10]
    plays = [processes[name].result() for name in ("honest", "dies")]
    assert peers.row(plays) == {"why": "died: ValueError: at request 15"}
    driver.play(processes, driver.Case(tmp_path / "p.npz", 10, 200), 8, 10)  # a new case, a new life
    close(processes)
    assert [(process.why, len(process.played)) for process in processes.values()] == [("", 10), ("", 10)]


@pytest.mark.process
def test_a_contender_without_end_is_stopped_for_its_case_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(driver, "PATIENCE_S", 0)
    processes = played(tmp_path, "honest")
    assert (processes["honest"].why, len(processes["honest"].played)) == ("stopped: 10 requests took 0 s", 10)
    monkeypatch.undo()
    driver.play(processes, driver.Case(tmp_path / "p.npz", 40, 200), 8, 10)
    close(processes)
    assert (processes["honest"].why, len(processes["honest"].played)) == ("", 40)


@pytest.mark.process
def test_a_contender_that_cannot_be_imported_is_a_row(tmp_path):
    process = driver.Process(driver.Entry("none", "dev", "no_such_adapter", ""))
    process.make(driver.Case(tmp_path / "p.npz", 1, 1), 8)
    process.play(0, 1)
    assert process.why == "not here: ModuleNotFoundError: No module named 'no_such_adapter'"


def test_an_environment_that_cannot_be_made_is_a_row(monkeypatch):
    def refuse(name):
        raise environments.Missing("no network")

    monkeypatch.setattr(driver, "python_of", refuse)
    process = driver.Process(peers.ENTRIES[2])
    process.make(driver.Case(Path("p"), 1, 1), 8)
    process.play(0, 1)
    assert (process.memory(driver.Case(Path("p"), 1, 1), 8), peers.row([process.result()])) == (
        {},
        {"why": "not here: no network"},
    )


def test_a_named_environment_is_used_as_it_is(monkeypatch, tmp_path):
    monkeypatch.setattr(environments, "_run", lambda *command, **variables: pytest.fail(f"ran {command}"))
    monkeypatch.setenv(environments.HOST_VENV, str(tmp_path))
    with pytest.raises(environments.Missing, match="names no environment"):
        environments.python_of("fastdeploy")
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.touch()
    assert environments.python_of("fastdeploy") == python


def test_a_missing_checkout_is_a_row(monkeypatch):
    monkeypatch.setattr(driver, "python_of", lambda name: pytest.fail(f"made {name} for nothing"))
    monkeypatch.delenv("FASTDEPLOY_25", raising=False)
    assert driver.Process(driver.Entry("2.5", "fastdeploy", "a", "", "FASTDEPLOY_25")).why == (
        "not here: FASTDEPLOY_25 names no checkout of FastDeploy"
    )


def test_the_table_marks_a_lie_and_shows_a_reason():
    times = dict.fromkeys(("median_us", "mean_us", "p99_us", "cpu_us", "hash_us", "hash_cpu_us", "hit_share"), 1.0)
    times |= {"blocks_out": 2.5, "blocks_in": 0.5}
    cases = {"case": {"a": {"why": "not here: no network"}, "b": {**times, "lie": "block 0 of 1"}}}
    result = {"cases": cases, "memory": {}, "warm_up": 0.2, "block_size": 64}
    shown = [row.value for row in rows.tables_of("peers", result)[0].rows]
    assert shown[0] == "not here: no network"
    assert shown[1].endswith("copied 2.5 blocks out and 0.5 in; **matched what was not computed**: block 0 of 1")


def test_ours_is_compared_with_the_fastest_peer_that_tells_the_truth():
    def row(us, lie=""):
        times = dict.fromkeys(("median_us", "p99_us", "cpu_us", "hash_us", "hash_cpu_us", "hit_share"), 2.0)
        return {**times, "mean_us": us, "lie": lie, "blocks_out": 0}

    contenders = {"ours, adaptive": row(3.0), "ours, lru": row(1.0), "a": row(9.0), "b": row(6.0), "c": row(1.0, "lie")}
    result = {"cases": {"case": {**contenders, "d": {"why": "died"}}}, "memory": {}, "warm_up": 0.2, "block_size": 64}
    shown = [each for each in rows.tables_of("peers", result)[0].rows if each.target]
    assert [(each.number, each.value) for each in shown] == [
        (0.5, "0.5x (b)"), (1.0, "1x (a)"), (0.625, "0.625x (b)"), (1.0, "1x (a)"),
    ]  # fmt: skip
    result["cases"]["case"]["ours, adaptive"] = {"why": "died"}
    assert not [each for each in rows.tables_of("peers", result)[0].rows if each.target]
