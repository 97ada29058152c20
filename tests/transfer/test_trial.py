"""What `doctor` says of servers with two ranks each: every rank counts, not only the first one."""

import msgspec
import pytest

from fastdeploy_kvcache_v1.transfer.role_info import RankInfo, RoleInfo
from tests.transfer.planes import HOST, SECRET
from tests.transfer.ranks import DecodeRank, PrefillRank, Sockets, geometry

pytest.importorskip("httpx")
from fastdeploy_kvcache_v1.transfer.trial import try_servers

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


def verdicts(directory, prefill, decode):
    """Whether the prefill server, the decode server and the pair are well."""
    files = []
    for role, infos in (("prefill", prefill), ("decode", decode)):
        files.append(directory / role)
        files[-1].write_bytes(msgspec.json.encode(RoleInfo(role, "socket", HOST, infos)))
    return [is_well for is_well, _, _ in try_servers([str(files[0])], [str(files[1])], SECRET)]


def test_all_is_well(tmp_path, sides):
    assert verdicts(tmp_path, *map(rank_infos, sides)) == [True, True, True]


@pytest.mark.parametrize("rank", TWO)
@pytest.mark.parametrize("side", TWO)
def test_a_rank_that_does_not_listen(tmp_path, sides, side, rank):
    infos = list(map(rank_infos, sides))
    lost = sides[side][rank]
    lost.plane.close() if side == 0 else lost.desk.close()
    assert verdicts(tmp_path, *infos) == [side != 0, side != 1, True]


@pytest.mark.parametrize("rank", TWO)
@pytest.mark.parametrize("side", TWO)
def test_a_rank_that_does_not_fit(tmp_path, sides, side, rank):
    infos = list(map(rank_infos, sides))
    infos[side][rank].geometry = geometry(2, rank, model="another")
    assert verdicts(tmp_path, *infos) == [True, True, False]
