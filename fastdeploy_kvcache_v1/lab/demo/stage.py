"""Plays the scene against each set-up, with a table that fills meanwhile, and says on a page what differed."""

from __future__ import annotations

import io
import os
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from ... import __version__
from ...errors import ConfigError
from ..server.client import Answer, running_server
from ..server.command import embedded_model, fastdeploy_cpu_model
from ..server.text import load_tokenizer
from . import scene
from .scene import COMPUTED, HOST, LARGE, SMALL, Played, Results, Setup

INTRODUCTION = """\
Three questions about a long document and a chat about a letter take turns. The same six requests were sent to four \
set-ups of one server, one request at a time.
"""
PAGE_WIDTH = 120
"""Letters."""
NO_BREAK_SPACE = "\u00a0"


class DemoServer(NamedTuple):
    """How to start one, whatever the set-up."""

    model: Path | None
    """None is the random model."""
    flags: tuple[str, ...]
    environment: Mapping[str, str]


def demo_server(model: str | None, checkout: Path | None) -> DemoServer:
    """With SmolLM2 unless `model` names another one; FastDeploy's, if a source tree of it is given.

    Raises `ConfigError` for a `checkout` that is none, `ModelFetchError`.
    """
    flags: tuple[str, ...] = ()
    environment = {}
    if checkout is None:
        path = embedded_model(model)
    else:
        root = checkout.resolve()
        if not (root / "fastdeploy" / "envs.py").is_file():
            raise ConfigError(f"--fastdeploy: {checkout} is no FastDeploy checkout")
        name = fastdeploy_cpu_model(model or "smollm2")
        path, flags = Path(name) if name else None, ("--fastdeploy-cpu",)
        environment = {"PYTHONPATH": os.pathsep.join(filter(None, (str(root), os.environ.get("PYTHONPATH"))))}
    return DemoServer(path, (*flags, *(("--model", str(path)) if path else ())), environment)


def show(server: DemoServer, page: Path, picture: Path | None) -> int:
    """0 when all set-ups gave the same answers, 1 otherwise. Raises `WorkerDiedError`."""
    prompt = load_tokenizer(server.model).apply_chat_template([scene.user(scene.DOCUMENT, scene.QUESTIONS[0])])
    setups = scene.setups(len(prompt) + scene.MAX_TOKENS)
    results, console = {setup.name: Played() for setup in setups}, Console()
    with Live(table(results), console=console, auto_refresh=False) as live:
        for setup in setups:
            played = results[setup.name]
            flags = (*server.flags, "--served-model-name", scene.SERVED_NAME, *setup.flags)
            with running_server(flags, server.environment) as url:
                for answer in scene.play(url):
                    played.answers.append(answer)
                    live.update(table(results), refresh=True)
                played.host_tokens = scene.host_tokens(url, sum(answer.cached_tokens for answer in played.answers))
    write_page(page, setups, results)
    if picture:
        from .picture import write_picture

        write_picture(picture, results)
    if not console.is_terminal:
        console.print()  # the table's last line
    for line in (*verdicts(results), f"The page: {page}"):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    return 1 if differences(results) else 0


def table(results: Results) -> Table:
    made = Table(title="Seconds to the first token, and how much of the prompt came from the cache")
    made.add_column("request", no_wrap=True)
    made.add_column("tokens", justify="right", no_wrap=True)
    for name in results:
        made.add_column(name, justify="right", min_width=11)  # a name may take two lines
    for number, label in enumerate(scene.ASKED):
        answers = [played.answers[number] if number < len(played.answers) else None for played in results.values()]
        made.add_row(label, f"{answers[0].prompt_tokens:,}" if answers[0] else "", *map(_cell, answers))
    return made


def _cell(answer: Answer | None) -> str:
    if answer is None:
        return ""
    cached, seconds = answer.cached_tokens / answer.prompt_tokens, answer.first_token_s
    return f"{seconds:.{2 if seconds < 10 else 1}f} s [dim]{cached:4.0%}[/dim]".replace(" ", NO_BREAK_SPACE, 1)


def verdicts(results: Results) -> list[str]:
    """One sentence per finding."""
    # Questions about the document after the first one: each second request from the third on.
    again = {name: median(answer.first_token_s for answer in played.answers[2::2]) for name, played in results.items()}
    computed, device, host = again[COMPUTED], again[LARGE], again[HOST]
    return [
        f"A question about a document that the server knows: first token after {device:.2f} s from the device tier and "
        f"{host:.2f} s from the host tier, {computed:.2f} s without a cache ({_sooner(computed / device)} and "
        f"{_sooner(computed / host)})",
        f"With a device tier too small for document and chat, {results[SMALL].sources[0]:,} prompt tokens were "
        f"computed; with host memory behind it, {results[HOST].sources[0]:,}",
        *(differences(results) or ["All answers are the same in all set-ups"]),
    ]


def _sooner(ratio: float) -> str:
    return f"{ratio:.0f}x sooner" if ratio >= 1.5 else "no sooner"  # the random model computes next to nothing


def differences(results: Results) -> list[str]:
    """One line per answer that is not what the server said without a cache."""
    return [
        f"{name}, {label}: {answer.text!r} instead of {expected.text!r}"
        for name, played in results.items()
        for label, answer, expected in zip(scene.ASKED, played.answers, results[COMPUTED].answers, strict=True)
        if answer.text != expected.text
    ]


def write_page(path: Path, setups: Sequence[Setup], results: Results) -> None:
    """One HTML document that needs no other file. Raises `OSError`."""
    console = Console(record=True, file=io.StringIO(), width=PAGE_WIDTH, highlight=False)
    sources = Table("set-up", title="Where the prompt tokens came from")
    for source in ("computed", "device tier", "host tier"):
        sources.add_column(source, justify="right")
    for name, played in results.items():
        sources.add_row(name, *(f"{count:,}" for count in played.sources))
    said = Table("request", "question", "answer without a cache", title="What was said")
    for (label, question), answer in zip(scene.ASKED.items(), results[COMPUTED].answers, strict=True):
        said.add_row(label, question, Text(answer.text))
    console.print("[bold]What the KV cache is worth[/bold]\n", INTRODUCTION, *map(Text, verdicts(results)), sep="\n")
    console.print("", table(results), sources, said, "")
    for setup in setups:
        console.print(f"[bold]{setup.name}[/bold]: {setup.explanation}\n[dim]{' '.join(setup.flags)}[/dim]")
    machine = f"{len(os.sched_getaffinity(0))} cores, Python {platform.python_version()}"
    console.print(f"\n./scripts/demo of fastdeploy-kvcache-v1 {__version__}, {machine}")
    console.save_html(str(path))
