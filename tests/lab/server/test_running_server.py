"""How a server of our own starts for the demo and benchmarks; how it ends is in `tests/lab/demo`."""

import httpx2
import pytest

from fastdeploy_kvcache_v1.errors import WorkerDiedError
from fastdeploy_kvcache_v1.lab.server.client import complete, running_server

pytestmark = pytest.mark.process


def test_it_answers_inside_the_block_and_not_after_it():
    with running_server([]) as url:
        first, again = (complete(url, tuple(range(200)), 3) for _ in range(2))
    assert first.token_ids == again.token_ids
    assert (first.prompt_tokens, first.cached_tokens, again.cached_tokens) == (200, 0, 192)
    with pytest.raises(httpx2.ConnectError):
        httpx2.get(f"{url}/health")


def test_a_server_that_cannot_start_says_why():
    with (
        pytest.raises(WorkerDiedError, match="--write-policy must be"),
        running_server(["--write-policy=never"]),
    ):
        pass
