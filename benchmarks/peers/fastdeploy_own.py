"""FastDeploy's own PrefixCacheManager, as its scheduler calls it, with all logging off. It hashes while it matches."""

from __future__ import annotations

import logging
import os
from typing import Any

from contender import Contender

os.environ.update(ENABLE_V1_KVCACHE_MANAGER="0", ENABLE_V1_KVCACHE_SCHEDULER="1")
os.environ.setdefault("FD_LOG_DIR", "/tmp/peers_log")
logging.disable(logging.CRITICAL)

from tests.fastdeploy.real_manager import make_manager, make_request  # noqa: E402

LONGEST = 1 << 18


class FastDeploy(Contender):
    """`kind` is the release."""

    def __init__(self, device: int, host: int, block_size: int, kind: str) -> None:
        assert not host, "its host tier needs the cache transfer process, and so a GPU"
        self.version, self.block_size = kind, block_size
        self.manager = make_manager(
            device, 0, "write_through", block_size=block_size, seats=64, max_tokens=LONGEST
        ).cache_manager

    def arrive(self, number: int, tokens: list[int]) -> Any:
        return make_request(str(number), tokens)

    def start(self, request: Any) -> None:
        manager, size = self.manager, self.block_size
        request.block_tables, request.num_cached_tokens, _ = manager.request_match_blocks(request, size)
        request.num_matched_blocks = len(request.block_tables)
        missing = -(-request.prompt_token_ids_len // size) - request.num_matched_blocks
        assert manager.can_allocate_gpu_blocks(missing), "the device tier must hold the window"
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
        return self.manager.num_gpu_blocks - len(self.manager.gpu_free_block_list)
