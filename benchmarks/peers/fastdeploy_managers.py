"""FastDeploy's own cache managers, as its scheduler calls them, with all logging off: that of a release, and the v1
manager of its develop branch.
"""

from __future__ import annotations

import logging
import os
import sys
from typing import Any

from contender import Contender

IS_DEVELOP = sys.argv[-1] == "develop"
os.environ.update(ENABLE_V1_KVCACHE_MANAGER=str(int(IS_DEVELOP)), ENABLE_V1_KVCACHE_SCHEDULER="1")
os.environ.setdefault("FD_LOG_DIR", "/tmp/peers_log")
logging.disable(logging.CRITICAL)

from tests.fastdeploy.real_manager import make_manager, make_request  # noqa: E402

LONGEST = 1 << 18
NO_ROOM = "the device tier must hold the window"


class FastDeploy(Contender):
    """`kind` is the release. It hashes while it matches."""

    policy = "write_through"

    def __init__(self, device: int, host: int, block_size: int, kind: str) -> None:
        assert not host, "its host tier needs a process of its own and a GPU"
        self.version, self.block_size = kind, block_size
        host_manager = make_manager(device, 0, self.policy, block_size=block_size, seats=64, max_tokens=LONGEST)
        self.manager = host_manager.cache_manager

    def arrive(self, number: int, tokens: list[int]) -> Any:
        return make_request(str(number), tokens)

    def start(self, request: Any) -> None:
        manager, size = self.manager, self.block_size
        request.block_tables, request.num_cached_tokens, _ = manager.request_match_blocks(request, size)
        request.num_matched_blocks = len(request.block_tables)
        missing = -(-request.prompt_token_ids_len // size) - request.num_matched_blocks
        assert manager.can_allocate_gpu_blocks(missing), NO_ROOM
        request.block_tables.extend(manager.allocate_gpu_blocks(missing, request.request_id))

    def commit(self, request: Any) -> None:
        self.manager.update_cache_blocks(request, self.block_size, request.prompt_token_ids_len)
        request.output_token_ids.append(0)

    def finish(self, request: Any) -> None:
        self.manager.release_block_ids(request)
        self.manager.recycle_gpu_blocks(request.block_tables[request.num_cached_blocks :], request.request_id)

    def table(self, request: Any) -> tuple[list[int], int]:
        return list(request.block_tables), request.num_matched_blocks

    def cached_blocks(self) -> int:
        return int(self.manager.num_gpu_blocks - len(self.manager.gpu_free_block_list))


class Develop(FastDeploy):
    """Its blocks can be found as soon as they are allocated."""

    policy = "write_through_selective"

    def __init__(self, device: int, host: int, block_size: int, kind: str) -> None:
        super().__init__(device, host, block_size, kind)
        assert ".v1." in type(self.manager).__module__, "FastDeploy chose its older manager"
        from fastdeploy.cache_manager.v1.cache_utils import get_request_block_hasher

        self.hasher = get_request_block_hasher(block_size)

    def arrive(self, number: int, tokens: list[int]) -> Any:
        request = super().arrive(number, tokens)
        request.set_block_hasher(self.hasher)
        return request

    def key(self, request: Any) -> None:
        _ = request.prompt_hashes

    def start(self, request: Any) -> None:
        self.manager.match_prefix(request, True)
        request.block_tables = request.match_result.device_block_ids
        request.num_matched_blocks = request.match_result.total_matched_blocks
        missing = -(-request.prompt_token_ids_len // self.block_size) - request.num_matched_blocks
        assert self.manager.can_allocate_gpu_blocks(missing), NO_ROOM
        new = self.manager.allocate_gpu_blocks(request, missing)
        assert len(new) == max(0, missing), f"asked for {missing} blocks, got {len(new)}"
        request.block_tables.extend(new)

    def commit(self, request: Any) -> None:
        request.output_token_ids.append(0)

    def finish(self, request: Any) -> None:
        self.manager.request_finish(request)


CONTENDER = Develop if IS_DEVELOP else FastDeploy
