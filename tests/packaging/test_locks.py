"""The lock files against pyproject.toml: what was changed in one place must have been renewed in the other."""

import re
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PYTHONS = ["3.10", "3.11", "3.12", "3.13"]
FASTDEPLOY_PYTHONS = PYTHONS[:-1]
"""FastDeploy requires numpy 1.26 at most, which has no wheel for 3.13."""
ENTRY = re.compile(
    r"^([a-z0-9-]+)==(\S+)(?: ; (.+?))? \\\n((?:    --hash=sha256:[0-9a-f]{64}(?: \\)?\n)+)", re.MULTILINE
)


def required(extra: str, python: str) -> dict[str, Requirement]:
    """What the package needs with `extra` on this Python, by name; extras of the package itself are followed."""
    environment = {"python_version": python, "python_full_version": f"{python}.0"}
    waiting = [*PROJECT["dependencies"], *PROJECT["optional-dependencies"][extra]]
    found = {}
    while waiting:
        requirement = Requirement(waiting.pop())
        if requirement.name == PROJECT["name"]:
            waiting += [one for other in requirement.extras for one in PROJECT["optional-dependencies"][other]]
        elif requirement.marker is None or requirement.marker.evaluate(environment):
            found[canonicalize_name(requirement.name)] = requirement
    return found


def locked(name: str, python: str) -> dict[str, str]:
    """Name -> version in `locks/NAME.txt` on this Python."""
    environment = {"python_version": python, "python_full_version": f"{python}.0"}
    entries = ENTRY.findall((ROOT / f"locks/{name}.txt").read_text())
    return {
        package: version
        for package, version, marker, _ in entries
        if not marker or Requirement(f"{package}; {marker}").marker.evaluate(environment)
    }


@pytest.mark.parametrize(
    ("lock", "extra", "python"),
    [(lock, extra, python) for lock, extra in [("dev", "dev"), ("lowest", "test")] for python in PYTHONS]
    + [("fastdeploy", "dev", python) for python in FASTDEPLOY_PYTHONS],
)
def test_lock_file_satisfies_the_project_requirements(lock, extra, python):
    versions = locked(lock, python)
    wrong = [
        str(requirement)
        for name, requirement in required(extra, python).items()
        if name not in versions or versions[name] not in requirement.specifier
    ]
    assert not wrong, f"locks/{lock}.txt does not fit pyproject.toml: run scripts/lock"


@pytest.mark.parametrize(("lock", "extra"), [("dev", "dev"), ("fastdeploy", "dev"), ("lowest", "test")])
def test_a_lock_holds_nothing_that_the_project_no_longer_requires(lock, extra):
    block = re.compile(r"^([a-z0-9-]+)==(?:.*\\\n)(?:    --hash.*\n)+((?:    #.*\n)+)", re.MULTILINE)
    text = (ROOT / f"locks/{lock}.txt").read_text()
    direct = {name for name, origin in block.findall(text) if f"{PROJECT['name']} (pyproject.toml)" in origin}
    assert direct == {name for python in PYTHONS for name in required(extra, python)}, "run scripts/lock"


@pytest.mark.parametrize("python", PYTHONS)
def test_the_lowest_lock_tests_the_lower_bounds(python):
    versions = locked("lowest", python)
    for name, requirement in required("test", python).items():
        bounds = [one.version for one in requirement.specifier if one.operator == ">="]
        assert bounds, f"{name} has no lower bound in pyproject.toml"
        same = Requirement(f"{name}=={bounds[0]}").specifier
        assert versions[name] in same or versions[name].startswith(f"{bounds[0]}."), f"{name}: run scripts/lock"


@pytest.mark.parametrize("lock", ["uv", "dev", "fastdeploy", "lowest"])
def test_every_locked_version_has_a_hash(lock):
    text = (ROOT / f"locks/{lock}.txt").read_text()
    named = re.findall(r"^([a-z0-9][^=\s]*)", text, re.MULTILINE)
    assert named == [package for package, *_ in ENTRY.findall(text)]


def test_fastdeploy_requirements_are_locked():
    lines = [line for line in (ROOT / "locks/fastdeploy.in").read_text().splitlines() if line[0] != "#"]
    versions = locked("fastdeploy", "3.11")
    for requirement in map(Requirement, lines):
        name = canonicalize_name(requirement.name)
        assert name in versions, f"{name}: run scripts/lock"
        assert versions[name] in requirement.specifier, f"{name}: run scripts/lock"
