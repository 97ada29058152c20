"""What users install: the sdist, the wheel made of it, and that wheel alone in a fresh environment."""

import importlib.metadata
import json
import os
import py_compile
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from fastdeploy_kvcache_v1 import __version__
from fastdeploy_kvcache_v1.cli import COMMANDS
from fastdeploy_kvcache_v1.fastdeploy_integration.overlay.table import known_releases
from fastdeploy_kvcache_v1.lab.traffic import KINDS
from fastdeploy_kvcache_v1.storage.file.file_backend import FileBackend
from tests.storage.values import namespace
from tests.worker.ops.native import compiler

pytestmark = pytest.mark.process

ROOT = Path(__file__).parents[2]
PACKAGE = "fastdeploy_kvcache_v1"
PARTS = (PACKAGE, "custom_ops", "patches", f"{PACKAGE}.pth", "pyproject.toml", "setup.py", "README.md", "LICENSE")
COPIES = f"{PACKAGE}/worker/ops/_copy_rows.so"
KERNEL = f"{PACKAGE}/worker/cuda/copy_rows.ptx"
PAGE = f"{PACKAGE}/page/page.html"
OURS = "\nimport sys; print(sorted(name for name in sys.modules if name.startswith('fastdeploy_kvcache_v1')))"


def run(*command, expect=0, **options):
    done = subprocess.run(
        [*map(str, command)], capture_output=True, text=True, timeout=240, stdin=subprocess.DEVNULL, **options
    )
    assert done.returncode == expect, done.stdout + done.stderr
    return done.stdout + done.stderr


class Environment:
    """A virtual environment with nothing in it, not even pip."""

    def __init__(self, directory, python=sys.executable):
        run(python, "-m", "venv", "--without-pip", directory)
        self.python = directory / "bin/python"
        self.site_packages = next(directory.glob("lib/python*/site-packages"))

    def pip(self, *arguments):
        return run(sys.executable, "-m", "pip", "--python", self.python, *arguments)

    def files(self):
        return {path for path in self.python.parents[1].rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def build(tmp_path_factory):
    """`build("sdist", source)` calls the hook that every installer calls, and returns the file that it made."""

    def hook(kind, source, native="none", **variables):
        target = tmp_path_factory.mktemp(kind)
        code = f"from setuptools import build_meta; build_meta.build_{kind}({str(target)!r})"
        settings = {**os.environ, "FASTDEPLOY_KVCACHE_BUILD": native, **variables}
        run(sys.executable, "-c", code, cwd=source, env=settings)
        (made,) = target.iterdir()
        return made

    return hook


@pytest.fixture(scope="module")
def sdist(build, tmp_path_factory):
    """Made of a copy, since building leaves directories behind; of one that was used, so that it has bytecode."""
    copy = tmp_path_factory.mktemp("checkout")
    for part in (*PARTS, "MANIFEST.in"):
        if (ROOT / part).is_dir():
            shutil.copytree(ROOT / part, copy / part, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / part, copy / part)
    for source in (copy / "custom_ops/build.py", copy / PACKAGE / "__init__.py"):
        py_compile.compile(str(source))
    return build("sdist", copy)


@pytest.fixture(scope="module")
def unpacked(sdist, tmp_path_factory):
    target = tmp_path_factory.mktemp("unpacked")
    run("tar", "xf", sdist, "-C", target)
    (tree,) = target.iterdir()
    return tree


@pytest.fixture(scope="module")
def wheel(build, unpacked):
    return build("wheel", unpacked, native="cpu")


def relative(directory, pattern):
    return {str(path.relative_to(directory)) for path in directory.rglob(pattern)}


def test_the_wheel_holds_the_package_its_tables_and_the_bootstrap_file(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
        assert archive.read(f"{PACKAGE}.pth") == (ROOT / f"{PACKAGE}.pth").read_bytes()
    modules = {f"{PACKAGE}/{name}" for name in relative(ROOT / PACKAGE, "*.py")}
    texts = {f"{PACKAGE}/lab/demo/{name}" for name in ("document.txt", "letter.txt")}
    texts |= {f"{PACKAGE}/lab/model/random/{name}" for name in relative(ROOT / PACKAGE / "lab/model/random", "*")}
    tables = {f"{PACKAGE}/fastdeploy_integration/patches/{name}" for name in relative(ROOT / "patches", "*.toml")}
    assert len(tables) == 3 * len(known_releases()), (
        "each release has a table for the overlay, one for the CPU worker, and digests of bodies"
    )
    assert names - {COPIES} == modules | tables | texts | {KERNEL, PAGE, f"{PACKAGE}/py.typed", f"{PACKAGE}.pth"}


def test_the_sdist_builds_the_copies_in_c(wheel):
    compiler("CC")
    with zipfile.ZipFile(wheel) as archive:
        assert COPIES in archive.namelist()


def test_the_wheel_is_for_this_platform_and_every_python(wheel):
    compiler("CC")
    platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
    assert wheel.name == f"fastdeploy_kvcache_v1-{__version__}-py3-none-{platform}.whl"


def test_a_wheel_without_libraries_is_for_every_platform(build, unpacked):
    """Also of a machine without compilers, where nothing fails."""
    for settings in ({}, {"native": "cpu,paddle", "CC": "/nowhere", "CXX": "/nowhere"}):
        assert build("wheel", unpacked, **settings).name == f"fastdeploy_kvcache_v1-{__version__}-py3-none-any.whl"


def test_the_changelog_names_the_version_that_comes_next():
    changelog = (ROOT / "CHANGELOG.md").read_text()
    released, _, dev = __version__.partition(".dev")
    assert (f"## [Unreleased]\n\nBecomes {released}.\n" in changelog) == bool(dev)
    assert (f"## [{released}]" in changelog) != bool(dev)


def test_the_sdist_holds_every_native_source_and_nothing_that_a_run_left(sdist):
    """Asked of the archive: a tree in which something was built has bytecode of its own."""
    built = (".pyc", ".so")
    sources = {name for name in relative(ROOT / "custom_ops", "*.*") if not name.endswith(built)}
    with tarfile.open(sdist) as archive:
        files = [member.name.split("/", 1)[1] for member in archive.getmembers() if member.isfile()]
    assert {name.removeprefix("custom_ops/") for name in files if re.match(r"custom_ops/.*\.", name)} == sources
    assert [name for name in files if name.endswith(built)] == []


def test_deleted_file_is_not_in_the_next_wheel(build, unpacked, tmp_path):
    """Installers build in the checkout itself, where the last build has left its files."""
    tree = tmp_path / "checkout"
    shutil.copytree(unpacked, tree)
    old = [tree / PACKAGE / "old.py", tree / "patches/fastdeploy-0.1.toml"]
    for path in old:
        path.touch()
    for expected in (2, 0):
        with zipfile.ZipFile(build("wheel", tree)) as archive:
            names = [Path(name).name for name in archive.namelist()]
        assert sum(path.name in names for path in old) == expected
        for path in old:
            path.unlink(missing_ok=True)


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """The wheel and nothing else, not even what it depends on; uninstalled at the end."""
    environment = Environment(tmp_path_factory.mktemp("user") / "venv")
    before = environment.files()
    environment.pip("install", "-q", "--no-deps", "--no-index", wheel)
    yield environment
    environment.pip("uninstall", "-q", "-y", "fastdeploy-kvcache-v1")
    assert environment.files() == before


@pytest.mark.parametrize(
    ("switch", "statement", "loaded"),
    [("", "", []), ("0", "import fastdeploy", []), ("1", "", [PACKAGE, f"{PACKAGE}.plugin", f"{PACKAGE}.switch"])],
)
def test_a_process_loads_no_more_than_the_switch_asks_for(installed, tmp_path, switch, statement, loaded):
    """By the bootstrap file. FAKE fastdeploy: an empty module."""
    (tmp_path / "fastdeploy.py").touch()
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment["ENABLE_V1_KVCACHE_MANAGER"] = switch
    assert run(installed.python, "-c", f"{statement}{OURS}", cwd=tmp_path, env=environment).strip() == str(loaded)


@pytest.fixture(scope="module")
def required(tmp_path_factory):
    """A directory with what the package requires without an extra, and nothing else."""
    directory = tmp_path_factory.mktemp("required")
    requirements = map(Requirement, importlib.metadata.requires("fastdeploy-kvcache-v1"))
    for name in [each.name for each in requirements if each.marker is None or each.marker.evaluate({"extra": ""})]:
        distribution = importlib.metadata.distribution(name)
        for top in {file.parts[0] for file in distribution.files} - {"..", "__pycache__"}:
            (directory / top).symlink_to(distribution.locate_file(top))
    return directory


@pytest.fixture
def bare(installed, required, tmp_path):
    """Runs the command with the package's own requirements and nothing else; returns exit status, output and errors."""
    names = ("PATH", "LD_LIBRARY_PATH")
    environment = {name: os.environ[name] for name in names if name in os.environ}
    environment |= {"HOME": str(tmp_path)}
    (tmp_path / "trace").write_text(2 * f"{json.dumps(TURN)}\n")
    FileBackend(tmp_path / "store", namespace(), capacity_bytes=1 << 20).close()

    def command(words, packages=required):
        done = subprocess.run(
            [installed.python.parent / "fastdeploy-kvcache", *words],
            cwd=tmp_path,
            env={**environment, "PYTHONPATH": str(packages)},
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert "Traceback" not in done.stdout + done.stderr, done.stderr
        return done.returncode, done.stdout, done.stderr

    return command


TURN = {
    "timestamp": 0,
    "input_length": 99,
    "output_length": 9,
    "session_id": 0,
    "tokens_per_id": 64,
    "hash_ids": [1, 2],
}
NEEDS_EXTRA = (
    "serve",
    "serve --port 0",
    "serve --model random --tensor-parallel-size 2",
    "serve --model smollm2",
    "serve --kvcache-storage-backend file --kvcache-storage-dir kv",
    "serve --kvcache-storage-backend mooncake",
    "serve --role prefill",
    "serve --role decode --transfer-plane mooncake",
    "serve --fastdeploy-cpu --model smollm2",
    "router --prefill http://127.0.0.1:1 --decode http://127.0.0.1:2",
    "demo",
    "demo --fastdeploy .",
    "storage verify --kvcache-storage-dir store",
)
WORKS = (
    "replay trace",
    "replay trace --closed-loop --verify --outputs",
    "replay trace --compare --json --device-blocks 20 --host-blocks 20",
    *(f"traffic {kind} --requests 2" for kind in KINDS),
    "storage info --kvcache-storage-dir store",
    "storage prune --older-than 1 --kvcache-storage-dir store",
    "storage clear --json --kvcache-storage-dir store",
)


def test_every_command_is_tried_without_extras():
    tried = {line.split()[0] for line in (*NEEDS_EXTRA, *WORKS)}
    assert tried | {"doctor", "explain"} == {command.name for command in COMMANDS}


@pytest.mark.parametrize("command", [command.name for command in COMMANDS])
def test_without_extras_every_command_has_its_help(bare, command):
    status, output, errors = bare([command, "--help"])
    assert (status, errors) == (0, "")
    assert output.startswith("usage: fastdeploy-kvcache")


@pytest.mark.parametrize("line", NEEDS_EXTRA)
def test_command_without_its_extras_says_in_one_line_what_to_install(bare, line):
    (extras,) = (command.extras for command in COMMANDS if command.name == line.split()[0])
    status, output, errors = bare(line.split())
    assert (status, output) == (2, "")
    install = re.escape(f"pip install 'fastdeploy-kvcache-v1[{extras}]'\n")
    assert re.fullmatch(rf"fastdeploy-kvcache: error: .* needs the package \w+: {install}", errors)


@pytest.mark.parametrize("line", WORKS)
def test_without_extras_the_other_commands_work(bare, line):
    status, output, errors = bare(line.split())
    assert (status, errors) == (0, "")
    assert output


def test_without_fastdeploy_its_cpu_server_is_one_line(bare):
    status, output, errors = bare(["serve", "--fastdeploy-cpu"])
    assert (status, output, errors.count("\n")) == (2, "", 1)
    assert "FastDeploy is not installed here" in errors
    assert "pip install 'fastdeploy-kvcache-v1[embedded]'" in errors


@pytest.mark.parametrize(
    ("flags", "problems"),
    [
        ("", {"FastDeploy", "PaddlePaddle", "CuPy"}),
        ("--kvcache-storage-dir kv", {"storage file kv"}),
        ("--kvcache-storage-backend mooncake", {"storage mooncake"}),
        ("--kvcache-storage-backend attention_store", {"storage attention_store"}),
        ("--prefill http://127.0.0.1:1 --decode http://127.0.0.1:2", {"servers"}),
    ],
)
def test_to_the_doctor_a_missing_package_is_a_finding(bare, flags, problems):
    status, output, _ = bare(["doctor", *flags.split()])
    failed = dict(re.findall(r"^FAIL  ([^:]*): (.*)$", output, re.M))
    assert (status, output.splitlines()[-1].startswith("Lab: ok; ")) == (1, True)
    assert len(failed) == sum(map(int, re.findall(r": (\d+) to do", output.splitlines()[-1])))
    assert problems <= set(failed)
    assert failed["CuPy"] == "a server on a GPU needs the package cupy: pip install 'fastdeploy-kvcache-v1[gpu]'"
    if flags:
        assert all("pip install 'fastdeploy-kvcache-v1[embedded]'" in failed[name] for name in problems)


def test_to_the_doctor_even_a_missing_requirement_is_a_finding(bare):
    """Who installs beside FastDeploy with --no-deps has none of them."""
    status, output, _ = bare(["doctor"], packages="")
    found = dict(re.findall(r"^FAIL  ([^:]*): (.*)$", output, re.M))
    assert status == 1
    assert re.fullmatch("this check needs the package .*: pip install fastdeploy-kvcache-v1", found["FastDeploy"])
    assert {"copy ops", "replay and traffic"} <= found.keys()


def test_without_extras_no_package_of_one_is_there(installed, required):
    code = (
        "import importlib.util, os; from fastdeploy_kvcache_v1.contract.installation import DEPENDENCIES;"
        "print(*sorted(name for name in DEPENDENCIES if importlib.util.find_spec(name)))"
    )
    found = run(installed.python, "-c", code, env={**os.environ, "PYTHONPATH": str(required)}).split()
    assert set(found) - {"tomli"} == {"msgspec", "numpy", "prometheus_client", "psutil", "pyroaring", "tqdm", "wrapt"}


def test_the_command_is_installed(installed):
    assert run(installed.python.parent / "fastdeploy-kvcache", "--version").split()[-1] == __version__


def test_without_the_lab_doctor_runs_and_a_lab_command_is_one_line(wheel, required, tmp_path):
    environment = Environment(tmp_path / "venv")
    environment.pip("install", "-q", "--no-deps", "--no-index", wheel)
    shutil.rmtree(environment.site_packages / PACKAGE / "lab")
    options = {"cwd": tmp_path, "env": {"PYTHONPATH": str(required), "HOME": str(tmp_path), "PATH": os.environ["PATH"]}}
    command = environment.python.parent / "fastdeploy-kvcache"
    report = run(command, "doctor", expect=1, **options)
    assert "Traceback" not in report
    assert report.splitlines()[-1].startswith("Machine: ok; FastDeploy: ")
    assert run(command, "serve", expect=2, **options).count("\n") == 1
    assert "lab" in run(command, "replay", "trace", expect=2, **options)
