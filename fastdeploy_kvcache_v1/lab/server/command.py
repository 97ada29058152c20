"""The `serve` command: this package's own server or, with --fastdeploy-cpu, FastDeploy's over the CPU worker."""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from ...contract.flags import add_flags
from ...errors import ConfigError, ModelFetchError
from ...telemetry.trace_recorder import VARIABLE as RECORD_VARIABLE
from ..hub.smollm2 import SMOLLM2, fetch
from ..model.config import load_model_config
from .settings import FLAGS, given_flags, server_config, with_defaults

__all__ = ["add_arguments", "embedded_model", "fastdeploy_cpu_model", "run"]

CPU_SERVER = "fastdeploy_kvcache_v1.lab.fastdeploy_cpu"

OWN_FLAGS = frozenset(flag.name for flag in FLAGS if flag.fastdeploy == "no")
"""Flags that FastDeploy's api_server does not have."""

RANDOM_WORD = "random"
SMOLLM2_WORD = "smollm2"
"""Words, not directories; `./random` and `./smollm2` are directories."""

EPILOG = """\
Exit status: 0 after SIGINT or SIGTERM; 1 after a worker process died and every open request was answered with 503 (run
the server under a supervisor that restarts it); 2 for a wrong setting or model.

GET /docs and /openapi.json describe the endpoints and request fields; docs/lab/server.md explains them. A chat without
max_tokens runs up to --max-model-len, a completion without it gets 16 tokens. The server has no password: without
--host it serves this machine only. On a GPU start FastDeploy's own server instead.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EPILOG
    parser.add_argument(
        "--config", type=Path, metavar="FILE", help="read flags from a YAML file; the command line wins"
    )
    parser.add_argument("--print-config", action="store_true", help="print the flags as such a file, and end")
    add_flags(parser, FLAGS)


def run(args: argparse.Namespace, extra: Sequence[str]) -> int:
    """Serve until a signal. `extra`: unknown flags. Raises `KVCacheError` before it listens."""
    others: dict[str, Any] = {}
    if args.config is not None or args.print_config:
        from . import config_file

        others = config_file.fill(args)
    if extra and (args.print_config or not args.fastdeploy_cpu):
        raise ConfigError(f"unrecognized arguments: {' '.join(extra)} (see fastdeploy-kvcache serve --help)")
    given = given_flags(args)
    if args.print_config:
        print(config_file.text({**(given if args.fastdeploy_cpu else with_defaults(given)), **others}), end="")
        return 0
    if args.fastdeploy_cpu:
        _exec_fastdeploy(given, [*_words(others), *extra])
    from .serve import serve  # first, to report a missing extra before anything else
    from .text import load_tokenizer

    model_path = embedded_model(args.model, is_random=args.mtp or args.model_family is not None)
    args.model = None if model_path is None else str(model_path)
    from ...worker.runtime.base import free_host_memory

    model = load_model_config(model_path, args.model_family, mtp=bool(args.mtp))
    config = server_config(args, model, free_bytes=free_host_memory())
    logging.basicConfig(level=config.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    return serve(config, load_tokenizer(model_path))


def _exec_fastdeploy(given: dict[str, Any], extra: Sequence[str]) -> NoReturn:
    """Replace this process by FastDeploy's server without a GPU, with its flags among the `given`."""
    if (path := given.get("record_trace")) is not None:
        os.environ[RECORD_VARIABLE] = str(path)  # FastDeploy takes it as a variable
    given["model"] = fastdeploy_cpu_model(given.get("model"))
    theirs = {name: value for name, value in given.items() if name not in OWN_FLAGS and value is not None}
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, [sys.executable, "-m", CPU_SERVER, *_words(theirs), *extra])


def _words(values: Mapping[str, Any]) -> Iterator[str]:
    """Flags as words of a command line."""
    for name, value in values.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            yield f"--{flag}" if value else f"--no-{flag}"
        else:
            yield from (f"--{flag}", json.dumps(value) if isinstance(value, (dict, list)) else str(value))


def embedded_model(word: str | None, *, is_random: bool = False) -> Path | None:
    """Directory that the embedded server loads; None is the random model.

    Without a word it is the random model if `is_random`, else SmolLM2. If SmolLM2 cannot be fetched, one line on
    standard error says why, and it is the random model. Raises `ModelFetchError` if the word asked for SmolLM2.
    """
    if word is None and not is_random:
        try:
            return fetch(SMOLLM2, _say)
        except ModelFetchError as error:
            _say(f"warning: {error}; until then, the random model is served")
            return None
    if word is None or word == RANDOM_WORD:
        return None
    return Path(_directory(word))


def fastdeploy_cpu_model(word: str | None) -> str | None:
    """`--model` for FastDeploy over the CPU worker; None is its random model. Raises `ModelFetchError`."""
    return None if word is None or word == RANDOM_WORD else _directory(word)


def _directory(word: str) -> str:
    return str(fetch(SMOLLM2, _say)) if word == SMOLLM2_WORD else word


def _say(line: str) -> None:
    print(f"fastdeploy-kvcache: {' '.join(line.split())}", file=sys.stderr, flush=True)
