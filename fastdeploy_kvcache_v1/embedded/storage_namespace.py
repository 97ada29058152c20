"""Which stored blocks the embedded server may use: those that it would compute bit by bit itself."""

from __future__ import annotations

from .. import __version__
from ..model import load_model_config
from ..scheduler.cache_utils import HASH_VERSION
from ..storage.model_digest import model_digest, numeric_variables, paddle_version, processor
from ..storage.namespace import Namespace
from .settings import ServerConfig

__all__ = ["storage_namespace"]


def storage_namespace(config: ServerConfig) -> Namespace:
    """Reads the whole model. Raises `ModelError`."""
    model = load_model_config(config.model_path, config.model_family, mtp=config.mtp)
    own = model.shard(config.tensor_parallel_size)
    backend = own.cache_backend(block_size=config.cache.block_size, dtype=config.cache_dtype)
    math_library = f"{paddle_version()}, {', '.join(numeric_variables())}"
    return Namespace(
        model=f"{model}" if config.model_path is None else model_digest(config.model_path),
        weight_epoch="0",
        layout=backend.layout,
        block_size=config.cache.block_size,
        tensor_parallel_size=config.tensor_parallel_size,
        implementation=f"embedded {__version__}, {math_library}, {processor()}",
        hash_version=HASH_VERSION.decode(),
    )
