"""What a process has mapped of memory that several processes share."""

import os
import platform
import re
from pathlib import Path

import pytest

KERNEL = tuple(map(int, re.match(r"(\d+)\.(\d+)", platform.release()).groups()))

needs_mapping_ahead = pytest.mark.skipif(KERNEL < (5, 14), reason="the kernel cannot map pages ahead")


def mapped_bytes(name, pid=None):
    """Of the memory files `name`, in the page tables of a process, or of this one."""
    sections = Path(f"/proc/{pid or os.getpid()}/smaps").read_text(encoding="utf-8").split(f"/memfd:{name} ")[1:]
    return sum(1024 * int(re.search(r"Rss: +(\d+) kB", section)[1]) for section in sections)
