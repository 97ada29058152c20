"""Patches of FastDeploy's environment variables, arguments and configuration."""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Callable
from typing import Any

import wrapt

from ..config import KVCacheConfig, WritePolicy
from ..contract.flags import SWAP_SPACE, WRITE_POLICY, add_flags
from ..storage.attention_store.sdk import require_installed, require_layout
from ..storage.registry import known_names
from ..storage.settings import takes_host_blocks
from ..switch import SWITCH
from . import Args, Kwargs, Wrapped
from .backends import MLA
from .refusals import require_served
from .settings import ADDED_FLAGS, storage_settings
from .swap_space import host_layout, size_host_tier

logger = logging.getLogger(__name__)


def add_switch(environment_variables: dict[str, Callable[[], Any]]) -> None:
    """Extend FastDeploy's list of environment variables, so that it shows the switch."""
    environment_variables[SWITCH] = lambda: int(os.getenv(SWITCH, "0"))


def add_arguments(engine_args: Any) -> None:
    """Extend the dataclass `EngineArgs` by our arguments and our default policy."""
    added = dataclasses.make_dataclass("Added", [(flag.name, Any, flag.default) for flag in ADDED_FLAGS])
    for field in dataclasses.fields(added):
        engine_args.__dataclass_fields__[field.name] = field
        setattr(engine_args, field.name, field.default)
    engine_args.write_policy = None
    wrapt.wrap_function_wrapper(engine_args, "__init__", _init_arguments)


def _init_arguments(wrapped: Wrapped, instance: Any, args: Args, kwargs: Kwargs) -> None:
    for flag in ADDED_FLAGS:
        setattr(instance, flag.name, kwargs.pop(flag.name, flag.default))
    given = {"write_policy": None, **kwargs}
    if given.get("splitwise_role") != "decode":
        wrapped(*args, **given)
        return
    wrapped(*args, **{**given, "kvcache_storage_backend": None})
    instance.kvcache_storage_backend = given.get("kvcache_storage_backend")
    if not instance.enable_prefix_caching:
        # 2.5 switches it off for decode, and refuses a store then; other reasons hold for prefill as well.
        as_prefill = type(instance)(*args, **{**given, "splitwise_role": "prefill"})
        instance.enable_prefix_caching = as_prefill.enable_prefix_caching


def add_cli_arguments(wrapped: Wrapped, instance: Any, args: Args, kwargs: Kwargs) -> Any:
    """Wraps `EngineArgs.add_cli_args`. `init_cache_config` checks the values, which may come from a file."""
    parser = wrapped(*args, **kwargs)
    policy = parser._option_string_actions[WRITE_POLICY.option]
    policy.choices, policy.default, policy.help = None, None, f"{WRITE_POLICY.full_help} (--swap-space)"
    parser._option_string_actions["--kvcache-storage-backend"].choices = known_names()
    add_flags(parser, ADDED_FLAGS, with_defaults=True)
    return parser


def add_cache_fields(cache_config: Any) -> None:
    """Extend `CacheConfig`, which takes over the arguments whose names it has as attributes."""
    for flag in ADDED_FLAGS:
        setattr(cache_config, flag.name, None)
    cache_config.sized_by_swap_space = False
    cache_config.host_block_bytes = None


def init_cache_config(wrapped: Wrapped, instance: Any, args: Args, kwargs: Kwargs) -> None:
    """Wraps `CacheConfig.__init__`. Raises `ConfigError` with the wrong flag, before FastDeploy computes with it."""
    given = kwargs["args"] if "args" in kwargs else args[0]
    for flag in (SWAP_SPACE, WRITE_POLICY, *ADDED_FLAGS):
        if (value := given.get(flag.name)) is not None:
            flag.checked(value)
    wrapped(*args, **kwargs)
    instance.sized_by_swap_space = bool(instance.swap_space) and given.get("num_cpu_blocks") is None
    stores = takes_host_blocks(instance.kvcache_storage_backend)
    threshold = instance.write_through_threshold
    instance.write_policy = WritePolicy.chosen(instance.write_policy, threshold, stores=stores).value
    instance.write_through_threshold = KVCacheConfig.write_through_threshold if threshold is None else threshold


def postprocess_config(wrapped: Wrapped, instance: Any, args: Args, kwargs: Kwargs) -> None:
    """Wraps `FDConfig.postprocess`. Raises `ConfigError` with every refused setting."""
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
    """Keep the arguments' speculation for names of stored blocks: FastDeploy changes it on a prefill server."""
    speculative = config.speculative_config
    if speculative is not None:
        asked = (getattr(speculative, name, None) for name in ("num_speculative_tokens", "num_model_steps"))
        config.asked_speculation = tuple(asked)
