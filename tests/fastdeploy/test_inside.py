"""The tests of inside/, each file in a process of each release."""

import pytest

from .fastdeploy_trees import HERE, RELEASES, run_tests_inside

FILES = sorted(path.stem for path in (HERE / "inside").glob("*.py") if path.stem not in ("__init__", "conftest"))

pytestmark = [pytest.mark.process, pytest.mark.timeout(660)]


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("name", FILES)
def test_inside(release, name, tmp_path):
    print(run_tests_inside(release, tmp_path, name))
