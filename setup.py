"""Build script. Metadata lives in pyproject.toml; here is only what setuptools cannot declare there.

Native libraries: plain shared libraries, not Python extension modules, and all of them optional. What this machine
cannot build is left out with one line that says why, and the NumPy twins do the work.
The FastDeploy overlay: the patch tables of `patches/` become data of the package, and the bootstrap `.pth` file goes
beside it, into site-packages.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py
from setuptools.command.editable_wheel import editable_wheel
from setuptools.errors import CompileError

sys.path.insert(0, str(Path(__file__).resolve().parent / "custom_ops"))
import build as native

ROOT = Path(__file__).resolve().parent
PREFIX = "fastdeploy_kvcache_v1.worker.ops."
BOOTSTRAP = ROOT / "fastdeploy_kvcache_v1.pth"
TABLES = "fastdeploy_kvcache_v1/fastdeploy_integration/patches"


class BuildNative(build_ext):
    """Runs our own build for each library; setuptools puts the files where wheels and editable installs want them."""

    def initialize_options(self) -> None:
        super().initialize_options()
        self.built: set[str] = set()

    def get_ext_filename(self, fullname: str) -> str:
        return fullname.replace(".", "/") + ".so"

    def get_export_symbols(self, ext: Extension) -> list[str]:
        return []

    def build_extension(self, ext: Extension) -> None:
        name = next(name for name, file in native.TARGETS.items() if PREFIX + file == ext.name + ".so")
        missing = native.build_what_works({name: Path(self.get_ext_fullpath(ext.name)).with_name(native.TARGETS[name])})
        if missing:
            raise CompileError(f"{name} is left out: {missing[name]}")
        self.built.add(name)


class BdistWheel(bdist_wheel):
    """One wheel per platform, for every Python: ctypes loads the libraries. Paddle's operators fit one Paddle only."""

    def get_tag(self) -> tuple[str, str, str]:
        python, abi, platform = super().get_tag()
        built = self.get_finalized_command("build_ext").built
        if "paddle" in built:
            return python, abi, platform
        return "py3", "none", platform if built else "any"


class BuildPy(build_py):
    """Adds the tables and the bootstrap file to a wheel, and leaves out what only an earlier build had."""

    def run(self) -> None:
        if not self.editable_mode:  # pip builds in the checkout, and setuptools keeps what it finds in build/
            shutil.rmtree(Path(self.build_lib) / "fastdeploy_kvcache_v1", ignore_errors=True)
        super().run()
        if not self.editable_mode:  # a checkout has its tables in patches/
            target = Path(self.build_lib)
            (target / TABLES).mkdir(parents=True, exist_ok=True)
            for table in (ROOT / "patches").glob("*.toml"):
                shutil.copy(table, target / TABLES)
            shutil.copy(BOOTSTRAP, target)


class EditableWheel(editable_wheel):
    """Adds the bootstrap file to an editable wheel, which otherwise holds only the path of the checkout."""

    def _install_namespaces(self, installation_dir: str, pth_prefix: str) -> None:
        super()._install_namespaces(installation_dir, pth_prefix)
        shutil.copy(BOOTSTRAP, installation_dir)


setup(
    ext_modules=[
        Extension(PREFIX + native.TARGETS[name].removesuffix(".so"), sources=[], optional=True)
        for name in native.wanted()
    ],
    cmdclass={
        "bdist_wheel": BdistWheel,
        "build_ext": BuildNative,
        "build_py": BuildPy,
        "editable_wheel": EditableWheel,
    },
)
