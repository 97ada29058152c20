"""`./scripts/bench`: runs benchmarks by name, or all that need nothing special, and writes the docs anew.

`--list` prints all with their minutes, needs and the age of their results.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from itertools import takewhile

import tables
from _support import MOST_LOAD, PUBLIC_TRACE, PUBLIC_TRACE_SHA256, ROOT, TRACE_VARIABLE, Run
from programs import PROGRAMS, list_text

USAGE = f"""\
usage: ./scripts/bench [--quick] [--anyway]           every benchmark that needs nothing special
       ./scripts/bench NAME... [OPTION...]            the named ones, with their options (NAME --help)
       ./scripts/bench --list                         their names

Without --trace FILE or {TRACE_VARIABLE}, generated chats are played. The public trace:
  {PUBLIC_TRACE}
  sha256 {PUBLIC_TRACE_SHA256}
"""
PATIENCE_S = 600


def wait_for_idle() -> None:
    """The program before leaves a load average that falls within a minute or two."""
    if os.getloadavg()[0] > MOST_LOAD:
        print(f"waiting until the load average ({os.getloadavg()[0]:.1f}) is below {MOST_LOAD:g}", file=sys.stderr)
    end = time.monotonic() + PATIENCE_S
    while os.getloadavg()[0] > MOST_LOAD and time.monotonic() < end:
        time.sleep(5)


def main() -> int:
    words = sys.argv[1:]
    names = list(takewhile(PROGRAMS.__contains__, words))
    options = words[len(names) :]
    if "--list" in words:
        print(list_text())
        return 0
    if not names and {"-h", "--help"} & set(words):
        print(USAGE, end="")
        return 0
    if not names and (unknown := [word for word in words if word not in ("--quick", "--anyway")]):
        print(f"error: no benchmark named {unknown[0]}: ./scripts/bench --list names them", file=sys.stderr)
        return 2
    names = names or [each.name for each in PROGRAMS.values() if not each.needs]
    hasty = {"--quick", "--anyway", "--help", "-h"} & set(options)
    is_timed = any(PROGRAMS[name].is_timed for name in names)
    if not hasty and (refusal := Run("", argparse.Namespace(), "", is_timed=is_timed).refusal):
        print(f"error: {refusal}", file=sys.stderr)
        return 1
    failed = []
    for number, name in enumerate(names):
        if number and PROGRAMS[name].is_timed and not hasty:
            wait_for_idle()
        print(f"==> {name}", file=sys.stderr)
        if subprocess.run([sys.executable, PROGRAMS[name].file, *options], cwd=ROOT).returncode:
            failed.append(name)
    if failed:
        print(f"error: failed: {', '.join(failed)}", file=sys.stderr)
        return 1
    if not {"--quick", "--results", "--help", "-h"} & set(options):
        tables.main()
    return 0


if __name__ == "__main__":
    sys.exit(main())
