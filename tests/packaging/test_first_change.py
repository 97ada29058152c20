"""The first change that CONTRIBUTING.md walks a newcomer through: its code works, and its test can fail."""

import re
from pathlib import Path
from textwrap import dedent

import pytest

from fastdeploy_kvcache_v1.scheduler.policies import eviction
from tests.scheduler import test_eviction_policies as its_file

PAGE = (Path(__file__).parents[2] / "CONTRIBUTING.md").read_text(encoding="utf-8")
POLICY, TEST = map(dedent, re.findall(r"^ +```python\n(.*?)^ +```", PAGE, re.S | re.M))
ROW = re.search(r'`"fifo": (.*),`', PAGE)


def run_its_test(policy, monkeypatch):
    names = dict(vars(eviction))
    exec(policy, names)
    monkeypatch.setitem(eviction.EVICTION_POLICIES, "fifo", eval(ROW[1], names))
    found = dict(vars(its_file))
    exec(TEST, found)
    (name,) = (each for each in found if each.startswith("test_fifo"))
    found[name]()


def test_the_first_change_passes_its_test(monkeypatch):
    run_its_test(POLICY, monkeypatch)


def test_the_first_change_without_its_condition_fails_its_test(monkeypatch):
    broken, replaced = re.subn(r"if not place.is_queued:\n +", "", POLICY)
    assert replaced == 1
    with pytest.raises(AssertionError):
        run_its_test(broken, monkeypatch)
