"""Which FastDeploy is this? Answered without importing it."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
from dataclasses import dataclass
from pathlib import Path

from ...errors import OverlayError

PACKAGE = "fastdeploy"
DISTRIBUTIONS = ("fastdeploy-gpu", "fastdeploy", "fastdeploy-cpu")
OWN_MANAGER = (
    "this FastDeploy has its own v1 KV-cache manager, so fastdeploy-kvcache-v1 does nothing: its flags, stores, "
    "roles, request fields (cache_salt) and metrics are lost. To have them, install a supported release"
)
OVERRIDE = "FASTDEPLOY_KVCACHE_HOST_VERSION"
"""Environment variable with the version of a FastDeploy that does not say it."""

_RELEASE = re.compile(r"(\d+\.\d+)(?:\.\d+)*(?:[-_.]?(dev))?")
_IN_VERSION_FILE = re.compile(r"^fastdeploy version:\s*(\S+)", re.MULTILINE)
_IN_SETUP = re.compile(r"FASTDEPLOY_VERSION\"?,\s*\"([^\"]+)\"")


@dataclass(frozen=True)
class FastDeployTree:
    """`root` is the directory of FastDeploy's package."""

    root: Path
    version: str

    @property
    def release(self) -> str:
        """Name in patch tables: the first two numbers of the version, with "-dev" for a develop version.

        "2.6.1" is release 2.6; "2.6.0-dev" ("2.6.0.dev0" in package metadata) is 2.6-dev.
        """
        found = _RELEASE.match(self.version)
        if found is None:
            return self.version
        numbers, dev = found.groups()
        return f"{numbers}-dev" if dev else str(numbers)

    @property
    def has_own_manager(self) -> bool:
        """A newer FastDeploy, which has a v1 manager, is left alone."""
        return (self.root / "cache_manager" / "v1").is_dir()


def installed_fastdeploy() -> FastDeployTree | None:
    """The FastDeploy that `import fastdeploy` would load; None without one."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        return None
    return fastdeploy_at(Path(next(iter(spec.submodule_search_locations))), installed=True)


def fastdeploy_at(directory: Path, *, installed: bool = False) -> FastDeployTree:
    """`installed`: metadata of this environment describes it. Raises `OverlayError` without FastDeploy or a version."""
    root = directory if directory.name == PACKAGE and (directory / "envs.py").is_file() else directory / PACKAGE
    if not (root / "envs.py").is_file():
        raise OverlayError(f"{directory} holds no FastDeploy: name a checkout or the directory of its package")
    version = os.environ.get(OVERRIDE) or _written_version(root) or (_metadata_version() if installed else None)
    if version is None:
        raise OverlayError(
            f"the FastDeploy in {root} does not say its version (no version.txt, setup.py or package metadata): "
            f"set {OVERRIDE}, for example to 2.6.0"
        )
    return FastDeployTree(root, version)


def _written_version(root: Path) -> str | None:
    for path, pattern in ((root / "version.txt", _IN_VERSION_FILE), (root.parent / "setup.py", _IN_SETUP)):
        if path.is_file() and (found := pattern.findall(path.read_text(encoding="utf-8"))):
            return str(found[-1])  # the build appends to version.txt
    return None


def _metadata_version() -> str | None:
    for name in DISTRIBUTIONS:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None
