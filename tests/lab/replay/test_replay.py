"""Whole replays: every policy, several admissions per step, too few blocks, with the shadow data plane watching."""

import json
import re

import pytest

from fastdeploy_kvcache_v1.cli import main
from fastdeploy_kvcache_v1.config import KVCacheConfig, WritePolicy
from fastdeploy_kvcache_v1.contract.messages import SWAP_IN, SWAP_OUT, SwapStep
from fastdeploy_kvcache_v1.errors import InvariantError
from fastdeploy_kvcache_v1.lab.replay.driver import Replay, ReplayOptions
from fastdeploy_kvcache_v1.lab.replay.hashes import TraceHasher
from fastdeploy_kvcache_v1.lab.replay.report import percentile
from fastdeploy_kvcache_v1.lab.replay.trace import read_trace
from fastdeploy_kvcache_v1.scheduler.policies.eviction import EVICTION_POLICIES

from .conftest import traffic


def play(trace, *, limit=None, window=128, admissions=8, outputs=True, **config) -> Replay:
    settings = {"num_device_blocks": 150, "num_host_blocks": 400, "max_queued_events": 0} | config
    replay = Replay(ReplayOptions(KVCacheConfig(**settings), window, admissions, outputs, verify=True))
    replay.run(read_trace(trace, limit))
    return replay


@pytest.mark.parametrize("policy", list(WritePolicy))
@pytest.mark.parametrize(("window", "admissions"), [(1, 1), (128, 16)])
@pytest.mark.parametrize("num_host_blocks", [5, 400])
def test_every_block_holds_what_it_should(synthetic_trace, policy, window, admissions, num_host_blocks):
    options = {"write_policy": policy, "num_host_blocks": num_host_blocks}
    done = play(synthetic_trace, window=window, admissions=admissions, **options)
    counters = done.manager.stats().counters
    assert len(done.request_seconds) + done.num_too_long == 400
    assert done.num_too_long < 10
    assert counters.device_evicted_blocks > 1_000
    assert counters.requests_finished == len(done.request_seconds)
    assert (done.num_swap_out_copies, done.num_swap_in_copies) == (counters.swap_out_blocks, counters.swap_in_blocks)
    if num_host_blocks == 400:
        assert done.num_swap_in_copies > 100
    if window == 128:
        assert done.num_no_space > 100


def test_a_cache_that_forgets_nothing_hits_every_repeated_block(synthetic_trace):
    done = play(synthetic_trace, window=1, num_device_blocks=10_000, num_host_blocks=0, outputs=False)
    hasher, seen, repeated = TraceHasher(64), set(), 0
    for request in read_trace(synthetic_trace):
        hashes = hasher.prompt_hashes(request)
        repeated += sum(block in seen for block in hashes[: (request.input_length - 1) // 64])
        seen.update(hashes)
    assert repeated > 1_000
    assert done.num_device_hit_tokens == repeated * 64
    assert done.manager.stats().counters.device_evicted_blocks == 0


def test_outputs_fill_the_cache_too(tmp_path):
    """Those that no later prompt repeats: each adds blocks."""
    trace = traffic(tmp_path / "trace", "hot", 400)
    without = play(trace, window=1, num_device_blocks=10_000, outputs=False)
    with_outputs = play(trace, window=1, num_device_blocks=10_000, outputs=True)
    assert with_outputs.num_outputs_cut == 0
    more = with_outputs.manager.stats().device_cached_blocks - without.manager.stats().device_cached_blocks
    expected = sum(
        (request.input_length + max(request.output_length, 1) - 1) // 64 - request.input_length // 64
        for request in read_trace(trace)
    )
    assert more == expected


def test_outputs_larger_than_the_tier_are_cut_before_hashing(tmp_path, monkeypatch):
    """2 billion tokens would be 34 million hashes. Of the tier's 640, 128 are left; the last output is not computed."""
    named, plain = [], TraceHasher.output_hashes

    def output_hashes(self, request):
        named.append(request.line)
        return plain(self, request)

    monkeypatch.setattr(TraceHasher, "output_hashes", output_hashes)
    trace = tmp_path / "trace.jsonl"
    lengths = (2**31 - 1, 130, 129)
    requests = [
        {"timestamp": 0, "input_length": 512, "output_length": length, "hash_ids": [index], "tokens_per_id": 512}
        for index, length in enumerate(lengths)
    ]
    trace.write_text("".join(json.dumps(request) + "\n" for request in requests))
    done = play(trace, window=1, num_device_blocks=10)
    assert (named, done.num_outputs_cut, len(done.request_seconds)) == ([3], 2, 3)


def test_a_request_whose_output_is_cut_makes_room_in_the_same_step(tmp_path):
    """The first output takes the last free block of ten, the second finds none, and the third prompt needs three."""
    trace = tmp_path / "trace.jsonl"
    lengths = {5: 60, 4: 60, 3: 1}
    lines = [
        {"input_length": 64 * count, "output_length": more, "hash_ids": [10 * count + id for id in range(count)]}
        for count, more in lengths.items()
    ]
    trace.write_text("".join(json.dumps({**line, "tokens_per_id": 64}) + "\n" for line in lines))
    done = play(trace, num_device_blocks=10, num_host_blocks=0, admissions=2)
    assert (done.num_outputs_cut, done.num_no_space, done.num_steps) == (1, 2, 3), "the last one copies"


@pytest.mark.parametrize("lost", [SWAP_IN, SWAP_OUT], ids=["swap_in", "evict"])
def test_a_lost_copy_is_noticed(synthetic_trace, monkeypatch, lost):
    config = KVCacheConfig(150, 400, write_policy=WritePolicy.WRITE_BACK)
    replay = Replay(ReplayOptions(config, outputs=True, verify=True))
    take = replay.manager.take_swap_step

    def take_less() -> SwapStep:
        step = take()
        return SwapStep(step.step, tuple(each for each in step.transfers if each.kind != lost))

    monkeypatch.setattr(replay.manager, "take_swap_step", take_less)
    with pytest.raises(InvariantError):
        replay.run(read_trace(synthetic_trace))


SMALL = ("--device-blocks", "150", "--host-blocks", "400", "--limit", "100")


def test_table_names_the_facts(synthetic_trace, capsys):
    assert main(["replay", str(synthetic_trace), *SMALL, "--verify", "--outputs"]) == 0
    out, err = capsys.readouterr()
    for name in ("requests", "hit rate", "evictions", "swaps", "time per request", "peak memory", "verified", "check"):
        assert any(line.startswith(name) for line in out.splitlines()), name
    *_, verified, check = out.splitlines()
    assert (verified.split()[0], check.split()) == ("verified", ["check", "clean"])
    assert re.search(r"^swaps .* blocks out \([\d.]+ for each that was hit on the host\), ", out, re.MULTILINE)
    assert err == ""


def test_percentiles_are_values_that_were_seen():
    assert [percentile([1, 2, 3, 4], share) for share in (0, 0.5, 0.99, 1)] == [1, 3, 4, 4]


def test_json_is_one_object(synthetic_trace, capsys):
    assert main(["replay", str(synthetic_trace), *SMALL, "--json", "--write-policy", "write_back"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["requests"] + result["requests_too_long"] == 100
    assert result["options"]["write_policy"] == "write_back"
    assert result["verified_blocks"] is None
    assert result["manager"]["counters"]["requests_finished"] == result["requests"]


REFUSALS = [
    # flags, the one line
    (("--write-policy", "sometimes"), "write_through, write_through_selective, write_back"),
    (("--write-through-threshold", "0"), "write_through_threshold must be a whole number of at least 1"),
    (("--device-blocks", "0"), "num_device_blocks must be a whole number of at least 1"),
    (("--device-blocks", "1000000000000"), "--device-blocks must be at most 67108864, got 1000000000000"),
    (("--device-blocks", "5,6"), "--device-blocks takes several values with --compare only, got 5,6"),
    (("--host-blocks", "-1"), "num_host_blocks must be a whole number of at least 0"),
    (("--host-blocks", "67108865"), "--host-blocks must be at most 67108864, got 67108865"),
    (("--host-blocks", "5,6"), "--host-blocks takes several values with --compare only, got 5,6"),
    (("--told", "last,all"), "--told takes several values with --compare only, got last,all"),
    (("--compare", "--told", "none,al"), "--told must be one of trace, unnamed, none, last, all, lies, got 'al'"),
    (("--told-error", "0.5"), "--told-error must be a factor of at least 1, got 0.5"),
    (("--block-size", "100"), "block size 100 must divide the 64 tokens of a hash id"),
    (("--tokens-per-id", "0"), "--tokens-per-id must be at least 1"),
    (("--window", "0"), "--window must be at least 1"),
    (("--admissions-per-step", "0"), "--admissions-per-step must be at least 1"),
    (("--limit", "0"), "--limit must be at least 1"),
    (("--policies", "lru"), "--policies needs --compare"),
    (("--compare", "--policies", "oldest"), "unknown policy 'oldest': choose from auto, write_through"),
    (("--eviction-policy", "oldest"), f"eviction_policy must be one of {', '.join(EVICTION_POLICIES)}, got 'oldest'"),
    (("--compare", "--write-policy", "write_back"), "--write-policy write_back: --compare plays every policy"),
    (("--compare", "--device-blocks", "0,5"), "num_device_blocks must be a whole number of at least 1, got 0"),
]


@pytest.mark.parametrize(("flags", "line"), REFUSALS)
def test_wrong_flags_are_one_line(synthetic_trace, capsys, flags, line):
    assert main(["replay", str(synthetic_trace), *flags]) == 2
    said = capsys.readouterr().err
    assert line in said
    assert said.count("\n") == 1


@pytest.mark.parametrize("policy", [WritePolicy.AUTO, WritePolicy.WRITE_THROUGH_SELECTIVE])
def test_the_whole_real_trace(real_trace, policy):
    done = play(real_trace, num_device_blocks=20_000, num_host_blocks=80_000, write_policy=policy)
    assert len(done.request_seconds) == 12_031
    assert done.num_no_space > 1_000
    assert done.num_device_hit_tokens > 0.05 * done.num_input_tokens
    assert done.num_swap_in_copies > 1_000
