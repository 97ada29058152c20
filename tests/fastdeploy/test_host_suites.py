"""How FastDeploy's own tests are run and compared, over a FAKE tree that has a manager of its own."""

import pytest

from fastdeploy_kvcache_v1.switch import SWITCH

from . import host_suites

pytestmark = pytest.mark.process

TESTS = f"""
import os
from fastdeploy.platforms.base import Platform

IS_ON = os.environ["{SWITCH}"] == "1"

def test_passes():
    assert Platform().is_cuda()

def test_fails():
    assert False, "without a GPU"

def test_is_refused():
    if IS_ON:
        raise KeyError("engine") from ValueError("{host_suites.REFUSAL}a role")

def test_differs():
    assert not IS_ON
"""


@pytest.fixture
def checkout(tmp_path):
    def make(name, text):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
        return tmp_path / name

    for name in ("__init__", "platforms/__init__", "cache_manager/v1/__init__"):
        make(f"fastdeploy/{name}.py", "")
    make("fastdeploy/envs.py", "environment_variables = {}\n")
    make("fastdeploy/version.txt", "fastdeploy version: 9.1.0\n")
    make("fastdeploy/platforms/base.py", "class Platform:\n    def is_cuda(self):\n        return False\n")
    return make


def test_only_what_differs_by_another_reason_than_a_refusal_counts(checkout, capsys):
    path = checkout("tests/v1/test_some.py", TESTS)
    assert host_suites.compare("9.1", path.parents[2]) == 1
    _, row, *rest, total, _ = capsys.readouterr().out.splitlines()
    assert row.split() == ["v1/test_some.py", "3/1", "1/3"]
    assert [line.strip() for line in rest] == [
        "test_is_refused: passed, on: refused a role",
        "test_differs: passed, on: failed AssertionError: assert not True",
    ]
    assert total.endswith("3 pass, 1 with the switch on; 1 are refused, 1 differ for another reason")


def test_a_file_that_hangs_is_ended_and_has_told_what_came_before(checkout, monkeypatch):
    path = checkout("tests/v1/test_hangs.py", "import time\ntime.sleep(3600)\n")
    monkeypatch.setattr(host_suites, "LIMIT_S", 0.1)
    assert host_suites.run_file(path.parents[2], path, is_on=False) == ({}, "ended after 0.1 s")
