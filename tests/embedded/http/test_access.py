"""What a web page in somebody's browser must not be able to do."""

import pytest
from fastapi import Depends, FastAPI, Request
from fastapi.testclient import TestClient

from fastdeploy_kvcache_v1.embedded.http.access import (
    OPERATOR_HEADER,
    HostCheck,
    listens_beyond_this_machine,
    require_json,
    require_operator,
)
from fastdeploy_kvcache_v1.embedded.http.errors import install_error_handlers


def client_of(host="127.0.0.1", allowed_hosts=()):
    app = FastAPI()
    app.add_middleware(HostCheck, host=host, allowed_hosts=allowed_hosts)
    install_error_handlers(app)

    @app.post("/json")
    async def json_only(request: Request) -> str:
        require_json(request)
        return "ok"

    @app.get("/operator", dependencies=[Depends(require_operator)])
    async def operator() -> str:
        return "ok"

    return TestClient(app, "http://localhost")


def status(client, host):
    return client.get("/nothing", headers={"host": host}).status_code


@pytest.mark.parametrize(
    "host",
    [
        *("127.0.0.1:8000", "127.0.0.1", "localhost:8000", "LOCALHOST", "localhost.", "kv.localhost", "[::1]:8000"),
        *("192.168.3.4:80", "[fe80::1]", "10.0.0.1"),
    ],
)
def test_addresses_and_localhost_are_this_server(host):
    assert status(client_of(), host) == 404


@pytest.mark.parametrize(
    "host",
    [
        *(
            "evil.example",
            "evil.example:8000",
            "localhost.evil.example",
            "127.0.0.1.evil.example",
            "evil.example:80:80",
        ),
        *("", "evil.example#127.0.0.1", "127.0.0.1@evil.example", "0x7f.1.evil", "evillocalhost"),
    ],
)
def test_another_name_is_refused(host):
    assert status(client_of(), host) == 403


def test_the_refusal_says_what_to_do():
    error = client_of().get("/nothing", headers={"host": "evil.example"}).json()["error"]
    fault = "the Host header names 'evil.example', which is not this server"
    assert error["message"] == f"{fault}: start it with --allowed-hosts to add the name"


def test_names_that_were_given_are_this_server():
    client = client_of("kv.lan", ("Proxy.example", "other.example"))
    assert [status(client, host) for host in ("kv.lan:1", "proxy.example", "other.example", "third.example")] == [
        *(404, 404, 404),
        403,
    ]
    assert status(client_of(allowed_hosts=("*",)), "evil.example") == 404


@pytest.mark.parametrize(
    "content_type",
    [
        *("application/json", "Application/JSON; charset=utf-8", "application/json, application/json"),
        *("application/vnd.api+json", "application/json;", " application/json "),
    ],
)
def test_json_is_json(content_type):
    assert client_of().post("/json", content=b"{}", headers={"content-type": content_type}).status_code == 200


@pytest.mark.parametrize(
    "content_type",
    [
        *(
            "text/plain",
            "application/x-www-form-urlencoded",
            "multipart/form-data; boundary=x",
            "",
            "application/jsonp",
        ),
        *("text/plain; application/json", "text/plain, application/json", "text/plain;a=application/json", "text/json"),
    ],
)
def test_what_a_page_can_send_without_being_asked_is_not_json(content_type):
    response = client_of().post("/json", content=b"{}", headers={"content-type": content_type})
    assert response.status_code == 415
    assert response.json()["error"]["message"] == f"the content type must be application/json, got {content_type!r}"


def test_a_body_without_a_type_is_not_json():
    assert client_of().post("/json", content=b"{}").status_code == 415


def test_operators_say_that_they_mean_it():
    client = client_of()
    assert client.get("/operator", headers={OPERATOR_HEADER: "1"}).status_code == 200
    response = client.get("/operator")
    assert response.status_code == 403
    assert response.json()["error"]["message"].endswith("send the header X-KVCache-Operator: 1")


def test_pages_are_never_given_leave_to_send_headers():
    response = client_of().options(
        "/operator", headers={"origin": "http://evil.example", "access-control-request-headers": OPERATOR_HEADER}
    )
    assert not [name for name in response.headers if name.startswith("access-control")]


@pytest.mark.parametrize(
    ("address", "beyond"),
    [
        ("127.0.0.1", False),
        ("127.9.9.9", False),
        ("::1", False),
        ("0.0.0.0", True),
        ("::", True),
        ("fe80::1%eth0", True),
    ],
)
def test_addresses_that_others_reach(address, beyond):
    assert listens_beyond_this_machine(address) is beyond
