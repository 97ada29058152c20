"""Blocks of the KV cache on an S3 server: `--kvcache-storage-backend s3`, an example of a store of your own.

The bucket, `--kvcache-s3-bucket`, must exist; endpoint and keys are in boto3's own variables and files, such as
AWS_ENDPOINT_URL_S3. A block is an object named `NAMESPACE/KEY`. S3 evicts nothing: give the bucket a lifecycle rule.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, TypeVar

from fastdeploy_kvcache_v1.errors import ConfigError, StorageError
from fastdeploy_kvcache_v1.storage.base import StorageBackend, StoreKey
from fastdeploy_kvcache_v1.storage.namespace import Namespace
from fastdeploy_kvcache_v1.storage.registry import Chosen, StoreKind, store_flag

BUCKET = store_flag("kvcache_s3_bucket", "bucket of the s3 store", unit="BUCKET")
CONNECTIONS = 16
MOST_REMOVED = 1000
"""Objects that S3 deletes by one request."""

Result = TypeVar("Result")


class S3Backend(StorageBackend):
    """Requests of one call run beside each other, over connections that are kept."""

    name = "s3"

    def __init__(self, bucket: str, namespace: Namespace) -> None:
        """Connects at the first call. Raises `ConfigError`."""
        self.namespace_digest = namespace.digest
        self._client, self._bucket = _connect(), bucket
        self._threads = ThreadPoolExecutor(CONNECTIONS, "kv-s3")

    def count_stored(self, keys: Sequence[StoreKey]) -> int:
        return _num_leading([size is not None for size in self._all(self._size, keys)])

    def get(self, keys: Sequence[StoreKey], buffers: Sequence[memoryview]) -> int:
        return _num_leading(self._all(self._get, keys, buffers))

    def put(self, keys: Sequence[StoreKey], buffers: Sequence[memoryview]) -> int:
        return sum(self._all(self._put, keys, buffers))

    def touch(self, keys: Sequence[StoreKey]) -> None:
        """S3 remembers no use."""

    def remove(self, keys: Sequence[StoreKey]) -> None:
        for begin in range(0, len(keys), MOST_REMOVED):
            objects = {"Objects": [{"Key": self._named(key)} for key in keys[begin : begin + MOST_REMOVED]]}
            answer = _asked(lambda some=objects: self._client.delete_objects(Bucket=self._bucket, Delete=some))
            if errors := answer.get("Errors"):
                raise StorageError(f"s3 cannot remove {len(errors)} of {len(keys)} values: {errors[0]['Code']}")

    def close(self) -> None:
        self._threads.shutdown()
        self._client.close()

    def _named(self, key: StoreKey) -> str:
        return f"{self.namespace_digest}/{key}"

    def _size(self, key: StoreKey) -> int | None:
        """None if the value is missing."""
        answer = _asked(lambda: self._client.head_object(Bucket=self._bucket, Key=self._named(key)), missing=True)
        return None if answer is None else int(answer["ContentLength"])

    def _get(self, key: StoreKey, buffer: memoryview) -> bool:
        answer = _asked(lambda: self._client.get_object(Bucket=self._bucket, Key=self._named(key)), missing=True)
        if answer is None:
            return False
        value = _asked(answer["Body"].read)
        if len(value) != len(buffer):
            self.remove([key])  # it would count as stored for ever
            return False
        buffer[:] = value
        return True

    def _put(self, key: StoreKey, buffer: memoryview) -> bool:
        """Whether it was written. An object is visible as a whole or not at all."""
        if self._size(key) is not None:
            return False
        _asked(lambda: self._client.put_object(Bucket=self._bucket, Key=self._named(key), Body=bytes(buffer)))
        return True

    def _all(self, act: Callable[..., Result], *given: Sequence[Any]) -> list[Result]:
        """Returns, or raises, when none of them runs any more: only then nothing touches a buffer."""
        futures: list[Future[Result]] = [self._threads.submit(act, *each) for each in zip(*given, strict=True)]
        wait(futures)
        return [future.result() for future in futures]


def _num_leading(are_there: Sequence[bool]) -> int:
    return next((number for number, is_there in enumerate(are_there) if not is_there), len(are_there))


def _connect() -> Any:
    try:
        import boto3
        from botocore.config import Config
        from botocore.exceptions import BotoCoreError
    except ImportError as error:
        raise ConfigError(f"the store s3 needs a package ({error}): pip install boto3") from None
    deadlines = Config(connect_timeout=2, read_timeout=5, retries={"total_max_attempts": 2})
    try:
        return boto3.session.Session().client("s3", config=deadlines.merge(Config(max_pool_connections=CONNECTIONS)))
    except BotoCoreError as error:
        raise ConfigError(f"the store s3 cannot be used: {error}") from error


def _asked(ask: Callable[[], Any], *, missing: bool = False) -> Any:
    """What S3 answers; None for an object that is not there, where it may be `missing`."""
    from botocore.exceptions import BotoCoreError, ClientError

    try:
        return ask()
    except ClientError as error:
        if missing and error.response["Error"]["Code"] in ("404", "NoSuchKey"):
            return None
        raise StorageError(f"s3 refuses: {error}") from error
    except (BotoCoreError, OSError) as error:
        raise StorageError(f"s3 does not answer: {error}") from error


def _check(chosen: Chosen, namespace: Namespace | None) -> None:
    bucket = chosen.options[BUCKET.name]
    client = _connect()
    try:
        if _asked(lambda: client.head_bucket(Bucket=bucket), missing=True) is None:
            raise ConfigError(f"the store s3 has no bucket {bucket!r}: create it, or change {BUCKET.option}")
    finally:
        client.close()


STORE = StoreKind(
    "s3",
    open=lambda chosen, namespace: S3Backend(chosen.options[BUCKET.name], namespace),
    check=_check,
    flags=[BUCKET],
    module="boto3",
    load_threads=1,
)
