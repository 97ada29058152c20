"""Writes the sample trace `traces/conversations.jsonl`: `python benchmarks/sample_trace.py`.

Fifty invented requests in Mooncake's JSONL format: eight conversations with one system prompt take turns. Each prompt
of a conversation holds the answer of the turn before and a new question.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from itertools import count
from pathlib import Path

PATH = Path(__file__).resolve().parent / "traces" / "conversations.jsonl"

REQUESTS = 50
CONVERSATIONS = 8
TOKENS_PER_ID = 512
SYSTEM_IDS = 3
"""Whole hash ids of the system prompt."""


def requests() -> Iterator[dict[str, object]]:
    """The lines of the trace, equal in every run."""
    rng = random.Random(CONVERSATIONS)
    new_id = count(SYSTEM_IDS).__next__
    prefixes = [list(range(SYSTEM_IDS)) for _ in range(CONVERSATIONS)]
    for number in range(REQUESTS):
        prefix = prefixes[rng.randrange(CONVERSATIONS)]
        prefix += [new_id() for _ in range(rng.randint(0, 3))]
        tail = rng.randint(1, TOKENS_PER_ID - 1)  # the next turn's prompt differs from here on
        yield {
            "timestamp": number * 500,
            "input_length": len(prefix) * TOKENS_PER_ID + tail,
            "output_length": rng.randint(20, 400),
            "hash_ids": [*prefix, new_id()],
        }


def text() -> str:
    return "".join(json.dumps(request) + "\n" for request in requests())


if __name__ == "__main__":
    PATH.write_text(text(), encoding="utf-8")
