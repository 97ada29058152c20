"""Why FastDeploy's server ended, from its own logs: it says so there, and its exit status is 0 even then."""

from __future__ import annotations

import re
from pathlib import Path

LOGS = ("launch_worker.log", "workerlog.0", "api_server.out")
"""Files that may tell, the worker's first: when it ends, the others end because of it."""

TAIL_BYTES = 1 << 16
MAX_CHARACTERS = 300

CAUSE = re.compile(
    r"^(?:[\w.]*(?:Error|Exception)(?::.+)?"  # the last line of a traceback
    r"|[\w. -]+: error: .+"  # argparse; FastDeploy gives its worker a name of three words
    r"|Fatal Python error: .+|terminate called .+|corrupted .+|.*(?:core dumped|Illegal instruction).*"
    r"|worker rank \d+ of \d+ ended .+)$"  # `rank_processes`
)
FOLLOWS = re.compile(r"^(?:[\w.]*RankLostError:|RuntimeError: \[\S*/gloo/transport/|worker rank \d+ of )")
"""What the end of another rank leads to (gloo's errors: in FastDeploy's own barriers). Said only if the log has no
cause of that end.
"""


def failure_cause(log_directory: Path) -> str | None:
    """One line with the name of its file; None when no log names a cause."""
    for name in LOGS:
        found = [line for line in reversed(_tail(log_directory / name)) if CAUSE.match(line)]
        if found:
            line = next((each for each in found if not FOLLOWS.match(each)), found[0])
            return f"{line[:MAX_CHARACTERS]} ({name})"
    return None


def _tail(path: Path) -> list[str]:
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - TAIL_BYTES))
            return file.read().decode("utf-8", "replace").splitlines()
    except OSError:
        return []
