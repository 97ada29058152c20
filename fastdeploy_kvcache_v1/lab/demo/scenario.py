"""Six requests, and the five set-ups of a server that the demo sends them to."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.resources import files
from typing import NamedTuple

from ..server.client import Answer, ask

Message = dict[str, str]

DOCUMENT, LETTER = ((files(__package__) / name).read_text("utf-8").strip() for name in ("document.txt", "letter.txt"))

QUESTIONS = (
    "In which year was the harbour light of Kelder Point built?",
    "Who was the first keeper?",
    "How much does a ticket cost?",
)
"""Questions about the document, each in a chat of its own."""
TURNS = (
    "Who won the card games?",
    "And what did they make on Thursday?",
    "What should Anna bring next year?",
)
"""Turns of one chat about the letter."""

ASKED = {
    f"{what} {number}": text
    for number, pair in enumerate(zip(QUESTIONS, TURNS, strict=True), 1)
    for what, text in zip(("document", "chat"), pair, strict=True)
}
"""The requests by name, in order: questions and the chat evict each other's blocks from a tier that is too small."""

SERVED_NAME = "demo"
MAX_TOKENS = 20
"""Tokens of each answer."""

BLOCK_SIZE = 64
"""Block size in tokens: FastDeploy's default."""
RESERVED_BLOCKS = 2
"""Device blocks beside those of the longest request: FastDeploy needs them to start (`enc_dec_block_num`)."""
HOST_GIB = "0.5"
LARGE_OVER_SMALL = 4
"""Device blocks of the large set-up, as a multiple of the small one's."""


class Setup(NamedTuple):
    name: str
    explanation: str
    flags: tuple[str, ...]
    """Flags of `fastdeploy-kvcache serve`."""


COMPUTED, SMALL, LARGE, HOST, RESTARTED = "cache off", "small device", "large device", "small + host", "after restart"
"""Names of the set-ups."""


def setups(num_tokens: int, directory: str) -> tuple[Setup, ...]:
    """Make the set-ups for requests of `num_tokens` tokens at most, with output. The last two store in `directory`."""
    longest = -(-num_tokens // BLOCK_SIZE) + 1
    small = longest + RESERVED_BLOCKS
    large = LARGE_OVER_SMALL * small
    limit = str(longest * BLOCK_SIZE)
    limits = ("--block-size", str(BLOCK_SIZE), "--max-model-len", limit, "--max-num-batched-tokens", limit)
    disk = ("--kvcache-storage-backend", "file", "--kvcache-storage-dir", directory)
    # Waits for every stored block: the demo shows where blocks come from, also for a model that computes faster.
    stored = (*disk, "--storage-prefetch", "wait_complete", "--write-policy", "write_through")

    def tiers(num_blocks: int, swap_space: str, *flags: str) -> tuple[str, ...]:
        return ("--num-gpu-blocks-override", str(num_blocks), "--swap-space", swap_space, *limits, *flags)

    off = tiers(large, "0", "--no-enable-prefix-caching")
    return (
        Setup(COMPUTED, "Every prompt is computed from its first token.", off),
        Setup(
            SMALL,
            f"{small} device blocks hold the document or the chat, not both: each evicts blocks of the other.",
            tiers(small, "0"),
        ),
        Setup(LARGE, f"{large} device blocks hold both.", tiers(large, "0")),
        Setup(
            HOST,
            f"{small} device blocks again, with {HOST_GIB} GiB of host memory and a directory behind them. "
            "Evicted blocks are copied back from the host.",
            tiers(small, HOST_GIB, *stored),
        ),
        Setup(
            RESTARTED,
            "The same server after a restart: device and host are empty, the directory has the blocks.",
            tiers(small, HOST_GIB, *stored),
        ),
    )


def user(context: str, question: str) -> Message:
    return {"role": "user", "content": f"{context}\n\n{question}".strip()}


def play(url: str) -> Iterator[Answer]:
    """Yield the answer to a greeting, then those to `ASKED`, of a server that serves nothing else meanwhile.

    Raises `WorkerDiedError`.
    """
    yield _ask(url, [user("", "Hello.")])  # what a server does only once is done before the measurement
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
