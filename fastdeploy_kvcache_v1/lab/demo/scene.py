"""What the demo plays, and the four set-ups of a server that it is played against."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib.resources import files
from typing import NamedTuple

import httpx2

from ...telemetry.metrics import PREFIX
from ..server.client import Answer, ask

Message = dict[str, str]

DOCUMENT, LETTER = ((files(__package__) / name).read_text("utf-8").strip() for name in ("document.txt", "letter.txt"))

QUESTIONS = (
    "In which year was the harbour light of Kelder Point built?",
    "Who was the first keeper?",
    "How much does a ticket cost?",
)
"""About the document, each in a chat of its own."""
TURNS = (
    "Who won the card games?",
    "And what did they make on Thursday?",
    "What should Anna bring next year?",
)
"""Of one chat about the letter."""

ASKED = {
    f"{what} {number}": text
    for number, pair in enumerate(zip(QUESTIONS, TURNS, strict=True), 1)
    for what, text in zip(("document", "chat"), pair, strict=True)
}
"""The requests by name, in their order: question and chat find each other's blocks in a tier that is too small."""

SERVED_NAME = "demo"
MAX_TOKENS = 20
"""Of each answer."""

BLOCK_SIZE = 64
"""Tokens; FastDeploy's default."""
RESERVED_BLOCKS = 2
"""On the device, beside those of the longest request: FastDeploy does not start without them (`enc_dec_block_num`)."""
HOST_GIB = "0.5"
LARGE_OVER_SMALL = 4
"""Device blocks of the set-up that has enough, over those of the small one."""

HITS = re.compile(rf"^{re.escape(PREFIX)}(device|host)_hit_tokens_total(?:{{[^}}]*}})? (\S+)$", re.MULTILINE)
SETTLE_TIMEOUT_S = 3.0


class Setup(NamedTuple):
    name: str
    explanation: str
    flags: tuple[str, ...]
    """Of `fastdeploy-kvcache serve`."""


COMPUTED, SMALL, LARGE, HOST = "cache off", "small device", "large device", "small device + host"
"""Names of the set-ups."""


def setups(num_tokens: int) -> tuple[Setup, ...]:
    """For requests of at most `num_tokens` tokens, output included."""
    longest = -(-num_tokens // BLOCK_SIZE) + 1
    small = longest + RESERVED_BLOCKS
    large = LARGE_OVER_SMALL * small
    limit = str(longest * BLOCK_SIZE)
    limits = ("--block-size", str(BLOCK_SIZE), "--max-model-len", limit, "--max-num-batched-tokens", limit)

    def tiers(num_blocks: int, swap_space: str, *flags: str) -> tuple[str, ...]:
        return ("--num-gpu-blocks-override", str(num_blocks), "--swap-space", swap_space, *limits, *flags)

    off = tiers(large, "0", "--no-enable-prefix-caching")
    return (
        Setup(COMPUTED, "every prompt is computed from its first token", off),
        Setup(SMALL, f"{small} device blocks, which hold the document or the chat, not both", tiers(small, "0")),
        Setup(LARGE, f"{large} device blocks, which hold both", tiers(large, "0")),
        Setup(
            HOST,
            f"{small} device blocks again, and {HOST_GIB} GiB of host memory behind them",
            tiers(small, HOST_GIB, "--write-policy", "write_through"),
        ),
    )


def user(context: str, question: str) -> Message:
    return {"role": "user", "content": f"{context}\n\n{question}".strip()}


def play(url: str) -> Iterator[Answer]:
    """The answers, in the order of `ASKED`, of a server that serves nobody else. Raises `WorkerDiedError`."""
    _ask(url, [user("", "Hello.")])  # what is done only once is done before the measurement
    said: list[Message] = []
    for question, turn in zip(QUESTIONS, TURNS, strict=True):
        yield _ask(url, [user(DOCUMENT, question)])
        said.append(user("" if said else LETTER, turn))
        answer = _ask(url, said)
        said.append({"role": "assistant", "content": answer.text})
        yield answer


def _ask(url: str, messages: list[Message]) -> Answer:
    # Greedy by top_p as well: FastDeploy 2.5 makes 1 of temperature 0.
    body = {"model": SERVED_NAME, "messages": messages, "max_tokens": MAX_TOKENS, "temperature": 0, "top_p": 0}
    answer = ask(f"{url}/v1/chat/completions", body)
    answer.text = answer.text.strip()
    return answer


def host_tokens(url: str, cached_tokens: int) -> int:
    """How many of the prompts' `cached_tokens` came from the host tier, by the server's counters. FastDeploy publishes
    them now and then.
    """
    deadline = time.monotonic() + SETTLE_TIMEOUT_S
    while True:
        found = HITS.findall(httpx2.get(f"{url}/metrics", timeout=60).text)
        device, host = (sum(float(value) for tier, value in found if tier == each) for each in ("device", "host"))
        if device + host >= cached_tokens or time.monotonic() > deadline:
            return int(host)
        time.sleep(0.05)


@dataclass
class Played:
    """What came of one set-up."""

    answers: list[Answer] = field(default_factory=list)
    """So far, in the order of the scene."""
    host_tokens: int = 0
    """Prompt tokens that came from the host tier; known at the end."""

    @property
    def sources(self) -> tuple[int, int, int]:
        """Prompt tokens that were computed, that came from the device tier, and from the host tier."""
        cached = sum(answer.cached_tokens for answer in self.answers)
        computed = sum(answer.prompt_tokens for answer in self.answers) - cached
        return computed, cached - self.host_tokens, self.host_tokens


Results = Mapping[str, Played]
"""By the name of the set-up."""
