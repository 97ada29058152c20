import pytest


@pytest.fixture
def cache(monkeypatch, tmp_path):
    path = tmp_path / "cache with a space"
    monkeypatch.setenv("FASTDEPLOY_KVCACHE_CACHE", str(path))
    return path
