"""vLLM's KVCacheManager, for a model of one full-attention layer."""

from __future__ import annotations

import torch
from contender import Contender
from vllm import __version__
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request

LONGEST = 1 << 20
NO_ROOM = "the device tier must hold the window"


class VLLM(Contender):
    """`kind` is the hash function, one of vLLM's names."""

    version = __version__

    def __init__(self, device: int, host: int, block_size: int, kind: str) -> None:
        assert not host, "vllm_offloading.py has the host tier"
        digest = get_hash_fn_by_name(kind)
        init_none_hash(digest)
        layer = FullAttentionSpec(block_size=block_size, num_kv_heads=1, head_size=64, dtype=torch.bfloat16)
        group = KVCacheGroupSpec(layer_names=["layer"], kv_cache_spec=layer)
        config = KVCacheConfig(device + 1, kv_cache_tensors=[], kv_cache_groups=[group])  # block 0 is never handed out
        self.manager = KVCacheManager(
            config, max_model_len=LONGEST, scheduler_block_size=block_size, hash_block_size=block_size
        )
        self.block_size = block_size
        self.hasher = get_request_block_hasher(block_size, digest)
        self.sampling = SamplingParams(max_tokens=16)

    def arrive(self, number: int, tokens: list[int]) -> Request:
        return Request(str(number), tokens, self.sampling, None)

    def key(self, request: Request) -> None:
        """What the constructor does when it is given the hasher."""
        request._block_hasher = self.hasher
        request.update_block_hashes()

    def start(self, request: Request) -> None:
        blocks, request.num_matched, _ = self.manager.get_computed_blocks(request)
        new = request.num_tokens - request.num_matched
        slots = self.manager.allocate_slots(request, new, request.num_matched, blocks)
        assert slots is not None, NO_ROOM

    def commit(self, request: Request) -> None:
        """`allocate_slots` has made the blocks findable."""
        request.num_computed_tokens = request.num_tokens
        request.append_output_token_ids(0)

    def finish(self, request: Request) -> None:
        self.manager.free(request)

    def table(self, request: Request) -> tuple[list[int], int]:
        return self.manager.get_block_ids(request.request_id)[0], request.num_matched // self.block_size

    def cached_blocks(self) -> int:
        return len(self.manager.block_pool.cached_block_hash_to_block)


CONTENDER = VLLM
