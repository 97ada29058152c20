"""What the user says about transfers."""

from pathlib import Path

import pytest

from fastdeploy_kvcache_v1.errors import ConfigError
from fastdeploy_kvcache_v1.fastdeploy_integration.disaggregation import settings


@pytest.fixture
def secret(tmp_path):
    path = tmp_path / "secret"
    path.write_text("0123456789abcdef\n")
    path.chmod(0o600)
    return {settings.SECRET_FILE: str(path)}


def test_the_secret_is_that_of_the_file_and_limits_are_those_given(secret):
    limits = {settings.LIMITS: '{"wait_s": 7, "digest": false}'}
    choice = settings.transfer_choice({**secret, **limits})
    assert (choice.settings.secret, choice.settings.wait_s, choice.settings.silence_s) == (b"0123456789abcdef", 7, 10.0)
    assert (choice.plane, choice.digest) == ("socket", False)
    assert settings.transfer_choice(secret).digest


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({settings.SECRET_FILE: ""}, "share a secret: write one to a file"),
        ({settings.SECRET_FILE: "/nowhere/at/all"}, "cannot be read: .*No such file"),
        ({settings.PLANE: "carrier pigeon"}, "must be one of socket, mooncake, cuda_ipc, got "),
        ({settings.LIMITS: "5"}, "give an object of"),
        ({settings.LIMITS: "{"}, "is not JSON"),
        ({settings.LIMITS: '{"secret": 1}'}, "give an object of"),
        ({settings.LIMITS: '{"wait_s": "soon"}'}, "wait_s must be a number of seconds"),
        ({settings.LIMITS: '{"wait_s": 0}'}, "wait_s must be above 0 seconds"),
    ],
)
def test_what_cannot_work_is_refused(secret, changed, reason):
    with pytest.raises(ConfigError, match=reason):
        settings.transfer_choice({**secret, **changed})


@pytest.mark.parametrize("mode", [0o640, 0o604])
def test_a_secret_that_others_can_read_is_refused_in_a_role(secret, mode):
    Path(secret[settings.SECRET_FILE]).chmod(mode)
    with pytest.raises(ConfigError, match="others can read the secret in"):
        settings.transfer_choice(secret)


def test_cuda_ipc_is_chosen_by_name_and_says_what_it_lacks(secret):
    choice = settings.transfer_choice({**secret, settings.PLANE: "cuda_ipc"})
    with pytest.raises(ConfigError, match="cuda_ipc needs a GPU"):
        choice.open_plane("127.0.0.1")


def test_workers_learn_what_the_engine_knows():
    environment, place = {}, settings.RankPlace("10.0.0.1", (4, 5), "a model")
    settings.export(place, environment)
    assert settings.rank_place(environment) == place
    with pytest.raises(ConfigError, match="expected this worker's role"):
        settings.rank_place({})
