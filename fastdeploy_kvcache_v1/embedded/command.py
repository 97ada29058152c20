"""The `serve` command."""

from __future__ import annotations

import argparse
import logging
import os
from collections.abc import Sequence

from ..errors import ConfigError
from ..model.config import load_model_config
from ..trace_recorder import VARIABLE as RECORD_VARIABLE
from .handover import exec_fastdeploy, exec_fastdeploy_cpu, fastdeploy_can_serve, fastdeploy_command
from .model_choice import embedded_model, fastdeploy_cpu_model, fastdeploy_model
from .settings import add_serve_arguments, server_config

__all__ = ["add_arguments", "run"]

COPY_FAULTS_VARIABLE = "FASTDEPLOY_KVCACHE_COPY_FAULTS"
"""Test hook, see `copy_faults.py`."""


EPILOG = """\
Exit status: 0 after SIGINT or SIGTERM; 1 when the worker process died, or was stuck for --worker-timeout seconds, after
every open request was answered with 503 and the reason (run the server under a supervisor that restarts it); 2 for a
wrong setting or model.

Beside the OpenAI endpoints and /health and /metrics, the embedded server has two for operators, which need the header
X-KVCache-Operator: 1. POST /reset_prefix_cache forgets every cached block; GET /debug/check proves the invariants of
the cache and, when idle, that nothing leaked. Limits, deadlines and who may call: docs/embedded-server.md.
The request fields are those of OpenAI's API and of FastDeploy; the same page lists them.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EPILOG
    add_serve_arguments(parser)


def run(args: argparse.Namespace, extra: Sequence[str]) -> int:
    """Serve until a signal; `extra` are flags this package does not know. Raises `KVCacheError` before it listens."""
    if args.fastdeploy_cpu:
        if args.embedded:
            raise ConfigError("--embedded and --fastdeploy-cpu are two different servers: choose one")
        args.model = fastdeploy_cpu_model(args.model)
        _export_trace(args)
        exec_fastdeploy_cpu(args, extra)
    if not args.embedded and fastdeploy_can_serve():
        if args.role is not None:
            raise ConfigError("--role is of the embedded server: give --embedded too, or FastDeploy's --splitwise-role")
        args.model = fastdeploy_model(args.model)
        _export_trace(args)
        exec_fastdeploy(fastdeploy_command(args, extra))
    if extra:
        raise ConfigError(f"unrecognized arguments: {' '.join(extra)} (see fastdeploy-kvcache serve --help)")
    from .serve import serve  # first: an extra that is missing is the only thing to say
    from .text import load_tokenizer

    args.model = model_path = embedded_model(args.model, is_random=args.mtp or args.model_family is not None)
    from ..worker.runtime.base import free_host_memory

    config = server_config(
        args, load_model_config(model_path, args.model_family, mtp=args.mtp), free_bytes=free_host_memory()
    )
    logging.basicConfig(level=config.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    return serve(config, load_tokenizer(model_path), copy_faults=os.environ.get(COPY_FAULTS_VARIABLE, ""))


def _export_trace(args: argparse.Namespace) -> None:
    """FastDeploy takes the flag as a variable."""
    if args.record_trace is not None:
        os.environ[RECORD_VARIABLE] = args.record_trace
