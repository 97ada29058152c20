"""FastDeploy's own requests with images and videos: what they find, against a definition without blocks and hashes."""

import re

import pytest

from .fastdeploy_trees import HERE, RELEASES, run_inside

pytestmark = pytest.mark.process

NUM_CASES = 15


@pytest.mark.parametrize("release", RELEASES)
def test_a_prompt_finds_exactly_what_has_its_text_its_items_and_their_shapes(release, tmp_path):
    output = run_inside(release, tmp_path, HERE / "drive_multimodal.py", 1, 200)
    cases = [line.split(maxsplit=3)[1:] for line in output.splitlines() if line.startswith("CASE")]
    assert len(cases) == NUM_CASES
    assert [case for case in cases if case[0] != case[1]] == []
    (result,) = re.findall(r"RESULT prompts=200 hits=(\d+) with_items=(\d+)", output)
    assert min(map(int, result)) > 40
