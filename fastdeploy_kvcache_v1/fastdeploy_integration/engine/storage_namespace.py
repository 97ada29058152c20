"""Which stored blocks a FastDeploy server may use: those that it would compute itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ... import __version__
from ...scheduler.cache_utils import HASH_VERSION
from ...storage.model_digest import model_digest, paddle_version, processor
from ...storage.namespace import Namespace
from ..overlay import overlay
from ..swap_space import has_draft_layer, host_layout, kv_cache_quant_type

FROM_DIRECTORY = "0"
"""Weight epoch of weights that the model's directory holds."""

GPU_FILES = Path("/proc/driver/nvidia/gpus")
"""Where the driver says the model of each GPU, without starting CUDA in this process."""


def storage_namespace(config: Any, attention_backend: str) -> Namespace:
    """For the model of an `FDConfig`, as long as it has the weights of its directory. Reads all of them.

    Raises `ModelError`, `ConfigError`.
    """
    model, cache = config.model_config, config.cache_config
    kernels = f"{attention_backend}, weights {model.quantization!r}, cache {kv_cache_quant_type(config)}"
    release = overlay.active().table
    return Namespace(
        model=_all_weights(config),
        weight_epoch=FROM_DIRECTORY,
        layout=host_layout(config, attention_backend),
        block_size=int(cache.block_size),
        tensor_parallel_size=int(config.parallel_config.tensor_parallel_size),
        implementation=f"FastDeploy {release.release} {release.commit}, {__version__}, {paddle_version()}, "
        f"{kernels}, {_device()}",
        hash_version=HASH_VERSION.decode(),
    )


def _all_weights(config: Any) -> str:
    """Of the draft model too, whose layer is cached and stored with the others."""
    digest = model_digest(Path(config.model_config.model))
    if not has_draft_layer(config):
        return digest
    return f"{digest} {model_digest(Path(config.speculative_config.model))}"


def has_weights_of_directory(config: Any) -> bool:
    """Whether an `FDConfig` says that the workers read their weights from the model's directory."""
    load = config.load_config
    is_dummy = load is not None and str(load.load_choices).rpartition(".")[2].lower() == "dummy"
    return load is None or not (is_dummy or load.dynamic_load_weight)


def _device() -> str:
    models = set()
    for path in sorted(GPU_FILES.glob("*/information")):
        lines = path.read_text().splitlines()
        models |= {line.partition(":")[2].strip() for line in lines if line.startswith("Model:")}
    return " and ".join(sorted(models)) or processor()
