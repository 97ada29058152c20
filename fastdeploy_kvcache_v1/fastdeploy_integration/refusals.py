"""Settings with which FastDeploy's server does not start while this package is on. A new refusal is a row here."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..errors import ConfigError
from ..storage.settings import takes_host_blocks
from ..switch import SWITCH
from .backends import BLOCK_WISE_FP8, DSA, MLA, NATIVE, PLAS
from .disaggregation.settings import CUDA_IPC, PLANE
from .overlay import overlay
from .overlay.table import PatchTable
from .settings import RUN_DIRECTORY
from .swap_space import has_draft_layer, kv_cache_quant_type

FOREIGN = ("xpu", "intel_hpu", "maca", "iluvatar", "gcu", "dcu")
"""Platforms of FastDeploy whose model runners we do not patch."""


@dataclass(frozen=True, kw_only=True)
class Facts:
    config: Any
    fastdeploy: PatchTable
    v1_scheduler: bool
    sees_gpu: bool
    """Without a GPU FastDeploy chooses the V0 scheduler. A CPU worker counts as a GPU."""
    attention: str
    """FD_ATTENTION_BACKEND."""
    whole_prompts: bool
    """The scheduler does not cut prompts into chunks."""
    platform: str | None
    """A name of `FOREIGN`, or None."""
    pd_via_storage: bool
    environment: Mapping[str, str]

    @classmethod
    def of(cls, config: Any) -> Facts:
        """Reads the rest from FastDeploy in this process."""
        from fastdeploy import envs
        from fastdeploy.platforms import current_platform

        def answers(question: str) -> bool:
            return bool(getattr(current_platform, question, bool)())

        return cls(
            config=config,
            fastdeploy=overlay.active().table,
            v1_scheduler=bool(int(envs.ENABLE_V1_KVCACHE_SCHEDULER)),
            sees_gpu=answers("is_cuda") or RUN_DIRECTORY in os.environ,
            attention=envs.FD_ATTENTION_BACKEND,
            whole_prompts=bool(envs.FD_DISABLE_CHUNKED_PREFILL) and not getattr(envs, "FD_DETERMINISTIC_MODE", False),
            platform=next((name for name in FOREIGN if answers(f"is_{name}")), None),
            pd_via_storage=bool(getattr(envs, "FD_PD_TRANSFER_VIA_STORAGE", 0)),
            environment=os.environ,
        )

    @property
    def role(self) -> str:
        return str(self.config.scheduler_config.splitwise_role)

    @property
    def store(self) -> str:
        return self.config.cache_config.kvcache_storage_backend or ""

    @property
    def swaps(self) -> bool:
        cache = self.config.cache_config
        return bool(cache.num_cpu_blocks > 0 or cache.sized_by_swap_space)

    @property
    def is_fp8(self) -> bool:
        return kv_cache_quant_type(self.config) == BLOCK_WISE_FP8

    @property
    def graph_level(self) -> int:
        return int(getattr(self.config.graph_opt_config, "graph_opt_level", 0))

    def spans_machines(self) -> bool:
        return int(self.config.parallel_config.tensor_parallel_size) > int(self.config.worker_num_per_node)

    def replays_routing(self) -> bool:
        return bool(getattr(self.config.routing_replay_config, "enable_routing_replay", False))

    def lacks_router(self) -> bool:
        router = self.config.router_config  # None in a worker
        return router is not None and not router.router

    def reloads_weights(self) -> bool:
        return self.config.load_config is not None and bool(self.config.load_config.dynamic_load_weight)

    def has_set(self, variable: str) -> bool:
        return self.environment.get(variable, "0") == "1"


class Refusal(NamedTuple):
    """`setting` is refused for `reason`; `instead` says what to do. `{0.name}` is a field of `Facts`."""

    setting: str
    reason: str
    instead: str
    applies: Callable[[Facts], bool]


OTHER_ATTENTION = "choose another FD_ATTENTION_BACKEND"
ROUTER_ONLY = "prefill and decode servers find each other through FastDeploy's router"
UNFOLLOWED = "it hands requests over by a path that this package does not patch"

# fmt: off
REFUSALS = (
    Refusal("--kvcache-storage-backend {0.store} without --swap-space",
            "stored blocks pass through the host tier", "give --swap-space GIB",
            lambda facts: facts.store != "" and takes_host_blocks(facts.store) and not facts.swaps),
    Refusal("--kvcache-storage-backend {0.store} with tensor parallelism over several machines",
            "a rank reaches only the store of an engine on its machine", "keep tensor-parallel groups on one machine",
            lambda facts: facts.store != "" and facts.spans_machines()),
    Refusal("FD_PD_TRANSFER_VIA_STORAGE=1",
            "prefill and decode workers read each other's blocks without a store", "unset it",
            lambda facts: facts.pd_via_storage),
    Refusal("no CUDA GPU is seen",
            "FastDeploy's own workers need one",
            "install paddlepaddle-gpu, or run `fastdeploy-kvcache serve --fastdeploy-cpu`",
            lambda facts: not facts.v1_scheduler and not facts.sees_gpu and facts.platform is None),
    Refusal("ENABLE_V1_KVCACHE_SCHEDULER=0",
            "the V0 scheduler uses another cache manager", "unset it",
            lambda facts: not facts.v1_scheduler and facts.sees_gpu),
    Refusal("the {0.platform} platform",
            "this package cannot copy its blocks", "use an NVIDIA GPU",
            lambda facts: facts.platform is not None),
    Refusal(PLAS,
            "it keeps means of key blocks outside the cache", OTHER_ATTENTION,
            lambda facts: facts.attention == PLAS),
    Refusal(NATIVE,
            "FastDeploy cannot make it for a GPU", OTHER_ATTENTION,
            lambda facts: facts.attention == NATIVE),
    Refusal(f"{DSA} with prefix caching or prompts in chunks",
            "its prefill attends only to tokens of its own pass, so output tokens would be wrong",
            "set FD_DISABLE_CHUNKED_PREFILL=1 and --no-enable-prefix-caching, and unset FD_DETERMINISTIC_MODE",
            lambda facts: facts.attention == DSA
            and (facts.config.cache_config.enable_prefix_caching or not facts.whole_prompts)),
    Refusal(f"{MLA} with {BLOCK_WISE_FP8}",
            "its kernels expect one tensor per layer", "choose another quantization of the cache, or none",
            lambda facts: facts.attention == MLA and facts.is_fp8),
    Refusal(f"{MLA} with graph_opt_level {{0.graph_level}}",
            "a static graph ignores the cached part of a prompt", "set graph_opt_level to 0",
            lambda facts: facts.attention == MLA and facts.graph_level > 0),
    Refusal(f"speculative method mtp with {MLA} or {DSA}",
            "FastDeploy has no draft model for it", "choose another speculative method, or none",
            lambda facts: facts.attention in (MLA, DSA) and has_draft_layer(facts.config)),
    Refusal(f"{BLOCK_WISE_FP8} without APPEND_ATTN in FastDeploy {{0.fastdeploy.release}}",
            "other attention backends give the scales of another layer to their kernels",
            "set FD_ATTENTION_BACKEND=APPEND_ATTN",
            lambda facts: facts.is_fp8 and not facts.fastdeploy.capabilities.flash_block_wise_fp8
            and facts.attention != "APPEND_ATTN"),
    Refusal("routing replay with --swap-space",
            "FastDeploy keeps the routing of tokens by device block, and swaps move the block without it",
            "leave out one of the two",
            lambda facts: facts.swaps and facts.replays_routing()),
)
OF_ROLES = (
    Refusal("on a GPU",
            "no server starts a data plane on GPU memory yet",
            "run `fastdeploy-kvcache serve --fastdeploy-cpu`, which has roles",
            lambda facts: RUN_DIRECTORY not in facts.environment),
    Refusal(f"with {PLANE}={CUDA_IPC}",
            f"{CUDA_IPC} needs a GPU", "choose socket or mooncake",
            lambda facts: RUN_DIRECTORY in facts.environment and facts.environment.get(PLANE) == CUDA_IPC),
    Refusal("with --scheduler-name {0.config.scheduler_config.name}", ROUTER_ONLY, "choose local, and give --router",
            lambda facts: facts.config.scheduler_config.name != "local"),
    Refusal("without --router", ROUTER_ONLY, "give its address",
            lambda facts: facts.config.scheduler_config.name == "local" and facts.lacks_router()),
    Refusal("with --kvcache-storage-backend {0.store}",
            "servers with a role exchange blocks with a store through the host tier only", "choose file or mooncake",
            lambda facts: facts.store != "" and not takes_host_blocks(facts.store)),
    Refusal("with data parallelism",
            "a server has the peers of one group only", "start a server for each group",
            lambda facts: int(facts.config.parallel_config.data_parallel_size) > 1),
    Refusal("with speculative decoding",
            "draft tokens are not sent to decode", "leave out --speculative-config",
            lambda facts: facts.config.speculative_config.method is not None),
    Refusal("with --dynamic-load-weight",
            "its weight updates do not end open transfers first",
            "leave it out; to update, pause both servers, use update_weights and resume",
            lambda facts: facts.reloads_weights()),
    Refusal("with FD_ENABLE_INTERNAL_ADAPTER=1", UNFOLLOWED, "unset it",
            lambda facts: facts.has_set("FD_ENABLE_INTERNAL_ADAPTER")),
    Refusal("with FD_ENABLE_CACHE_TASK=1", UNFOLLOWED, "unset it",
            lambda facts: facts.has_set("FD_ENABLE_CACHE_TASK")),
)
"""For prefill and decode servers, in addition."""
# fmt: on


def refused(facts: Facts) -> list[str]:
    """One line for each refused setting."""
    rows = list(REFUSALS)
    if facts.role != "mixed":
        rows += [row._replace(setting=f"--splitwise-role {facts.role} {row.setting}") for row in OF_ROLES]
    return [f"{row.setting} ({row.reason}): {row.instead}".format(facts) for row in rows if row.applies(facts)]


def require_served(config: Any) -> None:
    """Raises `ConfigError` with every refused setting of an `FDConfig`."""
    if reasons := refused(Facts.of(config)):
        raise ConfigError(f"{SWITCH}=1 cannot serve this: {'; '.join(reasons)}. Change it, or unset {SWITCH}")
