"""Sessions as clients name them: which field wins, what reaches the cache, what is refused and never repeated."""

import pytest

from fastdeploy_kvcache_v1.contract.sessions import UNTOLD, session_hint
from fastdeploy_kvcache_v1.scheduler.reuse.history import FIRST_TURN, TOOL_CALL
from tests.lab.server.served import error_of, running

SECRET = "ada@example.org"
WRONG_ID = "a session id must be a text of 1 to 1024 characters; leave it out for none"
WRONG_TIME = "return_in_s must be a number of seconds from 0 to 2592000, or -1 for a session that has ended"


@pytest.fixture
def hints(server, monkeypatch):
    """Hints of the requests that reached the engine."""
    kept, submit = [], server.engine.submit

    def keep(generation):
        kept.append(generation.hasher.session)
        submit(generation)

    monkeypatch.setattr(server.engine, "submit", keep)
    return kept


@pytest.fixture
def told(server, monkeypatch):
    """What the cache, which knows the session "known", was told later."""
    kept, known = [], session_hint("known").name

    def tell_return(session):
        kept.append(session)
        return session.name == known

    monkeypatch.setattr(server.engine.core.manager, "tell_return", tell_return)
    return kept


def send(server, path, body, **headers):
    given = {"prompt": "hi"} if path.endswith("/completions") else {}
    given = {"messages": [{"role": "user", "content": "hi"}]} if "chat" in path else given
    return server.client.post(path, json={**given, **body}, headers=headers)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_session_is_named_by_field_header_cache_key_or_user(server, hints, path):
    fields = {"session_id": "a", "prompt_cache_key": "c", "user": "d"}
    for name in ("a", "b", "c", "d", None):
        headers = {"X-Session-ID": "b"} if name and name <= "b" else {}
        assert send(server, path, fields, **headers).status_code == 200
        assert hints.pop() == session_hint(name)
        fields = {field: value for field, value in fields.items() if name and value > name}


def test_hint_has_the_salt_and_the_time_of_return_also_without_an_id(server, hints):
    for session_id, salt, seconds in (("a", "s", 2.5), ("a", None, -1), (None, "s", 0), ("a", None, None)):
        body = {"session_id": session_id, "cache_salt": salt, "return_in_s": seconds}
        assert server.complete(prompt="hi", **body).status_code == 200
        assert hints.pop() == session_hint(session_id, (salt or "").encode(), seconds)


def test_header_in_utf_8_names_the_session_of_the_same_field(server, hints):
    send(server, "/v1/completions", {}, **{"X-Session-ID": "Gespräch".encode()})
    send(server, "/v1/completions", {"session_id": "Gespräch"})
    assert hints[0] == hints[1] == session_hint("Gespräch")


def test_empty_fields_of_openai_name_no_session(server, hints):
    assert server.complete(prompt="hi", user="", prompt_cache_key="", session_id=None).status_code == 200
    assert hints == [UNTOLD]


def test_hint_in_metadata_fails_no_request_and_is_not_read(server, hints):
    assert server.chat(metadata={"session_id": 7, "return_in_s": "soon", "user": "u"}).status_code == 200
    assert hints == [UNTOLD]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/cache/session"])
@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        *(({"session_id": each}, "session_id", f"session_id: {WRONG_ID}") for each in ("", SECRET * 100, [SECRET], 7)),
        *(({"return_in_s": each}, "return_in_s", WRONG_TIME) for each in (-2, "1", True, 1e300, [0])),
    ],
)
def test_wrong_hint_is_refused_in_one_line_without_its_value(server, caplog, path, fields, param, message):
    caplog.set_level("DEBUG")
    answer = send(server, path, {"session_id": "a", "return_in_s": 1, **fields})
    error = error_of(answer)
    assert (answer.status_code, error["param"], error["message"]) == (400, param, message)
    assert SECRET not in answer.text + caplog.text


def test_wrong_header_is_refused_unless_the_body_names_the_session(server, hints):
    header = {"X-Session-ID": SECRET * 100}
    answer = send(server, "/v1/completions", {"user": "u"}, **header)
    assert (answer.status_code, error_of(answer)["message"]) == (400, f"X-Session-ID: {WRONG_ID}")
    assert send(server, "/v1/completions", {"session_id": "a"}, **header).status_code == 200
    assert hints == [session_hint("a")]


@pytest.mark.parametrize(("field", "value"), [("prompt_cache_key", 7), ("user", ["u"])])
def test_name_of_a_session_that_is_no_text_is_refused(server, field, value):
    answer = server.complete(prompt="hi", **{field: value})
    assert (answer.status_code, error_of(answer)["param"]) == (400, field)


def test_later_time_of_return_reaches_the_cache_which_says_if_it_knows(server, told):
    for name, salt, seconds in (("known", None, 3), ("known", "s", -1), ("other", None, 0.5)):
        body = {"session_id": name, "cache_salt": salt, "return_in_s": seconds}
        answer = server.client.post("/v1/cache/session", json=body)
        assert (answer.status_code, answer.json()) == (200, {"known": (name, salt) == ("known", None)})
        assert told.pop() == session_hint(name, (salt or "").encode(), seconds)


@pytest.mark.parametrize(("body", "param"), [({"session_id": "a"}, "return_in_s"), ({"return_in_s": 1}, "session_id")])
def test_later_time_of_return_needs_a_session_and_seconds(server, told, body, param):
    answer = server.client.post("/v1/cache/session", json=body)
    assert (answer.status_code, error_of(answer)["param"], told) == (400, param, [])


def test_unknown_field_beside_a_time_of_return_is_named():
    with running(strict_fields=True) as strict:
        body = {"session_id": "a", "return_in_s": 1}
        assert strict.client.post("/v1/cache/session", json=body).status_code == 200
        answer = strict.client.post("/v1/cache/session", json={**body, "cach_salt": "s"})
        assert (answer.status_code, error_of(answer)["code"]) == (400, "unknown_field")
        assert "did you mean cache_salt?" in error_of(answer)["message"]


def test_neither_id_nor_salt_is_logged(server, told, caplog):
    caplog.set_level("DEBUG")
    body = {"session_id": SECRET, "cache_salt": f"salt of {SECRET}", "return_in_s": 1}
    for path in ("/v1/completions", "/v1/cache/session"):
        assert send(server, path, body, **{"X-Session-ID": SECRET}).status_code == 200
    assert "/v1/cache/session: 200" in caplog.text
    assert SECRET not in caplog.text


@pytest.mark.parametrize("calls_tool", [True, False])
def test_cache_learns_whether_the_answer_ended_in_a_tool_call(calls_tool):
    ends = frozenset(range(300)) if calls_tool else frozenset({300})
    with running(tool_call_ends=ends) as server:
        assert server.complete(prompt="hello there").status_code == 200
        server.wait_for(lambda report: not report["running"] + report["waiting"])
        classes = {run.use_class for run in server.engine.core.manager._tree.runs()}
    assert classes == {TOOL_CALL if calls_tool else FIRST_TURN}
