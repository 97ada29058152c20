"""Build script. Metadata lives in pyproject.toml; here is only what setuptools cannot declare there: native libraries.

They are plain shared libraries, not Python extension modules, and all of them are optional: what this machine cannot
build is left out with one line that says why, and the NumPy twins do the work.
"""

from __future__ import annotations

import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

sys.path.insert(0, str(Path(__file__).resolve().parent / "custom_ops"))
import build as native

PREFIX = "fastdeploy_kvcache_v1.ops."


class BuildNative(build_ext):
    """Runs our own build for each library; setuptools puts the files where wheels and editable installs want them."""

    def get_ext_filename(self, fullname: str) -> str:
        return fullname.replace(".", "/") + ".so"

    def get_export_symbols(self, ext: Extension) -> list[str]:
        return []

    def build_extension(self, ext: Extension) -> None:
        name = next(name for name, file in native.TARGETS.items() if PREFIX + file == ext.name + ".so")
        directory = Path(self.get_ext_fullpath(ext.name)).parent
        missing = native.build_what_works(directory, [name])
        if missing:
            raise CompileError(f"{name} is left out: {missing[name]}")


setup(
    ext_modules=[
        Extension(PREFIX + native.TARGETS[name].removesuffix(".so"), sources=[], optional=True)
        for name in native.wanted()
    ],
    cmdclass={"build_ext": BuildNative},
)
