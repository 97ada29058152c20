"""The table of all benchmarks: time, needs, and the files that each measures; and the age of their results.

A result is older than the code when a file that its benchmark measures changed after the result's commit, in more than
its comments and docstrings. The age depends on the commit from which it is looked at, so every change of the code can
make results older. Tests therefore never fail on an age. `./scripts/bench --list` prints the ages of today. `tables.py`
writes them into the docs, with the commit that they hold for, and a test compares the page with that commit.
"""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any, NamedTuple

from _support import MOST_LOAD, RESULTS, ROOT, git, summary

PACKAGE = "fastdeploy_kvcache_v1"
SCHEDULER = ("config.py", "contract", "scheduler")
SERVER = (*SCHEDULER, "attention", "worker", "!worker/cuda", "lab/model", "lab/server")
STORE = ("storage", "contract")

ALONE = "the scheduler half alone, without a worker"
CPU_WORKER = "the embedded server with its CPU worker"
MEMORY = "the CPU copies of the worker half"
NETWORK = "the transfer half, over the loopback interface"
STORES = "the storage half, on this machine"


class Program(NamedTuple):
    """One benchmark. Its file is `benchmarks/NAME.py`, its result `benchmarks/results/NAME.json`."""

    name: str
    title: str
    minutes: int
    runs_over: str
    code: tuple[str, ...]
    """Files and folders of the package that it measures; behind a `!`, those that it does not."""

    arguments: str = ""
    """Behind its name, where it needs or takes some."""

    needs: str = ""
    """What a plain checkout lacks. `./scripts/bench` without a name leaves such programs out."""

    is_timed: bool = True
    """If not, its figures depend on no load."""

    keeps: bool = True
    """Whether it writes a result."""

    @property
    def file(self) -> Path:
        return ROOT / "benchmarks" / f"{self.name}.py"

    @property
    def command(self) -> str:
        words = self.arguments.split()
        variables = [word for word in words if word.isupper() and "=" in word]
        rest = [word for word in words if word not in variables]
        return " ".join([*variables, "./scripts/bench", self.name, *rest])

    @property
    def measures(self) -> list[str]:
        """Paths for git from the top of the repository, its own file and folder included."""
        own = [each for each in (self.file, self.file.with_suffix("")) if each.exists()]
        code = (f":(exclude){PACKAGE}/{each[1:]}" if each[0] == "!" else f"{PACKAGE}/{each}" for each in self.code)
        return [*(str(each.relative_to(ROOT)) for each in own), *code]

    def about(self) -> str:
        return summary(self.file)

    def result(self) -> dict[str, Any] | None:
        path = RESULTS / f"{self.name}.json"
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


TRACE = "[--trace FILE]"
CHECKOUTS = "FASTDEPLOY_25=DIR FASTDEPLOY_26=DIR"

PROGRAMS = {
    program.name: program
    for program in (
        Program("control_plane", "Time per request", 3, ALONE, (*SCHEDULER, "lab/replay"), TRACE),
        Program(
            "peers", "Beside other engines", 70, ALONE, (*SCHEDULER, "lab/replay", "lab/traffic.py"),
            f"{CHECKOUTS} FASTDEPLOY_DEVELOP=DIR {TRACE} [--only NAME...]", "other engines' wheels",
        ),
        Program(
            "policies", "Policies: shares of tokens that hit", 25, ALONE, (*SCHEDULER, "lab/replay", "lab/traffic.py"),
            TRACE, is_timed=False,
        ),
        Program(
            "hits", "Hits by what clients tell", 12, ALONE, (*SCHEDULER, "lab/replay", "lab/traffic.py"),
            f"{TRACE} [--agents FILE...] [--only PART]", is_timed=False,
        ),
        Program("eviction_time", "Cost of adaptive eviction", 3, ALONE, (*SCHEDULER, "lab/traffic.py"), TRACE),
        Program("growth", "Growth", 3, ALONE, SCHEDULER),
        Program("hashing", "Hashing", 1, ALONE, ("scheduler/block_hashing.py",)),
        Program("import_time", "Import", 1, ALONE, SCHEDULER),
        Program(
            "against", "Against another checkout", 4, ALONE, SCHEDULER, f"DIR {TRACE}", "another checkout", keeps=False
        ),
        Program(
            "overlay_scheduler", "Scheduler inside FastDeploy", 6, "FastDeploy's own scheduler, without a worker",
            (*SCHEDULER, "fastdeploy_integration"), CHECKOUTS, "a FastDeploy checkout",
        ),
        Program(
            "worker_steps", "The worker's thread inside FastDeploy", 1,
            "the CUDA worker's bookkeeping, over a driver whose functions do nothing",
            ("config.py", "contract", "attention", "worker", "fastdeploy_integration/worker"), needs="a C compiler",
        ),
        Program("copy_ops", "Copies", 1, MEMORY, ("worker/ops",), needs="a C++ compiler"),
        Program("first_touch", "First touch", 1, MEMORY, ("worker/ops", "worker/runtime", "storage/host_slots.py")),
        Program(
            "copy_gpu", "Copies of a GPU", 1, "the CUDA copies of the worker half, on a GPU", ("worker",), "REPORT",
            "a GPU's report", is_timed=False,
        ),
        Program("server", "Server", 3, CPU_WORKER, SERVER),
        Program(
            "cpu_model", "CPU model", 8, "the lab's CPU model alone", ("lab/model",),
            "MODEL_DIR [--transformers PYTHON]", "a Hugging Face directory",
        ),
        Program("storage", "Stores on disk", 2, STORES, STORE, "[DIRECTORY]"),
        Program("storage_large", "A large directory", 2, STORES, STORE, "[DIRECTORY]"),
        Program(
            "peers_store", "Beside other stores of files", 4, STORES, STORE, "[DIRECTORY] [--only NAME...]",
            "LMCache's wheels",
        ),
        Program(
            "stored_hits", "What to store", 1, ALONE, (*SCHEDULER, "lab/replay", "lab/traffic.py"), TRACE,
            is_timed=False,
        ),
        Program("storage_server", "Storage behind a server", 4, CPU_WORKER, (*SERVER, "storage")),
        Program("load_or_compute_stored", "Load or compute", 25, CPU_WORKER, (*SERVER, "storage")),
        Program("storage_mooncake", "Mooncake store", 1, STORES, STORE, needs="Mooncake's libraries"),
        Program("transfer", "Data planes", 1, NETWORK, ("transfer", "worker/ops"), needs="Mooncake's libraries"),
        Program("transfer_overlap", "Hidden share of a transfer", 1, NETWORK, ("transfer", "contract")),
        Program("roles", "Prefill and decode servers", 4, CPU_WORKER, (*SERVER, "transfer", "lab/router")),
    )
}  # fmt: skip

HELPERS = {"_support", "naive", "null_gpu", "programs", "rows", "run", "sample_trace", "tables"}
"""Files that are no benchmarks."""


def changed_since(commit: str | None, paths: list[str], until: str = "HEAD", root: Path = ROOT) -> list[str] | None:
    """The files below `paths` that differ between two commits, in more than their comments and docstrings if they are
    Python. None: `commit` is not in the history of `until`.
    """
    if not commit or git("merge-base", "--is-ancestor", commit, until, root=root) is None:
        return None
    names = git("diff", "--name-only", f"{commit}..{until}", "--", *paths, root=root)
    if names is None:
        return None
    versions = [f"{each}:{{}}" for each in (commit, until)]
    return [
        name
        for name in names.splitlines()
        if not name.endswith(".py")
        or len({code_of(git("show", each.format(name), root=root)) for each in versions}) > 1
    ]


def code_of(source: str | None) -> str:
    """What Python makes of `source`, without texts that stand alone; `source` where it can make nothing of it."""
    try:
        tree = ast.parse(source or "")
    except SyntaxError:
        return source or ""
    for node in ast.walk(tree):
        for statement in (each for each in ast.iter_child_nodes(node) if isinstance(each, ast.Expr)):
            if isinstance(statement.value, ast.Constant) and isinstance(statement.value.value, str):
                statement.value.value = ""
    return ast.dump(tree)


def age(program: Program, result: dict[str, Any], until: str = "HEAD") -> str:
    """The mark of a result's age, empty for one that is as new as the code."""
    changed = changed_since(result["commit"], program.measures, until)
    if changed is None:
        return "unknown commit"
    return "older than the code" if changed else ""


def other_marks(result: dict[str, Any]) -> list[str]:
    """Marks that do not depend on git: the state of tree and machine when the result was measured."""
    marks = []
    if result["clean"] is not True:
        marks.append("dirty tree" if result["clean"] is False else "unknown whether the tree was clean")
    if result["load"] is None:
        return marks
    before, after = result["load"]["before"], result["load"]["after"]
    if before is None and after is None:
        marks.append("unknown load")
    elif before > MOST_LOAD if before is not None else after > result["machine"]["cores"]:
        marks.append("busy machine")
    return marks


def list_text() -> str:
    """One line a program: minutes, first sentence, needs, and the marks of its result."""
    lines = []
    for program in PROGRAMS.values():
        result = program.result()
        if result is not None:
            marks = [mark for mark in (age(program, result), *other_marks(result)) if mark]
            state = "; ".join(marks) or "up to date"
            if changed := changed_since(result["commit"], program.measures):
                state = f"{state}; changed files: {len(changed)}"
        else:
            state = "no result" if program.keeps else "prints its result"
        about = program.about().split(". ")[0].rstrip(".")
        needs = f" (needs {program.needs})" if program.needs else ""
        lines.append(f"{program.name:23} {program.minutes:2} min  {about}{needs} [{state}]")
    return "\n".join(lines)
