"""Answers of a server, their percentiles, and the comparison of two servers' tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ..replay.report import percentile

PERCENTILES = (0.5, 0.9, 0.99)
NUM_TOKENS_SHOWN = 3


@dataclass
class Answer:
    """What came back for one request; `error` is None for a complete one."""

    name: str
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    first_token_s: float = 0.0
    """From sending to the first token."""
    total_s: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    error: str | None = None


def report(answers: Sequence[Answer], seconds: float) -> dict[str, Any]:
    """Percentiles and rates of the complete answers, JSON-ready."""
    complete = [answer for answer in answers if answer.error is None]
    prompt_tokens = sum(answer.prompt_tokens for answer in complete)
    output_tokens = sum(len(answer.token_ids) for answer in complete)
    return {
        "answered": len(complete),
        "failed": len(answers) - len(complete),
        "seconds": seconds,
        "ttft_ms": _percentiles([1e3 * answer.first_token_s for answer in complete]),
        "latency_ms": _percentiles([1e3 * answer.total_s for answer in complete]),
        "requests_per_s": len(complete) / seconds,
        "prompt_tokens_per_s": prompt_tokens / seconds,
        "output_tokens_per_s": output_tokens / seconds,
        "output_tokens_per_s_and_request": _percentiles(
            [len(answer.token_ids) / answer.total_s for answer in complete if answer.total_s]
        ),
        "cached_share": sum(answer.cached_tokens for answer in complete) / max(1, prompt_tokens),
    }


def failures(name: str, answers: Sequence[Answer]) -> list[str]:
    """One line per request that was not answered completely."""
    return [f"{name}, {answer.name}: {answer.error}" for answer in answers if answer.error is not None]


def differences(one: Sequence[Answer], other: Sequence[Answer]) -> list[str]:
    """One line per request that both servers answered, with different tokens."""
    found = []
    for left, right in zip(one, other, strict=True):
        if left.error is None and right.error is None and left.token_ids != right.token_ids:
            at = next(
                (place for place, (a, b) in enumerate(zip(left.token_ids, right.token_ids, strict=False)) if a != b),
                min(len(left.token_ids), len(right.token_ids)),
            )
            shown = slice(at, at + NUM_TOKENS_SHOWN)
            found.append(
                f"{left.name}: tokens differ from output token {at} on: "
                f"{left.token_ids[shown]} with the cache, {right.token_ids[shown]} without"
            )
    return found


def verdict(on: dict[str, Any], off: dict[str, Any]) -> str:
    """What the cache was worth, in a sentence, of two reports."""
    with_cache, without = on["ttft_ms"]["p50"], off["ttft_ms"]["p50"]
    sooner = f"{without / with_cache:.1f}x sooner" if with_cache < without else "no sooner"
    rate = on["requests_per_s"] / off["requests_per_s"]
    return (
        f"{on['cached_share']:.0%} of the prompt tokens came from the cache; with it the median first token was "
        f"{sooner} ({with_cache:,.0f} instead of {without:,.0f} ms), and requests were answered at {rate:.1f}x the rate"
    )


def table(result: dict[str, Any]) -> str:
    """What a person reads: one column per run, then what is wrong."""
    runs = result["runs"]
    rows = [("", list(runs))]
    for key, text in (("answered", "requests answered"), ("failed", "requests failed")):
        rows.append((text, [f"{run[key]:,}" for run in runs.values()]))
    for key, text in (("ttft_ms", "first token ms"), ("latency_ms", "whole answer ms")):
        for name in _percentiles([]):
            rows.append((f"{text} {name}", [f"{run[key][name]:.1f}" for run in runs.values()]))
    for key, text in (
        ("requests_per_s", "requests/s"),
        ("prompt_tokens_per_s", "prompt tokens/s"),
        ("output_tokens_per_s", "output tokens/s"),
    ):
        rows.append((text, [f"{run[key]:,.1f}" for run in runs.values()]))
    for name in _percentiles([]):
        values = [f"{run['output_tokens_per_s_and_request'][name]:,.1f}" for run in runs.values()]
        rows.append((f"output tokens/s of a request {name}", values))
    rows.append(("prompt tokens from cache", [f"{run['cached_share']:.1%}" for run in runs.values()]))
    lines = [f"{name:<36}" + "".join(f"{value:>14}" for value in values) for name, values in rows]
    return "\n".join([*lines, "", *_verdict(result)])


def _verdict(result: dict[str, Any]) -> list[str]:
    problems: list[str] = result["problems"]
    if problems:
        return [*problems[:20], f"{len(problems)} problem{'s' if len(problems) > 1 else ''}"]
    if not result["compared"]:
        return ["one server only: no tokens were compared"]
    return [
        result["verdict"],
        f"all tokens of {result['requests']:,} requests are the same with the cache on and off",
    ]


def _percentiles(values: Sequence[float]) -> dict[str, float]:
    ordered = sorted(values)
    return {f"p{100 * share:.0f}": percentile(ordered, share) for share in PERCENTILES}
