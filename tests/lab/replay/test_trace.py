"""Reading traces, and turning their 512-token ids into block hashes."""

import json
import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest

from fastdeploy_kvcache_v1.errors import ConfigError, TraceError
from fastdeploy_kvcache_v1.lab.replay.hashes import TraceHasher
from fastdeploy_kvcache_v1.lab.replay.trace import TraceRequest, read_trace

from .conftest import follow_one_prefix_each

GOOD = {"timestamp": 0, "input_length": 2000, "output_length": 10, "hash_ids": [0, 1, 2, 3]}


def request(*ids, input_length=None, line=1, output_length=0, tokens_per_id=512, output_hash_ids=()):
    length = input_length or tokens_per_id * len(ids)
    return TraceRequest(
        line=line,
        input_length=length,
        output_length=output_length,
        hash_ids=ids,
        tokens_per_id=tokens_per_id,
        output_hash_ids=output_hash_ids,
    )


def write(tmp_path, *lines: object):
    path = tmp_path / "trace.jsonl"
    path.write_bytes(b"\n".join(line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines))
    return path


def test_requests_come_in_order_with_their_line_numbers(tmp_path):
    path = write(tmp_path, GOOD, b"", {**GOOD, "hash_ids": [0, 2, 3, 4]}, b"")
    assert [(r.line, r.hash_ids) for r in read_trace(path)] == [(1, (0, 1, 2, 3)), (3, (0, 2, 3, 4))]


def test_limit_reads_no_further(tmp_path):
    path = write(tmp_path, GOOD, GOOD, b"broken")
    assert len(read_trace(path, limit=2)) == 2


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b"{", "data was truncated"),
        (b"[1, 2]", "Expected `object`, got `array`"),
        (b"\xff\xfe", "JSON is malformed"),
        (b'{"a": ' + b"[" * 100_000, "recursion"),
        ({**GOOD, "input_length": 0}, "Expected `int` >= 1 - at `$.input_length`"),
        ({**GOOD, "output_length": 2**31}, "Expected `int` <= 2147483647 - at `$.output_length`"),
        ({**GOOD, "input_length": 10**4000}, "$.input_length"),
        ({**GOOD, "input_length": 2000.5}, "$.input_length"),
        ({**GOOD, "output_length": -1}, "$.output_length"),
        ({**GOOD, "output_length": True}, "$.output_length"),
        ({**GOOD, "timestamp": -1}, "$.timestamp"),
        ({**GOOD, "timestamp": None}, "$.timestamp"),
        (b'{"timestamp": NaN, "input_length": 1, "output_length": 1, "hash_ids": [1]}', "JSON is malformed"),
        ({**GOOD, "hash_ids": 3}, "$.hash_ids"),
        ({**GOOD, "hash_ids": [0, -1]}, "$.hash_ids[1]"),
        (
            {**GOOD, "hash_ids": [0]},
            "2000 input tokens and 1 hash ids do not fit 512 tokens per id: another size needs",
        ),
        ({"timestamp": 0}, "missing required field `input_length`"),
        ({**GOOD, "delay": -1}, "$.delay"),
        ({**GOOD, "session_id": 1.5}, "$.session_id"),
        ({**GOOD, "return_in_s": "soon"}, "$.return_in_s"),
        ({**GOOD, "return_in_s": -2}, "return_in_s must be a number of seconds from 0 to 2592000, or -1"),
        ({**GOOD, "chat_id": 3, "parent_chat_id": []}, "$.parent_chat_id"),
        ({**GOOD, "tokens_per_id": 0}, "$.tokens_per_id"),
        ({**GOOD, "tokens_per_id": 64}, "tokens_per_id is 64, and 512 was given or fits the lines before"),
        ({**GOOD, "output_hash_ids": 7}, "$.output_hash_ids"),
        (
            {**GOOD, "output_hash_ids": [7, 8]},
            "10 output tokens after 2000 need 1 output_hash_ids of 512 tokens at most, got 2",
        ),
    ],
)
def test_broken_line_is_named_by_file_and_number(tmp_path, line, words):
    path = write(tmp_path, GOOD, GOOD, line, GOOD)
    with pytest.raises(TraceError) as raised:
        read_trace(path)
    message = str(raised.value)
    assert message.startswith(f"{path}:3: ")
    assert words in message
    assert "\n" not in message
    assert len(message) < 500


def test_fields_that_are_not_of_the_format_do_not_matter(tmp_path):
    path = write(tmp_path, {**GOOD, "line": "x", "after": 7, "type": []}, GOOD)
    assert [(r.line, r.after) for r in read_trace(path)] == [(1, None), (2, None)]


@pytest.mark.parametrize("make", ["missing", "directory", "empty"])
def test_unreadable_trace_is_named(tmp_path, make):
    path = tmp_path / "trace.jsonl"
    if make == "directory":
        path.mkdir()
    elif make == "empty":
        path.write_text("\n")
    with pytest.raises(TraceError, match=r"trace\.jsonl"):
        read_trace(path)


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


@pytest.mark.parametrize(("block_size", "tokens_per_id"), [(64, 512), (16, 16)])
def test_an_id_after_another_prefix_is_another_block(block_size, tokens_per_id):
    hasher = TraceHasher(block_size)
    below_one = hasher.prompt_hashes(request(1, 7, 8, tokens_per_id=tokens_per_id))
    below_two = hasher.prompt_hashes(request(2, 7, 8, tokens_per_id=tokens_per_id))
    assert not set(below_one) & set(below_two)


def test_output_blocks_follow_the_prompt_and_belong_to_one_request():
    hasher = TraceHasher(64)
    one = hasher.output_hashes(request(1, input_length=100, output_length=100, line=1))
    assert len(one) == 200 // 64 - 100 // 64
    assert not set(one) & set(hasher.output_hashes(request(1, input_length=100, output_length=100, line=2)))


@pytest.mark.parametrize("block_size", [0, -64, 48, 513, 768])
def test_a_block_is_a_part_of_an_id_or_a_chain_of_ids(block_size):
    with pytest.raises(ConfigError, match=rf"block size {block_size} must divide the 512 tokens of a hash id"):
        TraceHasher(block_size).prompt_hashes(request(1, 2))


def test_a_block_of_several_ids_is_the_chain_of_them():
    hasher = TraceHasher(64)
    ids = [1, 2, 3, 4, 5, 6, 7, 8, 9]
    first = hasher.prompt_hashes(request(*ids, input_length=9 * 16 - 1, tokens_per_id=16))
    assert len(first) == 2
    for changed in range(9):
        others = *ids[:changed], 99, *ids[changed + 1 :]
        other = hasher.prompt_hashes(request(*others, input_length=9 * 16, tokens_per_id=16))
        assert len(set(first) & set(other)) == changed // 4


def test_tokens_without_an_id_are_found_by_nobody():
    """A format that does not name the last block names 128 of 200 tokens with two ids of 64."""
    hasher = TraceHasher(32)
    one = hasher.prompt_hashes(request(1, 2, input_length=180, tokens_per_id=64))
    two = hasher.prompt_hashes(request(1, 2, input_length=180, tokens_per_id=64, line=2))
    assert (len(one), len(two), len(set(one) & set(two))) == (5, 5, 4)


@pytest.mark.parametrize("block_size", [16, 64, 128])
def test_a_later_turn_hits_the_outputs_that_a_trace_names(block_size):
    """Turn one: 150 tokens and 250 of output in ids 1, 2, (3,) 4, 5, 6, 7; 3 is the unfinished id of the prompt."""
    hasher = TraceHasher(block_size)
    turn = request(1, 2, 3, input_length=150, output_length=250, tokens_per_id=64, output_hash_ids=(4, 5, 6, 7))
    later = request(1, 2, 4, 5, 6, 7, 8, input_length=420, tokens_per_id=64, line=2)
    known = hasher.prompt_hashes(turn) + hasher.output_hashes(turn)
    assert len(known) == len(set(known)) == 400 // block_size
    assert hasher.prompt_hashes(later)[: 384 // block_size] == known[: 384 // block_size]


def test_ids_may_be_of_any_size():
    """Those of 64 bits are hashes; what is beyond them differs too."""
    hasher = TraceHasher(512)
    assert len({hasher.prompt_hashes(request(number))[0] for number in (1, 2**64 - 1, 2**64, 10**4000)}) == 4


def lines(*shapes: tuple[int, int], **more: object) -> list[dict]:
    """Requests of so many tokens and ids."""
    return [
        {"input_length": length, "output_length": 1, "hash_ids": list(range(count)), **more} for length, count in shapes
    ]


@pytest.mark.parametrize(
    ("shapes", "tokens"),
    [
        ([(6758, 14)], 512),  # Mooncake
        ([(3, 1), (521, 33), (40, 3)], 16),  # the last block has an id
        ([(3, 0), (521, 32), (40, 2)], 16),  # it has none
        ([(16, 1), (513, 2)], 512),
    ],
)
def test_the_size_of_an_id_is_that_of_mooncake_or_bailian_if_all_lines_fit(tmp_path, shapes, tokens):
    read = read_trace(write(tmp_path, *lines(*shapes)))
    assert [(r.input_length, r.tokens_per_id) for r in read] == [(length, tokens) for length, _ in shapes]


def test_outputs_are_checked_when_the_size_is_known(tmp_path):
    with pytest.raises(TraceError, match=r":1: 1 output tokens after 3 need 1 output_hash_ids"):
        read_trace(write(tmp_path, *lines((3, 1), output_hash_ids=[1, 2]), *lines((2000, 4))))


@pytest.mark.parametrize(
    ("shapes", "given", "words"),
    [
        ([(3, 1)], None, r"does not tell how many .* \(512 or 16 fit all lines\): give --tokens-per-id"),
        ([(600, 3)], None, r":1: 600 input tokens and 3 hash ids do not fit 512 or 16 tokens per id: another size"),
        ([(521, 33), (600, 36)], None, r":2: 600 input tokens and 36 hash ids do not fit 16 tokens per id"),
        ([(521, 33), (600, 39)], None, r":2: 600 input tokens and 39 hash ids do not fit 16 tokens per id"),
        ([(600, 2)], 64, r":1: 600 input tokens and 2 hash ids do not fit 64 tokens per id"),
    ],
)
def test_a_size_that_does_not_fit_every_line_is_no_size(tmp_path, shapes, given, words):
    with pytest.raises(TraceError, match=words):
        read_trace(write(tmp_path, *lines(*shapes)), tokens_per_id=given)


def test_a_given_size_decides_and_so_does_one_that_a_line_states(tmp_path):
    assert [r.tokens_per_id for r in read_trace(write(tmp_path, *lines((600, 2))), tokens_per_id=300)] == [300]
    stated = lines((3, 1), tokens_per_id=64) + lines((100, 2))
    assert [r.tokens_per_id for r in read_trace(write(tmp_path, *stated))] == [64, 64]
    later = lines((3, 1)) + lines((5, 1), tokens_per_id=16)
    assert [r.tokens_per_id for r in read_trace(write(tmp_path, *later))] == [16, 16]
    with pytest.raises(ConfigError, match="--tokens-per-id must be at least 1, got 0"):
        read_trace(write(tmp_path, *stated), tokens_per_id=0)


def test_turns_of_a_session_know_the_line_before(tmp_path):
    path = write(
        tmp_path,
        {**GOOD, "session_id": "a"},
        {**GOOD, "session_id": 7, "timestamp": 20},
        GOOD,
        {**GOOD, "session_id": "a", "delay": 1500},
        {**GOOD, "session_id": "a", "delay": None},
    )
    assert [(r.after, r.delay_ms) for r in read_trace(path)] == [*[(None, None)] * 3, (1, 1500), (4, None)]


def test_a_line_of_qwen_bailian_knows_its_parent_and_seconds(tmp_path):
    chat = {**GOOD, "type": "text", "turn": 1}
    path = write(
        tmp_path,
        {**chat, "chat_id": 5, "parent_chat_id": -1, "timestamp": 0.5},
        {**chat, "chat_id": 6, "parent_chat_id": 4, "timestamp": 1.25},  # its parent was before the trace
        {**chat, "chat_id": 7, "parent_chat_id": 5, "timestamp": 61.114},
        {**chat, "chat_id": 8, "parent_chat_id": 5, "timestamp": 62},  # asked again in another way
    )
    expected = [(None, 500), (None, 1250), (1, pytest.approx(61_114)), (1, 62_000)]
    assert [(r.after, r.timestamp_ms) for r in read_trace(path)] == expected


def test_ids_of_the_real_trace_name_whole_prefixes(real_trace):
    hasher = TraceHasher(512)
    requests = read_trace(real_trace)
    assert sum(len(hasher.prompt_hashes(request)) > 0 for request in requests) > 12_000
    assert len(requests) == 12_031
    assert follow_one_prefix_each(requests)


# ---- the sample trace of benchmarks


ROOT = Path(__file__).parents[3]
sample_trace = SimpleNamespace(**runpy.run_path(str(ROOT / "benchmarks/sample_trace.py")))


def test_the_sample_trace_is_what_its_generator_writes():
    assert sample_trace.PATH.read_text() == sample_trace.text()


def test_conversations_of_the_sample_trace_return():
    requests = read_trace(sample_trace.PATH)
    assert len(requests) == sample_trace.REQUESTS
    seen, repeated = set(), 0
    for request in requests:
        repeated += len(seen.intersection(request.hash_ids))
        seen.update(request.hash_ids)
    assert repeated > sum(len(request.hash_ids) for request in requests) / 2
