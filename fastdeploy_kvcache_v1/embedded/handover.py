"""Where FastDeploy and a GPU are present, `serve` starts FastDeploy's own api_server instead of the embedded one."""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from ..switch import SWITCH
from .settings import own_flags

API_SERVER = "fastdeploy.entrypoints.openai.api_server"

CPU_SERVER = "fastdeploy_kvcache_v1.fastdeploy_integration.cpu_worker"


def fastdeploy_can_serve() -> bool:
    """FastDeploy is installed and an NVIDIA device is there. Imports nothing: that would take seconds."""
    return importlib.util.find_spec("fastdeploy") is not None and any(Path("/dev").glob("nvidia[0-9]*"))


def fastdeploy_command(args: argparse.Namespace, extra: Sequence[str], module: str = API_SERVER) -> list[str]:
    """The command line with every flag that was given; `extra` holds those only FastDeploy knows."""
    command, own = [sys.executable, "-m", module], own_flags()
    for name, value in vars(args).items():
        if name in own or name in ("command", "run") or value is None:
            continue
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            command.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            command += [f"--{flag}", str(value)]
    return [*command, *extra]


def exec_fastdeploy(command: Sequence[str]) -> NoReturn:
    """Replace this process: signals and exit status are then FastDeploy's own."""
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(command[0], list(command), {**os.environ, SWITCH: "1"})


def exec_fastdeploy_cpu(args: argparse.Namespace, extra: Sequence[str]) -> NoReturn:
    """Replace this process by the one that runs FastDeploy's server without a GPU."""
    sys.stdout.flush()
    sys.stderr.flush()
    command = fastdeploy_command(args, extra, CPU_SERVER)
    os.execv(command[0], command)
