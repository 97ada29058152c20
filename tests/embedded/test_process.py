"""How a server of our own starts for the demo and benchmarks; how it ends is in `tests/demo`."""

import httpx
import pytest

from fastdeploy_kvcache_v1.embedded.process import running_server
from fastdeploy_kvcache_v1.errors import WorkerDiedError

pytestmark = pytest.mark.process


def test_it_answers_inside_the_block_and_not_after_it():
    with running_server([]) as url:
        assert httpx.get(f"{url}/health").is_success
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{url}/health")


def test_a_server_that_cannot_start_says_why():
    with pytest.raises(WorkerDiedError, match="unknown write policy 'never'"), running_server(["--write-policy=never"]):
        pass
