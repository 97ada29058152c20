"""Build script. Metadata lives in pyproject.toml; what setuptools cannot declare there is done here: the patch tables of
`patches/` become data of the package, and the bootstrap `.pth` file goes beside it, into site-packages.
"""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py
from setuptools.command.editable_wheel import editable_wheel

ROOT = Path(__file__).parent
BOOTSTRAP = ROOT / "fastdeploy_kvcache_v1.pth"
TABLES = "fastdeploy_kvcache_v1/fastdeploy_host/patches"


class BuildPy(build_py):
    """Adds the tables and the bootstrap file to a wheel."""

    def run(self) -> None:
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


setup(cmdclass={"build_py": BuildPy, "editable_wheel": EditableWheel})
