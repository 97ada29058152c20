"""Where the ranks of a server are, and what their blocks mean, from FastDeploy's configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ...errors import ConfigError, ModelError
from ...storage.model_digest import model_digest
from .settings import RankPlace


def place_of(config: Any) -> RankPlace:
    """Of an `FDConfig`. Reads all weights: blocks of another fine-tuning have the same shape. Raises `ConfigError`."""
    ports = config.cache_config.local_rdma_comm_ports or ()
    try:
        model = model_digest(Path(config.model_config.model))
    except ModelError as error:
        raise ConfigError(f"prefill and decode servers compare their models: {error}") from None
    return RankPlace(
        config.host_ip, tuple(int(port) for port in ports), f"{model} {config.model_config.quantization!r}"
    )
