"""`scripts/test-gpu` over the fake GPU: every check runs, whatever the others do. Of CUDA it says nothing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import paddle
import pytest

from fastdeploy_kvcache_v1.worker.cuda.rates import PATHS
from tests.gpu import suite
from tests.gpu.in_process import STAND_IN

pytestmark = pytest.mark.process

TROUBLE = """
import ctypes, os, time

def goes_well():
    print("seen")
    return {"rate": 2.5}

def fails():
    raise ValueError("this one fails")

def hangs():
    time.sleep(600)

def breaks_the_context():
    import cupy, fake_driver
    fake_driver.current.fault(700, "an access outside of all memory")

def crashes():
    os.kill(os.getpid(), 11)

def works_on_the_gpu():
    import cupy
    assert cupy.asnumpy(cupy.full(3, 7)).tolist() == [7, 7, 7]

CHECKS = {check.__name__: check for check in (goes_well, fails, hangs, breaks_the_context, crashes, works_on_the_gpu)}
"""


def start(folder: Path, *flags: str, **more: str) -> subprocess.Popen[str]:
    """The script, where no command can be found."""
    environment = {**os.environ, **more, "PYTHONPATH": str(STAND_IN), "PYTHON": sys.executable, "PATH": str(folder)}
    command = ["/bin/bash", str(suite.ROOT / "scripts/test-gpu"), "--results", str(folder), *flags]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def results(folder: Path) -> list[dict]:
    (file,) = folder.glob("gpu-*.jsonl")
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def test_everything_passes(tmp_path):
    assert suite.WAYS == PATHS
    with start(tmp_path, "--suite") as run:
        said, _ = run.communicate(timeout=500)
    found = results(tmp_path)
    assert run.returncode == 0, said
    assert found[0]["measured"]["gpu"] == "the fake GPU"
    assert found[1]["check"] == "ways that are used"
    assert found[-1]["reason"] == f"Paddle {paddle.__version__} sees no GPU"
    assert [line["result"] for line in found] == ["ok"] * (2 + 3 * (4 + 3) + 2 + 16) + ["left out"]


def test_what_fails_hangs_or_breaks_the_gpu_takes_nothing_along(tmp_path, monkeypatch, capsys):
    for name in ("trouble", "measures"):
        (tmp_path / f"{name}.py").write_text(TROUBLE, encoding="utf-8")
    (tmp_path / "lacks.py").write_text("import a_package_that_is_missing", encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", f"{STAND_IN}{os.pathsep}{tmp_path}")
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(suite, "SUITE", [*map(suite.Group, ("trouble", "lacks")), suite.Group("lacks", needed=True)])
    monkeypatch.setattr(suite, "BENCHMARK", [suite.Group("measures")])
    assert suite.main(["--results", str(tmp_path), "--deadline", "20"]) == 1
    found = {(line["group"], line["check"]): line for line in results(tmp_path)}
    for group in ("trouble", "measures"):
        assert [check for of, check in found if of == group] == [
            "goes_well", "fails", "hangs", "breaks_the_context", "crashes", "works_on_the_gpu"
        ]  # fmt: skip
        assert found[group, "goes_well"]["measured"] == {"rate": 2.5}
        assert found[group, "goes_well"]["said"] == "seen\n"
        assert "ValueError: this one fails" in found[group, "fails"]["reason"]
        assert found[group, "hangs"]["reason"] == "killed: it took more than 20 s"
        assert "CUDARuntimeError" in found[group, "breaks_the_context"]["reason"]
        assert found[group, "crashes"]["reason"].startswith("its process ended with -11")
        assert found[group, "works_on_the_gpu"]["result"] == "ok"
    printed = capsys.readouterr().out.splitlines()
    assert [line.partition("failed: ")[2] for line in printed if line.startswith("failed: ")] == [
        f"{group} {check}" for group, check in found if found[group, check]["result"] == "FAILED"
    ]
    assert "failed: lacks import" in printed
    assert "left out lacks                  import" in printed


def test_what_has_no_time_is_named_and_only_a_benchmark_may(tmp_path, monkeypatch):
    (tmp_path / "trouble.py").write_text(TROUBLE, encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", f"{STAND_IN}{os.pathsep}{tmp_path}")
    monkeypatch.setattr(suite, "SUITE", [suite.Group("trouble")])
    with closing(suite.Report(tmp_path)) as report:
        suite.run(suite.SUITE, report, 60, 0)
        assert report.failed == ["trouble 6 checks"]
        monkeypatch.setattr(suite, "BENCHMARK", suite.SUITE)
        suite.run(suite.BENCHMARK, report, 60, 0)
        assert report.counts == {"FAILED": 1, "no time": 1}
    assert results(tmp_path)[1]["not_run"][0] == "goes_well"


def test_what_was_measured_before_it_was_killed_is_written(tmp_path):
    with start(tmp_path, "--benchmark", "--only", "copy_gpu/kernel") as run:
        cases = (line for line in run.stdout if line.startswith("ok       copy_gpu"))
        for _case in range(3):
            next(cases)
        run.send_signal(signal.SIGTERM)
    found = [line for line in results(tmp_path) if line["group"] == "copy_gpu/kernel"]
    assert len(found) >= 3
    assert all(line["measured"]["gb_per_s"] > 0 and line["measured"]["us_per_layer"] > 0 for line in found)


def test_a_report_becomes_a_result_of_its_gpu(tmp_path):
    with start(tmp_path, "--benchmark", "--only", "beside_pass", FASTDEPLOY_KVCACHE_BENCH_QUICK="1") as run:
        said, _ = run.communicate(timeout=300)
    assert run.returncode == 0, said
    (report,) = tmp_path.glob("gpu-*.jsonl")
    keep = [sys.executable, "benchmarks/copy_gpu.py", str(report), "--anyway", "--results", str(tmp_path)]
    subprocess.run(keep, cwd=suite.ROOT, check=True, stdout=subprocess.DEVNULL)
    result = json.loads((tmp_path / "copy_gpu.json").read_text(encoding="utf-8"))
    assert result["machine"]["cpu"].startswith("the fake GPU")
    assert [*map(set, result["beside"].values())] == [{*PATHS}] * 10
    wrong = ('"ok"', '"no time"', "lacks"), ('"code": "', '"code": "f', "measured other code"), ("{", "", "no report")
    for was, now, said in wrong:
        report.write_text(report.read_text(encoding="utf-8").replace(was, now), encoding="utf-8")
        done = subprocess.run(keep, cwd=suite.ROOT, check=False, capture_output=True, text=True)
        assert said in done.stderr
