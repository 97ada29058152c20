"""What FastDeploy's server refuses to start with while this package is on: a new refusal is a row here."""

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
"""Devices of FastDeploy's whose model runner we do not patch, so that nothing copies their blocks."""


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What decides whether an `FDConfig` can be served."""

    config: Any
    fastdeploy: PatchTable
    """Of the release that runs."""
    v1_scheduler: bool
    sees_gpu: bool
    """Else FastDeploy has chosen the V0 scheduler itself. A CPU worker stands for a GPU."""
    attention: str
    """FD_ATTENTION_BACKEND."""
    whole_prompts: bool
    """The settings ask the scheduler to cut no prompt into chunks."""
    platform: str | None
    """One of `FOREIGN`, if it is one."""
    pd_via_storage: bool
    environment: Mapping[str, str]

    @classmethod
    def of(cls, config: Any) -> Facts:
        """In this process of FastDeploy."""
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
        router = self.config.router_config  # a worker knows of no router
        return router is not None and not router.router

    def reloads_weights(self) -> bool:
        return self.config.load_config is not None and bool(self.config.load_config.dynamic_load_weight)

    def has_set(self, variable: str) -> bool:
        return self.environment.get(variable, "0") == "1"


class Refusal(NamedTuple):
    """`setting` cannot be served for `reason`; `instead` is what to do. `{0.name}` is that of the `Facts`."""

    setting: str
    reason: str
    instead: str
    applies: Callable[[Facts], bool]


OTHER_ATTENTION = "choose another FD_ATTENTION_BACKEND"
ROUTER_ONLY = "prefill and decode servers find each other by FastDeploy's router"
UNFOLLOWED = "it hands requests over in a way that this package does not follow"

# fmt: off
REFUSALS = (
    Refusal("--kvcache-storage-backend {0.store} without --swap-space",
            "its blocks go through the host tier", "give --swap-space GIB",
            lambda facts: facts.store != "" and takes_host_blocks(facts.store) and not facts.swaps),
    Refusal("--kvcache-storage-backend {0.store} with tensor parallelism over several machines",
            "ranks reach the store of their engine on its machine only", "keep tensor-parallel groups on one machine",
            lambda facts: facts.store != "" and facts.spans_machines()),
    Refusal("FD_PD_TRANSFER_VIA_STORAGE=1",
            "prefill and decode workers read each other's blocks without a store", "unset it",
            lambda facts: facts.pd_via_storage),
    Refusal("no CUDA GPU is seen",
            "FastDeploy's own workers need one",
            "install paddlepaddle-gpu, or run `fastdeploy-kvcache serve --fastdeploy-cpu`",
            lambda facts: not facts.v1_scheduler and not facts.sees_gpu and facts.platform is None),
    Refusal("ENABLE_V1_KVCACHE_SCHEDULER=0",
            "the V0 scheduler takes another cache manager", "unset it",
            lambda facts: not facts.v1_scheduler and facts.sees_gpu),
    Refusal("the {0.platform} platform",
            "nothing of this package copies its blocks", "use an NVIDIA GPU",
            lambda facts: facts.platform is not None),
    Refusal(PLAS,
            "it keeps means of key blocks outside the cache", OTHER_ATTENTION,
            lambda facts: facts.attention == PLAS),
    Refusal(NATIVE,
            "FastDeploy cannot make it for a GPU", OTHER_ATTENTION,
            lambda facts: facts.attention == NATIVE),
    Refusal(f"{DSA} with prefix caching or prompts in chunks",
            "its prefill attends to the tokens of its own pass, so the tokens would be wrong",
            "set FD_DISABLE_CHUNKED_PREFILL=1 and --no-enable-prefix-caching, and unset FD_DETERMINISTIC_MODE",
            lambda facts: facts.attention == DSA
            and (facts.config.cache_config.enable_prefix_caching or not facts.whole_prompts)),
    Refusal(f"{MLA} with {BLOCK_WISE_FP8}",
            "its kernels expect one tensor per layer", "choose another quantization of the cache, or none",
            lambda facts: facts.attention == MLA and facts.is_fp8),
    Refusal(f"{MLA} with graph_opt_level {{0.graph_level}}",
            "a static graph leaves out what a prompt has in the cache", "set graph_opt_level to 0",
            lambda facts: facts.attention == MLA and facts.graph_level > 0),
    Refusal(f"speculative method mtp with {MLA} or {DSA}",
            "FastDeploy has no draft model for it", "choose another speculative method, or none",
            lambda facts: facts.attention in (MLA, DSA) and has_draft_layer(facts.config)),
    Refusal(f"{BLOCK_WISE_FP8} without APPEND_ATTN in FastDeploy {{0.fastdeploy.release}}",
            "other attention backends hand the scales of another layer to their kernels",
            "set FD_ATTENTION_BACKEND=APPEND_ATTN",
            lambda facts: facts.is_fp8 and not facts.fastdeploy.capabilities.flash_block_wise_fp8
            and facts.attention != "APPEND_ATTN"),
    Refusal("routing replay with --swap-space",
            "FastDeploy keeps the routing of tokens by their block on the device, and swaps move the block alone",
            "leave one of the two out",
            lambda facts: facts.swaps and facts.replays_routing()),
)
OF_ROLES = (
    Refusal("on a GPU",
            "no data plane has read the memory of one yet",
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
            "only prefill servers load and store, and through the host tier",
            "leave it out at decode, and choose a store of the host tier at prefill",
            lambda facts: facts.store != "" and (facts.role == "decode" or not takes_host_blocks(facts.store))),
    Refusal("with data parallelism",
            "the peers of a server are those of one group", "start a server for each group",
            lambda facts: int(facts.config.parallel_config.data_parallel_size) > 1),
    Refusal("with speculative decoding",
            "draft tokens are not handed over", "leave --speculative-config out",
            lambda facts: facts.config.speculative_config.method is not None),
    Refusal("with --dynamic-load-weight",
            "its weight updates do not first end open transfers", "pause both servers, update the weights, and resume",
            lambda facts: facts.reloads_weights()),
    Refusal("with FD_ENABLE_INTERNAL_ADAPTER=1", UNFOLLOWED, "unset it",
            lambda facts: facts.has_set("FD_ENABLE_INTERNAL_ADAPTER")),
    Refusal("with FD_ENABLE_CACHE_TASK=1", UNFOLLOWED, "unset it",
            lambda facts: facts.has_set("FD_ENABLE_CACHE_TASK")),
)
"""Of prefill and decode servers, in addition."""
# fmt: on


def refused(facts: Facts) -> list[str]:
    """Why these cannot be served, a line for each reason; empty when they can."""
    rows = list(REFUSALS)
    if facts.role != "mixed":
        rows += [row._replace(setting=f"--splitwise-role {facts.role} {row.setting}") for row in OF_ROLES]
    return [f"{row.setting} ({row.reason}): {row.instead}".format(facts) for row in rows if row.applies(facts)]


def require_served(config: Any) -> None:
    """Raises `ConfigError` with every reason for which this `FDConfig` cannot be served."""
    if reasons := refused(Facts.of(config)):
        raise ConfigError(f"{SWITCH}=1 cannot serve this: {'; '.join(reasons)}. Change it, or unset {SWITCH}")
