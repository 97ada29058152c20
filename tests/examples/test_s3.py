"""The example store over a real S3 server: as an installed package, and what it says when S3 does not work."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from fastdeploy_kvcache_v1.errors import ConfigError, StorageError
from fastdeploy_kvcache_v1.storage.conformance import *  # noqa: F403
from tests.storage.values import keys, namespace, put

boto3 = pytest.importorskip("boto3", reason="boto3 is not installed: pip install boto3 'moto[server]'")
moto_server = pytest.importorskip("moto.server", reason="moto is not installed: pip install boto3 'moto[server]'")
EXAMPLE = Path(__file__).parents[2] / "examples" / "s3"


@pytest.fixture(scope="module")
def endpoint():
    server = moto_server.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def bucket(request):
    return f"kv-{abs(hash(request.node.name))}"


@pytest.fixture
def s3(endpoint, monkeypatch, bucket):
    """The module of the example, and an empty bucket."""
    for name, value in {
        "AWS_ENDPOINT_URL_S3": endpoint,
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_DEFAULT_REGION": "us-east-1",
    }.items():
        monkeypatch.setenv(name, value)
    boto3.client("s3").create_bucket(Bucket=bucket)
    monkeypatch.syspath_prepend(EXAMPLE)
    import fastdeploy_kvcache_s3

    return fastdeploy_kvcache_s3


@pytest.fixture
def open_store(s3, bucket, request):
    def open_one(**changes):
        backend = s3.S3Backend(bucket, namespace(**changes))
        request.addfinalizer(lambda: (backend.close(), backend.close()))
        return backend

    return open_one


def test_example_has_at_most_150_lines():
    assert len((EXAMPLE / "fastdeploy_kvcache_s3.py").read_text().splitlines()) <= 150


def test_more_values_are_removed_than_s3_takes_at_once(s3, open_store, monkeypatch):
    monkeypatch.setattr(s3, "MOST_REMOVED", 2)
    backend = open_store()
    put(backend, *range(5))
    backend.remove(keys(*range(5)))
    assert backend.count_stored(keys(0)) == 0


def test_what_does_not_work_is_one_line(s3, bucket, monkeypatch):
    def check(bucket):
        s3.STORE.check(SimpleNamespace(options={"kvcache_s3_bucket": bucket}), None)

    check(bucket)
    with pytest.raises(ConfigError, match="the store s3 has no bucket 'missing': create it"):
        check("missing")
    with pytest.raises(StorageError, match=r"s3 refuses: .*NoSuchBucket"):
        put(s3.S3Backend("missing", namespace()), 1)
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:9")
    with pytest.raises(StorageError, match=r"s3 does not answer: .*127\.0\.0\.1:9"):
        check(bucket)
    with pytest.raises(ConfigError, match="--kvcache-storage-backend s3 needs --kvcache-s3-bucket"):
        s3.STORE.options_of(SimpleNamespace(kvcache_s3_bucket=None))


@pytest.mark.process
def test_installed_example_is_a_store_that_doctor_tries(s3, bucket, tmp_path):
    copy = shutil.copytree(EXAMPLE, tmp_path / "source")
    site = tmp_path / "site"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, "--target", str(site), str(copy)], check=True)
    path = os.pathsep.join([str(site), *(each for each in sys.path if each and each != str(EXAMPLE))])
    doctor = [sys.executable, "-m", "fastdeploy_kvcache_v1.cli", "doctor"]
    doctor += ["--kvcache-storage-backend", "s3", "--kvcache-s3-bucket", bucket]
    told = subprocess.run(doctor, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path}, cwd=tmp_path)
    lines = [line.strip() for line in told.stdout.splitlines() if " storage s3" in line]
    assert any("boto3 importable" in line for line in lines), told
    assert any(line.startswith("ok") and "64 MiB stored at" in line for line in lines), told
