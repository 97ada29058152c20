"""`explain --plan`: what other sizes of the tiers would have hit."""

from __future__ import annotations

from ..contract.plan import FEWEST_REQUESTS, Plan

GIB = 2**30
DAY_S = 86_400


def told(plan: Plan) -> str:
    """Say a plan in words."""
    if plan.failure:
        return f"  No answer: {plan.failure}"
    if plan.num_requests < FEWEST_REQUESTS:
        return f"  Not known yet ({plan.num_requests:,} of {FEWEST_REQUESTS:,} requests)."
    lines = [
        f"  Last {plan.num_requests:,} requests, {plan.seconds / 3600:.1f} h: "
        f"{plan.hit_share:.1%} of the prompt tokens were hits."
    ]
    if not plan.sizes:
        return "\n".join([*lines, "  Almost no block was evicted: more memory would hit no more."])
    for tier in dict.fromkeys(size.tier for size in plan.sizes):
        now = plan.device_blocks if tier == "device" else plan.host_blocks
        lines.append(f"\n  {tier} tier, now {_amount(now, plan)}:")
        for size in plan.sizes:
            if size.tier == tier:
                points, error = 100 * (size.hit_share - plan.hit_share), 100 * size.error
                lines.append(
                    f"    {_amount(size.num_blocks, plan):>14}  {size.hit_share:6.1%} hits, {points:+.1f} points "
                    f"(+-{error:.1f}){_written(size.written_blocks, plan)}"
                )
    return "\n".join(lines)


def _amount(num_blocks: float, plan: Plan) -> str:
    return f"{num_blocks * plan.block_bytes / GIB:,.3g} GiB" if plan.block_bytes else f"{num_blocks:,.0f} blocks"


def _written(num_blocks: int, plan: Plan) -> str:
    """What is copied to the host in a day."""
    if not plan.seconds or not num_blocks:
        return ""
    return f", {_amount(num_blocks * DAY_S / plan.seconds, plan)} a day to the host"
