"""What `--model` means to each server."""

import sys
from pathlib import Path

import pytest

from fastdeploy_kvcache_v1 import cli
from fastdeploy_kvcache_v1.errors import ModelFetchError
from fastdeploy_kvcache_v1.lab.hub.smollm2 import SMOLLM2
from fastdeploy_kvcache_v1.lab.server import command
from fastdeploy_kvcache_v1.lab.server.command import embedded_model, fastdeploy_cpu_model

FETCHED = Path("/cache/SmolLM2-135M-Instruct")


@pytest.fixture
def fetches(monkeypatch):
    """Models that were fetched, in order."""
    fetched = []

    def fetch(model, say):
        fetched.append(model)
        return FETCHED

    monkeypatch.setattr(command, "fetch", fetch)
    return fetched


@pytest.fixture
def no_network(monkeypatch):
    def fetch(model, say):
        raise ModelFetchError("cannot fetch it: no\nnetwork; do this")

    monkeypatch.setattr(command, "fetch", fetch)


@pytest.mark.parametrize("word", [None, "smollm2"])
def test_the_embedded_server_serves_smollm2_by_default_and_by_name(fetches, word):
    assert embedded_model(word) == FETCHED
    assert fetches == [SMOLLM2]


@pytest.mark.parametrize(("word", "model"), [("random", None), ("./smollm2", Path("smollm2")), ("/m", Path("/m"))])
def test_other_models_fetch_nothing(fetches, word, model):
    assert embedded_model(word) == model
    assert fetches == []


def test_without_the_default_model_one_line_says_why_and_random_serves(no_network, capsys):
    assert embedded_model(None) is None
    assert capsys.readouterr().err == (
        "fastdeploy-kvcache: warning: cannot fetch it: no network; do this; until then, the random model is served\n"
    )


def test_a_model_that_was_asked_for_is_not_replaced_by_another(no_network, capsys):
    assert cli.main(["serve", "--model", "smollm2"]) == 2
    assert capsys.readouterr().err == "fastdeploy-kvcache: error: cannot fetch it: no network; do this\n"


def test_fastdeploy_over_the_cpu_worker_has_the_random_model_by_default(fetches):
    assert [fastdeploy_cpu_model(word) for word in (None, "random", "/m", "smollm2")] == [
        None,
        None,
        "/m",
        str(FETCHED),
    ]
    assert fetches == [SMOLLM2]


def test_fastdeploy_is_handed_the_directory(fetches, monkeypatch):
    commands = []

    def execute(path, words):
        commands.append(words)
        raise SystemExit(0)

    monkeypatch.setattr(command.os, "execv", execute)
    with pytest.raises(SystemExit):
        cli.main(["serve", "--fastdeploy-cpu", "--model", "smollm2"])
    assert commands == [[sys.executable, "-m", command.CPU_SERVER, "--model", str(FETCHED)]]
