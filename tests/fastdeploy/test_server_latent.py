"""A cache of latent vectors (MLA, DeepSeek) in the real server: both tiers, two ranks, a store.

The worker's model is the checksum model with that layout. What FastDeploy's own layers make of a cached prefix is
proved in inside/latent_prefix.py.
"""

import json

import pytest

from fastdeploy_kvcache_v1.model.random_directory import write_random_directory

from .cpu_server import started
from .server_workload import Workload

pytestmark = [pytest.mark.process, pytest.mark.fastdeploy, pytest.mark.timeout(900)]

DEEPSEEK = {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3",
    "kv_lora_rank": 128, "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16, "v_head_dim": 16, "q_lora_rank": 64,
    "n_routed_experts": 8, "num_key_value_heads": 8,
}  # fmt: skip
ENVIRONMENT = {"FD_ATTENTION_BACKEND": "MLA_ATTN"}
BLOCK_BYTES = 4 * (128 + 16) * 64 * 2
"""Of 4 layers, 64 tokens, in bfloat16; every rank has the whole vector."""


def make_model(directory):
    model = write_random_directory(directory / "model")
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    (model / "config.json").write_text(json.dumps(config | DEEPSEEK), encoding="utf-8")


def run_workload(release, directory, *flags, **options):
    make_model(directory)
    with started(release, directory, *flags, environment=ENVIRONMENT, **options) as server, server.client() as client:
        workload = Workload(server, client)
        workload.run()
        copies = server.worker_copies() if options.get("manager", True) else None
        metrics = server.metrics() if options.get("manager", True) else {}
        assert server.stop() == 0, server.stderr
    return workload, copies, metrics


@pytest.fixture(scope="module")
def expected(release, tmp_path_factory):
    """FastDeploy without us and without a prefix cache, whose worker computes no attention here."""
    flags = ("--no-enable-prefix-caching", "--num-gpu-blocks-override", "256")
    return run_workload(release, tmp_path_factory.mktemp("reference"), *flags, manager=False)[0]


@pytest.mark.parametrize(
    ("ranks", "flags"),
    [
        (1, ("--write-policy", "write_through")),
        (2, ()),
        (1, ("--kvcache-storage-backend", "file", "--kvcache-storage-dir", "stored")),
    ],
)
def test_tokens_are_the_same_with_latent_blocks_in_every_tier(release, expected, tmp_path, ranks, flags):
    flags = tuple(str(tmp_path / flag) if flag == "stored" else flag for flag in flags)
    swap_space = 100 * BLOCK_BYTES * ranks / 1024**3
    flags = (*flags, "--swap-space", f"{swap_space:.9f}", "--tensor-parallel-size", str(ranks))
    workload, copies, metrics = run_workload(release, tmp_path, "--num-gpu-blocks-override", "16", *flags)
    assert workload.tokens() == expected.tokens()
    assert workload.cached_tokens() > 0
    assert min(copies.swap_out.blocks, copies.swap_in.blocks) > 0
    assert abs(metrics["host_blocks"] - 100) <= 1
