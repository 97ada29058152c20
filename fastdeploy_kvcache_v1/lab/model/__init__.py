"""Models of the CPU servers: the random one, whose KV is a checksum, and Llama, Qwen2 and Qwen3 of a directory.

`config` describes a model and `reproducible` prepares the process; neither imports paddle.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from .config import ChecksumConfig, ModelConfig, load_model_config
from .reproducible import configure_reproducible_math, default_threads

if TYPE_CHECKING:
    from ...attention.base import CacheLayout
    from .ranks import Ranks
    from .step_runner import Model

__all__ = ["ModelConfig", "configure_reproducible_math", "default_threads", "load_model", "load_model_config"]


def load_model(path: Path | None, config: ModelConfig, layout: CacheLayout, ranks: Ranks) -> Model:
    """The model of `config` as one of `ranks`, with a cache of `layout`. Reads the weights of directory `path`.

    Raises `ModelError` for weights that do not fit. Loads paddle: call `configure_reproducible_math` before.
    """
    if isinstance(config, ChecksumConfig):
        from .checksum import ChecksumModel
        from .directory import read_seed

        return ChecksumModel(config, layout, seed=0 if path is None else read_seed(path), ranks=ranks)
    from .llama import Llama

    assert path is not None, "only the random model needs no directory"
    return Llama.load(path, config)
