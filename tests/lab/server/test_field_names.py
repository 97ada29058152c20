"""Unknown request fields: named once in the log with the nearest known one, counted, or refused."""

import json
import threading

import pytest
from openai import BadRequestError, OpenAI

from fastdeploy_kvcache_v1.lab.server.field_names import MAX_FIELDS, MAX_LENGTH, MAX_NAMES
from tests.lab.server.served import error_of, running

LOGGER = "fastdeploy_kvcache_v1.lab.server.field_names"
HELLO = {"role": "user", "content": "hello"}


@pytest.fixture
def strict():
    with running(strict_fields=True) as started:
        yield started


def named(caplog):
    return [record.getMessage() for record in caplog.records if record.name == LOGGER]


def counted(server):
    lines = server.client.get("/metrics").text.splitlines()
    (line,) = [each for each in lines if each.startswith("fastdeploy:kvcache_v1_unknown_request_fields_total")]
    return float(line.split()[1])


def parts(**more):
    image = {"url": "data:image/png;base64,aGk=", **more.pop("image_url", {})}
    part = {"type": "image_url", "image_url": image} if len(image) > 1 else {"type": "text", "text": "hi"}
    return [{"role": "user", "content": [{**part, **more}]}]


def test_unknown_field_is_logged_once_with_the_nearest_and_always_counted(server, caplog):
    for _ in range(3):
        assert server.complete(prompt="hello", temperture=0).status_code == 200
        assert server.chat(temperture=0).status_code == 200
    assert named(caplog) == ["ignored the unknown request field 'temperture': did you mean temperature?"]
    assert counted(server) == 6


def test_unknown_field_without_a_near_one_points_to_the_docs(server, caplog):
    server.complete(prompt="hello", zzz=1)
    advice = "docs/reference/request-fields.md lists the known ones"
    assert named(caplog) == [f"ignored the unknown request field 'zzz': {advice}"]


@pytest.mark.parametrize(
    ("body", "line"),
    [
        ({"stream_options": {"include_usag": True}}, "'stream_options.include_usag': did you mean include_usage?"),
        ({"messages": [HELLO, {**HELLO, "contents": "x"}]}, "'messages.contents': did you mean content?"),
        ({"messages": parts(txt="x")}, "'messages.content.txt': did you mean text?"),
        ({"messages": parts(image_url={"detial": "low"})}, "'messages.content.image_url.detial': did you mean detail?"),
    ],
)
def test_nested_unknown_field_is_named_and_refused_with_its_path(server, strict, caplog, body, line):
    server.chat(**body)
    assert named(caplog) == [f"ignored the unknown request field {line}"]
    response = strict.chat(**body)
    assert (response.status_code, error_of(response)["message"]) == (400, f"unknown request field {line}")
    assert len(named(caplog)) == 1


@pytest.mark.parametrize(
    "body",
    [
        {"temperture": None, "stream_options": {"include_obfuscation": False}},
        {"metadata": {"tempertur": 1}, "chat_template_kwargs": {"anything": 1}},
        {"store": False, "tool_choice": "auto", "prompt_cache_key": "k", "service_tier": "auto", "request_id": "r"},
        {"messages": [{**HELLO, "name": "ada", "refusal": None, "annotations": [], "tool_call_id": "7"}]},
        {"messages": parts(uuid="7", prompt_cache_breakpoint={"mode": "explicit"})},
    ],
)
def test_known_fields_nulls_and_names_of_the_clients_choice_pass(strict, caplog, body):
    assert strict.chat(**body).status_code == 200
    assert (named(caplog), counted(strict)) == ([], 0)


@pytest.mark.parametrize(
    ("name", "same", "other"),
    [
        ("modalities", ["text"], ["text", "audio"]),
        ("audio", None, {"voice": "alloy", "format": "wav"}),
        ("web_search_options", None, {}),
        ("verbosity", "medium", "low"),
    ],
)
def test_field_of_openais_chats_with_an_effect_is_refused_not_unknown(server, strict, name, same, other):
    for each in (server, strict):
        assert each.chat(**{name: same}).status_code == 200
        response = each.chat(**{name: other})
        assert (response.status_code, error_of(response)["param"], error_of(response)["code"]) == (400, name, None)
    assert (counted(server), counted(strict)) == (0, 0)


def test_strict_server_refuses_an_unknown_field_and_logs_nothing(strict, caplog):
    for send in (strict.complete, strict.chat):
        response = send(prompt_token_ids=[1], temperture=0)
        error = error_of(response)
        assert (response.status_code, error["param"], error["code"]) == (400, "temperture", "unknown_field")
        assert error["message"] == "unknown request field 'temperture': did you mean temperature?"
    assert (named(caplog), counted(strict)) == ([], 2)


def test_a_million_names_are_counted_and_a_hundred_of_them_named(server, caplog):
    """In 40 requests here; of each, the first `MAX_FIELDS` are looked at."""
    for number in range(40):
        fields = {f"name {number} {field}": 1 for field in range(1000)}
        assert server.complete(prompt="hello", **fields).status_code == 200
    *first, last = named(caplog)
    assert len(first) == len(set(first)) == MAX_NAMES
    assert last == f"{MAX_NAMES} unknown request fields were named: later ones are only counted"
    assert counted(server) == 40 * MAX_FIELDS


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("a\nERROR forged", r"'a\nERROR forged'"),
        ("\x1b[31mred\u202e", r"'\x1b[31mred\u202e'"),
        ("half \ud800", "'half ?'"),
        ("temp\u00e9rature", "'temp\u00e9rature'"),
        ("x" * 10**6, repr("x" * MAX_LENGTH)),
        ("", "''"),
        ("%s%n", "'%s%n'"),
    ],
    ids=["newline", "escape", "surrogate", "unicode", "long", "empty", "format"],
)
def test_names_forge_no_line_and_are_cut(server, strict, caplog, name, shown):
    def send(to):
        body = json.dumps({"prompt": "x", "max_tokens": 1, name: 1})
        return to.client.post("/v1/completions", content=body, headers={"content-type": "application/json"})

    assert send(server).status_code == 200
    (line,) = named(caplog)
    assert line.startswith(f"ignored the unknown request field {shown}: ")
    assert line.isprintable()
    response = send(strict)
    assert response.status_code == 400
    assert error_of(response)["message"].startswith(f"unknown request field {shown}: ")


def test_requests_at_once_name_a_field_once(server, caplog):
    threads = [threading.Thread(target=server.complete, kwargs={"prompt": "x", "temperture": 0}) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(named(caplog)), counted(server)) == (1, 8)


def test_openais_client_passes_a_strict_server_with_its_usual_fields(strict, monkeypatch):
    monkeypatch.setattr("platform.platform", lambda: "Linux")  # for a header of the client; it would start `uname`
    chats = OpenAI(base_url="http://testserver/v1", api_key="none", http_client=strict.client).chat.completions
    usual = {"model": "default", "max_tokens": 4, "store": False, "service_tier": "auto", "user": "u", "metadata": {}}
    answer = chats.create(messages=[{"role": "user", "content": "hello", "name": "ada"}], **usual)
    said = answer.choices[0].message.model_dump()
    chunks = chats.create(messages=[HELLO, said, HELLO], stream=True, stream_options={"include_usage": True}, **usual)
    assert list(chunks)[-1].usage.completion_tokens == 4
    with pytest.raises(BadRequestError, match="unknown request field 'temperture'"):
        chats.create(messages=[HELLO], extra_body={"temperture": 0}, **usual)
    assert counted(strict) == 1
