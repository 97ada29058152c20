"""Tokens that end a tool call, as model directories of different makers name them."""

import json

import pytest

from fastdeploy_kvcache_v1.contract.tool_calls import LAST, ends_in_tool_call, tool_call_ends


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer.json", {"added_tokens": [{"id": 7, "content": "</tool_call>"}, {"id": 8, "content": "<call>"}]}),
        ("tokenizer_config.json", {"added_tokens_decoder": {"7": {"content": "<|eom_id|>"}, "9": {"content": "<s>"}}}),
        ("added_tokens.json", {"<\uff5ctool\u2581calls\u2581end\uff5c>": 7, "tool_call": 8}),
    ],
)
def test_ends_of_tool_calls_are_read_from_each_file_of_a_tokenizer(tmp_path, name, content):
    (tmp_path / name).write_text(json.dumps(content))
    assert tool_call_ends(tmp_path) == {7}


@pytest.mark.parametrize("content", ["", "[]", "{", '{"added_tokens": 3}', '{"added_tokens_decoder": {"x": {}}}'])
def test_files_that_cannot_be_read_name_no_tokens(tmp_path, content):
    for name in ("tokenizer.json", "tokenizer_config.json", "added_tokens.json"):
        (tmp_path / name).write_text(content)
    assert tool_call_ends(tmp_path) == frozenset()
    assert tool_call_ends(tmp_path / "no directory") == frozenset()


def test_an_answer_ends_in_a_tool_call_if_few_tokens_follow_it():
    assert ends_in_tool_call([1, 2, 7], frozenset({7}))
    assert ends_in_tool_call([7, *[1] * (LAST - 1)], frozenset({7}))
    assert not ends_in_tool_call([7, *[1] * LAST], frozenset({7}))
    assert not ends_in_tool_call([], frozenset({7}))
    assert not ends_in_tool_call([7], frozenset())
