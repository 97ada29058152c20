"""Patches of FastDeploy's environment variables, arguments and configuration."""

from __future__ import annotations

import argparse
import dataclasses
import logging
import os
from collections.abc import Callable
from typing import Any

import wrapt

from ..config import HELP, KVCacheConfig, WritePolicy
from ..errors import ConfigError
from ..storage.attention_store.sdk import require_installed, require_layout
from ..storage.settings import HELP as STORAGE_HELP
from ..storage.settings import StorageSettings, takes_host_blocks
from ..switch import SWITCH
from ..units import GIB
from .backends import MLA
from .refusals import require_served
from .settings import write_policy, write_through_threshold
from .storage_channel import storage_settings
from .swap_space import host_layout, require_amount, size_host_tier

logger = logging.getLogger(__name__)

Wrapped = Callable[..., Any]
Args = tuple[Any, ...]
Kwargs = dict[str, Any]


@dataclasses.dataclass
class _NewArguments:
    """Fields for FastDeploy's `EngineArgs`, each with a flag in `add_cli_arguments` and a name in `adds` of the patch
    table.
    """

    write_through_threshold: int | None = None
    eviction_policy: str = KVCacheConfig.eviction_policy
    kvcache_storage_dir: str | None = None
    kvcache_storage_gib: float = StorageSettings.capacity_bytes / GIB
    storage_prefetch: str = StorageSettings.prefetch.value


def add_switch(environment_variables: dict[str, Callable[[], Any]]) -> None:
    """Extends FastDeploy's list of environment variables, so that it shows ours among its own."""
    environment_variables[SWITCH] = lambda: int(os.getenv(SWITCH, "0"))


def add_arguments(engine_args: Any) -> None:
    """Extends the dataclass `EngineArgs` by our arguments, and gives it our default policy."""
    for name, field in _NewArguments.__dataclass_fields__.items():
        engine_args.__dataclass_fields__[name] = field
        setattr(engine_args, name, field.default)
    engine_args.write_policy = None
    wrapt.wrap_function_wrapper(engine_args, "__init__", _init_arguments)


def _init_arguments(wrapped: Wrapped, instance: Any, args: Args, kwargs: Kwargs) -> None:
    for name, field in _NewArguments.__dataclass_fields__.items():
        setattr(instance, name, kwargs.pop(name, field.default))
    given = {"write_policy": None, **kwargs}
    wrapped(*args, **given)
    if given.get("splitwise_role") == "decode" and not instance.enable_prefix_caching:
        # 2.5 switches it off in this role. Why else it may be off, it says of the other one.
        as_prefill = type(instance)(*args, **{**given, "splitwise_role": "prefill"})
        instance.enable_prefix_caching = as_prefill.enable_prefix_caching


def add_cli_arguments(wrapped: Wrapped, instance: Any, args: Args, kwargs: Kwargs) -> Any:
    """Wraps `EngineArgs.add_cli_args`: the choices of --write-policy, and the flags that FastDeploy does not have."""
    from ..scheduler.policies.eviction import known_eviction_policy  # workers, who parse nothing, do without it

    def eviction_policy(name: str) -> str:
        try:
            return known_eviction_policy(name)
        except ConfigError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    parser = wrapped(*args, **kwargs)
    policy = parser._option_string_actions["--write-policy"]
    policy.choices = [each.value for each in WritePolicy]
    policy.default = None
    policy.help = f"{HELP['write_policy']} (--swap-space)"
    parser.add_argument("--write-through-threshold", type=int, help=HELP["write_through_threshold"])
    parser.add_argument(
        "--eviction-policy",
        type=eviction_policy,
        default=KVCacheConfig.eviction_policy,
        help=f"{HELP['eviction_policy']} (%(default)s)",
    )
    for name, type_ in (("kvcache_storage_dir", str), ("kvcache_storage_gib", float), ("storage_prefetch", str)):
        default = _NewArguments.__dataclass_fields__[name].default
        parser.add_argument(f"--{name.replace('_', '-')}", type=type_, default=default, help=STORAGE_HELP[name])
    return parser


def add_cache_fields(cache_config: Any) -> None:
    """Extends `CacheConfig`: it takes over the arguments whose names it has as attributes."""
    for name in _NewArguments.__dataclass_fields__:
        setattr(cache_config, name, None)
    cache_config.sized_by_swap_space = False
    cache_config.host_block_bytes = None


def init_cache_config(wrapped: Wrapped, instance: Any, args: Args, kwargs: Kwargs) -> None:
    """Wraps `CacheConfig.__init__`: defaults (from the environment in workers) and validation.

    Raises `ConfigError`, for an amount of memory before FastDeploy computes with it: its own error names no flag.
    """
    given = kwargs["args"] if "args" in kwargs else args[0]
    if given.get("swap_space") is not None:
        require_amount(given["swap_space"])
    wrapped(*args, **kwargs)
    instance.sized_by_swap_space = bool(instance.swap_space) and given.get("num_cpu_blocks") is None
    stores = takes_host_blocks(instance.kvcache_storage_backend)
    instance.write_policy = write_policy(instance.write_policy, instance.write_through_threshold, stores=stores).value
    instance.write_through_threshold = write_through_threshold(instance.write_through_threshold)


def postprocess_config(wrapped: Wrapped, instance: Any, args: Args, kwargs: Kwargs) -> None:
    """Wraps `FDConfig.postprocess`: refuses what we cannot serve, sizes the host tier, switches off what cannot run
    with it.

    Raises `ConfigError` with every reason.
    """
    _note_speculation(instance)
    wrapped(*args, **kwargs)
    from fastdeploy import envs

    require_served(instance)
    chosen = storage_settings(instance.cache_config)
    if chosen is not None and chosen.uses_device_tier:
        require_installed()
        if not chosen.flush_only:
            require_layout(host_layout(instance, envs.FD_ATTENTION_BACKEND))
    size_host_tier(instance, envs.FD_ATTENTION_BACKEND)
    graphs = instance.graph_opt_config
    needs_python = {
        "prefill waits for layers being swapped in": instance.cache_config.num_cpu_blocks > 0,
        f"prefill with {MLA} reads cached prefixes": envs.FD_ATTENTION_BACKEND == MLA,
    }
    if any(needs_python.values()) and graphs is not None and graphs.cudagraph_only_prefill:
        why = next(why for why, applies in needs_python.items() if applies)
        logger.warning("cudagraph_only_prefill is switched off: %s", why)
        graphs.cudagraph_only_prefill = False


def _note_speculation(config: Any) -> None:
    """What the arguments ask for, before FastDeploy makes it what the role needs: names of stored blocks have it, so
    that a deployment's prefill servers find what its others have stored.
    """
    speculative = config.speculative_config
    if speculative is not None:
        asked = (getattr(speculative, name, None) for name in ("num_speculative_tokens", "num_model_steps"))
        config.asked_speculation = tuple(asked)
