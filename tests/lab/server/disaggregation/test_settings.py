"""Flags of the roles, and the secret that the servers share."""

import argparse
from concurrent.futures import ThreadPoolExecutor

import pytest

from fastdeploy_kvcache_v1.contract.flags import add_flags
from fastdeploy_kvcache_v1.errors import ConfigError
from fastdeploy_kvcache_v1.lab.server.disaggregation.settings import ROLE_FLAGS, Role, role_settings
from fastdeploy_kvcache_v1.transfer.secret_file import read_secret

SECRET = "sixteen bytes or more"


@pytest.fixture
def secret(tmp_path):
    path = tmp_path / "secret"
    path.write_text(f"{SECRET}\n")
    path.chmod(0o600)
    return str(path)


def settings(*words):
    parser = argparse.ArgumentParser()
    add_flags(parser, ROLE_FLAGS, with_defaults=True)
    return role_settings(parser.parse_args(words))


def test_a_server_is_mixed_unless_told_otherwise(secret):
    assert settings() is None
    assert settings("--role", "mixed") is None


def test_defaults_of_a_role(secret):
    made = settings("--role", "decode", "--peer-secret-file", secret)
    assert made.role is Role.DECODE
    assert made.address == ("127.0.0.1", 0)
    assert (made.plane, made.checksums) == ("socket", True)
    assert made.transfer.secret == SECRET.encode()
    assert SECRET not in repr(made)


@pytest.mark.parametrize(
    ("text", "address"),
    [("10.0.0.1", ("10.0.0.1", 0)), ("10.0.0.1:77", ("10.0.0.1", 77)), ("[::1]:5", ("::1", 5)), ("[::1]", ("::1", 0))],
)
def test_an_address_has_a_port_or_not(secret, text, address):
    made = settings("--role", "prefill", "--peer-secret-file", secret, "--transfer-address", text)
    assert made.address == address


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--transfer-wait", "5"), "--transfer-wait needs --role"),
        (("--peer-secret-file", "x"), "--peer-secret-file needs --role"),
        (("--role", "decode", "--transfer-address", "host:port"), "HOST or HOST:PORT"),
        (("--role", "decode", "--transfer-address", "host:70000"), "HOST or HOST:PORT"),
        (("--role", "decode", "--peer-secret-file", "/nowhere/secret"), "cannot be read"),
    ],
)
def test_what_cannot_work_is_said(flags, message):
    with pytest.raises(ConfigError, match=message):
        settings(*flags)


def test_a_secret_that_others_can_read_or_guess_is_refused(tmp_path):
    path = tmp_path / "secret"
    rows = (
        (SECRET, 0o644, "chmod 600"),
        ("short", 0o600, "give at least 16"),
        ("x" * 5000, 0o600, "is that the right file"),
    )
    for text, mode, message in rows:
        path.write_text(text)
        path.chmod(mode)
        with pytest.raises(ConfigError, match=message):
            read_secret(path)


def test_servers_that_start_together_make_one_secret(tmp_path, monkeypatch):
    monkeypatch.setenv("FASTDEPLOY_KVCACHE_CACHE", str(tmp_path / "cache"))
    with ThreadPoolExecutor(8) as pool:
        secrets = set(pool.map(lambda _: read_secret(None), range(16)))
    assert len(secrets) == 1
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["peer-secret"]
    assert (tmp_path / "cache" / "peer-secret").stat().st_mode & 0o777 == 0o600
