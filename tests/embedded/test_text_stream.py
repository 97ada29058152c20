"""What a client sees of the tokens, and when."""

import pytest

from tests.embedded.random_text import byte_stream


def stream(*stops):
    return byte_stream(stops)


def pieces(text, data):
    return [text.push(byte) for byte in data]


def test_text_without_stops_is_released_at_once():
    assert pieces(stream(), b"abc") == ["a", "b", "c"]


def test_incomplete_characters_are_held_back():
    assert pieces(stream(), "aé".encode()) == ["a", "", "é"]


def test_flush_replaces_what_never_became_a_character():
    text = stream()
    assert pieces(text, b"a\xc3") == ["a", ""]
    assert text.flush() == "\N{REPLACEMENT CHARACTER}"


@pytest.mark.parametrize(
    ("stops", "data", "shown", "stopped"),
    [
        (["END"], b"abEND", ["a", "b", "", "", ""], True),
        (["END"], b"abENd", ["a", "b", "", "", "ENd"], False),
        (["END"], b"EEND", ["", "E", "", ""], True),
        (["aab"], b"aaab", ["", "", "a", ""], True),
        (["xyz", "y"], b"axy", ["a", "", "x"], True),
        (["b", "abc"], b"ab", ["", "a"], True),
    ],
)
def test_stop_strings(stops, data, shown, stopped):
    text = stream(*stops)
    assert pieces(text, data) == shown
    assert text.stopped == stopped


def test_flush_releases_a_beginning_of_a_stop_string():
    text = stream("END")
    assert pieces(text, b"aEN") == ["a", "", ""]
    assert text.flush() == "EN"
    assert not text.stopped


def test_flush_can_complete_a_stop_string():
    text = stream("a\N{REPLACEMENT CHARACTER}")
    assert pieces(text, b"xa\xc3") == ["x", "", ""]
    assert text.flush() == ""
    assert text.stopped


def test_stops_are_ignored_until_they_may_count():
    text = stream("b")
    assert [text.push(byte, may_stop=False) for byte in b"abb"] == ["a", "b", "b"]
    assert not text.stopped
    assert text.push(ord("b")) == ""
    assert text.stopped
