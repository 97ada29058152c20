"""An environment for each engine, from its lock file. `Missing` says why one cannot be made.

They live in `.venv-peers-NAME` in the checkout. A lock names every file by its hash; nothing is resolved.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
STAMP = ".fastdeploy-kvcache-stamp"
PYTHONS = ">=3.11,<3.14"
"""The newest SGLang has wheels for these."""

HOST_VENV = "FASTDEPLOY_KVCACHE_HOST_VENV"


class Missing(Exception):
    """An environment that this machine does not have."""


def python_of(name: str) -> Path:
    """The interpreter of the environment `name`, which is made if need be. `dev` is the one that runs this."""
    if name == "dev":
        return Path(sys.executable)
    if name == "fastdeploy":
        return _named(Path(os.environ[HOST_VENV])) if HOST_VENV in os.environ else _made_by_script()
    return _made_by_lock(ROOT / f".venv-peers-{name}", ROOT / "locks" / f"peers-{name}.txt")


def _made_by_lock(folder: Path, lock: Path) -> Path:
    python, stamp = folder / "bin" / "python", folder / STAMP
    digest = hashlib.sha256(lock.read_bytes()).hexdigest()
    if not (stamp.exists() and stamp.read_text(encoding="ascii") == digest):
        print(f"making {folder.name} from {lock.name}", file=sys.stderr)
        _run([sys.executable, "-m", "uv", "-q", "venv", "--clear", "--python", PYTHONS, str(folder)])
        # --python names the target: without it uv takes the environment that runs this
        sync = ["pip", "sync", "--require-hashes", "--python", str(python), str(lock)]
        _run([sys.executable, "-m", "uv", "-q", *sync])
        stamp.write_text(digest, encoding="ascii")
    return python


def _named(folder: Path) -> Path:
    """An environment that other checkouts may share is used as it is: a setup would point its package here."""
    if not (python := folder / "bin" / "python").exists():
        raise Missing(f"{HOST_VENV} names no environment")
    return python


def _made_by_script() -> Path:
    """FastDeploy's in this checkout, as `scripts/test-fastdeploy` makes it."""
    folder = ROOT / ".venv-fastdeploy"
    script = f'. "{ROOT}/scripts/env.sh"; setup_env'
    _run(["bash", "-c", script, str(ROOT / "scripts" / "env")], FASTDEPLOY_KVCACHE_VENV=str(folder), LOCK="fastdeploy")
    return folder / "bin" / "python"


def _run(command: list[str], **variables: str) -> None:
    done = subprocess.run(command, env={**os.environ, **variables}, stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise Missing(next(iter(done.stderr.strip().splitlines()[-1:]), f"{command[0]} failed"))
