"""--swap-space through FastDeploy's real command line and configuration, against the shapes of its real backends."""

import json

import pytest

from fastdeploy_kvcache_v1.fastdeploy_integration.overlay.table import table_for

from .fastdeploy_trees import HERE, RELEASES, has_dsa_attention, run_inside

pytestmark = pytest.mark.process

SWAP_BYTES = int(1.5 * 1024**3)
GQA_BLOCK = 6 * 2 * 4 * 64 * 64 * 2
LATENT_BLOCK = 6 * 576 * 64 * 2

EXPECTED = {
    "gqa": GQA_BLOCK,
    "gqa_2_ranks": GQA_BLOCK // 2,
    "gqa_4_ranks": GQA_BLOCK // 4,
    "gqa_8_ranks": GQA_BLOCK // 4,
    "gqa_mtp": GQA_BLOCK // 6 * 7,
    "gqa_fp8": 6 * 2 * 2 * 64 * (64 + 2),
    "flash_fp8": 6 * 2 * 2 * 64 * (64 + 2),
    "flash_mask_fp8": 6 * 2 * 2 * 64 * (64 + 2),
    "gqa_int4": GQA_BLOCK // 4,
    "mla": LATENT_BLOCK,
    "mla_mtp": LATENT_BLOCK // 6 * 7,
    "dsa": 6 * (656 + 132) * 64,
}


@pytest.fixture(scope="module", params=RELEASES)
def report(request, tmp_path_factory):
    release = request.param
    script = HERE / "drive_swap_space.py"
    return release, run_inside(release, tmp_path_factory.mktemp("fastdeploy"), script).splitlines()


def cases(lines):
    found = [json.loads(line.removeprefix("CASE ")) for line in lines if line.startswith("CASE ")]
    return {case["name"]: case for case in found}


def unserved(release):
    """Cases without a tier: the release has no such backend, or hands it the scales of another layer."""
    can = table_for(release).capabilities
    return (
        {name for name in ("flash_fp8", "flash_mask_fp8") if not can.flash_block_wise_fp8}
        | {name for name in ("mla", "mla_mtp") if not can.disables_chunked_prefill}
        | (set() if has_dsa_attention(release) else {"dsa"})
    )


def test_the_tier_is_as_large_as_asked_in_real_bytes_of_all_ranks(report):
    release, lines = report
    found = cases(lines)
    assert found.pop("none")["blocks"] == 0
    assert set(found) == set(EXPECTED) - unserved(release)
    for name, case in found.items():
        assert case["real_bytes"] == case["expected_bytes"] == EXPECTED[name], name
        assert case["blocks"] == SWAP_BYTES // (EXPECTED[name] * case["ranks"]), name


def test_a_worker_takes_the_engines_number(report):
    _, lines = report
    assert all(case["told"] == case["blocks"] for case in cases(lines).values())


def test_the_formula_of_fastdeploy_is_right_only_for_plain_heads(report):
    """Why we count ourselves: if FastDeploy's own number becomes right, ours can go."""
    _, lines = report
    right = {name for name, case in cases(lines).items() if case["blocks"] == case["fastdeploys_formula"]}
    assert right == {"gqa", "gqa_2_ranks", "gqa_4_ranks"}


def test_what_cannot_work_is_one_line_at_start(report):
    release, lines = report
    refused = {line.split()[1]: line for line in lines if line.startswith("REFUSED")}
    assert "--swap-space 0.0001 GiB is less than one block: it takes 393216 bytes" in refused.pop("too_small")
    for name, given in {"nan": "nan", "infinite": "inf", "negative": "-1.0"}.items():
        assert f"--swap-space must be a number of GiB, 0 or more, got {given}" in refused.pop(name)
    assert "NATIVE_ATTN (FastDeploy cannot make it for a GPU)" in refused.pop("native")
    assert "PLAS_ATTN (it keeps means of key blocks outside the cache)" in refused.pop("plas")
    for name in unserved(release) & {"flash_fp8", "flash_mask_fp8"}:
        assert f"block_wise_fp8 in FastDeploy {release}" in refused.pop(name)
    can_be_served = table_for(release).capabilities.disables_chunked_prefill
    what = "with prefix caching or prompts in chunks" if can_be_served else f"in FastDeploy {release}"
    latent = {f"{family}_{case}" for family in ("mla", "dsa") for case in ("cached", "chunked", "default")}
    for name in sorted(latent | {"mla_split"} | (unserved(release) & {"mla", "mla_mtp"})):
        if name.startswith("mla") or has_dsa_attention(release):
            reason = f"{name[:3].upper()}_ATTN {what} (its prefill attends to the tokens of its own pass only"
            assert reason in refused.pop(name)
    if has_dsa_attention(release):
        assert "speculative method mtp with DSA_ATTN" in refused.pop("dsa_mtp")
    assert refused == {}
