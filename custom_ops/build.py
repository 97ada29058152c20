"""Builds the copy operators with nothing but the compilers: `python custom_ops/build.py [core] [cuda] [paddle]`.

    core    _core.so        CPU copies, queues, host memory; CUDA through the driver found at run time
    cuda    _core_cuda.so   the copy kernel; needs nvcc
    paddle  _paddle_ops.so  the operators for Paddle, linked to _core.so; needs an installed Paddle

Without names it builds what this machine can. `setup.py`, `scripts/build_ops.sh` and the tests use this file.
Environment: `CXX`, `NVCC`, `FASTDEPLOY_KVCACHE_CUDA_ARCHS` ("80,90,100"; "90-real": machine code for that GPU alone, no
PTX), `FASTDEPLOY_KVCACHE_BUILD` (what to build; "none": nothing).
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterable
from pathlib import Path

HERE = Path(__file__).resolve().parent
PACKAGE_OPS = HERE.parent / "fastdeploy_kvcache_v1" / "worker" / "ops"

TARGETS = {"core": "_core.so", "cuda": "_core_cuda.so", "paddle": "_paddle_ops.so"}
DEFAULT_ARCHS = "80,90,100"
REAL = "-real"
"""Behind an architecture: no PTX, which a driver older than the toolkit cannot compile."""

CXX_FLAGS = ["-std=c++17", "-O3", "-fPIC", "-pthread", "-fvisibility=hidden", "-Wall", "-Wextra", "-Wshadow"]
PADDLE_LIBRARIES = ("libphi_core.so", "libphi.so", "libcommon.so")
LINK_FLAGS = ["-shared", "-Wl,-z,defs", "-Wl,-O1"]


class BuildError(Exception):
    """Why something could not be built; the compiler's own words were printed."""


def source_digest() -> str:
    """Names the sources a library was built from, tests aside."""
    digest = hashlib.sha256()
    for path in sorted(HERE.rglob("*")):
        if path.suffix in {".h", ".cc", ".cu", ".py"} and "tests" not in path.parts:
            digest.update(str(path.relative_to(HERE)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def core_sources() -> list[Path]:
    return sorted([*HERE.glob("core/*.cc"), *HERE.glob("cuda/*.cc")])


def cxx() -> list[str]:
    """The C++ compiler. Raises `BuildError`."""
    named = os.environ.get("CXX")
    if named:
        return shlex.split(named)
    for name in ("g++", "c++", "clang++"):
        if shutil.which(name):
            return [name]
    raise BuildError("no C++ compiler found: install g++, or set CXX")


def nvcc() -> str:
    """The CUDA compiler. Raises `BuildError`."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or "/usr/local/cuda"
    for name in (os.environ.get("NVCC"), "nvcc", f"{home}/bin/nvcc"):
        if name and shutil.which(name):
            return name
    raise BuildError("no nvcc found: install the CUDA toolkit, or set NVCC")


def paddle_root() -> Path:
    """The installed Paddle, also from inside pip's isolated build, and without importing it. Raises `BuildError`."""
    for directory in [*sys.path, sysconfig.get_paths()["purelib"], sysconfig.get_paths()["platlib"]]:
        root = Path(directory or ".") / "paddle"
        if (root / "include" / "paddle" / "phi").is_dir() and list((root / "base").glob("libpaddle*.so")):
            return root.resolve()
    raise BuildError("no Paddle with headers is installed for this Python")


def paddle_version(root: Path) -> str:
    """Release and commit of the Paddle at `root`, as its own version file says."""
    text = (root / "version" / "__init__.py").read_text(encoding="utf-8")
    found = {name: re.search(rf"^{name}\s*=\s*'([^']*)'", text, re.MULTILINE) for name in ("full_version", "commit")}
    return "+".join(match[1] if match else "unknown" for match in found.values())


def run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    sys.stderr.write(done.stderr)
    if done.returncode != 0:
        raise BuildError(f"{command[0]} failed with status {done.returncode}: {shlex.join(command)}")


def install(command: list[str], output: Path) -> Path:
    """Run a compiler and put its output in place in one go: somebody may have the old library loaded."""
    output.parent.mkdir(parents=True, exist_ok=True)
    temporary = output.with_name(f".{output.name}.{os.getpid()}")
    try:
        run([*command, "-o", str(temporary)])
        temporary.replace(output)
    finally:
        temporary.unlink(missing_ok=True)
    return output


def build_core(directory: Path, flags: Iterable[str] = ()) -> Path:
    define = f'-DKVSWAP_SOURCES="{source_digest()}"'
    sources = [str(source) for source in core_sources()]
    command = [*cxx(), *CXX_FLAGS, define, *flags, *LINK_FLAGS, *sources, "-ldl"]
    return install(command, directory / TARGETS["core"])


def supported_archs(compiler: str, wanted: str) -> list[str]:
    """Those of the comma-separated architectures that this nvcc knows. Raises `BuildError` when it knows none."""
    known = subprocess.run([compiler, "--list-gpu-arch"], capture_output=True, text=True, check=False).stdout
    archs = [
        arch
        for arch in re.split(r"[,;\s]+", wanted)
        if f"compute_{arch.removesuffix(REAL).rstrip('af')}" in known.split()
    ]
    if not archs:
        raise BuildError(f"{compiler} supports none of the architectures {wanted}")
    return archs


def build_cuda(directory: Path, archs: str | None = None) -> Path:
    compiler = nvcc()
    wanted = archs or os.environ.get("FASTDEPLOY_KVCACHE_CUDA_ARCHS") or DEFAULT_ARCHS
    codes = supported_archs(compiler, wanted)
    command = [compiler, "-std=c++17", "-O3", "-shared", "-cudart", "static", "-Xcompiler"]
    command += ["-fPIC,-fvisibility=hidden,-Wall,-Wextra"]
    for number in [code.removesuffix(REAL) for code in codes]:
        command += ["-gencode", f"arch=compute_{number},code=sm_{number}"]
    newest = codes[-1]
    if not newest.endswith(REAL):
        command += ["-gencode", f"arch=compute_{newest},code=compute_{newest}"]  # for GPUs newer than all of them
    return install([*command, str(HERE / "cuda" / "kernel.cu")], directory / TARGETS["cuda"])


def build_paddle(directory: Path) -> Path:
    root = paddle_root()
    core = directory / TARGETS["core"]
    if not core.exists():
        build_core(directory)
    # Releases split Paddle differently; whoever imports Paddle has loaded all of these before us.
    candidates = [*sorted((root / "base").glob("libpaddle*.so")), *(root / "libs" / name for name in PADDLE_LIBRARIES)]
    libraries = [path for path in candidates if path.exists()]
    command = [*cxx(), *CXX_FLAGS, "-Wno-unused-parameter", "-Wno-shadow", "-shared", "-Wl,-z,defs"]
    command += [f'-DKVSWAP_PADDLE="{paddle_version(root)}"']
    command += [f"-isystem{root}/include", f"-isystem{root}/include/third_party", str(HERE / "paddle" / "ops.cc")]
    command += [f"-L{directory}", f"-l:{core.name}", f"-L{root}/base", f"-L{root}/libs", f"-Wl,-rpath-link,{root}/libs"]
    command += ["-Wl,--as-needed", *(f"-l:{path.name}" for path in libraries), "-Wl,-rpath,$ORIGIN"]
    return install(command, directory / TARGETS["paddle"])


BUILDERS = {"core": build_core, "cuda": build_cuda, "paddle": build_paddle}


def build_what_works(directory: Path, names: Iterable[str]) -> dict[str, str]:
    """Build `names` into `directory`. Returns what is missing and why; never raises for want of a compiler, nor in a
    tree that cannot be written."""
    missing = {}
    for name in names:
        try:
            BUILDERS[name](directory)
        except (BuildError, OSError) as error:
            missing[name] = str(error)
            try:
                (directory / TARGETS[name]).unlink(missing_ok=True)  # none is better than a stale one
            except OSError as kept:
                missing[name] += f"; the one of before stays: {kept}"
    return missing


def wanted(names: Iterable[str] = ()) -> list[str]:
    """What to build: `names`, else the environment's choice, else everything. Raises `BuildError`."""
    chosen = list(names) or re.split(r"[,\s]+", os.environ.get("FASTDEPLOY_KVCACHE_BUILD", "").strip())
    if chosen == ["none"]:
        return []
    unknown = [name for name in chosen if name and name not in TARGETS]
    if unknown:
        raise BuildError(f"cannot build {', '.join(unknown)}: choose among {', '.join(TARGETS)}, or none")
    return [name for name in TARGETS if name in chosen] or list(TARGETS)


def main() -> int:
    parser = argparse.ArgumentParser(description="Build the copy operators.")
    parser.add_argument("targets", nargs="*", help=f"{', '.join(TARGETS)} (default: what this machine can)")
    parser.add_argument("--out", type=Path, default=PACKAGE_OPS, help="where they go (default: the package)")
    arguments = parser.parse_args()
    try:
        names = wanted(arguments.targets)
    except BuildError as error:
        parser.error(str(error))
    missing = build_what_works(arguments.out, names)
    for name in names:
        print(f"{name}: {missing.get(name) or arguments.out / TARGETS[name]}")
    return 1 if arguments.targets and missing else 0


if __name__ == "__main__":
    sys.exit(main())
