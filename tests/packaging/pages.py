"""Runs the commands of a page as they stand there, and compares what they print with what the page shows.

Behind the language of a fenced block, where no reader of the rendered page sees it, stands what becomes of it:

    sh run                 in the clone's top folder; with `status=1` where it does not end with 0
    python run             the same, by the clone's environment
    sh terminals           each line in the background, once the line before it has printed "Ready: ..."
    sh not-run: REASON

A `text` block below is all that the command, or the last terminal, prints on both streams. `...` stands for any part of
a line, and alone on a line for any lines. The comment `<!-- stop -->`, and the end of a `## ` section, sends SIGINT to
all terminals, the newest first: they end with status 0 and print nothing more. Standard library only: bare machines
run it.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

ROOT = Path(__file__).resolve().parents[2]
PAGES = ("README.md", "docs/quickstart.md", "docs/lab/replay.md")
OUTPUT = "text"
PROGRAMS = {"sh": ("bash", "-euo", "pipefail", "-c"), "python": (".venv/bin/python", "-c")}
TIMEOUT_S = 900.0
SIOCSIFFLAGS, IFF_UP = 0x8914, 1
FENCE = re.compile(r"```(\w*) ?(.*)$")
STOP = "<!-- stop -->"
RUN = re.compile(r"run(?: status=(\d+))?$")
TERMINALS = "terminals"
MARKS = "run, run status=N, terminals, or not-run: REASON"


class PageError(Exception):
    """A page that does not say what happens; begins with `page:line`."""


@dataclass
class Block:
    """A fenced block; with STOP as its mark, the comment."""

    line: int
    """Of the text's first line, from 1."""
    language: str
    mark: str
    text: str
    section: int
    shown: Block | None = None
    """What the page says that it prints."""


def blocks(page: str, text: str) -> list[Block]:
    """All commands of a page, in order. Raises `PageError` for one that is not marked, or marked wrongly."""
    found: list[Block] = []
    lines, number, section = text.split("\n"), 0, 0
    while number < len(lines):
        line = lines[number]
        number += 1
        section += line.startswith("## ")
        if fence := FENCE.match(line):
            end = lines.index("```", number)
            block = Block(number + 1, fence[1], fence[2], "\n".join(lines[number:end]), section)
            number = end + 1
            if block.language != OUTPUT:
                found.append(_checked(page, block))
            elif found and found[-1].shown is None:
                found[-1].shown = block
        elif line == STOP:
            found.append(Block(number, "", STOP, "", section))
        elif line.startswith("    "):
            raise PageError(f"{page}:{number}: an indented block cannot be marked: fence it")
    return found


def _checked(page: str, block: Block) -> Block:
    at = f"{page}:{block.line - 1}"
    is_run = RUN.match(block.mark) or block.mark == TERMINALS
    if not is_run and not block.mark.startswith("not-run: "):
        raise PageError(f"{at}: got {block.mark!r} behind the language of a block, expected {MARKS}")
    if is_run and block.language not in PROGRAMS:
        raise PageError(f"{at}: got a block of {block.language!r} to run, expected sh or python")
    return block


def mismatch(shown: Sequence[str], printed: Sequence[str]) -> int | None:
    """The first line of `shown` that cannot be what was `printed`; `len(shown)` where more was; None if all fits."""
    ends = {0}
    for number, line in enumerate(shown):
        if line == "...":
            ends = set(range(min(ends), len(printed) + 1))
            continue
        pattern = re.compile(".*".join(map(re.escape, line.split("..."))))
        ends = {end + 1 for end in ends if end < len(printed) and pattern.fullmatch(printed[end])}
        if not ends:
            return number
    return None if len(printed) in ends else len(shown)


class Command:
    """One command that was started, with all that it prints."""

    def __init__(
        self, block: Block, text: str, shown: Block | None, clone: Path, environment: dict[str, str], output: IO[bytes]
    ) -> None:
        self.block, self.shown, self._output = block, shown, output
        self.process = subprocess.Popen(
            [*PROGRAMS[block.language], text],
            cwd=clone,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def printed(self) -> list[str]:
        number = self._output.fileno()  # shared with the command, which writes at its offset
        return os.pread(number, os.fstat(number).st_size, 0).decode(errors="replace").splitlines()

    def end(self, number: int) -> int:
        """Send a signal to its processes. Returns its exit status."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)
        return self.process.wait(TIMEOUT_S)


class Run:
    """One page in one clone."""

    def __init__(self, page: str, clone: Path, environment: dict[str, str]) -> None:
        self._page, self._clone, self._environment = page, clone, environment
        self._terminals: list[tuple[Command, list[str]]] = []
        """With what each had printed when it was ready."""
        self._outputs = ExitStack()

    def play(self, found: Sequence[Block], without: Sequence[str] = ()) -> int:
        """Number of blocks that were run. Raises `PageError` at the first that does not do what the page says."""
        num_run, section = 0, 0
        try:
            for block in found:
                if block.section != section or block.mark == STOP:
                    self._stop()
                section = block.section
                if block.language not in PROGRAMS or block.mark.startswith("not-run") or block.mark == STOP:
                    continue
                if any(word in block.text for word in without):
                    continue
                print(f"{self._page}:{block.line}: {block.text.splitlines()[0]}", flush=True)
                self._open_terminals(block) if block.mark == TERMINALS else self._play(block)
                num_run += 1
            self._stop()
        finally:
            for command, _ in self._terminals:
                command.end(signal.SIGKILL)
            self._outputs.close()
        return num_run

    def _start(self, block: Block, text: str, shown: Block | None) -> Command:
        output = self._outputs.enter_context(tempfile.TemporaryFile())  # noqa: SIM115 - the stack closes it
        return Command(block, text, shown, self._clone, self._environment, output)

    def _play(self, block: Block) -> None:
        command = self._start(block, block.text, block.shown)
        marked = RUN.match(block.mark)
        assert marked is not None
        try:
            status = command.process.wait(TIMEOUT_S)
        except subprocess.TimeoutExpired:
            command.end(signal.SIGKILL)
            raise self._error(command, f"did not end within {TIMEOUT_S:g} s") from None
        if status != int(marked[1] or 0):
            raise self._error(command, f"got exit status {status}, expected {marked[1] or 0}")
        self._compare(command)

    def _open_terminals(self, block: Block) -> None:
        lines = block.text.replace("\\\n", "").split("\n")
        for number, line in enumerate(lines, 1):
            shown = block.shown if number == len(lines) else None
            command = self._start(block, line, shown)
            self._terminals.append((command, []))
            self._wait_until_ready(command)
            self._compare(command)
            self._terminals[-1] = command, command.printed()

    def _wait_until_ready(self, command: Command) -> None:
        deadline = time.monotonic() + TIMEOUT_S
        while not any(line.startswith("Ready: ") for line in command.printed()):
            if command.process.poll() is not None:
                raise self._error(command, f"ended with status {command.process.returncode}, expected it to stay")
            if time.monotonic() > deadline:
                raise self._error(command, f"was not ready within {TIMEOUT_S:g} s")
            time.sleep(0.1)

    def _stop(self) -> None:
        while self._terminals:
            command, printed = self._terminals.pop()
            status = command.end(signal.SIGINT)
            if status != 0:
                raise self._error(command, f"got exit status {status} after SIGINT, expected 0")
            if command.printed() != printed:
                raise self._error(command, "expected nothing more after its start")

    def _compare(self, command: Command) -> None:
        """A page that shows nothing of a command says nothing of its output."""
        if command.shown is None:
            return
        shown, printed = command.shown.text.split("\n"), command.printed()
        if (number := mismatch(shown, printed)) is not None:
            expected = shown[number] if number < len(shown) else "no more lines"
            got = "\n".join(printed)
            raise PageError(
                f"{self._page}:{command.shown.line + number}: expected: {expected}\ngot all of this:\n{got}"
            )

    def _error(self, command: Command, problem: str) -> PageError:
        printed = "\n".join(command.printed()[-30:])
        return PageError(f"{self._page}:{command.block.line}: {problem}; it printed:\n{printed}")


def make_clone(directory: Path) -> None:
    """What is committed, its environment and the model: from here on no command needs a network."""
    subprocess.run(["git", "clone", "-q", str(ROOT), str(directory)], check=True)
    fetch = "from fastdeploy_kvcache_v1.lab.hub.smollm2 import SMOLLM2, fetch; fetch(SMOLLM2, print)"
    for command in (["scripts/serve", "--print-config"], [".venv/bin/python", "-c", fetch]):
        subprocess.run(command, cwd=directory, check=True, stdout=subprocess.DEVNULL, env=_environment())


def _environment() -> dict[str, str]:
    ours = ("VIRTUAL_ENV", "FASTDEPLOY_KVCACHE_VENV", "PYTHONPATH")
    return {name: value for name, value in os.environ.items() if name not in ours}


def make_home(directory: Path) -> dict[str, str]:
    """Variables with a home that commands may write to: it has links to what is in the user's own."""
    directory.mkdir()
    for entry in Path.home().iterdir():
        (directory / entry.name).symlink_to(entry)
    return {**_environment(), "HOME": str(directory)}


def isolation() -> list[str]:
    """What runs a command with a loopback of its own, whose ports are all free; nothing where that cannot be had."""
    for flags in (["--net"], ["--net", "--user", "--map-root-user"]):
        command = ["unshare", *flags]
        with suppress(OSError):
            if subprocess.run([*command, "true"], stderr=subprocess.DEVNULL).returncode == 0:
                return command
    return []


def raise_loopback() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        fcntl.ioctl(control, SIOCSIFFLAGS, struct.pack("16sh22x", b"lo", IFF_UP))


def main() -> int:
    parser = argparse.ArgumentParser(description="Run the marked commands of pages in a clean clone.")
    parser.add_argument("pages", nargs="*", default=PAGES, help=f"relative to the checkout ({' '.join(PAGES)})")
    parser.add_argument("--without", action="append", default=[], metavar="WORD", help="leave out commands with WORD")
    parser.add_argument("--clone", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--isolated", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.clone is None:
        with tempfile.TemporaryDirectory(prefix="pages-") as directory:
            clone = Path(directory) / "clone"
            make_clone(clone)
            alone = isolation()
            flags = ["--isolated"] if alone else []
            command = [*alone, sys.executable, __file__, "--clone", str(clone), *flags, *sys.argv[1:]]
            return subprocess.run(command).returncode
    if args.isolated:
        raise_loopback()
    try:
        for number, page in enumerate(args.pages):
            found = blocks(page, (args.clone / page).read_text())
            run = Run(page, args.clone, make_home(args.clone.parent / f"home{number}"))
            print(f"{page}: {run.play(found, args.without)} commands did as it says", flush=True)
    except PageError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
