"""Cache fields reach the hashes through FastDeploy's own API models and requests, whichever way a request takes."""

import pytest

from fastdeploy_kvcache_v1.scheduler.cache_utils import BlockHasher

from .fastdeploy_trees import HERE, RELEASES, run_inside

pytestmark = pytest.mark.process


def name(salt=b""):
    hasher = BlockHasher(4, salt=salt)
    hasher.extend(list(range(10)))
    return hasher.hashes[-1].hex()[:12]


PLAIN, SALTED, OTHER = name(), name(b"s"), name(b"t")


@pytest.fixture(scope="module", params=RELEASES)
def lines(request, tmp_path_factory):
    directory = tmp_path_factory.mktemp("fastdeploy")
    return run_inside(request.param, directory, HERE / "drive_cache_identity.py").splitlines()


def test_every_field_of_both_endpoints_arrives(lines):
    cases = dict(line.split(maxsplit=2)[1:] for line in lines if line.startswith("CASE"))
    for kind in ("completion", "chat"):
        assert {case.split("/")[1]: seen for case, seen in cases.items() if case.startswith(f"{kind}/")} == {
            "plain": f"{PLAIN} 1 1",
            "null": f"{PLAIN} 1 1",
            "salted": f"{SALTED} 1 1",
            "other": f"{OTHER} 1 1",
            "no-reads": f"{PLAIN} 0 1",
            "no-writes": f"{PLAIN} 1 0",
        }


def test_what_is_wrong_is_refused_by_the_api(lines):
    assert not [line for line in lines if line.startswith("ACCEPTED")]
    expected = ["cache_salt"] * 3 + ["skip_reading_prefix_cache"]
    for kind in ("completion", "chat"):
        assert [line.split()[2] for line in lines if line.startswith(f"REFUSED {kind} ")] == expected


def test_no_other_way_loses_the_salt(lines):
    cases = dict(line.split(maxsplit=2)[1:] for line in lines if line.startswith("CASE"))
    for way in ("metadata", "suffix", "object", "batch"):
        assert cases[f"{way}/salted"] == f"{SALTED} 1 1", way
    for way in ("pickle", "dict"):
        assert cases[f"{way}/salted"] == f"{SALTED} 1 0", way
    assert cases["metadata/wrong"] == "none 1 1", "unchecked there: the request is served without the cache"


def test_no_body_puts_anything_on_a_request_that_the_engine_attaches(lines):
    forged = [line.split()[1:] for line in lines if line.startswith("FORGED")]
    assert len(forged) == 14
    assert [line for line in forged if len(line) > 1] == []
