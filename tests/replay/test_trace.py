"""Reading traces, and turning their 512-token ids into block hashes."""

import json

import pytest

from fastdeploy_kvcache_v1.errors import ConfigError, TraceError
from fastdeploy_kvcache_v1.replay.trace import TraceHasher, TraceRequest, read_trace

GOOD = {"timestamp": 0, "input_length": 600, "output_length": 10, "hash_ids": [0, 1]}


def request(*hash_ids: int, input_length: int | None = None, line: int = 1, output_length: int = 0) -> TraceRequest:
    return TraceRequest(line, 0, input_length or 512 * len(hash_ids), output_length, hash_ids)


def write(tmp_path, *lines: object):
    path = tmp_path / "trace.jsonl"
    path.write_bytes(b"\n".join(line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines))
    return path


def test_requests_come_in_order_with_their_line_numbers(tmp_path):
    path = write(tmp_path, GOOD, b"", {**GOOD, "hash_ids": [0, 2]}, b"")
    assert [(r.line, r.hash_ids) for r in read_trace(path)] == [(1, (0, 1)), (3, (0, 2))]


def test_limit_reads_no_further(tmp_path):
    path = write(tmp_path, GOOD, GOOD, b"broken")
    assert len(list(read_trace(path, limit=2))) == 2


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b"{", "not a JSON object"),
        (b"[1, 2]", "not a JSON object"),
        (b"\xff\xfe", "not a JSON object"),
        (b"[" * 100_000, "not a JSON object"),
        ({**GOOD, "input_length": 0}, "input_length must be an integer from 1 to 2147483647, got 0"),
        ({**GOOD, "output_length": 10**18}, "output_length must be an integer from 0 to 2147483647, got 1000000000"),
        ({**GOOD, "input_length": 10**4000}, "input_length must be an integer from 1 to 2147483647, got 1000000000"),
        ({**GOOD, "hash_ids": [10**4000, 0]}, "hash ids must be integers"),
        (b" " * ((16 << 20) + 1), "the line is longer than 16 MiB"),
        ({**GOOD, "input_length": "7"}, "input_length"),
        ({**GOOD, "output_length": -1}, "output_length"),
        ({**GOOD, "output_length": True}, "output_length"),
        ({**GOOD, "timestamp": -1}, "timestamp"),
        ({**GOOD, "timestamp": None}, "timestamp"),
        (b'{"timestamp": NaN, "input_length": 1, "output_length": 1, "hash_ids": [1]}', "timestamp"),
        ({**GOOD, "hash_ids": 3}, "hash_ids must be a list"),
        ({**GOOD, "hash_ids": [0, -1]}, "hash ids must be integers"),
        ({**GOOD, "hash_ids": [0, 2**64]}, "hash ids must be integers"),
        ({**GOOD, "hash_ids": [0]}, "600 input tokens need 2 hash ids of 512 tokens, got 1"),
        ({"timestamp": 0}, "input_length"),
    ],
)
def test_broken_line_is_named_by_file_and_number(tmp_path, line, words):
    path = write(tmp_path, GOOD, GOOD, line, GOOD)
    requests = read_trace(path)
    assert [next(requests).line, next(requests).line] == [1, 2]
    with pytest.raises(TraceError) as raised:
        next(requests)
    message = str(raised.value)
    assert message.startswith(f"{path}:3: ")
    assert words in message
    assert "\n" not in message
    assert len(message) < 500


def test_line_of_the_longest_length_is_read(tmp_path):
    line = json.dumps(GOOD).encode()
    path = write(tmp_path, line + b" " * ((16 << 20) - len(line) - 1), GOOD)
    assert [r.line for r in read_trace(path)] == [1, 2]


@pytest.mark.parametrize("make", ["missing", "directory", "empty"])
def test_unreadable_trace_is_named(tmp_path, make):
    path = tmp_path / "trace.jsonl"
    if make == "directory":
        path.mkdir()
    elif make == "empty":
        path.write_text("\n")
    with pytest.raises(TraceError, match=r"trace\.jsonl"):
        list(read_trace(path))


def test_block_hashes_cover_the_full_blocks_only():
    hasher = TraceHasher(64)
    assert len(hasher.prompt_hashes(request(1, 2, input_length=512 + 63))) == 8
    assert len(hasher.prompt_hashes(request(1, 2, input_length=512 + 64))) == 9
    assert len(hasher.prompt_hashes(request(1, input_length=63))) == 0
    assert all(len(block) == 32 for block in hasher.prompt_hashes(request(1, 2)))


@pytest.mark.parametrize("block_size", [1, 64, 512])
def test_hashes_are_equal_exactly_for_equal_prefixes(block_size):
    hasher = TraceHasher(block_size)
    first, second = hasher.prompt_hashes(request(1, 2, 3)), hasher.prompt_hashes(request(1, 2, 4))
    per_id = 512 // block_size
    assert first[: 2 * per_id] == second[: 2 * per_id]
    assert not set(first[2 * per_id :]) & set(second)
    assert len(set(first)) == len(first)
    assert TraceHasher(block_size).prompt_hashes(request(1, 2, 3)) == first


def test_an_id_after_another_prefix_is_another_block_and_counted():
    hasher = TraceHasher(64)
    below_one = hasher.prompt_hashes(request(1, 7))
    assert hasher.num_reparented_ids == 0
    below_two = hasher.prompt_hashes(request(2, 7))
    assert hasher.num_reparented_ids == 1
    assert not set(below_one) & set(below_two)


def test_output_blocks_follow_the_prompt_and_belong_to_one_request():
    hasher = TraceHasher(64)
    one = hasher.output_hashes(request(1, input_length=100, output_length=100, line=1))
    assert len(one) == 200 // 64 - 100 // 64
    assert not set(one) & set(hasher.output_hashes(request(1, input_length=100, output_length=100, line=2)))


@pytest.mark.parametrize("block_size", [0, -64, 48, 1024])
def test_block_size_must_divide_512(block_size):
    with pytest.raises(ConfigError, match="must divide"):
        TraceHasher(block_size)


def test_ids_of_the_real_trace_name_whole_prefixes(real_trace):
    hasher = TraceHasher(512)
    lengths = [len(hasher.prompt_hashes(request)) for request in read_trace(real_trace)]
    assert len(lengths) == 12_031
    assert hasher.num_reparented_ids == 0
