"""create_kv_cache on FastDeploy's real attention backends, and every worker row applied to the real classes."""

import pytest

from fastdeploy_kvcache_v1.fastdeploy_integration.overlay.table import table_for

from .fastdeploy_trees import HERE, RELEASES, has_dsa_attention, run_inside

pytestmark = pytest.mark.process

PAIR = [[3, 2, 4, 16]] * 2
WITH_SCALES = PAIR + [[3, 2, 4]] * 2
FLAT = ("AppendAttentionBackend", "FlashAttentionBackend", "FlashMaskAttentionBackend")
OTHERS = ("PlasAttentionBackend", "BlockAttentionBackend")


@pytest.fixture(scope="module", params=RELEASES)
def report(request, tmp_path_factory):
    release = request.param
    lines = run_inside(release, tmp_path_factory.mktemp("fastdeploy"), HERE / "drive_backends.py").splitlines()
    return release, lines


def test_tensors_of_every_backend_and_quantization(report):
    release, lines = report
    layouts = {tuple(line.split(maxsplit=3)[1:3]): line.split(maxsplit=3)[3] for line in lines if "LAYOUT" in line}
    for name in FLAT + OTHERS:
        for quant_type in ("None", "int8", "float8_e4m3fn", "int8_zp", "float8_e4m3fn_zp"):
            assert layouts[name, quant_type] == f"4 {PAIR}"
        assert layouts[name, "block_wise_fp8"] == f"8 {WITH_SCALES}"
    assert layouts["AppendAttentionBackend", "int4_zp"] == f"4 {[[3, 2, 4, 8]] * 2}"
    assert layouts["MLAAttentionBackend", "None"] == "2 [[3, 1, 4, 576]]"
    assert layouts["MLAAttentionBackend", "block_wise_fp8"].startswith("refused")
    if has_dsa_attention(release):
        assert layouts["DSAAttentionBackend", "uint8"] == "4 [[3, 1, 4, 656], [3, 4, 132]]"


def test_every_row_is_applied_to_the_real_classes(report):
    release, lines = report
    states = dict(line.split()[1:] for line in lines if line.startswith("ROW"))
    assert states == {row.target: "APPLIED" for row in table_for(release).rows}


def test_the_runner_makes_and_drops_its_tensors_in_both_orders(report):
    _, lines = report
    assert "INITIALIZED" in lines
    names = [line.split()[2:] for line in lines if line.startswith("NAMES")]
    expected = [f"{kind}_caches_{layer}_rank1.device3" for layer in range(3) for kind in ("key", "value")]
    assert names == [expected] * 4


def test_host_memory_stays_allocated_unless_fastdeploy_is_told_to_clear_it(report):
    _, lines = report
    allocated = dict(line.split(maxsplit=2)[1:] for line in lines if line.startswith("HOST_MEMORY"))
    tier = str(5 * 3 * 2 * 2 * 4 * 16 * 4)
    assert allocated == {"0": tier, "1": f"{tier} {tier}"}
