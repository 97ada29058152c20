"""What the fake driver promises, checked on itself; tests/gpu/test_fake_gpu.py runs it in a process of its own."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from typing import Any

import cupy
import numpy as np
from cupy import driver
from cupy.cuda import runtime

H2D, D2H = runtime.memcpyHostToDevice, runtime.memcpyDeviceToHost


def stream() -> Any:
    return cupy.cuda.Stream(non_blocking=True)


def device(nbytes: int) -> Any:
    return cupy.empty(nbytes, cupy.uint8)


def pinned(nbytes: int) -> np.ndarray:
    array = np.zeros(nbytes, np.uint8)
    runtime.hostRegister(array.ctypes.data, nbytes, 0)
    return array


def upload(to: Any, of: np.ndarray, on: Any) -> None:
    runtime.memcpyAsync(to.data.ptr, of.ctypes.data, of.nbytes, H2D, on.ptr)


def refused(call: Callable[..., object], *arguments: Any) -> int:
    """The error's number; 0 when there was none."""
    try:
        call(*arguments)
    except runtime.CUDARuntimeError as error:
        return error.status
    return 0


def copies_into_pageable_memory_block() -> None:
    one, array = stream(), device(64)
    target = np.zeros(64, np.uint8)
    with one:
        array.fill(5)
    runtime.memcpyAsync(target.ctypes.data, array.data.ptr, 64, D2H, one.ptr)
    assert (target == 5).all()


def a_wait_means_the_latest_record_before_it() -> None:
    one, two, event = stream(), stream(), cupy.cuda.Event()
    assert event.done, "never recorded"
    two.wait_event(event)
    driver.launch(two.ptr, lambda: None)
    event.record(one)
    two.synchronize()
    event.synchronize()


def half_a_copy_can_be_seen() -> None:
    seen = set()
    for seed in range(40):
        driver.reset(seed)
        one, array, source = stream(), device(64), pinned(64)
        with one:
            array.fill(0)
        one.synchronize()
        source[:] = 1
        upload(array, source, one)
        driver.library.fake_pump(1)
        seen.add(int(array.of_kernel().sum()))
        one.synchronize()
        runtime.hostUnregister(source.ctypes.data)
    assert seen == {32, 64}, seen


def the_legacy_stream_and_blocking_streams_wait_for_each_other() -> None:
    for seed in range(20):
        driver.reset(seed)
        order: list[int] = []
        one = cupy.cuda.Stream(non_blocking=False)
        for handle, number in ((one.ptr, 1), (0, 2), (one.ptr, 3)):
            driver.launch(handle, lambda order=order, number=number: order.append(number))
        driver.library.fake_run_all()
        assert order == [1, 2, 3]


def queues_are_bounded() -> None:
    driver.reset(1, queue_depth=4)
    ran: list[int] = []
    one = stream()
    for number in range(50):
        driver.launch(one.ptr, lambda number=number: ran.append(number))
        assert driver.library.fake_pending() <= 4
    assert ran == list(range(46))


def freed_memory_breaks_the_context() -> None:
    one, array, source = stream(), device(64), pinned(64)
    upload(array, source, one)
    del array
    assert refused(one.synchronize) == 700
    assert refused(stream) == 700, "the error stays"
    assert "freed" in driver.faults()[0]


def unlocked_memory_breaks_the_context() -> None:
    one, array, source = stream(), device(64), pinned(64)
    upload(array, source, one)
    runtime.hostUnregister(source.ctypes.data)
    assert refused(one.synchronize) == 700


def a_copy_to_memory_that_never_was_is_refused() -> None:
    one, array, source = stream(), device(64), pinned(64)
    assert refused(runtime.memcpyAsync, array.data.ptr + 32, source.ctypes.data, 64, H2D, one.ptr) == 1
    assert refused(runtime.memcpyAsync, source.ctypes.data, source.ctypes.data + 32, 32, H2D, one.ptr) == 1
    one.synchronize()


def kernels_know_locked_memory_by_its_device_address() -> None:
    for has_aliases in (False, True):
        driver.reset(1, has_aliases=has_aliases)
        source = pinned(64)
        address = source.ctypes.data
        assert bool(driver.library.fake_resolve(address, 64)) != has_aliases
        assert runtime.deviceGetAttribute(91, 0) == int(not has_aliases)
        assert not driver.library.fake_resolve(np.zeros(8, np.uint8).ctypes.data, 8), "pageable"


def a_capture_forbids_what_would_ask_the_device() -> None:
    event = cupy.cuda.Event()
    forbidden: dict[str, Callable[[Any], object]] = {
        "query": lambda one: runtime.eventQuery(event.ptr),
        "synchronize": lambda one: event.synchronize(),
        "record elsewhere": lambda one: event.record(stream()),
        "wait": lambda one: one.wait_event(event),
        "allocation": lambda one: device(8),
        "page-locking": lambda one: runtime.hostRegister(4096, 8, 0),
        "nothing": lambda one: None,
    }
    for name, call in forbidden.items():
        driver.reset(1)
        event = cupy.cuda.Event()
        event.record(stream())
        one = stream()
        one.begin_capture()
        if refused(call, one) == 0 and name == "query":
            assert runtime.eventQuery(event.ptr) == 900
        assert bool(refused(one.end_capture)) == (name != "nothing"), name


CHECKS: list[Callable[[], None]] = [
    copies_into_pageable_memory_block,
    a_wait_means_the_latest_record_before_it,
    half_a_copy_can_be_seen,
    the_legacy_stream_and_blocking_streams_wait_for_each_other,
    queues_are_bounded,
    freed_memory_breaks_the_context,
    unlocked_memory_breaks_the_context,
    a_copy_to_memory_that_never_was_is_refused,
    kernels_know_locked_memory_by_its_device_address,
    a_capture_forbids_what_would_ask_the_device,
]


def main() -> int:
    failed = 0
    for check in CHECKS:
        driver.reset(1)
        try:
            check()
            print(f"ok      {check.__name__}")
        except Exception:  # the edge of one check: the others still run
            failed += 1
            print(f"FAILED  {check.__name__}\n{traceback.format_exc()}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
