"""What control groups leave of the machine's memory."""

import pytest

from fastdeploy_kvcache_v1.errors import ConfigError
from fastdeploy_kvcache_v1.worker.runtime import base, memory_limits

ABUNDANT = 1 << 62
V1, V2 = ("limit_in_bytes", "usage_in_bytes", "total_"), ("max", "current", "")


@pytest.fixture
def groups(tmp_path, monkeypatch):
    """Makes control groups: `groups(membership, {directory: (names, limit, used, inactive, active)})`."""

    def make(membership, limits):
        tmp_path.joinpath("self").write_text(membership)
        for directory, ((limit, used, prefix), *values) in limits.items():
            group = tmp_path / "cgroup" / directory
            group.mkdir(parents=True, exist_ok=True)
            group.joinpath(f"memory.{limit}").write_text(f"{values[0]}\n")
            group.joinpath(f"memory.{used}").write_text(f"{values[1]}\n")
            group.joinpath("memory.stat").write_text(
                f"anon 7000\n{prefix}inactive_file {values[2]}\n{prefix}active_file {sum(values[3:])}\n"
            )

    monkeypatch.setattr(memory_limits, "CGROUP", tmp_path / "cgroup")
    monkeypatch.setattr(memory_limits, "MEMBERSHIP", tmp_path / "self")
    return make


@pytest.mark.parametrize(
    ("membership", "limits", "room"),
    [
        ("0::/\n", {"": (V2, 10000, 9000, 1500)}, 2500),
        ("0::/\n", {"": (V2, 10000, 9000, 1500, 4000)}, 6500),
        ("0::/\n", {"": (V2, "max", 9000, 1500)}, None),
        ("0::/\n", {"": (V2, 5000, 9000, 0)}, 0),
        ("0::/a/b\n", {"a/b": (V2, 700, 300, 0), "a": (V2, "max", 300, 0)}, 400),
        ("0::/a/b\n", {"a/b": (V2, "max", 300, 0), "a": (V2, 900, 300, 0)}, 600),
        ("0::/a/b\n", {"": (V2, 800, 300, 0)}, 500),
        ("0::/a:b\n", {"a:b": (V2, 800, 300, 0)}, 500),
        ("0::/../c\n", {"": (V2, 800, 300, 0)}, 500),
        ("4:memory:/pod\n1:cpu:/x\n0::/\n", {"memory/pod": (V1, 1000, 400, 50), "memory": (V1, ABUNDANT, 1, 0)}, 650),
        ("4:cpu,memory:/docker/id\n", {"memory": (V1, 1000, 400, 0)}, 600),
        ("4:memory:/\n1:cpu:/x\n", {"memory": (V1, 1000, 0, 0), "memory/x": (V1, 10, 0, 0)}, 1000),
        ("4:memory:/\n", {"memory": (V1, ABUNDANT, 0, 0)}, ABUNDANT),
        ("", {"": (V2, 800, 300, 0)}, 500),
        ("1:cpu:/\n", {"": (V2, 800, 300, 0)}, None),
    ],
)
def test_limits_of_this_process_and_of_those_above_it(groups, membership, limits, room):
    groups(membership, limits)
    assert memory_limits.room() == room


def test_free_memory_may_be_used_to_the_last_byte():
    base.require("the pool", 5, 5)
    with pytest.raises(ConfigError, match="the pool needs"):
        base.require("the pool", 6, 5)


def test_free_memory_is_bounded_by_the_machine_and_by_limits(groups):
    groups("0::/", {})
    unlimited = base.free_host_memory()
    assert unlimited > 2500
    groups("0::/", {"": (V2, 10000, 9000, 1500)})
    assert base.free_host_memory() == 2500
    groups("0::/", {"": (V2, ABUNDANT, 9000, 1500)})
    assert 2500 < base.free_host_memory() < ABUNDANT - 9000
