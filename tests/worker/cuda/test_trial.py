"""Ways to copy are tried before they are used: what fails there is not used, and costs nothing.

Most laws run a trial in this process, over the fake GPU; those of processes that crash and hang start them.
"""

from __future__ import annotations

import json
import logging
import os
import re
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import count
from types import SimpleNamespace
from unittest.mock import Mock

import msgspec
import pytest

from fastdeploy_kvcache_v1.errors import ConfigError
from fastdeploy_kvcache_v1.worker.cuda import trial, trial_process
from fastdeploy_kvcache_v1.worker.cuda.rates import BATCH, KERNEL, PATHS, SPANS, Rates
from fastdeploy_kvcache_v1.worker.cuda.runtime import CudaRuntime, use_device
from fastdeploy_kvcache_v1.worker.cuda.trial import CHOICE
from fastdeploy_kvcache_v1.worker.ops import copies
from tests.gpu.in_process import STAND_IN

KB = 1 << 10
CALLS = {KERNEL: "cuLaunchKernelEx", BATCH: "cuMemcpyBatchAsync", SPANS: "cuMemcpy2DAsync"}


@pytest.fixture(autouse=True)
def machine(monkeypatch, tmp_path):
    """A driver without blemish, and an empty cache directory."""
    release = tmp_path / "version"
    release.write_text("570.86.10\n")
    monkeypatch.setenv("FASTDEPLOY_KVCACHE_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv(CHOICE, raising=False)
    monkeypatch.setattr(trial, "_MODULE_RELEASE", release)
    monkeypatch.setattr(subprocess, "run", Mock(side_effect=FileNotFoundError))
    monkeypatch.setattr(trial, "_known", Rates())
    return SimpleNamespace(release=release, kept=tmp_path / "cache" / "copies")


class Trials:
    """Runs a trial in this process, with a context of its own; `said` says something else for a way."""

    def __init__(self, gpu):
        self.gpu, self.asked, self.said = gpu, [], {}

    def __call__(self, way, device, sizes):
        self.asked.append(way)
        if way in self.said:
            return self.said[way]
        answer = trial_process.try_path(way, device, sizes)
        self.gpu.run_all()  # as when a process ends
        self.gpu.broken = 0
        self.gpu.registered.clear()
        return 0, msgspec.json.encode(answer).decode()

    def rates(self, row_bytes=(), device=0):
        """And which ways were tried for them."""
        self.asked.clear()
        return trial.rates_of(device, row_bytes)


@pytest.fixture
def trials(gpu, monkeypatch):
    gpu.free_bytes = 6 << 30
    monkeypatch.setattr(trial, "STANDARD", (8 * KB,))
    monkeypatch.setattr(trial_process, "WIDTHS", ((512,), (7, 100)))
    made = Trials(gpu)
    monkeypatch.setattr(trial, "run_child", made)
    for name, number in {"MOST_BLOCKS": 24, "TIMED_BLOCKS": 16, "REPEATS": 1}.items():
        monkeypatch.setattr(trial_process, name, number)
    return made


def test_working_copy_ways_are_used_and_timed_at_the_rows_of_the_cache(trials):
    rates = trials.rates([2112, 128, 2 << 20])
    assert (rates.left, rates.paths, rates.reach) == ({}, PATHS, 1 << 40)
    for way in PATHS:
        for to_device in (True, False):
            assert [each.row_bytes for each in rates.timings[way][to_device]] == [128, 2112, 8 * KB, 1 << 20]
    assert trial.known() is rates
    assert trials.gpu.faults == []


# ---- what fails


# what happens to a way's call, and what is said of it
IN_PROCESS = {
    "copies nothing": "wrong bytes, rows of (512,) bytes, 1 in a span",
    "breaks the context": "700",
    "is refused": "CUDA error 222",
    "is missing": "this CUDA driver has no {}: install a newer one",
}
TIMED = '"timings": [[[8192, 1.0, 1.0]], [[8192, 1.0, 1.0]]]'
SAID = {
    (None, "rows of (512,) bytes, 1 in a span\n"): "not done within 60 s: rows of (512,) bytes, 1 in a span",
    (-11, "rows of (512,) bytes, 1 in a span\n"): "Segmentation fault: rows of (512,) bytes",
    (3, "Traceback:\nImportError: no cupy"): "status 3: ImportError: no cupy",
    (0, ""): "status 0",
    (0, "{half of an answ"): "status 0",
    (0, '{"reach": "five"}'): "status 0",
    (0, '{"reach": 5, "timings": [[], []]}'): "status 0",
    (0, '{"reach": 5, "timings": [[[8192, 1.0, 1.0]], [[8192, 1.0, 0.0]]]}'): "status 0",
    (0, f"{{{TIMED}}}"): "status 0",
    (-11, f'{{"reach": 5, {TIMED}}}'): "Segmentation fault",
    (1, '{"left": "the reason"}'): "the reason",
}


@pytest.mark.parametrize("way", PATHS)
@pytest.mark.parametrize("fault", [*IN_PROCESS, *SAID])
def test_a_way_that_fails_is_not_used_and_the_others_are(trials, way, fault):
    if fault in SAID:
        trials.said[way] = fault
    else:
        if fault == "is refused":
            trials.gpu.statuses[CALLS[way]] = 222
        elif fault == "is missing":
            trials.gpu.missing.add(CALLS[way])
        else:
            breaks = fault == "breaks the context"
            setattr(trials.gpu, CALLS[way], lambda *_: breaks and trials.gpu.fault(700, "an illegal address"))
        if (way, fault) == (SPANS, "copies nothing"):
            with pytest.raises(ConfigError, match=r"^plain copies .* \(\d+ wrong bytes.*\): the machine is"):
                trials.rates()
            assert trial.known().paths == (SPANS,)
            return
    rates = trials.rates()
    assert rates.paths == tuple(each for each in PATHS if each != way)
    assert list(rates.left) == [way]
    assert {**IN_PROCESS, **SAID}[fault].format(CALLS[way]) in rates.left[way]


def test_a_kernel_that_the_driver_does_not_take_is_left(trials):
    trials.gpu.statuses["cuModuleLoadData"] = 222
    assert trials.rates().left == {KERNEL: "the driver refused it: cuModuleLoadData: CUDA error 222"}


def test_a_gpu_that_has_far_memory_elsewhere_does_without_the_kernel(trials):
    """Two windows of addresses are page-locked, each by a call of its own."""
    real = trials.gpu.cuMemHostGetDevicePointer
    trials.gpu.cuMemHostGetDevicePointer = lambda address, flags: (
        real(address, flags) + (address > min(trials.gpu.registered) + trial_process.WINDOW)
    )
    rates = trials.rates()
    assert rates.left == {
        KERNEL: "the driver refused it: the GPU sees parts of the host tier at other distances than this process"
    }
    assert trials.gpu.faults == []


@pytest.mark.parametrize(("cuda", "extra"), [(12040, "gpu"), (13010, "gpu-cuda13")])
def test_without_cupy_one_line_names_the_extra(gpu, cuda, extra):
    said = re.escape(f"a server on a GPU needs the package cupy: pip install 'fastdeploy-kvcache-v1[{extra}]'")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpu, "cuDriverGetVersion", lambda: cuda)
        patch.setitem(sys.modules, "cupy", None)
        for start in (partial(trial.rates_of, 0, [8 * KB]), CudaRuntime, partial(use_device, 0)):
            with pytest.raises(ConfigError, match=f"^{said}$"):
                start()


@pytest.mark.parametrize("what", ["all is used", "allocation fails", "nothing ends"])
def test_where_nothing_can_be_tried_plain_copies_are_used_with_one_warning(trials, caplog, what):
    if what == "all is used":
        trials.gpu.free_bytes = 100 << 20
    elif what == "allocation fails":
        trials.gpu.statuses["cuMemAlloc"] = 2
    else:
        trials.said = dict.fromkeys(PATHS, (None, "rows of (512,) bytes\n"))
    with caplog.at_level(logging.WARNING):
        rates = trials.rates()
    assert (rates.paths, rates.reach, dict(rates.timings)) == ((SPANS,), 0, {})
    assert list(rates.left) == [KERNEL, BATCH]
    (line,) = caplog.messages
    assert all(f"{way}: " in line for way in PATHS)
    trials.rates()
    assert trials.asked == ([] if what == "nothing ends" else [*PATHS]), "there may be memory another time"


def test_trial_on_a_gpu_with_little_memory_limits_reach_and_is_repeated(trials):
    trials.gpu.free_bytes = 300 << 20
    assert trials.rates().reach == 236 << 20
    trials.gpu.free_bytes = 6 << 30
    assert trials.rates().reach == 1 << 40
    assert trials.asked == [*PATHS]


def test_no_way_is_used_farther_than_all_were_tried(trials):
    trials.said[BATCH] = 0, f'{{"reach": 5, {TIMED}}}'
    assert trials.rates().reach == 5


@pytest.mark.parametrize(("given", "reach"), [(16 << 30, 16 << 30), (6 << 30, 5 << 30), (1 << 30, 0)])
def test_addresses_are_tried_as_far_as_the_system_gives_them(trials, monkeypatch, given, reach):
    real = trial_process.mmap.mmap

    def few(file, nbytes, **flags):
        if file == -1 and nbytes > given:
            raise OSError("too many")
        return real(file, nbytes, **flags)

    monkeypatch.setattr(trial_process.mmap, "mmap", few)
    rates = trials.rates()
    assert (rates.reach, bool(rates.timings)) == (reach, reach > 0)
    assert reach or "refused 5368709120 bytes of addresses" in rates.left[KERNEL]
    trials.rates()
    assert trials.asked == ([] if reach > 5 << 30 else [*PATHS]), "what is short is not kept"


# ---- what a trial notices


def rows_that(change):
    """Copies of single rows by another rule: `change(offset of the target, bytes)` gives what is done instead."""

    def break_it(gpu):
        real = gpu._row

        def row(to, of, nbytes):
            start = next((at for at, each in gpu._memory.items() if at <= to - (1 << 48) < at + len(each.bytes)), to)
            offset, nbytes = change(max(0, to - (1 << 48) - start), nbytes)
            return real(start + (1 << 48) + offset if to >= 1 << 48 else to, of, nbytes)

        def plain(*given):
            gpu._row = real
            copy(*given)
            gpu._row = row

        copy, gpu._row, gpu.cuMemcpyAsync = gpu.cuMemcpyAsync, row, plain

    return break_it


def loses_the_end_of_a_batch(gpu):
    real = gpu.cuMemcpyBatchAsync
    gpu.cuMemcpyBatchAsync = lambda to, of, sizes, count, *more: real(to, of, sizes, min(count, 3990), *more)


def forgets_a_layer(gpu):
    real = gpu._kernel_row
    gpu._kernel_row = lambda arguments, number: None if number and arguments.to_device else real(arguments, number)


def mixes_the_directions_up(gpu):
    """A copy that goes out while another one goes in takes that one's place."""
    real, seen = gpu.cuMemcpy2DAsync, set()

    def copy(pointer, stream):
        seen.add(stream)
        if len(seen) == 1:
            real(pointer, stream)

    gpu.cuMemcpy2DAsync = copy


@pytest.mark.parametrize(
    ("way", "fault", "said"),
    [
        (SPANS, rows_that(lambda offset, nbytes: (offset, nbytes // 4 * 4 if nbytes % 4 else nbytes)), "(7, 100)"),
        (SPANS, rows_that(lambda offset, nbytes: (offset, nbytes // 32 * 32 if nbytes > 4096 else nbytes)), "(4112,)"),
        (SPANS, rows_that(lambda offset, nbytes: (offset, min(nbytes, 128 * KB))), "(262144,)"),
        (BATCH, rows_that(lambda offset, nbytes: (offset % (1 << 32), nbytes)), "(65536,) bytes, 1 in a span"),
        (KERNEL, forgets_a_layer, "(4096, 2048)"),
        (BATCH, loses_the_end_of_a_batch, "(512,) bytes, 1 in a span"),
        (SPANS, mixes_the_directions_up, "(512,) bytes, 1 in a span"),
    ],
)
def test_a_trial_notices(gpu, way, fault, said):
    gpu.free_bytes = 6 << 30
    fault(gpu)
    answer = trial_process.try_path(way, 0, [8 * KB])
    assert said in answer.left
    assert (answer.is_wrong, answer.is_lasting) == (True, False)
    assert gpu.faults == []


def test_copies_are_tried_beside_a_busy_stream_in_both_directions(trials, monkeypatch):
    """At once: nothing is found out between them."""
    plan = trial_process.plan_spans

    def plan_before_work(*given, **sizes):
        assert not any(stream.queue for stream in trials.gpu._streams.values())
        return plan(*given, **sizes)

    monkeypatch.setattr(trial_process, "plan_spans", plan_before_work)
    assert not trials.rates().left
    streams = {entry[1] for entry in trials.gpu.log if entry[0] == "copy 2D"}
    busy = {entry[1] for entry in trials.gpu.log if entry[:2] != ("copy", 0) and entry[4:] == (1 << 20,)}
    assert (len(streams), len(busy)) == (2, 3)
    assert not streams & busy


# ---- what the operator wants


@pytest.mark.parametrize(
    ("text", "tried"),
    [
        ("", PATHS),
        ("kernel", (KERNEL,)),
        (" -batch , -kernel", (SPANS,)),
        ("-spans", (KERNEL, BATCH)),
        ("-spans,-batch,-kernel", ()),
    ],
)
def test_variable_chooses_the_copy_ways_that_are_tried(trials, monkeypatch, text, tried):
    monkeypatch.setenv(CHOICE, text)
    rates = trials.rates()
    assert tuple(trials.asked) == tried
    assert rates.paths == (tried or (SPANS,))
    assert {*rates.left.values()} <= {f"{CHOICE} excludes it"}
    assert {*rates.paths, *rates.left} == {*PATHS}


def test_copy_way_left_out_by_the_variable_is_tried_when_it_is_unset(trials, monkeypatch):
    monkeypatch.setenv(CHOICE, "-batch")
    trials.rates()
    monkeypatch.delenv(CHOICE)
    assert trials.rates().paths == PATHS
    assert trials.asked == [BATCH]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("kernle", "must be one of kernel, batch, spans, or exclude some as in -batch,-kernel, got kernle"),
        ("kernel,spans", "-batch,-kernel, got kernel,spans"),
        ("-kernle", "-batch,-kernel, got -kernle"),
    ],
)
def test_a_wrong_name_is_one_line(trials, monkeypatch, text, said):
    monkeypatch.setenv(CHOICE, text)
    with pytest.raises(ConfigError, match=f"^{CHOICE} must be") as told:
        trials.rates()
    assert said in str(told.value)
    assert "\n" not in str(told.value)


@pytest.mark.parametrize("mode", [2, 3])
def test_a_gpu_for_one_process_alone_starts_nothing(trials, caplog, mode):
    trials.gpu.compute_mode = mode
    rates = trials.rates()
    assert (trials.asked, rates.paths) == ([], (SPANS,))
    assert "compute mode" in rates.left[KERNEL]
    assert [record.levelname for record in caplog.records if "use spans, untried" in record.message] == ["WARNING"]


@pytest.mark.parametrize("release", ["580.159.03", "580.159.04", "580.159", ""])
def test_batches_of_a_doubtful_driver_are_tried_only_where_they_are_forced(trials, machine, monkeypatch, release):
    machine.release.write_text(release)
    rates = trials.rates()
    assert trials.asked == [KERNEL, SPANS]
    assert (release or "unknown") in rates.left[BATCH]
    monkeypatch.setenv(CHOICE, BATCH)
    assert trials.rates().paths == (BATCH,)
    assert trials.asked == [BATCH]


def test_driver_release_comes_from_nvidia_smi_if_the_system_lacks_it(machine, monkeypatch):
    assert trial.driver_release() == "570.86.10"
    machine.release.unlink()
    assert trial.driver_release() == ""
    for tool, found in [
        (Mock(return_value=SimpleNamespace(stdout="580.159.04\n580.159.04\n")), "580.159.04"),
        (Mock(side_effect=subprocess.CalledProcessError(9, "nvidia-smi")), ""),
        (Mock(side_effect=subprocess.TimeoutExpired("nvidia-smi", 30)), ""),
    ]:
        monkeypatch.setattr(subprocess, "run", tool)
        assert trial.driver_release() == found
        assert tool.call_args.kwargs["check"]
        assert tool.call_args.kwargs["timeout"] == 30


# ---- what is kept


def test_results_of_a_trial_are_used_by_the_next_start(trials):
    trials.gpu.missing.add(CALLS[BATCH])
    found = trials.rates([2112])
    assert trials.rates([2112]) == found
    assert trials.asked == []


@pytest.mark.parametrize("what", ["driver", "kernel", "rows", "gpu", "edition", "file", "half a file"])
def test_another_one_is_tried_again(trials, machine, monkeypatch, tmp_path, what):
    trials.rates()
    (kept,) = machine.kept.glob("*.json")
    if what == "driver":
        machine.release.write_text("575.1.2")
    elif what == "kernel":
        (tmp_path / "ptx").write_text("// copy_rows.cu sha256 0\n" + trial.PTX.read_text().partition("\n")[2])
        monkeypatch.setattr(trial, "PTX", tmp_path / "ptx")
        monkeypatch.setattr("fastdeploy_kvcache_v1.worker.cuda.copies.PTX", tmp_path / "ptx")
    elif what == "gpu":
        trials.gpu.cuDeviceGetUuid = lambda device: b"\x02" * 16
    elif what == "edition":
        monkeypatch.setattr(trial, "_EDITION", 0)
    elif what == "file":
        kept.write_bytes(b"\xff[]")
    elif what == "half a file":
        kept.write_text(json.dumps({way: {"reach": 1} for way in PATHS}))
    assert trials.rates([512] if what == "rows" else []).paths == PATHS
    assert trials.asked == [*PATHS]
    trials.rates([512] if what == "rows" else [])
    assert trials.asked == []


@pytest.mark.parametrize(
    ("said", "is_kept"),
    [
        ((None, "rows of (512,) bytes\n"), True),
        ((None, ""), False),
        ((-9, "rows of (512,) bytes\n"), False),
        ((0, '{"left": "why"}'), True),
    ],
)
def test_results_of_a_trial_that_may_change_are_not_kept(trials, said, is_kept):
    trials.said[KERNEL] = said
    trials.rates()
    trials.rates()
    assert trials.asked == ([] if is_kept else [KERNEL])


def test_nothing_is_kept_of_a_driver_without_a_name(trials, machine):
    machine.release.unlink()
    trials.rates()
    assert trials.rates().paths == (KERNEL, SPANS)
    assert trials.asked == [KERNEL, SPANS]


@pytest.mark.parametrize("what", ["a file is in the way", "no home"])
def test_a_machine_that_keeps_nothing_tries_every_time(trials, monkeypatch, tmp_path, what):
    if what == "no home":
        monkeypatch.delenv("FASTDEPLOY_KVCACHE_CACHE")
        monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
        monkeypatch.setattr("pathlib.Path.home", lambda: (_ for _ in ()).throw(RuntimeError("no home")))
    else:
        (tmp_path / "cache").touch()
    for _ in range(2):
        assert trials.rates().paths == PATHS
        assert trials.asked == [*PATHS]


def test_ranks_take_turns_and_one_gpu_is_tried_once(machine, monkeypatch):
    """Both would meet at the barrier if they tried at once."""
    barrier, asked = threading.Barrier(2), []

    def run(way, device, sizes):
        asked.append(device)
        with pytest.raises(threading.BrokenBarrierError):
            barrier.wait(0.3)
        barrier.reset()
        return 0, f'{{"reach": 5, {TIMED}}}'

    def rank(number, gpu):
        return trial._answers(gpu, [KERNEL], number, [8 * KB])

    monkeypatch.setattr(trial, "run_child", run)
    with ThreadPoolExecutor(3) as ranks:
        found = [*ranks.map(rank, range(3), ["one GPU", "another", "another"])]
    assert len({*asked} & {1, 2}) == 1
    assert sorted(asked).count(0) == 1
    assert found == [found[0]] * 3


# ---- the fastest way (GPU-6)


def h100(way, pieces, width):
    """ns, by rates that others published: a batch is slow below 28 KB a row."""
    if way == KERNEL:
        return 3000 + pieces * width / 35.2
    if way == BATCH:
        return 4000 + pieces * width / (7.1 if width < 28 * KB else 51.5)
    return 1600 + pieces * width / 52


def slow_engine(way, pieces, width):
    """A GPU whose copy engines are good for large pieces only, and whose kernel is good for small ones."""
    return {KERNEL: 5000 + pieces * width / 12, BATCH: 4000 + pieces * (500 + width / 20)}.get(
        way, 9000 + pieces * (20 if width > 64 * KB else 900) + pieces * width / 24
    )


@pytest.mark.parametrize("made_up", [h100, slow_engine])
def test_the_way_that_is_taken_costs_at_most_a_tenth_more_than_the_best(trials, monkeypatch, made_up):
    trials.gpu.copy_ns = made_up
    monkeypatch.setattr(trial_process.time, "perf_counter_ns", lambda: 0)
    for name, given in {"WIDTHS": (), "REPEATS": 0, "TIMED_BLOCKS": 256}.items():
        monkeypatch.setattr(trial_process, name, given)
    taken = set()
    for row_bytes in [KB * each for each in (4, 6, 12, 16, 24, 27, 28, 29, 48, 64, 96, 128, 192, 256)]:
        rates = trials.rates([row_bytes])
        for blocks in (256, 2048):
            for length in (1, 2, 3, 5, 8, 16):
                spans = -(-blocks // length)
                costs = {way: made_up(way, blocks, row_bytes) for way in (KERNEL, BATCH)}
                costs[SPANS] = spans * made_up(SPANS, blocks / spans, row_bytes)
                for to_device in (False, True):
                    costs[KERNEL] *= trial_process.KERNEL_COST if to_device else 1.0
                    way = rates.fastest([row_bytes], blocks, spans, to_device=to_device, among=PATHS)
                    assert costs[way] <= 1.1 * min(costs.values()), (row_bytes, blocks, length, costs)
                    taken.add(way)
    assert taken == {*PATHS}


def test_each_direction_is_timed_by_copies_in_that_direction(trials, monkeypatch):
    monkeypatch.setattr(trial_process, "_nanoseconds", lambda *_, to_device: 16_000.0 if to_device else 32_000.0)
    timings = trials.rates().timings[BATCH]
    assert [timings[to_device][0].apart for to_device in (True, False)] == [1000.0, 2000.0], "of 16 blocks"


@pytest.mark.parametrize(("way", "cost"), [(KERNEL, trial_process.KERNEL_COST), (BATCH, 1.0)])
def test_half_of_the_threads_time_counts_and_what_a_swap_in_takes(trials, monkeypatch, way, cost):
    trials.gpu.copy_ns = lambda *_: 16_000.0
    monkeypatch.setattr(trial_process.time, "perf_counter_ns", partial(next, count(0, 32_000)))
    out, into = trials.rates().timings[way]
    assert out[0] == (8 * KB, pytest.approx(2000.0), pytest.approx(2000.0)), "of 16 blocks"
    assert into[0] == (8 * KB, pytest.approx(2000.0 * cost), pytest.approx(2000.0 * cost))


# ---- processes


@pytest.fixture
def child(monkeypatch, tmp_path):
    """What happens in a process before it tries a way, as Python over its `gpu`."""

    def prepare(code):
        hook = f"import os, cupy\nfrom fake_driver import current as gpu\n{code}\n"
        (tmp_path / "sitecustomize.py").write_text(hook)
        monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{STAND_IN}")

    return prepare


@pytest.mark.process
@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("gpu.cuMemcpy2DAsync = lambda *_: os._exit(3)", "its trial ended with status 3: rows of (512,) bytes"),
        ("gpu.cuMemcpy2DAsync = lambda *_: os.kill(os.getpid(), 11)", "its trial ended with Segmentation fault: rows"),
        ("gpu.cuMemcpy2DAsync = lambda *_: gpu.fault(700, 'illegal')", "error 700"),
    ],
)
def test_a_process_that_dies_is_an_answer(child, code, said):
    child(code)
    assert said in trial._ask(SPANS, 0, [8 * KB]).left


@pytest.mark.process
def test_a_process_that_hangs_is_killed(child, monkeypatch):
    child("import time; time.sleep(10000)")
    monkeypatch.setattr(trial, "LIMIT_S", 2.0)
    assert trial.run_child(SPANS, 0, []) == (None, "")


@pytest.mark.process
def test_a_way_is_tried_by_a_process(gpu, child, monkeypatch):
    """Whatever libraries write, and whatever another variable says."""
    monkeypatch.setenv(copies.CHOICE, "cupy")
    writes = "gpu.cuModuleUnload = lambda *given: [os.write(2, b'half a line'), unload(*given)][1]"
    child(f"gpu.free_bytes, unload = 6 << 30, gpu.cuModuleUnload\n{writes}")
    found = trial._ask(KERNEL, 0, [8 * KB])
    assert (found.left, found.reach) == ("", 1 << 40)
