"""What must hold before paddle is loaded; each case needs a process of its own."""

import json
import os
import subprocess
import sys

import pytest

from fastdeploy_kvcache_v1.lab.model import reproducible

NAMES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "KMP_BLOCKTIME", "MKL_CBWR", "MKL_DEBUG_CPU_TYPE")
AMD = "vendor_id\t: AuthenticAMD\nflags\t\t: fpu avx avx2\n"
INTEL = "vendor_id\t: GenuineIntel\nflags\t\t: fpu avx avx2\n"


def run(code, **environment):
    clean = {name: value for name, value in os.environ.items() if name not in NAMES}
    done = subprocess.run(
        [sys.executable, "-c", code], env=clean | environment, capture_output=True, text=True, check=True, timeout=60
    )
    return json.loads(done.stdout)


@pytest.mark.process
def test_what_the_server_process_imports_does_not_load_paddle():
    code = (
        "import json, sys\n"
        "from fastdeploy_kvcache_v1.lab.server.text import load_tokenizer\n"
        "from fastdeploy_kvcache_v1.lab.model import config, load_model_config, plan, sampler\n"
        "load_model_config(None), load_tokenizer(None)\n"
        "print(json.dumps([name for name in ('paddle', 'cupy', 'fastdeploy') if name in sys.modules]))"
    )
    assert run(code) == []


CONFIGURE = (
    "import json, os\n"
    "from fastdeploy_kvcache_v1.lab.model import configure_reproducible_math\n"
    "done = configure_reproducible_math(2)\n"
    f"print(json.dumps([done, *(os.environ.get(name) for name in {NAMES})]))"
)


@pytest.mark.process
def test_settings_go_to_the_environment_and_respect_what_is_there():
    done, omp, mkl, block_time, mode, _ = run(CONFIGURE)
    assert (done, omp, mkl, block_time) == (True, "1", "2", "0")
    assert mode in ("AVX2,STRICT", "COMPATIBLE")
    assert run(CONFIGURE, MKL_CBWR="COMPATIBLE", MKL_NUM_THREADS="4")[1:5] == ["1", "4", "0", "COMPATIBLE"]


@pytest.mark.parametrize(
    ("cores", "allowed", "expected"),
    [(1, 2, 1), (2, 4, 1), (3, 8, 2), (64, 128, 2), (64, 2, 1), (64, 1, 1), (None, 8, 1)],
)
def test_default_threads_leave_one_allowed_physical_core(cores, allowed, expected, monkeypatch):
    monkeypatch.setattr(reproducible.psutil, "cpu_count", lambda logical: cores)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(allowed)))
    assert reproducible.default_threads() == expected


def test_too_late_once_paddle_is_there(monkeypatch):
    monkeypatch.setitem(sys.modules, "paddle", object())
    before = dict(os.environ)
    assert not reproducible.configure_reproducible_math()
    assert dict(os.environ) == before


@pytest.mark.parametrize(
    ("cpu", "expected"),
    [
        (AMD, {"MKL_CBWR": "AVX2,STRICT", "MKL_DEBUG_CPU_TYPE": "5"}),
        (INTEL, {"MKL_CBWR": "AVX2,STRICT"}),
        ("vendor_id : GenuineIntel\nflags : fpu sse2", {"MKL_CBWR": "COMPATIBLE"}),
        ("", {"MKL_CBWR": "COMPATIBLE"}),
    ],
)
def test_modes_by_processor(cpu, expected):
    assert reproducible.mkl_settings(cpu) == expected
