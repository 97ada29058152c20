"""The table on the terminal, which fills while the demo plays."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.live import Live
from rich.table import Table

from .player import Outcome
from .scenario import Request
from .setups import Setup

MIN_WIDTH = 11
"""Of a column of numbers; the names above them may take two lines."""

NO_BREAK_SPACE = "\u00a0"


class Board:
    """Outcomes so far, by set-up. `show` draws them anew."""

    def __init__(self, requests: Sequence[Request], setups: Sequence[Setup]) -> None:
        self._requests = requests
        self._setups = setups
        self._outcomes: dict[str, dict[str, Outcome]] = {setup.name: {} for setup in setups}
        self._live: Live | None = None

    @contextmanager
    def shown(self, console: Console) -> Iterator[None]:
        """On a terminal it is drawn in place; else once, at the end."""
        with Live(self.table(), console=console, refresh_per_second=4, transient=not console.is_terminal) as self._live:
            yield
        if not console.is_terminal:
            console.print(self.table())

    def add(self, setup: Setup, outcome: Outcome) -> None:
        self._outcomes[setup.name][outcome.label] = outcome
        if self._live is not None:
            self._live.update(self.table())

    def table(self) -> Table:
        table = Table(title="Seconds to the first token, and how much of the prompt came from the cache")
        table.add_column("request", no_wrap=True)
        table.add_column("tokens", justify="right", no_wrap=True)
        for setup in self._setups:
            table.add_column(setup.name, justify="right", min_width=MIN_WIDTH)
        for request in self._requests:
            found = [self._outcomes[setup.name].get(request.label) for setup in self._setups]
            size = next((f"{outcome.prompt_tokens:,}" for outcome in found if outcome), "")
            table.add_row(request.label, size, *map(_cell, found))
        return table


def _cell(outcome: Outcome | None) -> str:
    if outcome is None:
        return ""
    cached = 1 - outcome.computed_tokens / outcome.prompt_tokens
    return f"{outcome.first_token_s:.2f} s [dim]{cached:4.0%}[/dim]".replace(" ", NO_BREAK_SPACE, 1)
