"""Which rows of the workers' batch are running, and how long the engine knows them to be."""

from __future__ import annotations

from typing import Any

from ..transport import RunningRow


def running_rows(manager: Any) -> list[RunningRow]:
    """Of FastDeploy's resource manager, right after it scheduled a batch.

    FastDeploy takes a request out of `running` when it has its last token, and then gives its blocks away: on the
    device the row has stopped before. One that computes its prompt has all tokens here, but not on the device: 0.
    """
    with manager.lock:  # other threads end requests
        return [
            (int(request.idx), _length(request.num_total_tokens, request.need_prefill_tokens))
            for request in manager.running
        ]


def _length(num_tokens: int, num_prefill_tokens: int) -> int:
    return num_tokens if num_tokens > num_prefill_tokens else 0
