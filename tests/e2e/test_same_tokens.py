"""Cache off, on the device, on device and host under every policy, and with failing copies: the same tokens."""

import json

import pytest

from fastdeploy_kvcache_v1.config import WritePolicy
from fastdeploy_kvcache_v1.worker.ops.copies import cpu_paths
from tests.e2e.server_process import started
from tests.e2e.workload import NUM_REQUESTS, run_workload

pytestmark = pytest.mark.process

SMALL = (
    *("--block-size", "8", "--num-gpu-blocks-override", "120", "--max-model-len", "900"),
    *("--max-num-seqs", "12", "--max-num-batched-tokens", "256"),
)
"""The longest request alone takes most of the device blocks; each answer grows over several of them."""

OTHER_POLICIES = [policy.value for policy in WritePolicy if policy is not WritePolicy.AUTO]

HOST_TIER = ("--swap-space", "0.02")
"""1310 blocks of 16 KiB."""


def run(directory, *flags, environment=None, hints=False):
    with started(directory, *flags, environment=environment) as server:
        with server.client() as client:
            outputs = run_workload(client, hints=hints)
        report = server.wait_idle()
        metrics = server.metrics()
        assert report["ok"], report
        assert report["idle"]
        assert metrics["device_blocks"] == metrics["device_free_blocks"] + metrics["device_evictable_blocks"]
        for path in cpu_paths():
            assert metrics[f"copy_path{{direction={path.direction},path={path.name},rank=0,reason=}}"] == 1
        assert metrics["requests_ended_total{outcome=finished}"] == NUM_REQUESTS
        assert metrics["requests_ended_total{outcome=failed}"] == 0
        assert server.stop() == 0, server.stderr
        server.assert_nothing_left()
    return outputs, metrics


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """Tokens without any cache and with room for everything."""
    flags = ("--no-enable-prefix-caching", "--block-size", "16", "--max-num-seqs", "12")
    outputs, metrics = run(tmp_path_factory.mktemp("reference"), *flags)
    assert metrics["device_hit_tokens_total"] == 0
    assert metrics["requests_preempted_total"] == 0
    assert len(outputs) == NUM_REQUESTS
    return outputs


def test_device_tier_alone(tmp_path, expected):
    outputs, metrics = run(tmp_path, *SMALL, "--swap-space", "0")
    assert outputs == expected
    assert metrics["device_hit_tokens_total"] > 0
    assert metrics["host_hit_tokens_total"] == 0
    assert metrics["requests_preempted_total"] > 0


@pytest.mark.parametrize("policy", [pytest.param("auto", marks=pytest.mark.smoke), *OTHER_POLICIES])
def test_device_and_host_tier(tmp_path, expected, policy):
    outputs, metrics = run(tmp_path, *SMALL, *HOST_TIER, "--write-policy", policy)
    assert outputs == expected
    assert metrics["device_hit_tokens_total"] > 0
    assert metrics["host_hit_tokens_total"] > 0
    assert metrics["swap_blocks_total{direction=out,rank=0}"] > 0
    assert metrics["swap_blocks_total{direction=in,rank=0}"] > 0
    assert metrics["swap_bytes_total{direction=in,rank=0}"] > 0
    assert metrics["requests_preempted_total"] > 0


def test_hints_of_sessions_true_or_not_change_no_token(tmp_path, expected):
    outputs, metrics = run(tmp_path, *SMALL, *HOST_TIER, hints=True)
    assert outputs == expected
    assert metrics["device_evicted_blocks_total"] > 0
    assert metrics["host_hit_tokens_total"] > 0


def test_slow_and_failing_copies(tmp_path, expected):
    faults = {"seed": 5, "max_delay_ms": 2, "fail": {"swap_in": [0, 9, 30, 61], "swap_out": [2, 17]}}
    outputs, metrics = run(
        tmp_path,
        *SMALL,
        *HOST_TIER,
        *("--write-policy", "write_through"),
        environment={"FASTDEPLOY_KVCACHE_COPY_FAULTS": json.dumps(faults)},
    )
    assert outputs == expected
    assert metrics["transfer_failures_total{direction=in,rank=0}"] > 0
    assert metrics["transfer_failures_total{direction=out,rank=0}"] > 0
    assert metrics["exposed_wait_seconds_total{rank=0}"] > 0
