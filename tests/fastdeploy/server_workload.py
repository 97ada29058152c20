"""The same requests for every configuration of the server; what it answers must not depend on the cache."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from openai import OpenAI

from .cpu_server import Answer, Messages, ask, started, user
from .models import PLAIN, Model

NUM_DOCUMENTS = 8
DOCUMENT_LENGTH = 400
NUM_CONVERSATIONS = 4
TURNS = 3
BURST = 200
BURST_PROMPTS = 40


def noise(seed: int, length: int) -> str:
    return "".join(random.Random(seed).choices("abcdefghij ", k=length))


def document(index: int) -> Messages:
    """More than six blocks, and no two documents share one."""
    return user(f"{index}: {noise(index, DOCUMENT_LENGTH)}")


class Workload:
    """Runs the parts below and keeps every answer by a name."""

    def __init__(self, client: OpenAI) -> None:
        self._client = client
        self.answers: dict[str, Answer] = {}

    def assert_tokens_of(self, other: Workload) -> None:
        """Which has answered at least the same requests."""
        different = {name for name, answer in self.answers.items() if answer.tokens != other.answers[name].tokens}
        assert not different

    def cached_tokens(self) -> int:
        """Of all requests that came one at a time: what others found depends on when they came."""
        return sum(answer.cached_tokens for name, answer in self.answers.items() if not name.startswith("burst"))

    def send(self, said: str | Messages, **options: Any) -> Answer:
        return ask(self._client, said, **options)

    def ask(self, name: str, messages: Messages, **options: Any) -> Answer:
        self.answers[name] = self.send(messages, **options)
        return self.answers[name]

    def documents(self, rounds: int = 3) -> None:
        """One after the other, again and again: with a small device tier each evicts an earlier one."""
        for each in range(rounds):
            for index in range(NUM_DOCUMENTS):
                self.ask(f"document {index} round {each}", document(index))

    def hot_documents(self) -> None:
        """Each twice in a row, which makes them worth a host copy, and once more after others evicted them."""
        for index in range(4):
            for each in range(2):
                self.ask(f"hot {index} round {each}", document(50 + index))
        for index in range(4):
            self.ask(f"hot {index} round 2", document(50 + index))

    def conversations(self) -> None:
        """Turns of several conversations in between each other; each prompt holds all that was said before."""
        said = [user(f"Conversation {index}: {noise(100 + index, 90)}") for index in range(NUM_CONVERSATIONS)]
        for turn in range(TURNS):
            for index, messages in enumerate(said):
                answer = self.ask(f"conversation {index} turn {turn}", messages, max_tokens=20)
                messages += [{"role": "assistant", "content": answer.text}, *user(noise(1000 * turn + index, 40))]

    def sampling(self) -> None:
        """Seeds, stop strings, minimum lengths, long answers."""
        for seed in range(3):
            self.ask(f"seed {seed}", document(0), temperature=0.9, top_p=0.8, seed=seed)
        self.ask("minimum", document(2), max_tokens=40, extra_body={"min_tokens": 40})
        full = self.ask("no stop", document(1), max_tokens=30)
        letter = re.search("[A-Za-z0-9]", full.text[4:])
        assert letter is not None
        self.ask("stop", document(1), max_tokens=30, stop=[letter.group()])
        self.ask("long", user("long"), max_tokens=300, extra_body={"min_tokens": 300})

    def burst(self) -> None:
        """Everything at once; each prompt five times."""

        def one(index: int) -> Answer:
            kind = index % BURST_PROMPTS
            said = noise(kind % 7, 80) + noise(500 + kind, 30 + 5 * kind)
            return self.send(said, max_tokens=4 + kind % 13)

        with ThreadPoolExecutor(BURST) as pool:
            for index, answer in enumerate(pool.map(one, range(BURST))):
                self.answers[f"burst {index}"] = answer

    def run(self) -> None:
        self.documents()
        self.hot_documents()
        self.conversations()
        self.sampling()
        self.burst()


@cache
def expected_of(release: str, model: Model = PLAIN, part: Callable[[Workload], None] = Workload.run) -> Workload:
    """What FastDeploy answers as it is without us, prefix cache off: once for each release and model."""
    flags = ("--no-enable-prefix-caching", "--num-gpu-blocks-override", "256")
    options = {"manager": False, "model": model}
    with TemporaryDirectory() as directory, started(release, Path(directory), *flags, **options) as (_, client):
        workload = Workload(client)
        part(workload)
    assert all(answer.cached_tokens == 0 for answer in workload.answers.values())
    return workload
