"""Traffic that has something to hit, made from a seed: documents, chats, agents.

The shapes are those of the usual serving benchmarks: many questions about few long documents, conversations whose
prompts hold all that was said before, and agents that share long instructions and tools and read one tool's output
after the other. Tokens are random letters: what a cache does depends on which tokens are equal, not on what they mean.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from ..errors import ConfigError
from .session import Session, Turn, random_tokens

QUESTIONS = 4
"""About each document."""
QUESTION_TOKENS = 24

CHAT_TURNS = 8
AGENT_STEPS = 6

SYSTEM_SHARE = 10
"""One in so many tokens of a chat's longest prompt is the system prompt, which all chats share."""
INSTRUCTIONS_SHARE = 2
"""The same of agents, for their instructions and tools."""


@dataclass(frozen=True)
class Size:
    """Of a workload."""

    requests: int
    """At least so many, in whole sessions."""
    max_prompt_tokens: int
    max_output_tokens: int
    seed: int = 0


def documents(size: Size) -> list[Session]:
    """Each session is one question about one of several documents, in random order."""
    document_tokens = _require(size.max_prompt_tokens - QUESTION_TOKENS, "documents", size)
    asked = [(number // QUESTIONS, number % QUESTIONS) for number in range(_round_up(size.requests, QUESTIONS))]
    random.Random(f"documents {size.seed}").shuffle(asked)

    def session(document: int, question: int) -> Session:
        text = random_tokens(f"document {size.seed} {document}", document_tokens)
        words = random_tokens(f"question {size.seed} {document} {question}", QUESTION_TOKENS)
        return Session(f"document {document} question {question}", (Turn(text + words, size.max_output_tokens),))

    return [session(document, question) for document, question in asked]


def chat(size: Size) -> list[Session]:
    """Conversations with one system prompt, `CHAT_TURNS` turns each."""
    return _conversations("chat", size, CHAT_TURNS, size.max_prompt_tokens // SYSTEM_SHARE)


def agents(size: Size) -> list[Session]:
    """Agents with the same long instructions, which read the output of `AGENT_STEPS` tools each."""
    return _conversations("agent", size, AGENT_STEPS, size.max_prompt_tokens // INSTRUCTIONS_SHARE)


def _conversations(name: str, size: Size, num_turns: int, num_shared: int) -> list[Session]:
    said = size.max_output_tokens * (num_turns - 1)
    per_turn = _require((size.max_prompt_tokens - num_shared - said) // num_turns, f"{num_turns} turns", size)
    shared = random_tokens(f"{name} {size.seed} shared", num_shared)

    def turns(number: int) -> tuple[Turn, ...]:
        words = [random_tokens(f"{name} {size.seed} {number} {turn}", per_turn) for turn in range(num_turns)]
        words[0] = shared + words[0]
        return tuple(Turn(each, size.max_output_tokens) for each in words)

    return [Session(f"{name} {number}", turns(number)) for number in range(-(-size.requests // num_turns))]


def _require(num_tokens: int, what: str, size: Size) -> int:
    if num_tokens < 1:
        raise ConfigError(
            f"--max-prompt-tokens {size.max_prompt_tokens} with --max-output-tokens {size.max_output_tokens} "
            f"leaves no room for {what}: raise the first or lower the second"
        )
    return num_tokens


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


WORKLOADS: dict[str, Callable[[Size], list[Session]]] = {"documents": documents, "chat": chat, "agents": agents}
"""By their names on the command line."""
