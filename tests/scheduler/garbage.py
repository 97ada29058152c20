"""Whether the scheduler half leaves work to the garbage collector."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

OURS = "fastdeploy_kvcache_v1.scheduler"


@contextmanager
def no_cyclic_garbage() -> Iterator[None]:
    """Nothing of the scheduler half is freed late. Threads of other tests in this process may leave garbage, too."""
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        yield
        gc.collect()
        assert [left for left in gc.garbage if type(left).__module__.startswith(OURS)] == []
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
