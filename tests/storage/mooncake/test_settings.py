"""MooncakeSettings: the same file and variables as FastDeploy reads."""

import json

import pytest

from fastdeploy_kvcache_v1.config import GIB, MIB
from fastdeploy_kvcache_v1.errors import ConfigError
from fastdeploy_kvcache_v1.storage.mooncake.settings import MooncakeSettings, largest_registration

NEEDED = {"metadata_server": "P2PHANDSHAKE", "master_server_addr": "10.1.2.3:50051"}
VARIABLES = {f"MOONCAKE_{name.upper()}": value for name, value in NEEDED.items()}


def test_what_is_not_given_has_a_default():
    settings = MooncakeSettings.read(VARIABLES)
    assert (settings.metadata_server, settings.master_server_addr) == tuple(NEEDED.values())
    assert (settings.global_segment_size, settings.local_buffer_size) == (GIB, MIB)
    assert (settings.protocol, settings.rdma_devices) == ("rdma", "")


def test_variables_and_file_say_the_same(tmp_path):
    given = {
        **NEEDED,
        "local_hostname": "10.0.0.7",
        "global_segment_size": 5,
        "local_buffer_size": 6,
        "protocol": "tcp",
        "rdma_devices": "mlx5_0,mlx5_1",
    }
    file = tmp_path / "mooncake.json"
    file.write_text(json.dumps(given))
    by_variables = MooncakeSettings.read({f"MOONCAKE_{name.upper()}": str(value) for name, value in given.items()})
    by_file = MooncakeSettings.read({"MOONCAKE_CONFIG_PATH": str(file), "MOONCAKE_PROTOCOL": "rdma"})
    file.write_text(json.dumps({**given, "rdma_devices": ["mlx5_0", "mlx5_1"]}))
    with_a_list = MooncakeSettings.read({"MOONCAKE_CONFIG_PATH": str(file)})
    assert by_variables == by_file == with_a_list == MooncakeSettings(**given)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"MOONCAKE_MASTER_SERVER_ADDR": ""}, "needs master_server_addr: give it in the file"),
        ({"MOONCAKE_METADATA_SERVER": ""}, "or as MOONCAKE_METADATA_SERVER"),
        ({"MOONCAKE_MASTER_SERVER_ADDR": "somewhere"}, "must be HOST:PORT, got 'somewhere'"),
        ({"MOONCAKE_LOCAL_HOSTNAME": "localhost"}, "localhost would lead them to themselves"),
        ({"MOONCAKE_LOCAL_HOSTNAME": "localhost:12345"}, "localhost would lead them to themselves"),
        ({"MOONCAKE_PROTOCOL": "pigeon"}, "unknown mooncake protocol 'pigeon': choose one of rdma, tcp"),
        ({"MOONCAKE_GLOBAL_SEGMENT_SIZE": "1 GiB"}, "global_segment_size must be a whole number, got '1 GiB'"),
        ({"MOONCAKE_LOCAL_BUFFER_SIZE": "0"}, "local_buffer_size must be above 0 bytes, got 0"),
    ],
)
def test_a_wrong_setting_is_named(change, text):
    with pytest.raises(ConfigError, match=text):
        MooncakeSettings.read({**VARIABLES, **change})


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (None, "cannot read"),
        ("{", "is not JSON"),
        ("[]", "must hold a JSON object"),
        ('{"protocol": 1}', "must be text"),
    ],
)
def test_a_file_that_cannot_be_used_is_named(tmp_path, content, text):
    file = tmp_path / "mooncake.json"
    if content is not None:
        file.write_text(content)
    with pytest.raises(ConfigError, match=text):
        MooncakeSettings.read({"MOONCAKE_CONFIG_PATH": str(file)})


def test_this_machine_is_found_by_the_way_to_the_master():
    assert MooncakeSettings("P2PHANDSHAKE", "127.0.0.1:50051").hostname == "127.0.0.1"
    assert MooncakeSettings("P2PHANDSHAKE", "127.0.0.1:50051", local_hostname="10.9.8.7").hostname == "10.9.8.7"
    with pytest.raises(ConfigError, match=r"cannot find mooncake's master nobody\.invalid:1"):
        MooncakeSettings("P2PHANDSHAKE", "nobody.invalid:1").hostname  # noqa: B018


def test_devices_are_given_as_mooncake_reads_them():
    assert MooncakeSettings(**NEEDED, rdma_devices="mlx5_0, mlx5_1,").devices == "mlx5_0,mlx5_1"
    assert MooncakeSettings(**NEEDED).devices == ""


@pytest.mark.parametrize(
    ("given", "gib"), [(None, 6), ("", 6), ("1", 1), (str(2 * GIB), 2), (str(1 << 40), 6), ("-5", 1)]
)
def test_memory_is_registered_in_pieces_of_one_to_six_gib(given, gib):
    assert largest_registration({} if given is None else {"MC_MAX_MR_SIZE": given}) == gib * GIB


def test_a_size_that_is_no_number_is_named():
    with pytest.raises(ConfigError, match="MC_MAX_MR_SIZE must be a whole number, got '2G'"):
        largest_registration({"MC_MAX_MR_SIZE": "2G"})
