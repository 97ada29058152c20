"""What is known before any copy path is tried: the operator's choice, and the release of the driver."""

from __future__ import annotations

import pytest

from fastdeploy_kvcache_v1.errors import ConfigError
from fastdeploy_kvcache_v1.worker.ops import landing


def test_names_of_paths_are_checked():
    assert landing.read_choice({}) == landing.Choice()
    assert landing.read_choice({landing.CHOICE: " -batch, -kernel "}).forbidden == {"batch", "kernel"}
    assert landing.read_choice({landing.CHOICE: "staged"}).forced == "staged"
    for wrong in ("kernels", "kernel,batch", "-runs,dma"):
        with pytest.raises(ConfigError, match=f"{landing.CHOICE}={wrong} must be one of kernel"):
            landing.read_choice({landing.CHOICE: wrong})


CLOSED_MODULE = """NVRM version: NVIDIA UNIX x86_64 Kernel Module  470.103.01  Thu Jan  6 12:10:04 UTC 2022
GCC version:  gcc version 9.4.0 (Ubuntu 9.4.0-1ubuntu1~20.04.1)
"""
OPEN_MODULE = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.03  Release Build  (dvs-builder)\n"


@pytest.mark.parametrize(
    ("module", "process", "release"),
    [
        ("580.65.06\n", None, "580.65.06"),
        ("580.65.06\n", OPEN_MODULE, "580.65.06"),
        (None, OPEN_MODULE, "580.159.03"),
        (None, CLOSED_MODULE, "470.103.01"),
        ("\n", CLOSED_MODULE, "470.103.01"),
        ("nothing\n", None, "of NVML"),
        (None, None, "of NVML"),
    ],
)
def test_the_driver_release_is_read_wherever_it_stands(tmp_path, monkeypatch, module, process, release):
    files = tmp_path / "module", tmp_path / "process"
    for file, text in zip(files, (module, process), strict=True):
        if text is not None:
            file.write_text(text)
    monkeypatch.setattr(landing, "RELEASE_FILES", files)
    monkeypatch.setattr(landing, "_release_by_nvml", lambda: "of NVML")
    assert landing.driver_release() == release


def test_without_files_and_nvml_the_driver_release_is_unknown(monkeypatch):
    def no_library(name):
        assert name == "libnvidia-ml.so.1"
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(landing, "RELEASE_FILES", ())
    monkeypatch.setattr(landing.ctypes, "CDLL", no_library)
    assert landing.driver_release() == ""


def test_where_no_path_is_left_copies_go_by_runs_and_each_other_one_says_why():
    landed = landing.Landing(("kernel", "staged"), {"batch": "it lost a block"})
    paths = {(path.direction, path.name): path.left for path in landed.paths({"staged"})}
    later = "it was refused by the driver after it had been tried"
    assert paths == {
        ("in", "kernel"): later,
        ("in", "batch"): "it lost a block",
        ("in", "runs"): "",
        ("out", "kernel"): later,
        ("out", "staged"): "",
        ("out", "batch"): "it lost a block",
    }
