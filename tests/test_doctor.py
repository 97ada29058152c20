"""The `doctor` command on FAKE FastDeploy trees, and on this machine."""

import argparse
import importlib
import importlib.metadata
import os
import re
import sys
from dataclasses import replace
from importlib.metadata import EntryPoint, EntryPoints
from types import SimpleNamespace

import pytest
from msgspec.structs import asdict

from fastdeploy_kvcache_v1 import cli, doctor, plugin
from fastdeploy_kvcache_v1.contract.installation import Finding
from fastdeploy_kvcache_v1.errors import ConfigError
from fastdeploy_kvcache_v1.fastdeploy_integration import checks as fastdeploy_checks
from fastdeploy_kvcache_v1.fastdeploy_integration.overlay import release
from fastdeploy_kvcache_v1.fastdeploy_integration.overlay.table import known_releases, table_for
from fastdeploy_kvcache_v1.lab.fastdeploy_cpu import activation
from fastdeploy_kvcache_v1.storage import checks as storage_checks
from fastdeploy_kvcache_v1.storage.file import file_backend
from fastdeploy_kvcache_v1.storage.file.file_backend import FileBackend
from fastdeploy_kvcache_v1.storage.mooncake.settings import MooncakeSettings
from fastdeploy_kvcache_v1.storage.mooncake.share import take_back_memory
from fastdeploy_kvcache_v1.storage.registry import store_kind
from fastdeploy_kvcache_v1.switch import SWITCH
from fastdeploy_kvcache_v1.worker import checks as worker_checks
from fastdeploy_kvcache_v1.worker.cuda import trial
from fastdeploy_kvcache_v1.worker.cuda.rates import KERNEL, SPANS, Rates
from fastdeploy_kvcache_v1.worker.ops.copies import cpu_paths
from tests.gpu.in_process import fake_gpu
from tests.mooncake_master import Master, needs_mooncake
from tests.storage.attention_store.stand_in import installed, num_stored, set_faults
from tests.storage.mooncake.stand_in import give_now
from tests.storage.values import keys, namespace, values


@pytest.fixture
def make_tree(tmp_path):
    def make(version="2.6.0", files=()):
        root = tmp_path / "fastdeploy"
        root.mkdir()
        for name, text in {"envs.py": "environment_variables = {}\n", **dict(files)}.items():
            path = root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        if version:
            (root / "version.txt").write_text(f"fastdeploy version: {version}\n", encoding="utf-8")
        return tmp_path

    return make


def test_every_patch_point_is_named(make_tree, capsys):
    tree = make_tree(files={"config.py": "class CacheConfig:\n    def __init__(self, changed): ...\n"})
    assert cli.main(["doctor", "--source", str(tree)]) == 1
    report = capsys.readouterr().out
    rows = [*table_for("2.6").rows, *activation.table_for("2.6").rows]
    for row in rows:
        assert row.target in report
    assert "ok  extend fastdeploy.envs:environment_variables" in report
    assert "CacheConfig.__init__: drifted: expected (self, args), FastDeploy has (self, changed)" in report
    assert "FAIL  replace fastdeploy.engine.resource_manager:PrefixCacheManager: missing" in report
    num_lab = len(activation.table_for("2.6").rows)
    assert report.endswith(f"\nLab: {num_lab} to do; FastDeploy: {len(rows) - num_lab - 1} to do\n")


@pytest.mark.parametrize("argument", ["--write-bodies", "--against=old"])
def test_bodies_are_those_of_a_tree_that_is_named(argument, capsys):
    assert cli.main(["doctor", argument]) == 2
    assert "need a tree: name it with --source DIR" in capsys.readouterr().err


def test_trees_without_a_difference_are_said_to_have_none(make_tree, capsys):
    tree = str(make_tree())
    assert cli.main(["doctor", "--source", tree, "--against", tree]) == 0
    assert capsys.readouterr().out.startswith(f"no difference to {tree} in ")


def test_doctor_fails_for_unknown_settings_left_out_of_block_names(make_tree, capsys):
    files = {
        "config.py": "class ParallelConfig:\n    def __init__(self):\n        self.device_ids = ''\n",
        "envs.py": "environment_variables = {'FD_LOG_DIR': None}\n",
    }
    cli.main(["doctor", "--source", str(make_tree(files=files))])
    (line,) = (line for line in capsys.readouterr().out.splitlines() if "names of stored blocks" in line)
    assert line.startswith("FAIL  names of stored blocks: FastDeploy has no ")
    for setting, is_lost in {
        "ParallelConfig.pod_ip": True,
        "ParallelConfig.device_ids": False,
        "environment_variables.FD_API_KEY": True,
        "environment_variables.FD_LOG_DIR": False,
        "CacheConfig.kvcache_storage_dir": False,  # we add it ourselves
    }.items():
        assert (f"{setting}," in line or f"{setting}:" in line) == is_lost, setting


@pytest.mark.parametrize("release_name", known_releases())
def test_the_capabilities_of_the_release_are_shown(make_tree, capsys, release_name):
    cli.main(["doctor", "--source", str(make_tree(release_name))])
    report = capsys.readouterr().out
    for name, has_it in asdict(table_for(release_name).capabilities).items():
        assert f"   -  capability {name}: {'yes' if has_it else 'no'}\n" in report


OWN_MANAGER = {"cache_manager/v1/__init__.py": ""}


def asked(*words):
    """What `doctor` is asked with these flags."""
    parser = argparse.ArgumentParser()
    doctor.add_arguments(parser)
    return parser.parse_args(words)


def findings(*names, words=()):
    """Of the checks of these names, by their own names."""
    found = [each for check in doctor.CHECKS if check.name in names for each in doctor.findings(check, asked(*words))]
    return {each.name: each for each in found}


def test_every_check_names_a_function_of_its_room():
    for check in doctor.CHECKS:
        module, _, function = check.function.partition(":")
        assert callable(getattr(importlib.import_module(f"fastdeploy_kvcache_v1.{module}"), function)), check


def test_patch_points_of_the_cpu_worker_alone_do_not_fail_doctor(make_tree, monkeypatch):
    monkeypatch.syspath_prepend(make_tree())
    monkeypatch.delitem(doctor.sys.modules, plugin.FASTDEPLOY, raising=False)
    found = {name: finding.ok for name, finding in findings("FastDeploy", "CPU worker").items()}
    for row in table_for("2.6").rows:
        assert found[f"{row.kind.value} {row.target}"] is not None
    assert {found[f"{row.kind.value} {row.target}"] for row in activation.table_for("2.6").rows} == {None}


@pytest.mark.parametrize(
    ("tree", "flags", "status", "said"),
    [
        (("3.1.4",), [], 1, "FastDeploy 3.1 is not supported"),
        (("3.1.4", OWN_MANAGER), [], 0, "so fastdeploy-kvcache-v1 does nothing: its flags, stores, "),
        (("3.1.4", OWN_MANAGER), [], 0, "\n\nFastDeploy: nothing to patch\n"),
        ((), ["--write-bodies"], 2, "is missing: correct the table first"),
        (None, [], 2, "holds no FastDeploy"),
    ],
)
def test_what_a_tree_is(make_tree, tmp_path, capsys, tree, flags, status, said):
    root = tmp_path if tree is None else make_tree(*tree)
    assert cli.main(["doctor", "--source", str(root), *flags]) == status
    printed = capsys.readouterr()
    assert said in (printed.err if status == 2 else printed.out)


def test_this_machine_is_described():
    found = findings(*(check.name for check in doctor.CHECKS))
    assert found["copy ops"].detail == f"on a CPU by {cpu_paths()[0].name}"
    assert found["replay and traffic"].ok
    assert {"GPU", "CuPy", "PaddlePaddle", "NUMA nodes", "page-locked memory", "activation"} <= found.keys()


def test_without_fastdeploy_the_lab_is_ok_and_failures_come_first(capsys, monkeypatch):
    monkeypatch.delitem(sys.modules, "fastdeploy", raising=False)  # pytest gives the folder of our tests that name
    assert cli.main(["doctor"]) == 1
    *report, _, verdict = capsys.readouterr().out.splitlines()
    assert verdict.startswith("Lab: ok; Machine: ok; FastDeploy: ")
    begin = next(number for number, line in enumerate(report) if line.startswith("FastDeploy: "))
    section = report[begin + 1 : report.index("", begin)]
    known = ", ".join(known_releases())
    assert section[0].startswith(f"FAIL  FastDeploy: got none, expected one of {known}: install it")
    failed = [line.startswith("FAIL") for line in section]
    assert failed == sorted(failed, reverse=True)


def test_another_tree_says_nothing_about_this_machine(make_tree, capsys):
    assert cli.main(["doctor", "--source", str(make_tree("3.1.4", OWN_MANAGER))]) == 0
    report = capsys.readouterr().out
    assert "GPU" not in report
    assert "Machine" not in report


def test_a_room_that_is_not_installed_is_asked_nothing(monkeypatch):
    find_spec = importlib.util.find_spec
    without_lab = lambda name: None if name.endswith(".lab") else find_spec(name)  # noqa: E731
    monkeypatch.setattr(doctor.importlib.util, "find_spec", without_lab)
    assert findings("packages", "CPU worker") == {}
    assert "copy ops" in findings("copy ops")


@pytest.mark.parametrize(
    ("lacking", "commands", "ok"), [("fastapi", "serve and router", None), ("msgspec", "replay and traffic", False)]
)
def test_only_a_package_that_all_commands_need_is_a_failure(monkeypatch, lacking, commands, ok):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == lacking else find_spec(name))
    found = findings("packages")
    assert [each.name for each in found.values() if not each.ok] == [commands]
    assert found[commands].ok is ok
    assert re.match(rf"got no {lacking}, expected them: pip install '?fastdeploy-kvcache-v1", found[commands].detail)


@pytest.mark.parametrize(
    ("installed", "ok", "detail"),
    [
        ({"paddlepaddle-gpu": "3.3.1", "paddlepaddle": "3.3.0"}, True, "paddlepaddle-gpu 3.3.1"),
        ({"paddlepaddle": "3.3.1"}, False, "got paddlepaddle 3.3.1, expected paddlepaddle-gpu: install it"),
        ({}, False, "got nothing, expected paddlepaddle-gpu: install it"),
    ],
)
def test_a_wrong_paddlepaddle_is_named_beside_the_one_that_is_wanted(monkeypatch, installed, ok, detail):
    def version(name):
        if name not in installed:
            raise importlib.metadata.PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(importlib.metadata, "version", version)
    (found,) = findings("PaddlePaddle").values()
    assert found.ok is ok
    assert found.detail.startswith(detail)


@pytest.mark.parametrize(
    ("driver", "ok", "said"),
    [
        (OSError("no libcuda"), False, "no NVIDIA driver (no libcuda), expected one: install one, or run "),
        ((100, 0), False, "got CUDA error 100 from the driver, expected 0: look at nvidia-smi"),
        ((0, 0), False, "got 0 GPUs, expected at least 1: look at CUDA_VISIBLE_DEVICES"),
        ((0, 2), True, "2 x "),
    ],
)
def test_a_gpu_that_is_not_there_is_said_with_what_to_do(monkeypatch, driver, ok, said):
    def load(name):
        if isinstance(driver, OSError):
            raise driver
        status, count = driver
        return SimpleNamespace(
            cuInit=lambda flags: status,
            cuDeviceGetCount=lambda number: setattr(number._obj, "value", count),
            cuDeviceGetName=lambda *_: None,
        )

    monkeypatch.setattr(worker_checks.ctypes, "CDLL", load)
    (found,) = findings("GPU").values()
    assert found.ok is ok
    assert said in found.detail


@pytest.mark.parametrize(
    ("served", "of_cupy", "ok", "said"),
    [
        (12040, None, False, "needs the package cupy: pip install 'fastdeploy-kvcache-v1[gpu]'"),
        (13010, None, False, "needs the package cupy: pip install 'fastdeploy-kvcache-v1[gpu-cuda13]'"),
        (12040, 13000, False, "pip uninstall cupy-cuda13x && pip install 'fastdeploy-kvcache-v1[gpu]'"),
        (12040, 12090, True, "for CUDA 12"),
        (13010, 12090, True, "for CUDA 12"),
        (0, 12090, True, "for CUDA 12"),
    ],
)
def test_the_cupy_that_fits_the_driver_is_named(served, of_cupy, ok, said):
    with fake_gpu() as gpu, pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpu, "cuDriverGetVersion", lambda: served)
        patch.setattr(sys.modules["cupy"].cuda.runtime, "runtimeGetVersion", lambda: of_cupy)
        patch.setattr(trial, "rates_of", lambda device, row_bytes: Rates())
        if of_cupy is None:
            patch.setitem(sys.modules, "cupy", None)
        (found,) = findings("CuPy").values()
    assert found.ok is ok
    assert said in found.detail


@pytest.mark.parametrize(
    ("rates", "ok", "said"),
    [
        (Rates({SPANS: {}}, {KERNEL: "it hangs"}), True, "spans (not kernel: it hangs)"),
        (Rates({}, {KERNEL: "no memory"}), False, "spans (not kernel: no memory)"),
        (ConfigError("plain copies give other bytes"), False, "plain copies give other bytes"),
    ],
)
def test_what_a_trial_of_the_copies_finds_is_told(monkeypatch, rates, ok, said):
    def rates_of(device, row_bytes):
        if isinstance(rates, Exception):
            raise rates
        return rates

    monkeypatch.setattr(trial, "rates_of", rates_of)
    with fake_gpu():
        (found,) = findings("copy paths on the GPU").values()
    assert (found.ok, found.detail) == (ok, said)


@pytest.mark.parametrize(("check", "ok"), [("system libraries", False), ("storage", None)])
def test_a_library_that_the_system_lacks_is_named_with_its_package(monkeypatch, check, ok):
    def need(libraries):
        monkeypatch.setattr(worker_checks, "PADDLE_LIBRARIES", libraries)
        monkeypatch.setattr(storage_checks, "store_kind", lambda name: replace(store_kind(name), libraries=libraries))

    need({"libc.so.6": "libc6", "libabsent.so.7": "libabsent7"})
    found = findings(check)["system libraries"]
    assert found.ok is ok
    assert "libabsent.so.7" in found.detail
    assert found.detail.endswith("missing here: apt-get install libabsent7")
    need({"libc.so.6": "libc6"})
    assert findings(check).get("system libraries", Finding(True, "", "")).ok


@pytest.fixture
def storage_doctor(make_tree, tmp_path, capsys):
    """Runs the doctor on a tree in which all is well, and on a storage: exit status, and the line about that."""
    tree = make_tree("3.1.4", OWN_MANAGER)

    def check(where=f"dir={tmp_path / 'kv'}"):
        status = cli.main(["doctor", "--source", str(tree), f"--kvcache-storage-{where}"])
        lines = capsys.readouterr().out.splitlines()
        (line,) = (line for line in lines if line[6:].startswith("storage "))
        return status, line

    return check


def test_a_storage_directory_is_tried_out_and_measured(storage_doctor, tmp_path):
    status, line = storage_doctor()
    assert status == 0
    name = f"  ok  storage file {tmp_path / 'kv'}"
    assert re.fullmatch(rf"{name}: 64 MiB stored at [\d,]+ MB/s and read at [\d,]+ MB/s, through the page cache", line)


def test_a_store_is_tried_where_one_of_its_flags_is_given(storage_doctor):
    for where in ("backend=file", "gib=3"):
        status, line = storage_doctor(where)
        assert (status, line[:22]) == (1, "FAIL  storage file: --")
        assert "--kvcache-storage-backend file needs --kvcache-storage-dir (directory" in line


def test_what_a_storage_directory_holds_stays_as_it_is(storage_doctor, tmp_path):
    server = FileBackend(tmp_path / "kv", namespace(), capacity_bytes=1 << 20)
    server.put(keys(1, 2), values(keys(1, 2)))

    def content():
        files = sorted(path for path in (tmp_path / "kv").rglob("*") if path.is_file() and path.name != "used")
        return [(path, path.read_bytes()) for path in files], sorted((tmp_path / "kv").iterdir()), server._used.read()

    before = content()
    assert storage_doctor()[0] == 0
    assert content() == before
    server.close()


def test_a_directory_that_holds_other_files_is_no_storage_directory(storage_doctor, tmp_path):
    (tmp_path / "kv").mkdir()
    (tmp_path / "kv" / "letter").write_text("Dear")
    status, line = storage_doctor()
    assert (status, line.startswith("FAIL"), "holds other files" in line) == (1, True, True)
    assert [path.name for path in (tmp_path / "kv").iterdir()] == ["letter"]


def change_one(backend, stored_keys, buffers):
    count = REALLY_GET(backend, stored_keys, buffers)
    buffers[5][7] ^= 1
    return count


REALLY_GET = FileBackend.get
EMPTY = ["format", "tmp", "used"]


@pytest.mark.parametrize(
    ("of", "function", "does", "line", "left"),
    [
        (FileBackend, "count_stored", lambda _, some: len(some) - 1, "only the first 63 are there", EMPTY),
        (
            FileBackend,
            "get",
            lambda _, some, to: len(some) - 1,
            "of 64 values that were stored, 63 came back",
            EMPTY,
        ),
        (FileBackend, "get", change_one, "64 came back, and 63 unchanged", EMPTY),
        (FileBackend, "remove", lambda *_: None, "a value that was removed is still there", None),
        (file_backend, "open_directory", lambda path, _: path.mkdir(exist_ok=True), "cannot be written to", None),
    ],
)
def test_a_directory_that_does_not_keep_what_it_is_given_is_a_problem(
    storage_doctor, tmp_path, monkeypatch, of, function, does, line, left
):
    monkeypatch.setattr(of, function, does)
    status, found = storage_doctor()
    assert (status, line in found) == (1, True)
    assert left is None or sorted(path.name for path in (tmp_path / "kv").iterdir()) == left


@pytest.mark.process
@needs_mooncake()
def test_mooncake_is_tried_out_with_memory_of_others(storage_doctor, tmp_path, monkeypatch):
    master = Master(tmp_path)
    for name, value in master.environment(segment_bytes=256 << 20).items():
        monkeypatch.setenv(name, value)
    try:
        status, found = storage_doctor("backend=mooncake")
        assert (status, found.startswith("   -"), "no room for a trial" in found) == (0, True, True)
        give_now(MooncakeSettings.read(os.environ))
        status, found = storage_doctor("backend=mooncake")
        assert status == 0
        assert re.fullmatch(r"  ok  storage mooncake: 64 MiB stored at [\d,]+ MB/s and read at [\d,]+ MB/s", found)
        master.kill()
        status, found = storage_doctor("backend=mooncake")
        assert (status, "cannot connect to mooncake's master" in found) == (1, True)
    finally:
        take_back_memory()
        master.kill()


@pytest.fixture
def attention_store(tmp_path, monkeypatch):
    with installed(monkeypatch, tmp_path / "store") as store:
        yield store


def test_the_attention_store_is_tried_out_by_a_round_trip(storage_doctor, attention_store):
    status, found = storage_doctor("backend=attention_store")
    assert status == 0, found
    assert re.match(r"  ok  storage attention_store: 64 MiB stored at [\d,]+ MB/s and read at [\d,]+ MB/s, from", found)
    assert num_stored(attention_store) == 32
    assert storage_doctor("backend=attention_store")[0] == 0, "the next trial does not meet what the first one left"
    assert num_stored(attention_store) == 64


def test_an_attention_store_that_does_not_work_is_a_problem(storage_doctor, attention_store):
    set_faults(attention_store, match={"error": "no route to host"})
    line = "FAIL  storage attention_store: the attention store cannot be used: no route to host"
    assert storage_doctor("backend=attention_store") == (1, line)


def test_the_attention_store_without_its_sdk_is_one_line(storage_doctor):
    status, found = storage_doctor("backend=attention_store")
    assert (status, "needs the package attentionstore_sdk, which is not installed" in found) == (1, True)


def test_activation_by_bootstrap_file_or_by_plugin(tmp_path, monkeypatch):
    monkeypatch.delenv("ENABLE_V1_KVCACHE_MANAGER", raising=False)
    monkeypatch.delenv("FD_PLUGINS", raising=False)
    user, packages = tmp_path / "user", tmp_path / "packages"
    user.mkdir()
    packages.mkdir()
    monkeypatch.setattr(fastdeploy_checks.site, "getsitepackages", lambda: [str(packages)])
    monkeypatch.setattr(fastdeploy_checks.site, "getusersitepackages", lambda: str(user))
    monkeypatch.setattr(fastdeploy_checks.site, "ENABLE_USER_SITE", False)
    (user / fastdeploy_checks.BOOTSTRAP).write_text("", encoding="utf-8")
    assert findings("activation")["activation"].ok is False  # Python does not read that folder here
    monkeypatch.setenv("FD_PLUGINS", "other,kvcache_v1")
    installed = EntryPoints([EntryPoint("kvcache_v1", "a:b", fastdeploy_checks.PLUGIN_GROUP)])
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: installed.select(group=group))
    assert findings("activation")["activation"].ok is True
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: EntryPoints())
    line = "got FD_PLUGINS=kvcache_v1 without its entry point: reinstall"
    assert findings("activation")["activation"][::2] == (False, line)
    monkeypatch.delenv("FD_PLUGINS")
    monkeypatch.setattr(fastdeploy_checks.site, "ENABLE_USER_SITE", True)
    assert findings("activation")["activation"].ok is True


@pytest.mark.parametrize(
    ("version", "line"),
    [("2.6.0", "FAIL  wrap fastdeploy.config:FDConfig.postprocess: missing"), (None, "does not say its version")],
)
def test_a_refused_fastdeploy_is_described_while_the_switch_is_on(make_tree, monkeypatch, capsys, version, line):
    """The start-up error sends people here, with the variable still set."""
    monkeypatch.setattr(doctor.sys, "meta_path", list(doctor.sys.meta_path))
    monkeypatch.syspath_prepend(make_tree(version))
    monkeypatch.setenv(SWITCH, "1")
    monkeypatch.delitem(doctor.sys.modules, plugin.FASTDEPLOY, raising=False)
    monkeypatch.setattr(release, "_metadata_version", lambda: None)
    plugin.activate()
    assert cli.main(["doctor"]) == 1
    assert line in capsys.readouterr().out
