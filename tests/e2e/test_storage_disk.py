"""A real server whose disk fills up, and becomes read-only: the newest blocks stay, the same tokens, and it heals."""

import shutil

import httpx
import pytest

from tests.e2e.server_process import OPERATOR, started, wait_until
from tests.e2e.small_disk import SmallDisk, needs_small_disk
from tests.e2e.test_storage import CACHED, ask, end, flags, prompt

pytestmark = [pytest.mark.process, needs_small_disk()]

DISK_MIB = 3
"""Two prompts of 37 blocks of 36 KiB fit, and a part of a third one."""

BLOCKS = CACHED // 16


class Asker:
    """Asks a server for prompts by number, and checks that the same prompt has the same answer."""

    def __init__(self, server):
        self.server = server
        self.known = []

    def cached(self, number):
        """Tokens of a prompt that came from the store: the server's own tiers are emptied before."""
        url = f"{self.server.url}/reset_prefix_cache"
        httpx.post(url, headers=OPERATOR, timeout=30.0).raise_for_status()
        tokens, cached = ask(self.server, prompt(number))
        self.known += [tokens] if number == len(self.known) else []
        assert self.known[number] == tokens
        return cached

    def is_next_stored(self, emptied=None):
        """Whether all blocks of a new prompt were stored, `emptied` being a directory without values by then."""
        for path in emptied.glob("*/??") if emptied is not None else ():
            shutil.rmtree(path)
        before = self.stores()
        assert self.cached(len(self.known)) == 0
        wait_until(lambda: self.stores()[0] - before[0] == BLOCKS or self.stores()[1:] != before[1:], "all stores")
        return self.stores()[0] - before[0] == BLOCKS

    def stores(self):
        """Stored blocks, failed pieces, blocks that a failing store was spared."""
        metrics = self.server.metrics()
        totals = (f"storage_{what}_total{{direction=store}}" for what in ("blocks", "failures"))
        return *(metrics[name] for name in totals), metrics["storage_skipped_store_blocks_total"]


def test_a_disk_that_fills_up_or_becomes_read_only_costs_hits_and_nothing_else(tmp_path):
    disk = SmallDisk(tmp_path / "kv", DISK_MIB)
    with started(tmp_path / "server", *flags(tmp_path / "kv"), wrapper=disk.wrapper) as server:
        asker, directory = Asker(server), disk.seen_by(server.process.pid)
        assert all(asker.is_next_stored() for _ in range(6)), "the oldest blocks make room, far below the capacity"
        wait_until(lambda: not list((directory / "tmp").iterdir()), "no half written files")
        assert asker.stores()[1:] == (0, 0), "no store has failed, and none was skipped"
        assert BLOCKS <= len(list(directory.glob("*/??/*"))) < 3 * BLOCKS
        kept = len(asker.known) - 1
        disk.make_read_only(server.process.pid)
        assert not asker.is_next_stored()
        assert [asker.cached(number) for number in (kept, kept + 1)] == [CACHED, 0]
        assert asker.stores()[1] >= 1, "the fault was counted"
        disk.make_writable(server.process.pid)
        wait_until(lambda: asker.is_next_stored(emptied=directory), "a store that can be written to again")
        end(server)
