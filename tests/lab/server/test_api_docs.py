"""The description of the API says what the server does: endpoints, fields, errors, version."""

import json
import re
from pathlib import Path

import pytest

from fastdeploy_kvcache_v1 import __version__
from fastdeploy_kvcache_v1.lab.server.request_fields import ChatBody, CompletionBody
from tests.lab.server.served import error_of

HELLO = [{"role": "user", "content": "hello"}]
BODIES = {"/v1/completions": CompletionBody, "/v1/chat/completions": ChatBody}


@pytest.fixture
def described(server):
    answer = server.client.get("/openapi.json")
    assert answer.status_code == 200
    return answer.json()


def fields_of(described, path):
    content = described["paths"][path]["post"]["requestBody"]["content"]["application/json"]
    return described["components"]["schemas"][content["schema"]["$ref"].rsplit("/", 1)[1]]["properties"]


def test_every_endpoint_is_described_once_with_a_sentence(described):
    found = {(path, method): each for path, item in described["paths"].items() for method, each in item.items()}
    assert set(found) == {
        *((path, "post") for path in ("/v1/completions", "/v1/chat/completions", "/v1/cache/session")),
        ("/reset_prefix_cache", "post"),
        *((path, "get") for path in ("/v1/models", "/v1/models/{asked}", "/health", "/metrics", "/version")),
        *((path, "get") for path in ("/debug/check", "/v1/cache/explain", "/v1/cache/state", "/v1/cache/plan")),
    }
    assert [key for key, each in found.items() if not each.get("description")] == []
    assert len({each["operationId"] for each in found.values()}) == len(found)


@pytest.mark.parametrize("path", BODIES)
def test_request_bodies_are_described_with_every_field_and_its_type(described, path):
    fields = fields_of(described, path)
    assert set(fields) == set(BODIES[path].model_fields)
    typeless = [name for name, field in fields.items() if not {"type", "anyOf", "$ref", "allOf"} & set(field)]
    assert typeless == []
    assert fields["prompt_token_ids"]["items"] == {"type": "integer"}


@pytest.mark.parametrize("path", BODIES)
def test_the_example_answer_has_the_fields_of_a_real_one(server, described, path):
    example = described["paths"][path]["post"]["responses"]["200"]["content"]["application/json"]["example"]
    real = (server.chat if "chat" in path else server.complete)(**({} if "chat" in path else {"prompt": "x"})).json()

    def shape(value):
        if isinstance(value, dict):
            return {key: shape(each) for key, each in value.items() if each is not None}
        return [shape(each) for each in value] if isinstance(value, list) else None

    assert shape(example) == shape(real)


def test_errors_are_described_as_they_are_sent(server, described):
    for item in described["paths"].values():
        for operation in item.values():
            assert {"4XX", "5XX"} <= set(operation["responses"])
            assert "422" not in operation["responses"], "a wrong field is a 400"
    detail = described["components"]["schemas"]["ErrorDetail"]["properties"]
    assert set(detail) == set(error_of(server.complete(prompt=7)))


def test_version_is_that_of_the_package(server, described):
    assert server.client.get("/version").json() == {"version": __version__}
    assert server.client.head("/version").status_code == 200
    assert described["info"]["version"] == __version__


def test_docs_page_reads_the_description_and_says_what_it_needs(server):
    page = server.client.get("/docs")
    assert page.headers["content-type"].startswith("text/html")
    assert page.text.count("Without internet it shows this line alone") == 1
    assert "url: 'openapi.json'" in page.text
    assert set(re.findall(r"https?://([^/\"']+)", page.text)) == {"cdn.jsdelivr.net"}


def test_the_description_tells_nothing_of_this_machine(server, described):
    text = json.dumps(described)
    assert "tiny" not in text, "the served model"
    assert str(Path.cwd()) not in text
