"""What `--model` names: a directory, the model that is fetched once, or the random model."""

from __future__ import annotations

import sys
from pathlib import Path

from ..errors import ModelFetchError
from ..model_hub.smollm2 import SMOLLM2, fetch

RANDOM_WORD = "random"
SMOLLM2_WORD = "smollm2"
"""Words rather than directories; `./random` and `./smollm2` are directories."""


def embedded_model(word: str | None, *, is_random: bool = False) -> Path | None:
    """Directory that the embedded server loads; None is the random model.

    Without a word it is the random model if `is_random`, where something of it was asked for. Else it is SmolLM2 or,
    after one line on standard error that says why not, the random model. Raises `ModelFetchError` when SmolLM2 was
    asked for and cannot be had.
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
