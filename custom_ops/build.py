"""Builds the native copies with nothing but the compilers: `python custom_ops/build.py [cpu] [paddle] [ptx]`.

    cpu     _copy_rows.so   copies of CPU servers; needs a C compiler
    paddle  _paddle_ops.so  the operators for Paddle; needs an installed Paddle and a C++ compiler, for tensors on a GPU
                            nvcc, too
    ptx     copy_rows.ptx   the copy kernel as text, which is committed and travels in every wheel; needs nvcc

Without names it builds what this machine can, the PTX aside. `setup.py`, `scripts/build_ops.sh` and the tests use this
file. Environment: `CC`, `CXX`, `NVCC`, `FASTDEPLOY_KVCACHE_BUILD` (what to build; "none": nothing).
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
from collections.abc import Iterable, Mapping
from pathlib import Path

HERE = Path(__file__).resolve().parent
WORKER = HERE.parent / "fastdeploy_kvcache_v1" / "worker"

TARGETS = {"cpu": "_copy_rows.so", "paddle": "_paddle_ops.so"}
"""The libraries, which are built where they can be."""
FILES = {**TARGETS, "ptx": "copy_rows.ptx"}
IN_PACKAGE = {name: WORKER / ("cuda" if name == "ptx" else "ops") / file for name, file in FILES.items()}
"""Where the package looks for them."""
PTX_VERSION = "7.4"
"""Of the language, the oldest that has what the kernel uses: drivers from CUDA 11.4 on take it."""

COMPILERS = {
    "CC": ("gcc", "cc", "clang"),
    "CXX": ("g++", "c++", "clang++"),
    "NVCC": ("nvcc", f"{os.environ.get('CUDA_HOME', '/usr/local/cuda')}/bin/nvcc"),
}
FLAGS = ["-O3", "-fPIC", "-Wall", "-Wextra", "-Wshadow", "-shared", "-Wl,-z,defs"]
PADDLE_LIBRARIES = ("libphi_core.so", "libphi.so", "libcommon.so")


class BuildError(Exception):
    """Why something could not be built; the compiler's own words were printed."""


def compiler(variable: str) -> list[str]:
    """The one that the environment names by `variable`, else the first of the usual ones. Raises `BuildError`."""
    if os.environ.get(variable):
        return shlex.split(os.environ[variable])
    for name in COMPILERS[variable]:
        if shutil.which(name):
            return [name]
    raise BuildError(f"no {COMPILERS[variable][0]} found: install it, or set {variable}")


def paddle_root() -> Path:
    """The installed Paddle, also from inside pip's isolated build, and without importing it. Raises `BuildError`."""
    for directory in [*sys.path, sysconfig.get_paths()["purelib"], sysconfig.get_paths()["platlib"]]:
        root = Path(directory or ".") / "paddle"
        if (root / "include" / "paddle" / "phi").is_dir() and list((root / "base").glob("libpaddle*.so")):
            return root.resolve()
    raise BuildError("no Paddle with headers is installed for this Python")


def paddle_says(root: Path, name: str) -> str:
    """A line of the version file of the Paddle at `root`."""
    found = re.search(
        rf"^{name}\s*=\s*'([^']*)'", (root / "version/__init__.py").read_text(encoding="utf-8"), re.MULTILINE
    )
    return found[1] if found else "unknown"


def install(command: list[str], output: Path) -> None:
    """Run a compiler and put its output in place in one go: somebody may have the old library loaded."""
    output.parent.mkdir(parents=True, exist_ok=True)
    temporary = output.with_name(f".{output.name}.{os.getpid()}")
    try:
        done = subprocess.run([*command, "-o", str(temporary)], capture_output=True, text=True, check=False)
        sys.stderr.write(done.stderr)
        if done.returncode != 0:
            raise BuildError(f"{command[0]} failed with status {done.returncode}: {shlex.join(command)}")
        temporary.replace(output)
    finally:
        temporary.unlink(missing_ok=True)


def build_cpu(output: Path) -> None:
    install([*compiler("CC"), "-std=c11", *FLAGS, str(HERE / "copy_rows.c")], output)


def build_ptx(output: Path) -> None:
    source = HERE / "copy_rows.cu"
    install([*compiler("NVCC"), "-std=c++17", "-O3", "-ptx", "-arch=compute_80", str(source)], output)
    text = re.sub(r"^\.version .*", f".version {PTX_VERSION}", output.read_text(encoding="utf-8"), flags=re.MULTILINE)
    digest = hashlib.sha256(source.read_bytes()).hexdigest()
    output.write_text(f"// {source.name} sha256 {digest}\n{text}", encoding="utf-8")


def build_paddle(output: Path) -> None:
    root = paddle_root()
    install([*paddle_compiler(root), str(HERE / "paddle_ops.cu"), *paddle_libraries(root)], output)


def paddle_compiler(root: Path, *, with_gpu: bool | None = None) -> list[str]:
    """Command and flags; `with_gpu`: for tensors on a GPU, too (None: where that Paddle has them and nvcc is). Raises
    `BuildError`."""
    if with_gpu is None:
        has_nvcc = os.environ.get("NVCC") or any(map(shutil.which, COMPILERS["NVCC"]))
        with_gpu = bool(has_nvcc) and paddle_says(root, "cuda_version") != "False"
    release = f"{paddle_says(root, 'full_version')}+{paddle_says(root, 'commit')}"
    flags = [f'-DKVCACHE_PADDLE="{release}"', "-isystem", f"{root}/include", "-isystem", f"{root}/include/third_party"]
    if not with_gpu:
        return [*compiler("CXX"), "-std=c++17", *FLAGS, "-fvisibility=hidden", "-Wno-unknown-pragmas", *flags, "-xc++"]
    flags += ["-Xcompiler", "-fPIC,-fvisibility=hidden", "-gencode", "arch=compute_90,code=sm_90"]
    flags += ["-gencode", "arch=compute_80,code=[sm_80,compute_80]"]  # newer ones compile the text
    return [*compiler("NVCC"), "-std=c++17", "-O3", "-shared", "-DPADDLE_WITH_CUDA", *flags]


def paddle_libraries(root: Path) -> list[str]:
    """Releases split Paddle differently; whoever imports Paddle has loaded all of these before us."""
    candidates = [*sorted((root / "base").glob("libpaddle*.so")), *(root / "libs" / name for name in PADDLE_LIBRARIES)]
    found = [path for path in candidates if path.exists()]
    directories = [f"-L{root}/{name}" for name in ("base", "libs")]
    return [*directories, "-Xlinker", f"-rpath-link={root}/libs", *(f"-l:{path.name}" for path in found)]


BUILDERS = {"cpu": build_cpu, "paddle": build_paddle, "ptx": build_ptx}


def build_what_works(outputs: Mapping[str, Path]) -> dict[str, str]:
    """Build each name into its file. Returns what is missing and why; never raises for want of a compiler, nor in a
    tree that cannot be written."""
    missing = {}
    for name, output in outputs.items():
        try:
            BUILDERS[name](output)
        except (BuildError, OSError) as error:
            missing[name] = str(error)
            try:
                if name in TARGETS:
                    output.unlink(missing_ok=True)  # none is better than a stale one
            except OSError as kept:
                missing[name] += f"; the one of before stays: {kept}"
    return missing


def wanted(names: Iterable[str] = ()) -> list[str]:
    """What to build: `names`, else the environment's choice, else every library. Raises `BuildError`."""
    known = FILES if names else TARGETS
    chosen = list(names) or re.split(r"[,\s]+", os.environ.get("FASTDEPLOY_KVCACHE_BUILD", "").strip())
    if chosen == ["none"]:
        return []
    unknown = [name for name in chosen if name and name not in known]
    if unknown:
        raise BuildError(f"cannot build {', '.join(unknown)}: choose among {', '.join(known)}, or none")
    return [name for name in known if name in chosen] or list(TARGETS)


def main() -> int:
    parser = argparse.ArgumentParser(description="Build the native copies.")
    parser.add_argument("targets", nargs="*", help=f"{', '.join(FILES)} (default: the libraries this machine can)")
    parser.add_argument("--out", type=Path, help="where they go (default: the package)")
    arguments = parser.parse_args()
    try:
        names = wanted(arguments.targets)
    except BuildError as error:
        parser.error(str(error))
    outputs = {name: arguments.out / FILES[name] if arguments.out else IN_PACKAGE[name] for name in names}
    missing = build_what_works(outputs)
    for name, output in outputs.items():
        print(f"{name}: {missing.get(name) or output}")
    return 1 if arguments.targets and missing else 0


if __name__ == "__main__":
    sys.exit(main())
