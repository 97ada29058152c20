"""Prefill and decode servers with two tensor parallel ranks behind FastDeploy's router: tokens of one mixed rank."""

from concurrent.futures import ThreadPoolExecutor

import msgspec
import openai
import pytest

from fastdeploy_kvcache_v1.fastdeploy_integration.disaggregation.role_caches import INFO_FILE
from fastdeploy_kvcache_v1.transfer.role_info import RoleInfo
from fastdeploy_kvcache_v1.transfer.trial import try_servers
from tests.fault_proxy import Fault

from .cpu_server import wait_until
from .models import LATENT, PLAIN
from .role_servers import PROMPTS, ask, num_fetches, servers, wait_idle

pytestmark = [pytest.mark.process, pytest.mark.fastdeploy, pytest.mark.timeout(1200)]

TWO = ("--tensor-parallel-size", "2")
SWAPPING = ("--num-gpu-blocks-override", "28", "--swap-space", "0.02", "--write-policy", "write_through")


@pytest.fixture(scope="module", params=[PLAIN, LATENT], ids=["plain", "latent"])
def made(release, request, tmp_path_factory):
    """Every rank of a latent cache has the whole vector."""
    with servers(release, tmp_path_factory.mktemp("ranks"), model=request.param) as made:
        yield made


@pytest.fixture(scope="module")
def expected(made):
    """One rank, mixed; ended before the others begin."""
    server = made.begin("mixed", "mixed")
    server.wait_ready()
    with server.client() as client:
        tokens = [ask(client, prompt) for prompt in PROMPTS]
    server.kill()
    return tokens


@pytest.fixture(scope="module")
def prefill(made, expected):
    server = made.begin("prefill", "prefill", *TWO, *SWAPPING, proxied=True)
    server.wait_ready()
    return server


@pytest.fixture(scope="module")
def two(made, prefill):
    return begun(made, "two", *TWO, *SWAPPING)


def begun(made, name, *flags):
    server = made.begin("decode", name, *flags)
    server.wait_ready()
    made.router.wait_registered(prefill=1, decode=1)
    return server


def assert_tokens(made, prefill, decode, expected):
    """One by one, and eight at a time, where transfers end in another order on each rank."""
    before = prefill.metrics()
    with made.router.client() as client, ThreadPoolExecutor(8) as pool:
        assert [ask(client, prompt) for prompt in PROMPTS] == expected
        assert list(pool.map(lambda prompt: ask(client, prompt), PROMPTS * 2)) == expected * 2
    wait_idle(prefill, decode)
    assert prefill.failed_copies() == 0
    leases = lambda: prefill.metrics()["transfers_started_total"] - before["transfers_started_total"]  # noqa: E731
    wait_until(lambda: leases() == num_fetches(decode) == 3 * len(PROMPTS), "one lease of each fetch, for all ranks")
    after = prefill.metrics()
    assert after["transfers_ended_total"] - before["transfers_ended_total"] == 3 * len(PROMPTS)


def assert_doctor_is_content(made, prefill, decode, *, ranks):
    paths = [server.logs / INFO_FILE for server in (prefill, decode)]
    infos = [msgspec.json.decode(path.read_bytes(), type=RoleInfo) for path in paths]
    assert [len(info.ranks) for info in infos] == ranks
    secret = (made.directory / "secret").read_bytes()
    verdicts = list(try_servers([str(paths[0])], [str(paths[1])], secret))
    assert [is_well for is_well, _, _ in verdicts] == [True, True, True], verdicts


def test_two_ranks_read_from_two(made, prefill, two, expected):
    assert_tokens(made, prefill, two, expected)
    assert_doctor_is_content(made, prefill, two, ranks=[2, 2])


@pytest.mark.parametrize("rank", [0, 1])
def test_corrupt_bytes_to_one_rank_fail_their_requests_alone(made, prefill, two, expected, rank):
    before = two.metrics()
    with made.router.client() as client:
        with made.fault(Fault.FLIP, rank), ThreadPoolExecutor(4) as pool:
            for asked in [pool.submit(ask, client, prompt) for prompt in PROMPTS[:4]]:
                # The router of 2.6 tries it four times; then a chat ends with "pd_reschedule" and without a token.
                assert isinstance(asked.exception(), openai.APIError) or asked.result() == ()
        wait_idle(prefill, two)
        after = two.metrics()
        assert after["transfers_started_total"] - before["transfers_started_total"] >= 4
        assert after["transfer_bytes_total"] == before["transfer_bytes_total"], "the other rank had no end of its own"
        assert [ask(client, prompt) for prompt in PROMPTS[:4]] == expected[:4]


def test_one_rank_reads_from_two(made, prefill, two, expected):
    two.kill()
    one = begun(made, "one")
    assert_tokens(made, prefill, one, expected)
    assert_doctor_is_content(made, prefill, one, ranks=[2, 1])
