"""Batch: jobs beside chat. A job sends many new documents, each once, at a steady pace: a scan that comes and goes."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from .chat import chat
from .source import Line, Shape, Source

JOB_REQUESTS = 200
CHAT_ITEMS = 3
CHAT_TOKENS = 500
INSTRUCTION_TOKENS = 300


def batch(source: Source, shape: Shape) -> Iterator[Line]:
    """Half of the requests are chat, half are of jobs: documents of `tokens`, about, behind the job's instruction, of
    which there are `items`.
    """
    talk = chat(source, Shape(shape.rate / 2, CHAT_TOKENS, CHAT_ITEMS))
    return heapq.merge(talk, _jobs(source, shape), key=lambda line: float(line["timestamp"]))


def _jobs(source: Source, shape: Shape) -> Iterator[Line]:
    """One after the other, at twice the average pace, with pauses as long as they are."""
    instructions = [source.fresh(INSTRUCTION_TOKENS) for _ in range(shape.items)]
    now = 0.0
    while True:
        instruction = source.random.choice(instructions)
        for _ in range(JOB_REQUESTS):
            now += 1000 / shape.rate
            yield source.line(now, source.longer(instruction, source.about(shape.tokens)), source.about(100))
        now += 1000 * JOB_REQUESTS / shape.rate
