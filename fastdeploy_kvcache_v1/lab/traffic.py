"""Generators of request traces: `fastdeploy-kvcache traffic KIND`. Each is a function and a row in `KINDS`."""

from __future__ import annotations

import argparse
import heapq
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import accumulate, count, cycle, islice
from typing import Any, NamedTuple

from ..errors import ConfigError

__all__ = ["KINDS", "Shape", "Source", "add_arguments", "run"]

TOKENS_PER_ID = 64

MS_PER_TOKEN = 30
"""Between two output tokens, as in `replay --closed-loop`. A later turn waits for them."""

Line = dict[str, Any]
"""A line of a trace, see `lab/replay/trace.py`."""


@dataclass(frozen=True)
class Shape:
    """A user's choices. Each kind gives `tokens` and `items` a meaning."""

    rate: float
    """Requests per second, on average."""
    tokens: int
    items: int


@dataclass(frozen=True)
class Prompt:
    """A text's length and identity. Prompts with equal ids begin with the same tokens."""

    length: int = 0
    ids: tuple[int, ...] = ()
    """Ids of its full blocks."""


class Source:
    """Seeded random numbers and new ids: equal seeds make equal traffic. Not thread-safe."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self._new_id = count(1).__next__

    def longer(self, prompt: Prompt, num_tokens: int) -> Prompt:
        """`prompt` and `num_tokens` new tokens."""
        length = prompt.length + num_tokens
        num_new = length // TOKENS_PER_ID - len(prompt.ids)
        return Prompt(length, prompt.ids + tuple(self._new_id() for _ in range(num_new)))

    def fresh(self, num_tokens: int) -> Prompt:
        """A prompt of new tokens."""
        return self.longer(Prompt(), num_tokens)

    def about(self, median: float, *, spread: float = 0.6) -> int:
        """Log-normal, at least 1, like lengths of texts and pauses of people. Spread 0.6: one in six is above 1.8 times
        the median.
        """
        return max(1, round(median * self.random.lognormvariate(0, spread)))

    def documents(self, shape: Shape) -> list[Prompt]:
        """`items` documents of about `tokens`."""
        return [self.fresh(self.about(shape.tokens)) for _ in range(shape.items)]

    def times_ms(self, per_second: float) -> Iterator[float]:
        """Poisson arrivals."""
        now = 0.0
        while True:
            now += 1000 * self.random.expovariate(per_second)
            yield now

    def popular(self, items: list[Prompt]) -> Callable[[], Prompt]:
        """Draws item `i` with weight `1 / (i + 1)` (Zipf's law), in the list's current order."""
        weights = list(accumulate(1 / (place + 1) for place in range(len(items))))
        return lambda: self.random.choices(items, cum_weights=weights)[0]

    def line(self, time_ms: float, prompt: Prompt, output_length: int, *, whole: Prompt | None = None) -> Line:
        """`whole`: prompt and output, if a later prompt repeats the output."""
        partial = () if prompt.length % TOKENS_PER_ID == 0 else (self._new_id(),)
        line: Line = {
            "timestamp": round(time_ms),
            "input_length": prompt.length,
            "output_length": output_length,
            "tokens_per_id": TOKENS_PER_ID,
            "hash_ids": [*prompt.ids, *partial],
        }
        if whole is not None:
            line["output_hash_ids"] = list(whole.ids[len(prompt.ids) :])
        return line


class Turn(NamedTuple):
    """One request of a session."""

    prompt: Prompt
    output_length: int
    whole: Prompt
    """Prompt and output."""
    pause_ms: int | None = None
    """From the end of the turn before to this one; None for a first turn."""
    subagent: int = 0
    """Number of the session's subagent that sends it, 0 for the session itself."""
    calls_tool: bool = False
    """Its answer ends in a tool call."""


def conversation(
    source: Source, prompt: Prompt, *, num_turns: int, output_tokens: float, more_tokens: float, pause_ms: float
) -> Iterator[Turn]:
    """A session from `prompt` on. Each later prompt repeats all before it with the output, and more. Medians."""
    for number in range(num_turns):
        output_length = source.about(output_tokens)
        whole = source.longer(prompt, output_length)
        yield Turn(prompt, output_length, whole, source.about(pause_ms, spread=1.0) if number else None)
        prompt = source.longer(whole, source.about(more_tokens))


def interleaved(source: Source, sessions_per_second: float, session: Callable[[], Iterator[Turn]]) -> Iterator[Line]:
    """Endless lines in the order of arrival. Sessions begin at random; pauses separate turns."""
    starts = source.times_ms(sessions_per_second)
    next_start, numbers = next(starts), count()
    waiting: list[tuple[float, int, Turn, Iterator[Turn], dict[int, float]]] = []
    """Heap by the next turn's time and the session's number, with the last ends of the session and its subagents."""
    while True:
        while not waiting or next_start <= waiting[0][0]:
            turns = session()
            heapq.heappush(waiting, (next_start, next(numbers), next(turns), turns, {}))
            next_start = next(starts)
        now, number, turn, turns, ends = heapq.heappop(waiting)
        name = f"{number}.{turn.subagent}" if turn.subagent else number
        delay = {"delay": round(now - ends[turn.subagent])} if turn.subagent in ends else {}
        tool = {"tool_call": True} if turn.calls_tool else {}
        yield source.line(now, turn.prompt, turn.output_length, whole=turn.whole) | {"session_id": name} | delay | tool
        ends[turn.subagent] = end = now + turn.output_length * MS_PER_TOKEN
        following = next(turns, None)
        if following is not None:
            heapq.heappush(waiting, (end + (following.pause_ms or 0), number, following, turns, ends))


def scan(source: Source, shape: Shape) -> Iterator[Line]:
    """Without hits; `items` has no effect."""
    for now in source.times_ms(shape.rate):
        yield source.line(now, source.fresh(source.about(shape.tokens)), source.about(200))


def loop(source: Source, shape: Shape) -> Iterator[Line]:
    """Documents in turn, each time with a new question."""
    for now, document in zip(source.times_ms(shape.rate), cycle(source.documents(shape)), strict=False):
        yield source.line(now, source.longer(document, source.about(60)), source.about(150))


def hot(source: Source, shape: Shape) -> Iterator[Line]:
    """A system prompt of exactly `tokens`, and new questions; `items` has no effect."""
    system = source.fresh(shape.tokens)
    for now in source.times_ms(shape.rate):
        yield source.line(now, source.longer(system, source.about(400)), source.about(150))


def chat(source: Source, shape: Shape) -> Iterator[Line]:
    """People who read and think between turns. The first system prompt is the most frequent."""
    mean_turns = 4.0
    system = source.popular(source.documents(replace(shape, tokens=350)))

    def session() -> Iterator[Turn]:
        # Most conversations end after a turn or two, a few are long.
        num_turns = min(100, max(1, round(source.random.expovariate(1 / mean_turns))))
        first = source.longer(system(), source.about(shape.tokens, spread=1.0))
        return conversation(source, first, num_turns=num_turns, output_tokens=250, more_tokens=120, pause_ms=25_000)

    return interleaved(source, shape.rate / mean_turns, session)


def agents(source: Source, shape: Shape) -> Iterator[Line]:
    """A session has one to twelve quick calls, whose results become part of the prompt. The first instructions are the
    most frequent.
    """
    mean_calls = 6.5
    instructions = source.popular(source.documents(shape))

    def session() -> Iterator[Turn]:
        first = source.longer(instructions(), source.about(500))
        num_turns = source.random.randint(1, 12)
        return conversation(source, first, num_turns=num_turns, output_tokens=100, more_tokens=600, pause_ms=1_500)

    return interleaved(source, shape.rate / mean_calls, session)


def sessions(source: Source, shape: Shape) -> Iterator[Line]:
    """Agents that work for minutes to hours, from the middle of their day on: older sessions go on at the first line.

    One session in five ends after its first answer; the median is 43 turns. A turn comes seconds after the answer, when
    a tool is done; one in twelve comes minutes after it, from a person. 44 % of the sessions send subagents, one at a
    time, while they wait. A session and its subagents have instructions and tools that they share with others. A prompt
    above 100,000 tokens is summed up: the next one repeats nothing but the instructions.
    """
    requests_per_session, warm_up_ms, most_tokens = 70, 3_600_000, 100_000
    tools, subagent_tools = (source.popular(source.documents(shape)) for _ in range(2))
    dice = source.random

    def agent(instructions: Prompt, num_turns: int) -> Iterator[Turn]:
        calls_tool = True
        while num_turns > 0:
            first = source.longer(instructions, source.about(800))
            turns = conversation(source, first, num_turns=num_turns, output_tokens=150, more_tokens=350, pause_ms=0)
            for turn in turns:
                if turn.prompt.length > most_tokens:
                    break
                num_turns -= 1
                pause_ms = source.about(3_000 if calls_tool else 180_000, spread=1.0)
                calls_tool = num_turns > 0 and dice.random() >= 1 / 12
                yield turn._replace(pause_ms=pause_ms, calls_tool=calls_tool)

    def session() -> Iterator[Turn]:
        num_turns = 1 if dice.random() < 0.2 else min(400, 1 + source.about(56, spread=0.9))
        sends = num_turns > 1 and dice.random() < 0.44 / 0.8
        sent_after = dice.choices(range(1, num_turns), k=dice.randint(1, 4)) if sends else []
        subagents = count(1)
        for number, turn in enumerate(agent(tools(), num_turns), 1):
            yield turn
            for subagent in islice(subagents, sent_after.count(number)):
                yield from (each._replace(subagent=subagent) for each in agent(subagent_tools(), source.about(12)))

    for line in interleaved(source, shape.rate / requests_per_session, session):
        if line["timestamp"] >= warm_up_ms:
            yield line | {"timestamp": line["timestamp"] - warm_up_ms}


def shifting(source: Source, shape: Shape) -> Iterator[Line]:
    """Popular documents change each five minutes. Each use has a new question."""
    period_ms, period = 300_000, 0
    documents = source.documents(shape)
    popular = source.popular(documents)
    for now in source.times_ms(shape.rate):
        if now >= period_ms * (period + 1):
            period = int(now / period_ms)
            source.random.shuffle(documents)
        yield source.line(now, source.longer(popular(), source.about(60)), source.about(150))


def batch(source: Source, shape: Shape) -> Iterator[Line]:
    """Chat, and jobs that send 200 documents, each once, at a steady pace."""

    def jobs() -> Iterator[Line]:
        """Jobs in turn at twice the average pace, with pauses of their own length."""
        instructions = [source.fresh(300) for _ in range(shape.items)]
        now, num_requests = 0.0, 200
        while True:
            instruction = source.random.choice(instructions)
            for _ in range(num_requests):
                now += 1000 / shape.rate
                yield source.line(now, source.longer(instruction, source.about(shape.tokens)), source.about(100))
            now += 1000 * num_requests / shape.rate

    return heapq.merge(chat(source, Shape(shape.rate / 2, 500, 3)), jobs(), key=lambda line: float(line["timestamp"]))


class Kind(NamedTuple):
    """`lines` never end. The default shape is that of real traffic."""

    lines: Callable[[Source, Shape], Iterator[Line]]
    shape: Shape
    help: str


KINDS = {
    "scan": Kind(scan, Shape(4, 4_000, 1), "every prompt is new: the cache must keep what it has"),
    "loop": Kind(loop, Shape(4, 6_000, 300), "ITEMS documents of TOKENS in turn: LRU evicts each just before its use"),
    "hot": Kind(hot, Shape(10, 6_000, 1), "one system prompt of TOKENS, short questions that evict it if they may"),
    "chat": Kind(chat, Shape(6, 900, 3), "conversations that begin with TOKENS, ITEMS system prompts, slow turns"),
    "agents": Kind(agents, Shape(6, 6_000, 40), "sessions of quick calls, which share ITEMS instructions of TOKENS"),
    "sessions": Kind(
        sessions, Shape(3, 10_000, 5), "long sessions of agents with subagents, pauses, and ITEMS tool sets of TOKENS"
    ),
    "shifting": Kind(
        shifting,
        Shape(4, 4_000, 600),
        "ITEMS documents of TOKENS, others popular every five minutes",
    ),
    "batch": Kind(batch, Shape(6, 5_000, 4), "half chat, half jobs: new documents of TOKENS behind ITEMS instructions"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = "\n".join(["kinds:", *(f"  {name:9} {kind.help}" for name, kind in KINDS.items())])
    parser.add_argument("kind", choices=tuple(KINDS), metavar="KIND", help="see below")
    parser.add_argument("--requests", type=int, default=10_000, metavar="N", help="lines to write (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="equal seeds make equal traces (%(default)s)")
    parser.add_argument("--rate", type=float, metavar="R", help="requests per second on average (the kind's)")
    parser.add_argument("--tokens", type=int, help="TOKENS below (the kind's)")
    parser.add_argument("--items", type=int, help="ITEMS below (the kind's)")


def run(args: argparse.Namespace) -> int:
    """Write the trace to standard output. Raises `ConfigError` for a value that cannot work."""
    given = {name: value for name in ("rate", "tokens", "items") if (value := getattr(args, name)) is not None}
    for name, value in {"requests": args.requests, **given}.items():
        if not (0 < value < float("inf") if name == "rate" else value >= 1):
            least = "more than 0" if name == "rate" else "at least 1"
            raise ConfigError(f"--{name} must be {least}, got {value}")
    kind = KINDS[args.kind]
    lines = kind.lines(Source(args.seed), replace(kind.shape, **given))
    for line in islice(lines, args.requests):
        print(json.dumps(line, separators=(",", ":")))
    return 0
