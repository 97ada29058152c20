"""Upstream's v1 manager of FastDeploy's develop branch, as its scheduler calls it, with all logging off."""

from __future__ import annotations

import logging
import os
from typing import Any

from contender import Contender

os.environ.update(ENABLE_V1_KVCACHE_MANAGER="1", ENABLE_V1_KVCACHE_SCHEDULER="1")
os.environ.setdefault("FD_LOG_DIR", "/tmp/peers_log")
logging.disable(logging.CRITICAL)

from tests.fastdeploy.real_manager import make_manager, make_request  # noqa: E402

LONGEST = 1 << 18


class Develop(Contender):
    """`kind` is the version. Its blocks can be found as soon as they are allocated."""

    def __init__(self, device: int, host: int, block_size: int, kind: str) -> None:
        assert not host, "its host tier needs a GPU"
        self.version, self.block_size = kind, block_size
        self.manager = make_manager(
            device, 0, "write_through_selective", block_size=block_size, seats=64, max_tokens=LONGEST
        ).cache_manager
        assert ".v1." in type(self.manager).__module__, "FastDeploy chose its older manager"
        from fastdeploy.cache_manager.v1.cache_utils import get_request_block_hasher

        self.hasher = get_request_block_hasher(block_size)

    def arrive(self, number: int, tokens: list[int]) -> Any:
        request = make_request(str(number), tokens)
        request.set_block_hasher(self.hasher)
        return request

    def key(self, request: Any) -> None:
        _ = request.prompt_hashes

    def start(self, request: Any) -> None:
        manager = self.manager
        manager.match_prefix(request, True)
        request.block_tables = request.match_result.device_block_ids
        request.num_matched_blocks = request.match_result.total_matched_blocks
        missing = -(-request.prompt_token_ids_len // self.block_size) - request.num_matched_blocks
        assert manager.can_allocate_gpu_blocks(missing), "the device tier must hold the window"
        new = manager.allocate_gpu_blocks(request, missing)
        assert len(new) == max(0, missing), f"asked for {missing} blocks, got {len(new)}"
        request.block_tables.extend(new)

    def commit(self, request: Any) -> None:
        request.output_token_ids.append(0)

    def finish(self, request: Any) -> None:
        self.manager.request_finish(request)

    def table(self, request: Any) -> tuple[list[int], int]:
        return list(request.block_tables), request.num_matched_blocks

    def cached_blocks(self) -> int:
        return int(self.manager.num_gpu_blocks - len(self.manager.gpu_free_block_list))
