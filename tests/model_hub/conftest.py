import os

import pytest

from tests.model_hub.web_server import serving


@pytest.fixture
def site():
    with serving() as site:
        yield site


@pytest.fixture
def pip_settings(monkeypatch, tmp_path):
    """Only what a test writes into the file: no settings and no proxy of this machine."""
    for name in [*os.environ]:
        if name.startswith("PIP_") or name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)
    file = tmp_path / "pip.conf"
    file.touch()
    monkeypatch.setenv("PIP_CONFIG_FILE", str(file))
    monkeypatch.setattr("fastdeploy_kvcache_v1.model_hub.web._pip_files", _only(file))
    return file


def _only(file):
    """`pip config list` also knows the machine's files; this reads one, in the same form."""
    import configparser

    def read():
        parser = configparser.RawConfigParser()
        parser.read(file)
        return {f"{section}.{name}": value for section in parser.sections() for name, value in parser[section].items()}

    return read


@pytest.fixture
def cache(monkeypatch, tmp_path):
    path = tmp_path / "cache with a space"
    monkeypatch.setenv("FASTDEPLOY_KVCACHE_CACHE", str(path))
    return path
