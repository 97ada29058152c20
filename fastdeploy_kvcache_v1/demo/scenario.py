"""What the demo asks: three questions about a long document, and between them a chat of three turns about a letter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files

Message = dict[str, str]

QUESTIONS = (
    "In which year was the harbour light of Kelder Point built?",
    "Who was the first keeper?",
    "How much does a ticket cost?",
)
CHAT = (
    "Who won the card games?",
    "And what did they make on Thursday?",
    "What should Anna bring next year?",
)

MAX_TOKENS = 20
"""Of each answer."""


@dataclass(frozen=True)
class Request:
    label: str
    """For a narrow column."""
    question: str
    context: str
    """Text that stands before the question, in the same message."""
    history: tuple[str, ...] = ()
    """Labels of the earlier turns of the same chat."""

    def messages(self, requests: Mapping[str, Request], answers: Mapping[str, str]) -> list[Message]:
        """What is sent, given all requests and the answers so far, by their labels."""
        said: list[Message] = []
        for label in self.history:
            said += [_user(requests[label]), {"role": "assistant", "content": answers[label]}]
        return [*said, _user(self)]


def _user(request: Request) -> Message:
    return {"role": "user", "content": f"{request.context}\n\n{request.question}".strip()}


def play() -> tuple[Request, ...]:
    """All requests, in the order in which they are sent: question and chat take turns, so each finds the other's blocks
    in its place where the device tier is too small for both.
    """
    document, letter = _text("document.txt"), _text("letter.txt")
    asked = [Request(f"document {number}", question, document) for number, question in enumerate(QUESTIONS, 1)]
    chat = [
        Request(f"chat {turn}", question, letter if turn == 1 else "", tuple(f"chat {each}" for each in range(1, turn)))
        for turn, question in enumerate(CHAT, 1)
    ]
    return tuple(request for pair in zip(asked, chat, strict=True) for request in pair)


def longest(requests: Sequence[Request]) -> Request:
    """The request with the longest context."""
    return max(requests, key=lambda request: len(request.context))


def _text(name: str) -> str:
    return (files(__package__) / name).read_text(encoding="utf-8").strip()
