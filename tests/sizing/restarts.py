"""What a server says that twice its host tier would hit, beside what it hits after a restart with that."""

from __future__ import annotations

import random
from argparse import Namespace
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stdout
from io import StringIO
from typing import NamedTuple, Protocol

import msgspec
import pytest

from fastdeploy_kvcache_v1.contract.plan import Plan
from fastdeploy_kvcache_v1.explain import command

NUM_PROMPTS = 90
NUM_REQUESTS = 2_100
PARALLEL = 4
POINTS = 3


class Life(NamedTuple):
    """What a server with one size of the host tier did and said."""

    host_blocks: float
    hit_share: float
    """As its answers count it."""
    plan: Plan


class Server(Protocol):
    url: str

    def metrics(self) -> dict[str, float]: ...


def live(server: Server, ask: Callable[[int], tuple[int, int]]) -> Life:
    """Send requests, each for one of `NUM_PROMPTS`, some of them far more often than others. `ask` sends the prompt of
    that number and returns how many of its tokens were hits, and its tokens.
    """
    weights = [1 / (1 + number) ** 0.7 for number in range(NUM_PROMPTS)]
    order = random.Random(3).choices(range(NUM_PROMPTS), weights, k=NUM_REQUESTS)
    with ThreadPoolExecutor(PARALLEL) as pool:
        hits, tokens = zip(*pool.map(ask, order), strict=True)
    with redirect_stdout(StringIO()) as said:
        assert (
            command.run(Namespace(url=server.url, api_key="", request=None, last=False, top=None, plan=True, json=True))
            == 0
        )
    return Life(
        server.metrics()["host_blocks"], sum(hits) / sum(tokens), msgspec.json.decode(said.getvalue(), type=Plan)
    )


def check(before: Life, after: Life) -> None:
    assert before.host_blocks < after.host_blocks
    assert 100 * after.hit_share > 100 * before.hit_share + 2 * POINTS, "sizes differ enough to be told apart"
    assert 100 * before.plan.hit_share == pytest.approx(100 * before.hit_share, abs=1)
    planned = {size.num_blocks: size.hit_share for size in before.plan.sizes if size.tier == "host"}
    twice = min(planned, key=lambda num_blocks: abs(num_blocks - after.host_blocks))
    assert twice == pytest.approx(after.host_blocks, rel=0.03)
    assert 100 * planned[twice] == pytest.approx(100 * after.hit_share, abs=POINTS)
