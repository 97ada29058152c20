"""Is a mistake in the C++ of GPU copies noticed? Changes it in one place, builds it, and runs what needs no GPU.

`scripts/mutate-native [NAME ...]`; without names all of `native_mistakes.txt`, and once none. First the test programs
of `custom_ops/tests` over the fake driver; a change that they pass goes to the checks of `tests/gpu/copy_checks.py`
over the asynchronous one, each way to copy, then to those between two processes. Exit status 1 when a change is not
noticed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.gpu import fake_gpu
from tests.mutation.changes import Change, read
from tests.worker.ops.native import ROOT, build, compile_program

MISTAKES = read(Path(__file__).with_name("native_mistakes.txt"))
FLAGS = ["-std=c++17", "-O1", "-fPIC", "-pthread", "-w", f'-DKVSWAP_SOURCES="{build.source_digest()}"']
PROGRAMS = ("cuda_test", "paths_test", "ranges_test")
RUN_SECONDS = 100
"""A change that loops is noticed, too."""

CHECKS = """
import ipc_checks, ipc_fake_checks, suite, sys
suite.optional = lambda name: None
sys.exit(suite.main() or ipc_checks.run(ipc_checks.CHECKS) or ipc_checks.run(ipc_fake_checks.CHECKS))
"""


class Workshop:
    """Objects of the sources as they are, a tree in which one file is changed, and both fake drivers."""

    def __init__(self, directory: Path) -> None:
        self.tree, self.objects, self.driver = (directory / name for name in ("custom_ops", "objects", "driver"))
        shutil.copytree(ROOT / "custom_ops", self.tree)
        self.objects.mkdir()
        self.driver.mkdir()
        compile_program([self.tree / "tests/fake_libcuda.cc"], self.driver / "libcuda.so.1", "-fPIC", "-shared")
        self.sources = [self.tree / path.relative_to(build.HERE) for path in build.core_sources()]
        for source in [*self.sources, *(self.tree / f"tests/{name}.cc" for name in PROGRAMS)]:
            self._compile(source, self.objects / f"{source.parent.name}-{source.stem}.o")
        self.asynchronous = directory / "asynchronous"
        shutil.copytree(ROOT / "fastdeploy_kvcache_v1", self.asynchronous / "fastdeploy_kvcache_v1")
        self.library = self.asynchronous / "fastdeploy_kvcache_v1/worker/ops/_core.so"
        self._link(self.library, self._objects(), "-shared")
        fake_gpu.build(self.asynchronous, compile_program, self.library)
        shutil.copy(self.asynchronous / "_core_cuda.so", self.library.with_name("_core_cuda.so"))

    def _compile(self, source: Path, output: Path) -> None:
        subprocess.run([*build.cxx(), *FLAGS, "-c", str(source), "-o", str(output)], check=True)

    def _link(self, output: Path, objects: Sequence[Path], *flags: str) -> Path:
        command = [*build.cxx(), "-pthread", *flags, *map(str, objects), "-ldl", "-o", str(output)]
        subprocess.run(command, check=True)
        return output

    def _objects(self, changed: Sequence[Path] = ()) -> list[Path]:
        """Of the core, `changed` ones instead of those of the same name."""
        known = {path.name: path for path in changed}
        names = [f"{source.parent.name}-{source.stem}.o" for source in self.sources]
        return [known.get(name, self.objects / name) for name in names]

    def noticed_by(self, mistake: Change | None) -> str:
        """What noticed the change; empty for nothing. Raises `LookupError` when the text is gone."""
        changed = [] if mistake is None else self._changed(mistake)
        objects = self._objects(changed)
        for name in PROGRAMS:
            program = self._link(self.objects / name, [*objects, self.objects / f"tests-{name}.o"])
            for kind in ("new", "old"):
                if not self._passes([str(program), kind], LD_LIBRARY_PATH=str(self.driver)):
                    return f"{name} {kind}"
        self._link(self.library, objects, "-shared")
        paths = (self.asynchronous, ROOT / "tests/gpu", ROOT / "tests/gpu/stand_in")
        environment = {"LD_LIBRARY_PATH": str(self.asynchronous), "PYTHONPATH": ":".join(map(str, paths))}
        return "" if self._passes([sys.executable, "-c", CHECKS], **environment) else "copy_checks"

    def _changed(self, mistake: Change) -> list[Path]:
        path = self.tree / "cuda" / mistake.file
        original = path.read_text(encoding="utf-8")
        path.write_text(mistake.applied_to(original), encoding="utf-8")
        made = []
        try:
            for name in (mistake.file,) if mistake.file.endswith(".cc") else ("runs.cc", "costs.cc"):
                output = self.objects / "changed" / f"cuda-{Path(name).stem}.o"
                output.parent.mkdir(exist_ok=True)
                self._compile(self.tree / "cuda" / name, output)
                made.append(output)
        finally:
            path.write_text(original, encoding="utf-8")
        return made

    def _passes(self, command: list[str], **environment: str) -> bool:
        try:
            done = subprocess.run(
                command,
                env={**os.environ, **environment},
                cwd=self.asynchronous,
                capture_output=True,
                text=True,
                timeout=RUN_SECONDS,
            )
        except subprocess.TimeoutExpired:
            return False
        return done.returncode == 0


def main(names: Sequence[str]) -> int:
    unknown = set(names) - {mistake.name for mistake in MISTAKES}
    if unknown:
        raise SystemExit(f"error: there is no mistake {', '.join(sorted(unknown))}: see native_mistakes.txt")
    survived = 0
    with tempfile.TemporaryDirectory() as directory:
        workshop = Workshop(Path(directory))
        if not names and (noticed := workshop.noticed_by(None)):
            raise SystemExit(f"error: without any change {noticed} fails: run scripts/test first")
        for mistake in MISTAKES:
            if not names or mistake.name in names:
                noticed = workshop.noticed_by(mistake)
                survived += not noticed
                print(f"noticed  {mistake.name}: {noticed}" if noticed else f"SURVIVED {mistake.name}", flush=True)
    return 1 if survived else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
