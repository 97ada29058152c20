"""The `doctor` command: would FastDeploy serve through this package here, and if not, what is missing?"""

from __future__ import annotations

import argparse
import ctypes
import importlib
import importlib.metadata
import importlib.util
import os
import resource
import site
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from . import __version__, plugin
from .errors import ConfigError, KVCacheError, OverlayError
from .extras import needed_by
from .switch import SWITCH, is_enabled
from .units import GIB, MIB

if TYPE_CHECKING:
    from .fastdeploy_integration.overlay.overlay import Overlay
    from .fastdeploy_integration.overlay.release import FastDeployTree
    from .storage.round_trip import RoundTrip

BOOTSTRAP = "fastdeploy_kvcache_v1.pth"
PLUGIN, PLUGIN_GROUP = "kvcache_v1", "fastdeploy.tool_parser_plugins"
"""The other way in, for a FastDeploy that loads plugins: `FD_PLUGINS` names it."""
PADDLE_LIBRARIES = {"libgomp.so.1": "libgomp1"}
MOONCAKE_LIBRARIES = {
    "libibverbs.so.1": "libibverbs1",
    "libnuma.so.1": "libnuma1",
    "libcurl.so.4": "libcurl4",
    "librdmacm.so.1": "librdmacm1",
    "liburing.so.2": "liburing2",
}
"""Of the system, with Debian's names of their packages."""

STORAGE_MODULES = {"mooncake": "mooncake", "attention_store": "attentionstore_sdk"}
"""Storage backends of FastDeploy, with the Python module each needs."""


class Finding(NamedTuple):
    """One line of the report."""

    ok: bool | None
    """None for information that decides nothing."""
    name: str
    detail: str

    def __str__(self) -> str:
        mark = {True: "ok", False: "FAIL", None: "-"}[self.ok]
        return f"{mark:>4}  {self.name}: {self.detail}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = (
        "Exit status: 0 when serving would work (with --source: when every patch point of that tree is as expected), "
        "1 when not, 2 for a wrong argument."
    )
    parser.add_argument(
        "--source", type=Path, metavar="DIR", help="check a FastDeploy source tree instead of what is installed here"
    )
    parser.add_argument(
        "--against",
        type=Path,
        metavar="OLD",
        help="with --source: show how the bodies that matter differ from those of OLD",
    )
    parser.add_argument(
        "--write-bodies", action="store_true", help="with --source: print patches/bodies-RELEASE.toml for that tree"
    )
    parser.add_argument(
        "--kvcache-storage-dir",
        type=Path,
        metavar="DIR",
        help="also check that this directory can store blocks, and how fast it is; made if need be",
    )
    parser.add_argument(
        "--kvcache-storage-backend",
        choices=["file", "mooncake", "attention_store"],
        metavar="NAME",
        help="also check this store, as its configuration says (file: give the directory)",
    )
    for role in ("prefill", "decode"):
        parser.add_argument(
            f"--{role}",
            nargs="+",
            default=[],
            metavar="URL",
            help=f"also check these servers with --role {role} (FastDeploy: the files kvcache_role.json of their logs)",
        )
    parser.add_argument("--peer-secret-file", type=Path, metavar="FILE", help="the secret of these servers")


def run(args: argparse.Namespace) -> int:
    """Returns the exit status; raises `OverlayError` for a `--source` that holds no FastDeploy, or without a table."""
    if args.against is not None or args.write_bodies:
        if args.source is None:
            raise ConfigError("--against and --write-bodies are about a tree: name it with --source DIR")
        print_bodies(args.source, args.against)
        return 0
    print(f"fastdeploy-kvcache-v1 {__version__}, Python {sys.version.split()[0]}")
    findings = list(fastdeploy_findings(args.source))
    this_machine = list(machine_findings())
    if args.source is not None:  # another tree says nothing about this machine
        this_machine = [Finding(None, each.name, each.detail) for each in this_machine]
    findings += [*this_machine, *storage_findings(args.kvcache_storage_backend, args.kvcache_storage_dir)]
    findings += peer_findings(args.prefill, args.decode, args.peer_secret_file)
    for finding in findings:
        print(finding)
    failed = sum(finding.ok is False for finding in findings)
    is_needed = any(finding.name == "bodies" for finding in findings)  # else FastDeploy has a manager of its own
    well = "all ok" if is_needed else "nothing wrong, and nothing to patch"
    print(well if not failed else f"{failed} problem{'s' if failed > 1 else ''}")
    return 1 if failed else 0


def print_bodies(source: Path, against: Path | None) -> None:
    """The digests of a tree, or how its bodies differ from those of another one."""
    with needed_by("the patch table"):
        from .fastdeploy_integration.overlay import bodies, release, table
    new = release.fastdeploy_at(source)
    if against is None:
        known = bodies.known_digests(new.release) if bodies.digests_file(new.release).exists() else {}
        print(bodies.to_toml(new.root, table.table_for(new.release), known), end="")
        return
    old = release.fastdeploy_at(against)
    for target in bodies.watched(table.table_for(old.release)):
        if difference := bodies.difference_in_words(old.root, new.root, target):
            print(f"==> {target}", *difference, sep="\n")


def fastdeploy_findings(source: Path | None) -> Iterator[Finding]:
    """FastDeploy, its table, and every patch point."""
    try:
        with needed_by("the patch table"):
            from msgspec.structs import asdict

            from .fastdeploy_integration.overlay import overlay, release
    except ConfigError as error:
        yield Finding(False, "FastDeploy", str(error))
        return
    plugin.stand_by()
    try:
        found = release.installed_fastdeploy() if source is None else release.fastdeploy_at(source)
    except OverlayError as error:
        if source is not None:
            raise
        yield Finding(False, "FastDeploy", str(error))
        return
    if found is None:
        yield Finding(False, "FastDeploy", "not installed in this environment (or name a tree with --source)")
        return
    yield Finding(True, "FastDeploy", f"{found.version} at {found.root}")
    if found.has_own_manager:
        yield Finding(None, "patch table", release.OWN_MANAGER)
        return
    try:
        checked = overlay.overlay_for(found)
    except OverlayError as error:
        yield Finding(False, "patch table", str(error))
        return
    yield from _table_findings("patch table", checked)
    yield from _body_findings(checked, found)
    num_left_out, lost = sum(map(len, checked.table.not_in_names.values())), checked.lost_settings()
    missing = f"FastDeploy has no {', '.join(lost)}: take them out of not_in_names, or name them in `removes`"
    known = f"without {num_left_out} settings, with all others"
    yield Finding(not lost, "names of stored blocks", missing if lost else known)
    for name, has_it in asdict(checked.table.capabilities).items():
        yield Finding(None, f"capability {name}", "yes" if has_it else "no")
    for each in _cpu_worker_findings(found):
        yield each if source is not None else Finding(None, each.name, each.detail)  # a GPU server does without


def _table_findings(name: str, checked: Overlay) -> Iterator[Finding]:
    table, problems = checked.table, checked.problems()
    yield Finding(True, name, f"{table.release}, {len(table.rows)} places, written for {table.commit}")
    for row in table.rows:
        yield Finding(row not in problems, f"{row.kind.value} {row.target}", problems.get(row, row.where.value))


def _body_findings(checked: Overlay, fastdeploy: FastDeployTree) -> Iterator[Finding]:
    """What signatures do not show."""
    from .fastdeploy_integration.overlay.bodies import acceptance, members_lacking, watched
    from .fastdeploy_integration.overlay.overlay import UNKNOWN_BODIES

    if checked.problems():
        yield Finding(None, "bodies", "not looked at until all rows are ok")
        return
    try:
        changed = checked.changed_bodies()
    except OverlayError as error:
        yield Finding(False, "bodies", str(error))
        return
    yield Finding(not changed, "bodies", f"{len(changed)} of {len(watched(checked.table))} changed")
    for each in changed:
        yield Finding(False, f"body {each.target}", each.where)
    if must := [each for each in changed if each.must_hold]:
        how = f"{UNKNOWN_BODIES}={acceptance(must)} starts a server with these {len(must)}, once you have read them"
        yield Finding(None, "bodies that must hold", f"{how}; others only warn")
    lacking = members_lacking(fastdeploy.root)
    missing = f"FastDeploy's engine takes {', '.join(lacking)}, which ours does not have"
    yield Finding(not lacking, "cache manager", missing if lacking else "has what FastDeploy's engine takes of it")


def _cpu_worker_findings(fastdeploy: FastDeployTree) -> Iterator[Finding]:
    """The places that only `serve --fastdeploy-cpu` patches."""
    from .fastdeploy_integration.overlay.overlay import Overlay

    if importlib.util.find_spec(f"{__package__}.lab") is None:
        return
    activation = importlib.import_module(f"{__package__}.lab.fastdeploy_cpu.activation")
    try:
        table = activation.table_for(fastdeploy.release)
    except OverlayError as error:
        yield Finding(False, "CPU worker table", str(error))
        return
    yield from _table_findings("CPU worker table", Overlay(table, fastdeploy.root))


def machine_findings() -> Iterator[Finding]:
    """This environment and this machine."""
    checks: dict[str, Callable[[], tuple[bool | None, str]]] = {
        "activation": _activation,
        "GPU": _gpu,
        "system libraries": _system_libraries,
        "PaddlePaddle": _paddle,
        "CuPy": _cupy,
        "copy ops": _ops,
        "Paddle's copy operators": _paddle_operators,
        "copy paths on the GPU": _copy_paths,
        "page-locked memory": _memory,
        "NUMA nodes": _numa,
    }
    for name, check in checks.items():
        try:
            yield Finding(*_named(name, check()))
        except (OSError, ImportError, KVCacheError) as error:
            yield Finding(False, name, " ".join(str(error).split()) or type(error).__name__)
    for backend, module in STORAGE_MODULES.items():
        found = importlib.util.find_spec(module) is not None
        yield Finding(None, f"storage {backend}", f"{module} {'importable' if found else 'not installed'}")


def storage_findings(backend: str | None, directory: Path | None) -> Iterator[Finding]:
    """The stores that are named: a directory, or the memory that servers share."""
    if directory is not None:
        yield _tried(f"storage file {directory}", lambda: _try_directory(directory), ", through the page cache")
    elif backend == "file":
        yield Finding(False, "storage file", "name its directory: --kvcache-storage-dir DIR")
    if backend == "mooncake":
        yield _tried("storage mooncake", _try_mooncake, "")
    if backend == "attention_store":
        yield _tried("storage attention_store", _try_attention_store, ", from and to the memory of the embedded server")


def peer_findings(prefill: Sequence[str], decode: Sequence[str], secret_file: Path | None) -> Iterator[Finding]:
    """The prefill and decode servers that are named: there, with the same secret, and caches that fit."""
    if not prefill and not decode:
        return
    try:
        with needed_by("trying them", "embedded"):
            from .transfer.secret_file import read_secret
            from .transfer.trial import try_servers
    except ConfigError as error:
        yield Finding(False, "prefill and decode servers", str(error))
        return
    for verdict in try_servers(prefill, decode, read_secret(secret_file)):
        yield Finding(*verdict)


def _try_directory(directory: Path) -> RoundTrip:
    from .storage.round_trip import try_directory

    return try_directory(directory)


def _try_mooncake() -> RoundTrip:
    from .storage.round_trip import try_mooncake

    return try_mooncake()


def _try_attention_store() -> RoundTrip:
    from .storage.attention_store.trial import try_attention_store

    return try_attention_store()


def _tried(name: str, trial: Callable[[], RoundTrip], how: str) -> Finding:
    from .storage.base import StorageFullError

    try:
        with needed_by("trying it", "embedded"):
            took = trial()
    except StorageFullError:
        return Finding(None, name, "it answers, but has no room for a trial: does a server give it memory?")
    except (OSError, ImportError, KVCacheError) as error:
        return Finding(False, name, " ".join(str(error).split()) or type(error).__name__)
    from .storage.round_trip import NUM_BYTES

    put, get = (f"{NUM_BYTES / 1e6 / seconds:,.0f} MB/s" for seconds in (took.put_s, took.get_s))
    return Finding(True, name, f"{NUM_BYTES // MIB} MiB stored at {put} and read at {get}{how}")


def _named(name: str, result: tuple[bool | None, str]) -> tuple[bool | None, str, str]:
    return result[0], name, result[1]


def _activation() -> tuple[bool | None, str]:
    places = site.getsitepackages()  # Python reads .pth files only there
    if site.ENABLE_USER_SITE:
        places.append(site.getusersitepackages())
    installed = [place for place in places if (Path(place) / BOOTSTRAP).is_file()]
    switch = "on" if is_enabled() else "off"
    if installed:
        return True, f"{BOOTSTRAP} in {installed[0]}; {SWITCH} is {switch}"
    if PLUGIN in os.environ.get("FD_PLUGINS", "").split(","):
        if PLUGIN not in importlib.metadata.entry_points(group=PLUGIN_GROUP).names:
            return False, f"FD_PLUGINS names {PLUGIN}, but its entry point is not installed: reinstall"
        return True, f"FD_PLUGINS={PLUGIN}; {SWITCH} is {switch}"
    return False, f"{BOOTSTRAP} is not in site-packages: reinstall, or set FD_PLUGINS={PLUGIN}"


def _gpu() -> tuple[bool | None, str]:
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        return False, f"no NVIDIA driver ({error}): install one, or run `serve --fastdeploy-cpu`, which needs none"
    if (status := driver.cuInit(0)) != 0:
        return False, f"the driver answers with CUDA error {status}, expected 0: look at nvidia-smi"
    count, name = ctypes.c_int(), ctypes.create_string_buffer(128)
    driver.cuDeviceGetCount(ctypes.byref(count))
    if count.value < 1:
        return False, "got 0, expected at least 1: look at CUDA_VISIBLE_DEVICES, and at how the container was started"
    driver.cuDeviceGetName(name, len(name), 0)
    return True, f"{count.value} x {name.value.decode()}"


def _system_libraries() -> tuple[bool | None, str]:
    """What no package from PyPI brings: Paddle's wheel and Mooncake's load it."""
    for user, libraries, ok in (("Paddle", PADDLE_LIBRARIES, False), ("Mooncake", MOONCAKE_LIBRARIES, None)):
        if lost := _missing(libraries):
            return ok, f"{user} loads {', '.join(lost)}, missing here: apt-get install {' '.join(lost.values())}"
    return True, "those that Paddle and Mooncake load"


def _missing(libraries: Mapping[str, str]) -> dict[str, str]:
    """Those that cannot be loaded, with Debian's names of their packages."""
    lost = {}
    for name, package in libraries.items():
        try:
            ctypes.CDLL(name)
        except OSError:
            lost[name] = package
    return lost


def _paddle() -> tuple[bool | None, str]:
    wanted, found = "paddlepaddle-gpu", "nothing"
    for name in (wanted, "paddlepaddle"):
        with suppress(importlib.metadata.PackageNotFoundError):
            found = f"{name} {importlib.metadata.version(name)}"
            break
    if found.startswith(wanted):
        return True, found
    return False, f"got {found}, expected {wanted}: install it as FastDeploy's installation guide says"


def _cupy() -> tuple[bool | None, str]:
    from .worker.cuda.driver import cuda_of_driver, load_cupy

    cupy, served = load_cupy(), cuda_of_driver()
    needs = cupy.cuda.runtime.runtimeGetVersion() // 1000
    if 0 < served < needs:
        install = f"pip uninstall cupy-cuda{needs}x && pip install 'fastdeploy-kvcache-v1[gpu]'"
        return False, f"{cupy.__version__} is for CUDA {needs}, the driver serves CUDA {served}: {install}"
    return True, f"{cupy.__version__} for CUDA {needs}"


def _ops() -> tuple[bool | None, str]:
    from .worker.ops.copies import cpu_paths

    return True, f"on a CPU by {cpu_paths()[0].name}"


def _paddle_operators() -> tuple[bool | None, str]:
    """Copies need them only where the user asks for them: so no failure."""
    from .worker.ops import paddle_ops

    try:
        paddle_ops.load()
    except (ImportError, KVCacheError) as error:
        return None, f"not there: {error}"
    tensors = "a CPU and a GPU" if paddle_ops.copies_on_gpu() else "a CPU"
    return (
        None,
        f"FASTDEPLOY_KVCACHE_OPS=paddle uses them; for Paddle {paddle_ops.installed_paddle()}, tensors on {tensors}",
    )


def _copy_paths() -> tuple[bool | None, str]:
    """Tries each way, as a worker does before it trusts one."""
    try:
        cupy = importlib.import_module("cupy")
        if cupy.cuda.runtime.getDeviceCount() < 1:
            return None, "no GPU here"
    except Exception as error:  # no CuPy, no driver: both are findings of their own
        return None, f"not tried without CuPy and a GPU ({type(error).__name__})"
    from .worker.cuda import trial

    rates = trial.rates_of(0, ())
    return bool(rates.timings), rates.describe()


def _memory() -> tuple[bool | None, str]:
    from .worker.runtime.base import free_host_memory

    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    limit = "unlimited" if soft == resource.RLIM_INFINITY else f"{soft / GIB:.2f} GiB"
    # The NVIDIA driver pins without regard to the limit, hence information only.
    return None, f"limit {limit}, {free_host_memory() / GIB:.1f} GiB of host memory free"


def _numa() -> tuple[bool | None, str]:
    online = Path("/sys/devices/system/node/online")
    nodes = online.read_text(encoding="ascii").strip() if online.is_file() else "unknown"
    return None, f"{nodes}; this process may run on {len(os.sched_getaffinity(0))} CPUs"
