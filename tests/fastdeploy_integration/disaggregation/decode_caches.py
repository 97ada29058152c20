"""The cache of a decode server with one rank, whose commands are kept in its `sent`."""

import time

from fastdeploy_kvcache_v1.fastdeploy_integration.disaggregation.decode_adapter import DecodeAdapter
from fastdeploy_kvcache_v1.fastdeploy_integration.disaggregation.grants import Grants
from tests.fastdeploy_integration.engine.by_hand import make_adapter

from .fake_requests import BLOCK


def decode_cache(blocks=20, host=0, *, clock=time.monotonic, **settings):
    cache = make_adapter(blocks, host, block_size=BLOCK, kind=DecodeAdapter, **settings)
    cache.sent = []
    cache.grants = Grants(
        num_ranks=1,
        send=lambda command: cache.sent.append(command) or (),
        give_back=cache.give_back,
        fetch_s=100.0,
        token_s=20.0,
        open_step=cache.open_step,
        clock=clock,
    )
    return cache
