"""Which FastDeploy there is, and which release it counts as."""

import importlib.util
from pathlib import Path
from types import SimpleNamespace

import pytest

from fastdeploy_kvcache_v1.errors import OverlayError
from fastdeploy_kvcache_v1.fastdeploy_integration.overlay.release import (
    OVERRIDE,
    FastDeployTree,
    fastdeploy_at,
    installed_fastdeploy,
)
from tests.fastdeploy_integration import fake_fastdeploy


@pytest.fixture
def tree(tmp_path):
    root = fake_fastdeploy.write(tmp_path, "fastdeploy")
    (root / "version.txt").unlink()
    return tmp_path


def test_where_the_version_comes_from(tree, monkeypatch):
    with pytest.raises(OverlayError, match=f"set {OVERRIDE}"):
        fastdeploy_at(tree)
    (tree / "setup.py").write_text('V = os.environ.get("FASTDEPLOY_VERSION", "2.5.0")\n', encoding="utf-8")
    assert fastdeploy_at(tree).release == "2.5"
    (tree / "fastdeploy" / "version.txt").write_text(
        "Paddle version: 3.3\nfastdeploy version: 2.5.0\nfastdeploy version: 2.6.1\n", encoding="utf-8"
    )
    assert fastdeploy_at(tree).version == "2.6.1"
    assert fastdeploy_at(tree / "fastdeploy").release == "2.6"
    monkeypatch.setenv(OVERRIDE, "2.5.9")
    assert fastdeploy_at(tree).release == "2.5"


@pytest.mark.parametrize(
    ("version", "release"),
    [
        ("2.6.0", "2.6"),
        ("2.6", "2.6"),
        ("2.6.1.post2", "2.6"),
        ("2.6.0rc1", "2.6"),
        ("2.6.0-dev", "2.6-dev"),
        ("2.6.0.dev0", "2.6-dev"),
        ("2.6.0.dev20260415+cuda12", "2.6-dev"),
        ("2.10.0-dev", "2.10-dev"),
        ("2.6.0+devbox", "2.6"),
        ("develop", "develop"),
    ],
)
def test_which_release_a_version_belongs_to(version, release):
    assert FastDeployTree(Path(), version).release == release


@pytest.mark.parametrize(("places", "is_there"), [(None, False), ([], False), (["fastdeploy"], True)])
def test_a_fastdeploy_is_installed_where_import_finds_a_package(tree, monkeypatch, places, is_there):
    monkeypatch.setenv(OVERRIDE, "2.6.0")
    spec = None if places is None else SimpleNamespace(submodule_search_locations=[str(tree / each) for each in places])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    assert installed_fastdeploy() == (FastDeployTree(tree / "fastdeploy", "2.6.0") if is_there else None)
