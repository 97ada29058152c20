"""What `doctor` says of servers with two ranks each: every rank counts, not only the first one."""

from types import SimpleNamespace

import msgspec
import pytest

from fastdeploy_kvcache_v1.transfer.role_info import RankInfo, RoleInfo
from tests.transfer.planes import HOST, SECRET
from tests.transfer.ranks import DecodeRank, PrefillRank, Sockets, geometry

pytest.importorskip("xxhash")
from fastdeploy_kvcache_v1.transfer.trial import servers, try_servers

TWO = range(2)


@pytest.fixture
def net():
    return Sockets()


@pytest.fixture
def sides(ranks):
    """Ranks of a prefill and of a decode server."""
    return [[ranks(kind, rank_geometry=geometry(2, rank)) for rank in TWO] for kind in (PrefillRank, DecodeRank)]


def rank_infos(side):
    return [RankInfo(getattr(rank, "port", None), rank.plane.address(), rank.ours.geometry) for rank in side]


def files_of(directory, prefill, decode):
    for role, infos in (("prefill", prefill), ("decode", decode)):
        (directory / role).write_bytes(msgspec.json.encode(RoleInfo(role, "socket", HOST, infos)))
    return str(directory / "prefill"), str(directory / "decode")


def verdicts(directory, prefill, decode, secret=SECRET):
    """Whether the prefill server, the decode server and the pair are well."""
    one, two = files_of(directory, prefill, decode)
    return [is_well for is_well, _, _ in try_servers([one], [two], secret)]


def test_all_is_well(tmp_path, sides):
    assert verdicts(tmp_path, *map(rank_infos, sides)) == [True, True, True]


def test_servers_with_another_secret_or_role_or_that_are_not_there(tmp_path, sides):
    infos = list(map(rank_infos, sides))
    assert verdicts(tmp_path, *infos, secret=b"another secret of these tests") == [False, False, True]
    prefill, decode = files_of(tmp_path, *infos)
    (tmp_path / "secret").write_bytes(SECRET)
    (tmp_path / "secret").chmod(0o600)
    asked = SimpleNamespace(prefill=[prefill], decode=[decode], peer_secret_file=tmp_path / "secret")
    found = list(servers(asked))
    assert [each[0] for each in found] == [True, True, True], "what doctor says"
    wrong, absent = try_servers([decode], ["http://127.0.0.1:1"], SECRET)
    assert (wrong[0], wrong[2]) == (False, "got role decode, expected prefill: start it with --role prefill")
    assert (absent[0], absent[1]) == (False, "decode server http://127.0.0.1:1")


@pytest.mark.parametrize("listens", [False, True])
@pytest.mark.parametrize("rank", TWO)
@pytest.mark.parametrize("side", TWO)
def test_a_rank_that_does_not_listen_or_does_not_fit(tmp_path, sides, side, rank, listens):
    infos, lost = list(map(rank_infos, sides)), sides[side][rank]
    if listens:
        infos[side][rank].geometry = geometry(2, rank, model="another")
    else:
        (lost.desk if side else lost.plane).close()
    assert verdicts(tmp_path, *infos) == ([True, True, False] if listens else [side != 0, side != 1, True])
