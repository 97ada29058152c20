"""Makes a `Plan` from logged requests, as SHARDS does with its adjusted sums (Waldspurger et al., FAST 2015).

What a size hits is what the real cache hit, and the difference of two simulations: of that size, and of the real one.
Errors of the sample and of the cold start are in both.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import repeat
from math import sqrt
from typing import NamedTuple

from msgspec.structs import replace

from ..config import KVCacheConfig
from ..contract.plan import FEWEST_EVICTIONS, FEWEST_REQUESTS, Plan, PlannedSize
from ..scheduler.traffic.log import Traffic
from .simulation import Outcome, Simulation

DEVICE_FACTORS = (2.0, 4.0)
HOST_FACTORS = (0.5, 2.0, 4.0, 8.0)
FIRST_HOST_FACTORS = (1.0, 2.0, 4.0, 8.0)
"""Of the device tier, where there is no host tier."""

STRETCH = 64
"""Requests whose differences count as one, because they depend on each other."""


def make_plan(traffic: Traffic, config: KVCacheConfig) -> Plan:
    """Play `traffic` at each size. `config`: of the real cache. Takes some seconds."""
    num_warm = 0 if traffic.is_whole else len(traffic.rows) // 2  # the real cache was warm at the start
    rows = traffic.rows[num_warm:]
    num_tokens = sum(row.num_tokens for row in rows)
    plan = Plan(
        device_blocks=config.num_device_blocks,
        host_blocks=config.num_host_blocks,
        block_bytes=config.block_bytes,
        num_requests=len(rows),
        seconds=rows[-1].ended_s - rows[0].started_s if rows else 0.0,
        hit_share=sum(row.num_hit for row in rows) / max(1, num_tokens),
    )
    if plan.num_requests < FEWEST_REQUESTS or not num_tokens:
        return plan
    simulation = Simulation(traffic, config, num_warm)
    real = simulation.play(plan.device_blocks, plan.host_blocks)
    plan = replace(plan, written_blocks=traffic.rate * real.written, evicted_blocks=traffic.rate * real.num_evicted)
    if plan.evicted_blocks < FEWEST_EVICTIONS:
        return plan
    tokens, per_block = [row.num_tokens for row in rows], traffic.rate * config.block_size
    sizes = []
    for size in _played(simulation, plan):
        saved = [per_block * (more - less) for more, less in zip(size.outcome.hits, real.hits, strict=True)]
        hit_share = min(1.0, max(0.0, plan.hit_share + sum(saved) / num_tokens))
        written = traffic.rate * size.outcome.written
        sizes.append(PlannedSize(size.tier, size.num_blocks, hit_share, _error(saved, tokens), written))
    return replace(plan, sizes=sizes)


class _Played(NamedTuple):
    tier: str
    num_blocks: int
    outcome: Outcome


def _played(simulation: Simulation, plan: Plan) -> Iterator[_Played]:
    """Play each tier at its sizes, from small to large, up to the first one that evicts nothing."""
    device, host = plan.device_blocks, plan.host_blocks
    devices = [round(device * factor) for factor in DEVICE_FACTORS]
    hosts = [round((host or device) * factor) for factor in (HOST_FACTORS if host else FIRST_HOST_FACTORS)]
    for tier, sizes in (("device", zip(devices, repeat(host), devices)), ("host", zip(repeat(device), hosts, hosts))):
        for *blocks, num_blocks in sizes:
            outcome = simulation.play(*blocks)
            yield _Played(tier, num_blocks, outcome)
            if not outcome.num_evicted:
                break


def _error(saved: Sequence[float], tokens: Sequence[int]) -> float:
    """Return two standard errors of the ratio of the sums. The sample are stretches of requests."""
    gain = sum(saved) / sum(tokens)
    starts = range(0, len(saved), STRETCH)
    residuals = [sum(saved[at : at + STRETCH]) - gain * sum(tokens[at : at + STRETCH]) for at in starts]
    return 2 * sqrt(sum(residual * residual for residual in residuals)) / sum(tokens)
