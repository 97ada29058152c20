"""Functions of the tables `patches/cpu-worker-*.toml`. Some replace module globals of FastDeploy that need a GPU."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy
from types import SimpleNamespace
from typing import Any

from ...errors import ConfigError
from ...fastdeploy_integration import Args, Kwargs, Wrapped
from ...fastdeploy_integration.overlay.table import Where
from ...switch import SWITCH
from . import activation
from .tasks import unsupported
from .token_channel import get_output, unsupported_output

LAUNCH = "fastdeploy_kvcache_v1.lab.fastdeploy_cpu.launch"

_WORKER_COMMAND = re.compile(
    r"^(?P<variables>(?:\w+=\S* +)*)(?P<python>\S+) (?:-u )? *-m paddle\.distributed\.launch --log_dir (?P<log>\S+) "
    r"+--devices \S+ \S+/worker_process\.py (?P<arguments>.*) 2>(?P<errors>\S+)$",
    re.DOTALL,
)
_GROUP, _ENGINES = (re.compile(rf"--{kind}[-_]parallel[-_]size (\d+)") for kind in ("tensor", "data"))


def cpu_worker_command(command: str) -> str:
    """The shell command that starts our worker or ranks with the arguments of FastDeploy's `command`.

    Output goes to files, for FastDeploy does not read it. Raises `ConfigError` for a command of unknown form.
    """
    found = _WORKER_COMMAND.match(command)
    if found is None:
        raise ConfigError(f"got an unknown command for FastDeploy's worker: {command}: install a supported release")
    part = found.groupdict()
    group, size = _sizes(part["arguments"])
    if size == 1:
        role, output = "worker", f"{part['log']}/workerlog.0"
    else:
        role, output = f"ranks {size} {group} {part['log']}", os.devnull
    return (
        f"exec env {part['variables']}{part['python']} -u -m {LAUNCH} {role} {part['arguments']} "
        f">{output} 2>{part['errors']}"
    )


def _sizes(arguments: str) -> tuple[int, int]:
    """Ranks of one engine, and of all."""
    group, engines = (int(found[1]) if (found := flag.search(arguments)) else 1 for flag in (_GROUP, _ENGINES))
    return group, group * engines


def as_cuda(wrapped: Wrapped, instance: Any, args: Args, kwargs: Kwargs) -> Any:
    """Wraps functions that switch off features on other platforms than CUDA."""
    platform = copy(wrapped.__globals__["current_platform"])
    platform.is_cuda = lambda: True
    wrapped.__globals__["current_platform"] = platform
    return wrapped(*args, **kwargs)


def model_config(wrapped: Wrapped, instance: Any, args: Args, kwargs: Kwargs) -> None:
    """Wraps the reading of a model's configuration. Real models compute and cache in float32, also with
    weights of another dtype, and engine and worker must count the same bytes of a block.
    """
    wrapped(*args, **kwargs)
    if not getattr(instance, "checksum_model", False):  # the random model supports every cache dtype
        instance.dtype = "float32"


def make_get_worker(original: Wrapped) -> Wrapped:
    """Replaces the choice of a worker by platform."""

    def get_worker(fd_config: Any, local_rank: int, rank: int) -> Any:
        from .worker import CpuWorker

        return CpuWorker(fd_config, local_rank, rank)

    return get_worker


def start_worker_service(wrapped: Wrapped, instance: Any, args: Args, kwargs: Kwargs) -> Any:
    """Wraps the start of the worker process: start ours."""

    def start(command: str, **options: Any) -> subprocess.Popen[bytes]:
        return subprocess.Popen(cpu_worker_command(command), **options)

    activation.require_complete(Where.ENGINE)
    with _starting_by(start, wrapped.__globals__):
        return wrapped(*args, **kwargs)


def start_servers(wrapped: Wrapped, instance: Any, args: Args, kwargs: Kwargs) -> Any:
    """Wraps the start of an API server for each data parallel engine: start ours, with a device for each rank."""

    def start(command: list[str], **options: Any) -> subprocess.Popen[bytes]:
        python, _, _, *arguments = command
        return subprocess.Popen([python, "-u", "-m", LAUNCH, "api", *arguments], **options)

    _, num_devices = _sizes(" ".join(kwargs["server_args"]))
    with _starting_by(start, wrapped.__globals__):
        return wrapped(*args, **{**kwargs, "device_count": num_devices})


@contextmanager
def _starting_by(start: Callable[..., subprocess.Popen[bytes]], names: dict[str, Any]) -> Iterator[None]:
    """Meanwhile the module with these `names` starts processes by `start`."""
    names["subprocess"] = SimpleNamespace(**{**vars(subprocess), "Popen": start})
    try:
        yield
    finally:
        names["subprocess"] = subprocess


def read_tokens(wrapped: Wrapped, instance: Any, args: Args, kwargs: Kwargs) -> Any:
    """Wraps the thread that reads the worker's tokens: provide the ops that it imports."""
    from fastdeploy.model_executor.ops import gpu

    for name in ("get_output", "get_output_ep"):  # the second one with several data parallel engines
        vars(gpu)[name] = get_output
    for name in ("get_output_topk", "speculate_get_output", "speculate_get_output_topk"):
        vars(gpu)[name] = unsupported_output
    return wrapped(*args, **kwargs)


def check_parameters(wrapped: Wrapped, instance: Any, args: Args, kwargs: Kwargs) -> Any:
    """Wraps the API server's last check of a request. Raises FastDeploy's error for HTTP 400."""

    def check(data: Any) -> Any:
        name = unsupported(data)
        if name is not None:
            from fastdeploy.utils import ParameterError

            raise ParameterError(name, f"{name} is not supported by the CPU worker: leave it out")
        return wrapped(data)

    return check(*args, **kwargs)


def make_cache_shape(original: Wrapped) -> Wrapped:
    """Replaces a call of an attention backend, which needs the GPU ops. FastDeploy only prints the result."""

    def _get_kv_cache_shape(self: Any, max_block_num: int) -> tuple[list[int], list[int]]:
        model = self.config.model_config
        shape = [max_block_num, int(model.num_key_value_heads), self.cache_config.block_size, model.head_dim]
        return shape, list(shape)

    return _get_kv_cache_shape


def launch_cache_manager(wrapped: Wrapped, instance: Any, args: Args, kwargs: Kwargs) -> Any:
    """Wraps the start of FastDeploy's cache service, whose transfer process needs a GPU."""
    if instance.num_cpu_blocks:
        raise ConfigError(f"got --swap-space with {SWITCH}=0, which needs a GPU: set {SWITCH}=1 or leave it out")
    wrapped.__globals__["get_all_visible_devices"] = str  # returns the empty string
    return wrapped(*args, **kwargs)
