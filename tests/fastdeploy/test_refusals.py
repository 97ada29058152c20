"""What an operator reads where FastDeploy's own server or worker is refused."""

import pytest

from fastdeploy_kvcache_v1.switch import SWITCH

from .fastdeploy_trees import run_inside
from .models import PLAIN

pytestmark = [pytest.mark.process, pytest.mark.timeout(660)]

PROCESSES = {
    "fastdeploy.entrypoints.openai.api_server": ("--port", "0"),
    "fastdeploy.worker.worker_process": ("--speculative_config", "{}"),
}


@pytest.mark.parametrize("module", PROCESSES)
def test_without_a_gpu_a_process_ends_with_that_reason_in_one_line(release, module, tmp_path):
    PLAIN.write(tmp_path / "model")
    said = run_inside(release, tmp_path, "-m", module, "--model", tmp_path / "model", *PROCESSES[module], expect=1)
    (line,) = (line for line in said.splitlines() if "cannot serve" in line)
    assert line.startswith(f"fastdeploy-kvcache: error: {SWITCH}=1 cannot serve this: no CUDA GPU is seen")
    assert "V0" not in line
    assert "Traceback" not in said
