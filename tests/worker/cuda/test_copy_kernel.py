"""The copy kernel without a GPU: its shipped PTX, instruction by instruction, and its body as C++, byte by byte."""

from __future__ import annotations

import ctypes
import hashlib
import shutil
import struct
import subprocess
from collections.abc import Callable
from itertools import chain

import numpy as np
import pytest

from fastdeploy_kvcache_v1.worker.cuda.copies import OUT_AT_ONCE, OUT_BY_LAYER, in_shape
from fastdeploy_kvcache_v1.worker.ops import BlockRows, plan_spans
from tests.worker.ops.copies import Memory
from tests.worker.ops.native import CUSTOM_OPS, build, compiler
from tests.worker.ops.ptx import GpuMemory, Kernel, WrongAccess

SOURCE = CUSTOM_OPS / "copy_rows.cu"
PTX = build.IN_PACKAGE["ptx"]
ARCHITECTURES = (80, 86, 89, 90, 100, 120)

ROW = np.dtype("u8,u8,i8,i8,i4,i4")
RUN = np.dtype("i4,i4,i4")
COPY = struct.Struct("=QQiiiii4x")

WIDTHS = {
    16: (16, 48, 528, 4096, 4112, 6656, 7696, 8448, 12304),
    4: (12, 72, 100, 520, 1024, 1924, 2460),
    1: (33, 34, 256, 459, 737, 1101),
}
"""Bytes of a row, by the border on which all rows begin and end."""

Launch = Callable[[bytes, GpuMemory], object]


def unit_of(device: BlockRows, host: BlockRows) -> int:
    borders = [device.address, host.address, device.pitch, host.pitch, device.row_bytes]
    return next(unit for unit in (16, 4, 1) if not any(border % unit for border in borders))


class Case:
    """A random copy: sizes, slots and direction by its seed."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = np.random.default_rng(seed)
        border = list(WIDTHS)[seed % 3]
        self.layers, roles = int(rng.integers(1, 4)), int(rng.integers(1, 4))
        self.widths = rng.choice(WIDTHS[border], roles).tolist()
        shift, trailer = border * int(rng.integers(2)), border * int(rng.integers(3))
        device_slots, host_slots = (int(rng.integers(2, 24)) for _side in range(2))
        self.memory = Memory(
            rng,
            layers=self.layers,
            widths=self.widths,
            device_slots=device_slots,
            host_slots=host_slots,
            shift=shift,
            trailer=trailer,
        )
        self.to_device = bool(rng.integers(2))
        blocks = int(rng.integers(1, min(device_slots, host_slots) + 1))
        self.device, self.host = (rng.permutation(slots)[:blocks] for slots in (device_slots, host_slots))
        if rng.integers(2):
            self.device, self.host = np.sort(self.device), np.sort(self.host)
        whole = (0, self.layers * roles)
        first = roles * int(rng.integers(self.layers))
        self.first_row, self.end_row = whole if rng.integers(2) else (first, first + roles)

    def expected(self) -> np.ndarray:
        after = self.memory.bytes.copy()
        before, tiers = self.memory.tiers, self.memory.tiers_in(after)
        pairs = list(zip(chain(*before.device), chain(*before.host_roles), strict=True))
        targets = list(zip(chain(*tiers.device), chain(*tiers.host_roles), strict=True))
        for (device, host), (to_device, to_host) in list(zip(pairs, targets, strict=True))[
            self.first_row : self.end_row
        ]:
            if self.to_device:
                to_device[self.device] = host[self.host]
            else:
                to_host[self.host] = device[self.device]
        return after

    def rows(self) -> np.ndarray:
        pairs = zip(chain(*self.memory.device_rows), chain(*self.memory.host_rows), strict=True)
        return np.array([(d.address, h.address, d.pitch, h.pitch, d.row_bytes, unit_of(d, h)) for d, h in pairs], ROW)

    def spans(self) -> np.ndarray:
        sources, targets = (self.host, self.device) if self.to_device else (self.device, self.host)
        table = plan_spans(sources.tolist(), targets.tolist(), num_sources=24, num_targets=24).table
        firsts = np.cumsum(table[:, 2]) - table[:, 2]
        return np.array(list(zip(table[:, 0], table[:, 1], firsts, strict=True)), RUN)

    def copy(self, launch: Launch, rows: np.ndarray | None = None) -> None:
        rows, spans = self.rows() if rows is None else rows, self.spans()
        numbers = (self.first_row, self.end_row, len(spans), len(self.device), self.to_device)
        parameters = COPY.pack(rows.ctypes.data, spans.ctypes.data, *numbers)
        launch(parameters, GpuMemory([rows, spans], [self.memory.bytes]))


def as_ptx(case: Case, kernel: Kernel, widths: set[int], shape: tuple[int, int] | None = None) -> Launch:
    groups, threads = shape or (int(case.rng.integers(1, 3)), 32 * int(case.rng.integers(1, 3)))

    def launch(parameters: bytes, memory: GpuMemory) -> None:
        kernel.run(parameters, memory, groups=groups, threads=threads, rng=case.rng)
        widths.update(memory.widths)

    return launch


@pytest.fixture(scope="module")
def kernel() -> Kernel:
    return Kernel.of(PTX.read_text())


def test_the_shipped_ptx_is_of_todays_kernel():
    lines = PTX.read_text().splitlines()
    digest = hashlib.sha256(SOURCE.read_bytes()).hexdigest()
    assert lines[0] == f"// copy_rows.cu sha256 {digest}", "renew it: python custom_ops/build.py ptx"
    assert ".version 7.4" in lines, "drivers from CUDA 11.4 on take it"
    assert ".target sm_80" in lines


@pytest.mark.process
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_shipped_ptx_assembles(architecture, tmp_path):
    ptxas = shutil.which("ptxas") or shutil.which("/usr/local/cuda/bin/ptxas")
    if ptxas is None:
        pytest.skip("no ptxas here: it comes with the CUDA toolkit")
    command = [ptxas, f"-arch=sm_{architecture}", str(PTX), "-o", str(tmp_path / "cubin")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr


def test_the_shipped_ptx_copies_every_byte_right_and_no_other(kernel):
    widths: set[int] = set()
    for seed in range(20):
        case = Case(seed)
        expected = case.expected()
        case.copy(as_ptx(case, kernel, widths))
        assert (case.memory.bytes == expected).all(), seed
    assert widths == {16, 4, 1}
    left = [block for name, block in kernel.blocks.items() if name not in kernel.ran and len(block) > 1]
    assert len(left) == 1, left
    assert "quotient" in left[0][0], "what no copy below 2^32 pieces needs"


def test_an_access_off_its_border_or_outside_is_noticed(kernel):
    case = Case(0)
    rows = case.rows()
    rows["f1"] += 8
    with pytest.raises(WrongAccess, match="border"):
        case.copy(as_ptx(case, kernel, set()), rows)
    rows = case.rows()
    rows["f1"] += 16 * case.memory.bytes.nbytes
    with pytest.raises(WrongAccess, match="outside"):
        case.copy(as_ptx(case, kernel, set()), rows)


@pytest.mark.parametrize("shape", [OUT_AT_ONCE, OUT_BY_LAYER, in_shape(7), in_shape(132)])
def test_the_shipped_ptx_copies_right_in_every_shape_that_is_launched(kernel, shape):
    case = Case(3)
    expected = case.expected()
    case.copy(as_ptx(case, kernel, set(), shape))
    assert (case.memory.bytes == expected).all()


@pytest.mark.process
def test_its_body_compiled_as_cpp_copies_every_byte_right_and_no_other(tmp_path):
    library = tmp_path / "kernel.so"
    command = [*compiler(), "-x", "c++", "-std=c++17", "-O1", "-shared", "-fPIC"]
    subprocess.run([*command, str(SOURCE), "-o", str(library)], check=True, timeout=250)
    body = ctypes.CDLL(str(library)).copy_cache_rows
    body.argtypes, body.restype = [ctypes.c_char_p, ctypes.c_int], None
    for seed in range(200):
        case = Case(seed)
        expected, warps = case.expected(), int(case.rng.integers(1, 65))
        case.copy(lambda parameters, memory, warps=warps: body(parameters, warps))
        assert (case.memory.bytes == expected).all(), seed
