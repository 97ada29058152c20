"""Which stored blocks a FastDeploy server may use: those that it would compute itself."""

from __future__ import annotations

import enum
import hashlib
import logging
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from ... import __version__
from ...scheduler.block_hashing import HASH_VERSION
from ...storage.model_digest import model_digest, numeric_variables, paddle_version, processor
from ...storage.namespace import Namespace
from ..overlay import overlay
from ..swap_space import has_draft_layer, host_layout, kv_cache_quant_type

logger = logging.getLogger(__name__)

FROM_DIRECTORY = "0"
"""Weight epoch of weights that the model's directory holds."""

GPU_FILES = Path("/proc/driver/nvidia/gpus")
"""Where the driver says the model of each GPU, without starting CUDA in this process."""

VARIABLES = "fastdeploy.envs:environment_variables"
PREFIXES = ("FD_", "USE_", "SOT_", "FLASHINFER_", "PER_TOKEN_QUANT_", "INFER_WITH_")
"""Of the variables that FastDeploy and its kernels read, in that table or beside it."""
ADDRESS = re.compile(r"<[^<>]* at 0x[0-9a-fA-F]+>")
"""How Python shows an object that does not say what it holds: with its place in this process."""
OURS = "FD_KVCACHE_V1_"
"""Of what the engine tells its workers for this package: addresses, sizes and policies."""


def storage_namespace(config: Any, attention_backend: str, settings: str | None = None) -> Namespace:
    """For the model of an `FDConfig`, as long as it has the weights of its directory. Reads all of them.

    `settings`: its `settings_digest`, if another thread may change the configuration meanwhile. Raises `ModelError`,
    `ConfigError`.
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
        f"{kernels}, {_device()}, settings {settings or settings_digest(config)}",
        hash_version=HASH_VERSION.decode(),
    )


def settings_digest(config: Any, known_variables: Collection[str] = ()) -> str:
    """Of every setting in an `FDConfig`, and every variable of FastDeploy, its kernels and their libraries, but those
    that the patch table knows not to decide the bytes of a block (`not_in_names`): 32 hexadecimal digits.

    What nobody has thought of gives another name: a miss, and never a wrong byte. `known_variables`: FastDeploy's own
    list of its variables, whatever they are called. Only a digest is kept, because settings may be secrets.
    """
    left_out = overlay.active().table.not_in_names
    variables = numeric_variables(PREFIXES, more=known_variables, without=left_out.get(VARIABLES, ()))
    variables = [each for each in variables if not each.startswith(OURS)]
    text = _text(config, left_out)
    if unread := sorted({*ADDRESS.findall(text)}):
        logger.warning("no other process finds stored blocks of this one, as its settings hold %s", ", ".join(unread))
    return hashlib.sha256(f"{text} {variables}".encode()).hexdigest()[:32]


def _text(value: Any, left_out: Mapping[str, Collection[str]], within: tuple[int, ...] = ()) -> str:
    """The same in every process for the same settings. What cannot be looked into has its address in its text, and
    so a name that no other process finds, of which `settings_digest` warns.
    """
    if isinstance(value, enum.Enum):
        value = value.value
    if id(value) in within:
        return "itself"
    within = (*within, id(value))
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(_text(each, left_out, within) for each in value)}]"
    if isinstance(value, (set, frozenset)):
        return f"set{sorted(_text(each, left_out, within) for each in value)}"
    if isinstance(value, dict):
        pairs = (f"{_text(key, left_out, within)}: {_text(each, left_out, within)}" for key, each in value.items())
        return f"dict{sorted(pairs)}"
    if callable(value) or not getattr(value, "__dict__", None):
        return repr(value)
    name = f"{type(value).__module__}:{type(value).__qualname__}"
    unnamed = left_out.get(name, ())
    fields = ((each, held) for each, held in sorted(vars(value).items()) if each not in unnamed)
    return f"{name}({', '.join(f'{each}={_text(held, left_out, within)}' for each, held in fields)})"


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
