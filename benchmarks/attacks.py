"""What one hostile request costs the others: seconds to its answer, and the longest pause of a stream beside it.

`attacks.py [MODEL_DIRECTORY]`: with a Hugging Face directory (tokenizer and weights), also prompts of megabytes for its
`attacks.py [MODEL_DIRECTORY]`: with a Hugging Face directory (tokenizer, weights), also prompts of megabytes for its
"""

from __future__ import annotations

import itertools
import json
import shutil
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from _support import median, save

from fastdeploy_kvcache_v1.embedded.process import running_server

REPEATS = 5
ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% set c = a * b %}{% endfor %}{% endfor %}"
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


@dataclass(frozen=True)
class Attack:
    path: str
    body: bytes


def of_any_model() -> dict[str, Attack | None]:
    prompt = b'{"prompt": [1], "max_tokens": 1, '
    return {
        "none": None,
        "4 million invalid stop_token_ids": Attack(COMPLETIONS, prompt + _list(b"stop_token_ids", b'""', 4_000_000)),
        "5 million valid stop_token_ids": Attack(COMPLETIONS, prompt + _list(b"stop_token_ids", b"1", 5_000_000)),
        "800,000 unknown fields": Attack(COMPLETIONS, prompt + _fields(800_000)),
        "5 million empty lists in an unknown field": Attack(COMPLETIONS, prompt + _list(b"x", b"[]", 5_000_000)),
        "300,000 invalid messages": Attack(CHAT, b"{" + _list(b"messages", b"{}", 300_000)),
        "300,000 empty messages": Attack(CHAT, b"{" + _list(b"messages", b'{"role": "user", "content": ""}', 300_000)),
        "a million brackets": Attack(COMPLETIONS, b"[" * 1_000_000),
    }


def of_a_tokenizer() -> dict[str, Attack | None]:
    text = json.dumps("The quick brown fox. " * 750_000).encode()
    part = b'{"messages": [{"role": "user", "content": [{"type": "text", "text": '
    return {
        "none": None,
        "prompt of 3 MB": Attack(COMPLETIONS, b'{"prompt": "' + text[1:3_000_000] + b'"}'),
        "the same as one part of a chat": Attack(CHAT, part + b'"' + text[1:3_000_000] + b'"}]}]}'),
        "prompt of 15.7 MB": Attack(COMPLETIONS, b'{"prompt": ' + text + b"}"),
    }


def of_a_template() -> dict[str, Attack | None]:
    body = b'{"messages": [{"role": "user", "content": "x"}]}'
    return {"none": None, "chat template with nested loops": Attack(CHAT, body)}


def _list(name: bytes, entry: bytes, count: int) -> bytes:
    return b'"' + name + b'": [' + b",".join([entry] * count) + b"]}"


def _fields(count: int) -> bytes:
    return b",".join(b'"k%d":0' % i for i in range(count)) + b"}"


@dataclass
class Stream:
    """A completion that goes on for as long as the measurement, and the moments at which its chunks arrived."""

    url: str
    arrivals: list[float] = field(default_factory=list)
    is_wanted: bool = True

    def run(self) -> None:
        body = json.dumps({"prompt": [5, 6, 7], "max_tokens": 4000, "ignore_eos": True, "stream": True}).encode()
        while self.is_wanted:
            with urllib.request.urlopen(_request(self.url, Attack(COMPLETIONS, body)), timeout=60) as chunks:
                for line in chunks:
                    if line.startswith(b"data: {"):
                        self.arrivals.append(time.perf_counter())
                    if not self.is_wanted:
                        return

    def longest_pause(self, start: float, end: float) -> float:
        moments = [start, *(moment for moment in self.arrivals if start < moment < end), end]
        return max(after - before for before, after in itertools.pairwise(moments))


@contextmanager
def streaming(url: str) -> Iterator[Stream]:
    stream = Stream(url)
    thread = threading.Thread(target=stream.run)
    thread.start()
    try:
        while len(stream.arrivals) < 20:
            time.sleep(0.05)
        yield stream
    finally:
        stream.is_wanted = False
        thread.join()


def _request(url: str, attack: Attack) -> urllib.request.Request:
    return urllib.request.Request(url + attack.path, attack.body, {"Content-Type": "application/json"})


def send(url: str, attack: Attack | None) -> int | None:
    """The answer's status."""
    if attack is None:
        time.sleep(1)
        return None
    try:
        with urllib.request.urlopen(_request(url, attack), timeout=120) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        error.read()
        return error.code


def measure(flags: Sequence[str], attacks: Mapping[str, Attack | None]) -> dict[str, Any]:
    rows = {}
    with running_server(flags) as url, streaming(url) as stream:
        for name, attack in attacks.items():
            seconds, pauses = [], []
            for _ in range(REPEATS):
                start = time.perf_counter()
                status = send(url, attack)
                end = time.perf_counter()
                seconds.append(end - start)
                pauses.append(stream.longest_pause(start, end))
                time.sleep(0.5)
            rows[name] = {
                "status": status,
                "seconds": median(seconds),
                "seconds_worst": max(seconds),
                "longest_pause_s": median(pauses),
                "longest_pause_worst_s": max(pauses),
            }
    return rows


def main() -> None:
    models: dict[str, Any] = {"random": measure((), of_any_model())}
    if len(sys.argv) > 1:
        path = Path(sys.argv[1])
        models[path.name] = measure(("--model", str(path)), of_a_tokenizer())
        with tempfile.TemporaryDirectory() as directory:
            looping = Path(shutil.copytree(path, Path(directory) / "model"))
            (looping / "chat_template.jinja").write_text(ENDLESS, encoding="utf-8")
            models[f"{path.name}, another chat template"] = measure(("--model", str(looping)), of_a_template())
    save("attacks", {"repeats": REPEATS, "models": models})


if __name__ == "__main__":
    main()
