"""Sends the requests to each set-up, with a table that fills meanwhile, and says what differed."""

from __future__ import annotations

import os
import secrets
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.live import Live
from rich.table import Table

from ...errors import ConfigError
from ...telemetry.drawing import seconds
from ..server.client import running_server
from ..server.command import embedded_model, fastdeploy_cpu_model
from ..server.text import load_tokenizer
from . import scenario
from .findings import differences, verdicts
from .observer import Observer, Results, Seen
from .page import write_page, write_picture

NO_BREAK_SPACE = "\u00a0"


class DemoServer(NamedTuple):
    """How to start a server, in every set-up."""

    model: Path | None
    """None is the random model."""
    flags: tuple[str, ...]
    environment: Mapping[str, str]


def demo_server(model: str | None, checkout: Path | None) -> DemoServer:
    """With SmolLM2 unless `model` names another one; FastDeploy's, if a source tree of it is given.

    Raises `ConfigError` for a `checkout` without FastDeploy, `ModelFetchError`.
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
    prompt = load_tokenizer(server.model).apply_chat_template([scenario.user(scenario.DOCUMENT, scenario.QUESTIONS[0])])
    directory = Path(tempfile.gettempdir(), f"kvcache-demo-{secrets.token_hex(8)}")  # the server makes it
    setups = scenario.setups(len(prompt) + scenario.MAX_TOKENS, str(directory))
    results: dict[str, list[Seen]] = {setup.name: [] for setup in setups}
    console, num_on_disk = Console(), 0
    try:
        with Live(table(results), console=console, auto_refresh=False) as live:
            for setup in setups:
                flags = (*server.flags, "--served-model-name", scenario.SERVED_NAME, *setup.flags)
                with running_server(flags, server.environment) as url:
                    observer = Observer(url, num_on_disk=num_on_disk)
                    answers = scenario.play(url)
                    observer.look(next(answers), "other")
                    for label, answer in zip(scenario.ASKED, answers, strict=True):
                        results[setup.name].append(observer.look(answer, label.split()[0]))
                        live.update(table(results), refresh=True)
                    num_on_disk = observer.num_on_disk
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    write_page(page, setups, results)
    if picture:
        write_picture(picture, results)
    if not console.is_terminal:
        console.print()  # the table's last line
    for line in (*verdicts(results), f"The page: {page}"):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    return 1 if differences(results) else 0


def table(results: Results) -> Table:
    made = Table(title="Time to the first token, and how much of the prompt came from the cache")
    made.add_column("request", no_wrap=True)
    made.add_column("tokens", justify="right", no_wrap=True)
    for name in results:
        made.add_column(name, justify="right", min_width=7)  # a name may take two lines
    for number, label in enumerate(scenario.ASKED):
        seen = [each[number] if number < len(each) else None for each in results.values()]
        made.add_row(label, f"{seen[0].answer.prompt_tokens:,}" if seen[0] else "", *map(_cell, seen))
    return made


def _cell(seen: Seen | None) -> str:
    if seen is None:
        return ""
    first = seconds(seen.answer.first_token_s).replace(" ", NO_BREAK_SPACE)
    return f"{first} [dim]{seen.answer.cached_tokens / seen.answer.prompt_tokens:4.0%}[/dim]"
