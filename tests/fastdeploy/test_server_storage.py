"""The real server with a storage directory: what one computed, the next one and the other one do not compute again."""

from contextlib import contextmanager

import pytest

from .cpu_server import BLOCK_SIZE, started, wait_until
from .server_workload import user

pytestmark = [pytest.mark.fastdeploy, pytest.mark.timeout(900)]

TEXT = "".join(chr(ord("a") + number * number % 26) for number in range(7 * BLOCK_SIZE))
PROMPT, OTHER = user(TEXT), user(TEXT[::-1])
SMALL = user("go on")
CACHED = 7 * BLOCK_SIZE
"""The template adds some tokens, so that the text fills seven blocks."""


def flags(directory, *others, prefetch="wait_complete"):
    return [
        *("--swap-space", "0.01", "--write-policy", "write_through"),
        *("--kvcache-storage-backend", "file", "--kvcache-storage-dir", str(directory)),
        *("--storage-prefetch", prefetch, *others),
    ]


@contextmanager
def serving(release, tmp_path, name, *words, **environment):
    """A server that has opened the store, and a client."""
    with (
        started(release, tmp_path / name, *words, environment=environment) as server,
        server.client() as client,
    ):
        yield server, client
        assert server.failed_copies() == 0
        assert server.stop() == 0, server.stderr


def wait_stored(server, client, blocks=7):
    """The blocks of a request leave the device with the next batches."""

    def is_stored():
        server.ask(client, SMALL, max_tokens=1)
        return server.metrics()["storage_blocks_total"] >= blocks

    wait_until(is_stored, lambda: f"stored blocks: {storage_metrics(server)}", 60.0)


def storage_metrics(server):
    return {name: value for name, value in server.metrics().items() if name.startswith("storage")}


@pytest.fixture
def stored(release, tmp_path):
    """A directory with the blocks of `PROMPT`, and the answer."""
    directory = tmp_path / "kv"
    with serving(release, tmp_path, "first", *flags(directory)) as (server, client):
        answer = server.ask(client, PROMPT)
        assert answer.cached_tokens == 0
        wait_stored(server, client)
    return directory, answer


def test_a_restarted_server_does_not_compute_again_what_is_stored(release, tmp_path, stored):
    directory, answer = stored
    with serving(release, tmp_path, "second", *flags(directory)) as (server, client):
        again = server.ask(client, PROMPT)
        assert (again.tokens, again.cached_tokens) == (answer.tokens, CACHED)
        assert storage_metrics(server)["storage_damaged_blocks_total"] == 0
