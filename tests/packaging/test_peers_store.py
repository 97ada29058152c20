"""The comparison with other stores of files: each plays each turn, wrong values are marked, and what is not here is a
row.
"""

import os
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "benchmarks"
sys.path[:0] = [str(FOLDER), str(FOLDER / "peers"), str(FOLDER / "peers_store")]
import driver  # noqa: E402
import environments  # noqa: E402
import files_player  # noqa: E402
import peers_store  # noqa: E402
import rows  # noqa: E402

del sys.path[:3]


@pytest.fixture(autouse=True)
def few(monkeypatch):
    for name, value in {"VALUES": 4, "TURNS": 2, "FILLED_TURNS": 2, "STARTS": 1}.items():
        monkeypatch.setattr(peers_store, name, value)


def played(tmp_path, *entries):
    """Rows of a case and first hits, both from processes that have ended."""
    stores = {entry.name: peers_store.Store(entry) for entry in entries}
    case = peers_store.play(stores, tmp_path / "case", 5000)
    hits = peers_store.first_hits(stores, tmp_path / "filled")
    return case, hits


def liars(*kinds):
    return [driver.Entry(kind, "dev", "tests.packaging.lying_store", kind) for kind in kinds]


@pytest.mark.process
def test_a_store_that_returns_other_bytes_is_marked(tmp_path):
    case, hits = played(tmp_path, *liars("honest", "swaps", "misses", "forgets"))
    assert {name: row["lie"] for name, row in case.items()} == {
        "honest": "",
        "swaps": "value 0 of 4 came back changed",
        "misses": "3 of 4 values came",
        "forgets": "3 of 4 values came",
    }
    assert [row["gb_per_s"].keys() >= {"put", "get"} for row in case.values()] == [True] * 4
    assert (hits["honest"]["lie"], hits["honest"]["ms"] > 0, hits["misses"]["ms"]) == ("", True, None)


@pytest.mark.process
def test_a_store_that_dies_is_a_row_and_lives_again_for_the_next_part(tmp_path):
    case, hits = played(tmp_path, *liars("honest", "dies"))
    assert case["dies"] == {"why": "died: ValueError: at the third get"}
    assert case["honest"]["lie"] == ""
    assert hits["dies"]["ms"] > 0


def test_an_environment_that_cannot_be_made_is_a_row(monkeypatch, tmp_path):
    def refuse(name):
        raise environments.Missing("no network")

    monkeypatch.setattr(driver, "python_of", refuse)
    case, hits = played(tmp_path, peers_store.ENTRIES[2])
    why = {"LMCache, fs_native": {"why": "not here: no network"}}
    assert (case, hits) == (why, why)
    result = {"values": 4, "cases": {"65536": case}, "filled": 8, "first_hits": hits}
    shown = rows.tables_of("peers_store", result)
    assert [row.value for table in shown[:2] for row in table.rows] == ["not here: no network"] * 2


@pytest.mark.process
@pytest.mark.skipif(
    not (ROOT / ".venv-peers-lmcache" / environments.STAMP).exists(), reason="./scripts/bench peers_store makes it"
)
def test_lmcache_returns_what_it_was_given(tmp_path):
    case, hits = played(tmp_path, *peers_store.ENTRIES[2:])
    assert {name: row.get("why") or row["lie"] for name, row in case.items()} == dict.fromkeys(case, "")
    found = {name: row["ms"] is not None for name, row in hits.items()}
    assert found == {"LMCache, fs_native": True, "LMCache, fs": True, "LMCache, local_disk": False}


def test_a_file_that_stays_in_the_page_cache_is_not_cold(monkeypatch, tmp_path):
    monkeypatch.setattr(os, "posix_fadvise", lambda *_: None)
    path = tmp_path / "value"
    path.write_bytes(bytes(10_000))
    assert not files_player.drop_from_cache(path)


def test_ours_is_compared_with_the_fastest_store_that_tells_the_truth():
    def row(lie="", **rates):
        times = {"cpu_s_per_gb": dict.fromkeys(rates, 1.0), "lookup_us": 1.0, "create_file_us": 1.0}
        return {"gb_per_s": rates, "lie": lie, **times}

    contenders = {
        "ours": row(put=2.0, get=3.0, cold=1.0),
        "a": row(put=1.0, get=2.0),
        "b": row(put=0.5, get=4.0),
        "c": row(put=9.0, get=9.0, lie="value 0 of 4 came back changed"),
        "d": {"why": "died"},
    }
    result = {"values": 4, "cases": {"65536": contenders}, "filled": 8, "first_hits": {}}
    shown = rows.tables_of("peers_store", result)[0].rows
    assert [(each.what, each.value) for each in shown if each.number] == [
        ("`put`, ours, over the fastest peer", "2x (a)"),
        ("`get`, ours, over the fastest peer", "0.75x (b)"),
    ]
    assert shown[3].value.endswith("**wrong**: value 0 of 4 came back changed")
    assert shown[4].value == "died"
