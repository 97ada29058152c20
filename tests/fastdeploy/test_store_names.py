"""What the name of stored blocks has of FastDeploy's settings: all but those that the table of its release lists."""

import pytest

from fastdeploy_kvcache_v1.fastdeploy_integration.overlay.overlay import Overlay
from fastdeploy_kvcache_v1.fastdeploy_integration.overlay.release import fastdeploy_at
from fastdeploy_kvcache_v1.fastdeploy_integration.overlay.table import table_for

from .fastdeploy_trees import HERE, RELEASES, run_inside, tree

pytestmark = pytest.mark.process

SCRIPT = HERE / "drive_store_names.py"
OTHER_SEED = """
import os, sys
os.execve(sys.executable, [sys.executable, *sys.argv[1:]], {**os.environ, "PYTHONHASHSEED": "7"})
"""
SAME = {"plain", "ports", "sizes", "store", "prefill", "decode", "profiled"}
"""Other addresses, sizes, policies or roles, under which the same model computes the same bytes."""


@pytest.fixture(scope="module", params=RELEASES)
def shown(request, tmp_path_factory):
    """The release, and what the script says of it, by the first word of a line."""
    output = run_inside(request.param, tmp_path_factory.mktemp("names"), SCRIPT, "model")
    lines = [line.split() for line in output.splitlines()]
    words = {word: [line[1:] for line in lines if line[:1] == [word]] for word in ("CASE", "IN", "OUT", "WRONG")}
    return request.param, words


def test_the_same_server_has_the_same_name_on_other_ports_and_with_other_sizes(shown):
    names = dict(shown[1]["CASE"])
    assert {case for case in names if names[case] == names["plain"]} == SAME


def test_a_restart_has_the_same_names_and_so_has_a_model_in_another_directory(shown, tmp_path):
    release, words = shown
    again = run_inside(release, tmp_path, "-c", OTHER_SEED, SCRIPT, "moved", "again")
    cases = [line.split()[1:] for line in again.splitlines() if line.startswith("CASE")]
    assert len(cases) >= 20
    assert [case for case in cases if case not in words["CASE"]] == []


def test_what_changes_the_numerics_changes_the_name(shown):
    names = {case: name for case, name in shown[1]["CASE"] if case == "plain" or case not in SAME}
    assert len(names) >= 15
    assert len(set(names.values())) == len(names)


def test_each_setting_is_in_the_name_or_on_the_list(shown):
    words = shown[1]
    assert words["WRONG"] == []
    settings = [setting for word in ("IN", "OUT") for (setting,) in words[word]]
    assert len(settings) > 400, "the script saw too little of FastDeploy"
    assert "fastdeploy.config:ModelConfig.of_a_later_release" in [setting for (setting,) in words["IN"]]


@pytest.mark.parametrize("release", RELEASES)
def test_each_setting_on_the_list_is_one_of_the_release(release):
    assert Overlay(table_for(release), fastdeploy_at(tree(release)).root).lost_settings() == []
