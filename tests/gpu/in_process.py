"""A GPU in this process: `cupy` is the stand-in, and the driver is `stand_in/fake_driver.py`."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fastdeploy_kvcache_v1.worker.cuda import driver

STAND_IN = Path(__file__).parent / "stand_in"


@contextmanager
def fake_gpu() -> Iterator[Any]:
    """A new `FakeGpu`; `import cupy` finds the stand-in over it."""
    sys.path.insert(0, str(STAND_IN))
    real = driver.address_of
    try:
        importlib.import_module("cupy")
        yield importlib.import_module("fake_driver").current
    finally:
        driver.address_of = real
        driver.driver.cache_clear()
        sys.path.remove(str(STAND_IN))
        for name in [name for name in sys.modules if name.partition(".")[0] in ("cupy", "fake_driver")]:
            del sys.modules[name]
