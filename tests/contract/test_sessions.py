import math

import pytest

from fastdeploy_kvcache_v1.contract.sessions import (
    LAST_TURN,
    MAX_ID_CHARACTERS,
    MAX_RETURN_S,
    UNTOLD,
    checked_return,
    checked_session_id,
    session_hint,
)


def test_a_session_is_its_id_and_its_salt():
    names = {session_hint(name, salt).name for name in ("a", "b") for salt in (b"", b"a", b"b")}
    assert len(names) == 6
    assert session_hint("a", b"s", 3.0) == session_hint("a", b"s", 3.0)


def test_parts_of_a_name_cannot_be_moved_between_salt_and_id():
    assert session_hint("bc", b"a").name != session_hint("c", b"ab").name


def test_no_id_and_an_empty_id_are_no_session():
    assert session_hint(None) == session_hint("") == UNTOLD
    assert session_hint(None, b"s").tenant == session_hint("a", b"s").tenant != b""


@pytest.mark.parametrize("value", [0, 0.5, MAX_RETURN_S, -1, LAST_TURN])
def test_a_time_of_return_is_taken(value):
    assert checked_return(value) == value


@pytest.mark.parametrize("value", [-0.5, -2, MAX_RETURN_S + 1, 10**400, math.inf, math.nan, True, "1", None, [1]])
def test_a_wrong_time_of_return_is_refused_in_one_line(value):
    with pytest.raises(ValueError, match="return_in_s must be a number of seconds from 0 to 2592000, or -1") as refused:
        checked_return(value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("value", ["", "x" * (MAX_ID_CHARACTERS + 1), 7, None])
def test_a_wrong_session_id_is_refused_without_its_value(value):
    with pytest.raises(ValueError, match="a session id must be a text of 1 to 1024 characters"):
        checked_session_id(value)
