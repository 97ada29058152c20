"""The router between small real servers: whom it chooses, what it tells them, what a client hears when they fail."""

import asyncio
import json
import os
import re
import signal
import threading

import httpx2
import pytest

from fastdeploy_kvcache_v1.cli import main
from fastdeploy_kvcache_v1.lab.router import app
from fastdeploy_kvcache_v1.lab.server.prefill_job import PREFILL_HEADER, PROOF_HEADER, proves
from tests.lab.router.servers import EVENTS, SECRET, Backend, Scene, until

pytestmark = pytest.mark.anyio
impatient = pytest.mark.parametrize("silence_s", [0.3])


@pytest.fixture
def anyio_backend():
    return "asyncio"


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(app, "LOOK_EVERY_S", 0.02)
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")  # not for servers that a flag names


@pytest.fixture
def rare_looks(quick, monkeypatch):
    monkeypatch.setattr(app, "LOOK_EVERY_S", 3600)


@pytest.fixture
def silence_s():
    return 60.0


@pytest.fixture
async def scene(quick, silence_s):
    """No request is open at its end."""
    async with Scene(silence_s) as made:
        yield made
        await until(lambda: made.open() == (0, 0), "no request to be open")


def answers(status):
    async def act(asked):
        asked.say(status, {"said": status})

    return act


async def dies(asked):
    """Before it answers."""


async def garbage(asked):
    asked.writer.write(b"\x00\xff what is this\r\n\r\n")


async def silent(asked):
    await asked.closed.wait()


def stream(then, content_type=EVENTS, length=None):
    """One event, and `then`."""

    async def act(asked):
        asked.start(content_type=content_type, **({} if length is None else {"content_length": length}))
        asked.writer.write(b"data: 1\n\n")
        await asked.writer.drain()
        await then(asked)

    return act


async def test_requests_take_turns_get_an_id_and_name_a_prefill_server_with_a_proof(scene):
    answers = [await scene.ask() for _ in range(4)]
    for answer in answers:
        assert (answer.status_code, answer.headers["content-type"]) == (200, "application/json")
    ids = {asked.headers["x-request-id"] for asked in scene.asked()}
    assert {answer.headers["x-request-id"] for answer in answers} == ids
    assert (len(ids), min(map(len, ids))) == (4, 32)
    assert [len(each.asked) for each in scene.decodes] == [2, 2]
    named = [asked.headers[PREFILL_HEADER.lower()] for asked in scene.asked()]
    assert sorted(named) == sorted([each.url for each in scene.prefills] * 2)
    for url, asked in zip(named, scene.asked(), strict=True):
        assert proves(SECRET, "url", url.encode(), asked.headers[PROOF_HEADER.lower()])
        assert asked.line == "POST /v1/completions HTTP/1.1"
        assert json.loads(asked.body) == {"prompt": "x"}


def test_a_busy_server_gets_no_more_than_the_others():
    servers = [app.Server(name) for name in "abc"]
    with app.choose(servers).busy():
        assert sorted(app.choose(servers).url for _ in range(4)) == ["b", "b", "c", "c"]
        for each in servers:
            each.answers = each.num_open == 1
        assert app.choose(servers).num_open == 1
        assert app.choose(servers, [servers[-1]]) is None
    assert [each.num_open for each in servers] == [0, 0, 0]


async def test_without_prefill_servers_decode_servers_are_alone(scene):
    await scene.prefills[0].stop()
    scene.prefills[1].health = answers(503)
    await until(lambda: scene.answering() == {"d0", "d1"}, "the looks")
    assert (await scene.ask()).status_code == 200
    (asked,) = scene.asked()
    assert PREFILL_HEADER.lower() not in asked.headers
    assert PROOF_HEADER.lower() not in asked.headers


@impatient
@pytest.mark.parametrize("act", [answers(502), answers(503), answers(504), dies, garbage, silent])
async def test_a_decode_server_that_fails_before_the_first_byte_costs_nothing(scene, act):
    scene.decodes[0].act = act
    for _ in range(4):
        assert (await scene.ask()).json() == {"from": "d1"}
    assert len(scene.decodes[0].asked) >= 2


async def test_a_server_that_cannot_be_reached_is_left_out_until_a_look_finds_it(rare_looks, scene, caplog):
    await until(lambda: scene.decodes[0].num_looks, "the first look")
    await scene.decodes[0].stop()
    for _ in range(4):
        assert (await scene.ask()).json() == {"from": "d1"}
    assert scene.answering() == {"p0", "p1", "d1"}
    assert scene.decodes[1].num_looks == 1
    (line,) = [each for each in caplog.messages if "left out" in each]
    assert line.startswith(f"{scene.decodes[0].url} does not answer, left out: ")


def test_only_a_server_that_has_answered_before_is_a_warning(caplog):
    caplog.set_level("INFO")
    server = app.Server("http://d0")
    for answers_now in (False, False, True, True, False, True):
        server.found(answers_now, "why")
    assert [(each.levelname, each.message) for each in caplog.records] == [
        ("INFO", "http://d0 does not answer, left out: why"),
        ("INFO", "http://d0 answers"),
        ("WARNING", "http://d0 does not answer, left out: why"),
        ("INFO", "http://d0 answers"),
    ]


async def test_a_server_answers_when_its_health_is_200_and_comes_in_time(scene, monkeypatch):
    monkeypatch.setattr(app, "SOON_S", 0.2)
    scene.decodes[0].health, scene.decodes[1].health = silent, answers(404)
    await until(lambda: scene.answering() == {"p0", "p1"}, "the looks")
    health = await scene.client.get("/health")
    assert (health.status_code, health.json()["status"]) == (503, "no decode server answers")
    answer = await scene.ask()
    assert answer.status_code == 503
    assert answer.json()["error"]["type"] == "service_unavailable_error"
    for each in scene.decodes:
        assert f"{each.url} does not answer" in answer.json()["error"]["message"]
        assert each.asked == []
        each.health = each.well
    await until(lambda: len(scene.answering()) == 4, "the looks")
    health = await scene.client.get("/health")
    state = {"answers": True, "open_requests": 0}
    groups = {"prefill": scene.prefills, "decode": scene.decodes}
    urls = {role: {each.url: state for each in group} for role, group in groups.items()}
    assert (health.status_code, health.json()) == (200, {"status": "ok", **urls})


async def test_a_status_that_all_have_is_passed_on_and_other_failures_are_told(scene):
    scene.decodes[0].act = scene.decodes[1].act = answers(503)
    answer = await scene.ask()
    assert (answer.status_code, answer.json()) == (503, {"said": 503})
    assert [len(each.asked) for each in scene.decodes] == [1, 1]
    await scene.decodes[0].stop()
    scene.decodes[1].act = dies
    await until(lambda: scene.answering() == {"p0", "p1", "d1"}, "the looks")
    answer = await scene.ask()
    assert answer.status_code == 503
    assert f"{scene.decodes[1].url}: it broke off: " in answer.json()["error"]["message"]
    scene.decodes[1].act = answers(429)
    assert (await scene.ask()).json() == {"said": 429}
    assert len(scene.decodes[1].asked) == 3


async def test_prompts_count_until_the_first_byte_and_answers_until_the_last(scene):
    begin, end = asyncio.Event(), asyncio.Event()

    async def act(asked):
        await begin.wait()
        await stream(lambda asked: end.wait())(asked)

    for each in scene.decodes:
        each.act = act
    answers = [asyncio.ensure_future(scene.ask(stream=True)) for _ in range(6)]
    await until(lambda: scene.open() == (6, 6), "six open requests")
    assert [each.num_open for each in scene.forwarder.prefills] == [3, 3]
    begin.set()
    await until(lambda: scene.open() == (0, 6), "the first bytes")
    end.set()
    assert {answer.text for answer in await asyncio.gather(*answers)} == {"data: 1\n\n"}


@pytest.mark.parametrize("content_type", [EVENTS, "application/json"])
async def test_bytes_are_relayed_as_they_come(scene, content_type):
    go_on = asyncio.Event()

    async def then(asked):
        await go_on.wait()
        asked.writer.write(b"data: 2\n\n")

    scene.decodes[0].act = scene.decodes[1].act = stream(then, content_type)
    async with scene.client.stream("POST", "/v1/completions", json={}) as answer:
        chunks = answer.aiter_raw()
        assert await anext(chunks) == b"data: 1\n\n"
        go_on.set()
        assert b"".join([chunk async for chunk in chunks]) == b"data: 2\n\n"


@impatient
@pytest.mark.parametrize(
    ("then", "words"), [(silent, "it was silent for 0.3 s"), (dies, "it broke off: peer closed connection")]
)
async def test_a_stream_that_breaks_ends_with_an_error_event_and_is_not_begun_again(scene, then, words, caplog):
    async def act(asked):
        asked.start(content_type=EVENTS, transfer_encoding="chunked")
        asked.writer.write(b"9\r\ndata: 1\n\n\r\n")
        await then(asked)

    scene.decodes[0].act = scene.decodes[1].act = act
    answer = await scene.client.post("/v1/completions", json={}, headers={"x-request-id": "mine"})
    first, _, last = answer.text.partition("\n\n")
    assert (answer.status_code, first) == (200, "data: 1")
    error = json.loads(last.strip().removeprefix("data: "))["error"]
    assert error["type"] == "service_unavailable_error"
    (server,) = [each for each in scene.decodes if each.asked]
    assert error["message"].startswith(f"{server.url}: {words}")
    assert error["message"].endswith("; the answer is not complete")
    assert any(f"request mine: {server.url}: {words}" in line for line in caplog.messages)


@impatient
@pytest.mark.parametrize("then", [silent, dies])
@pytest.mark.parametrize("length", [None, "40"])
async def test_a_plain_answer_that_breaks_is_too_short_for_the_client_as_well(scene, then, length):
    async def act(asked):
        framing = {"transfer_encoding": "chunked"} if length is None else {"content_length": length}
        asked.start(content_type="application/json", **framing)
        asked.writer.write(b'9\r\n{"half": \r\n' if length is None else b'{"half": ')
        await then(asked)

    scene.decodes[0].act = scene.decodes[1].act = act
    with pytest.raises(httpx2.RemoteProtocolError, match="peer closed connection"):
        await scene.ask()


@pytest.mark.parametrize("is_begun", [False, True])
async def test_a_client_that_leaves_takes_its_request_along(scene, is_begun):
    for each in scene.decodes:
        each.act = stream(silent) if is_begun else silent
    leaving = asyncio.ensure_future(scene.ask(stream=True))
    await until(lambda: scene.asked() and scene.open() == (0 if is_begun else 1, 1), "an open request")
    (asked,) = scene.asked()
    assert not asked.closed.is_set()
    leaving.cancel()
    await asyncio.wait_for(asked.closed.wait(), 20)
    await until(lambda: scene.open() == (0, 0), "no request to be open")
    assert scene.asked() == [asked]


async def test_a_client_that_leaves_within_its_request_is_heard_by_nobody(scene):
    _, writer = await asyncio.open_connection("127.0.0.1", int(scene.url.rpartition(":")[2]))
    writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: 9\r\n\r\n1234")
    await writer.drain()
    await asyncio.sleep(0.05)
    writer.close()
    assert (await scene.ask()).status_code == 200
    assert [each.body for each in scene.asked()] == [b'{"prompt":"x"}']


async def test_headers_that_matter_travel_both_ways_and_no_others(scene):
    async def act(asked):
        asked.say(302, {}, location="/else", retry_after="3", set_cookie="a=b", x_request_id="theirs", server="s")

    scene.decodes[0].act = scene.decodes[1].act = act
    sent = [
        (b"content-type", "ä".encode()),
        (b"authorization", b"Bearer k"),
        (b"traceparent", b"00-1-1-1"),
        (b"tracestate", b"a=1"),
        (b"x-request-id", b"mine"),
        (b"x-session-id", "ä".encode()),
        (b"accept", b"text/event-stream"),
        (b"cookie", b"a=b"),
        (PREFILL_HEADER.lower().encode(), b"http://evil"),
        (PROOF_HEADER.lower().encode(), b"00"),
    ]
    answer = await scene.client.request("POST", "/v1/chat/completions", content=b"{}", headers=sent)
    (asked,) = scene.asked()
    for name, value in sent[:7]:
        assert asked.headers[name.decode()].encode("latin-1") == value
    assert "cookie" not in asked.headers
    assert asked.headers["accept-encoding"] == "identity"
    assert asked.headers[PREFILL_HEADER.lower()] in {each.url for each in scene.prefills}
    assert asked.line == "POST /v1/chat/completions HTTP/1.1"
    assert (answer.status_code, answer.headers["location"]) == (302, "/else")
    assert (answer.headers["retry-after"], answer.headers["x-request-id"]) == ("3", "theirs")
    assert "set-cookie" not in answer.headers


def knows(known):
    async def act(asked):
        asked.say(200, {"known": known})

    return act


async def tell(scene):
    body = {"session_id": "a", "return_in_s": 1}
    return await scene.client.post("/v1/cache/session", json=body, headers={"X-Request-Id": "r"})


@pytest.mark.parametrize("knowing", [None, 0, 1, 2, 3])
async def test_time_of_return_goes_to_every_server_and_one_that_knows_answers(scene, knowing):
    backends = [*scene.prefills, *scene.decodes]
    for number, each in enumerate(backends):
        each.act = knows(number == knowing)
    answer = await tell(scene)
    assert (answer.status_code, answer.json()) == (200, {"known": knowing is not None})
    for each in backends:
        (asked,) = each.asked
        assert (asked.line, asked.headers["x-request-id"]) == ("POST /v1/cache/session HTTP/1.1", "r")
        assert json.loads(asked.body) == {"session_id": "a", "return_in_s": 1}
        assert PREFILL_HEADER.lower() not in asked.headers


@pytest.mark.parametrize(("act", "status"), [(answers(404), 404), (answers(503), 503), (dies, 503), (garbage, 503)])
async def test_time_of_return_needs_one_server_that_takes_it(scene, act, status):
    scene.prefills[0].act = scene.prefills[1].act = scene.decodes[0].act = act
    scene.decodes[1].act = knows(False)
    assert (await tell(scene)).json() == {"known": False}
    scene.decodes[1].act = dies
    assert (await tell(scene)).status_code == status


async def test_refusal_of_a_time_of_return_is_passed_on(scene):
    for each in (*scene.prefills, *scene.decodes):
        each.act = answers(400)
    answer = await tell(scene)
    assert (answer.status_code, answer.json()) == (400, {"said": 400})


async def test_time_of_return_without_a_server_that_answers_is_503(rare_looks, scene):
    for each in (*scene.forwarder.prefills, *scene.forwarder.decodes):
        each.answers = False
    answer = await tell(scene)
    assert (answer.status_code, answer.json()["error"]["message"]) == (503, "no server answers the request")
    assert scene.asked() == []


@pytest.mark.parametrize(
    ("path", "line"),
    [
        ("/v1/models", "/v1/models"),
        ("/v1/models/org/name", "/v1/models/org%2Fname"),
        ("/v1/models/..%2f..%2fdebug%2fcheck%3fa", "/v1/models/..%2F..%2Fdebug%2Fcheck%3Fa"),
    ],
)
async def test_models_are_asked_for_without_a_prefill_server(scene, path, line):
    assert (await scene.client.get(path)).status_code == 200
    (asked,) = scene.asked()
    assert asked.line == f"GET {line} HTTP/1.1"
    assert PREFILL_HEADER.lower() not in asked.headers
    assert (await scene.client.head(path)).status_code == 200
    assert (await scene.client.head("/health")).status_code == 200


async def test_a_body_that_is_too_large_and_a_path_that_is_none_are_refused_with_the_clients_type(scene, monkeypatch):
    monkeypatch.setattr(app, "MAX_BODY_BYTES", 1 << 20)

    async def pieces(size):
        for _ in range(size):
            yield b"x" * (1 << 19)

    answer = await scene.client.post("/v1/completions", content=pieces(3))
    error = answer.json()["error"]
    assert (answer.status_code, error["type"]) == (413, "invalid_request_error")
    assert error["message"] == "the request body is larger than 1 MiB: shorten it"
    assert (await scene.client.post("/v1/completions", content=pieces(2))).status_code == 200
    (asked,) = scene.asked()
    assert len(asked.body) == 1 << 20
    for method, path, status in (("GET", "/v1/completions", 405), ("POST", "/nothing", 404)):
        answer = await scene.client.request(method, path)
        assert answer.status_code == status
        assert answer.json()["error"]["message"]
    assert answer.json()["error"]["type"] == "not_found_error"


@pytest.fixture
def stopped(tmp_path, capfd):
    """`stopped(play)` runs the command until `play(url, backend, stop)` has called `stop`: its status and output."""
    secret = tmp_path / "secret"
    secret.write_bytes(SECRET)
    secret.chmod(0o600)

    def run(play, *flags):
        begun, ended, backend, heard = threading.Event(), threading.Event(), Backend("d"), []

        async def client():
            await backend.start()
            begun.set()
            printed = ""
            while not printed.endswith("\n"):  # the line and its end may come one by one
                await asyncio.sleep(0.01)
                printed += capfd.readouterr().out
            heard.append(printed)
            await play(printed.split()[1], backend, lambda: os.kill(os.getpid(), signal.SIGTERM))
            await asyncio.to_thread(ended.wait)
            await backend.stop()

        thread = threading.Thread(target=lambda: asyncio.run(client()))
        thread.start()
        begun.wait(20)
        fallen_through = []
        before = signal.signal(signal.SIGTERM, lambda *_: fallen_through.append(1))
        try:
            words = ("--decode", backend.url, "--prefill", "http://[::1]:9", "--port", "0", "--peer-secret-file")
            status = main(["router", *words, str(secret), *flags])
        finally:
            signal.signal(signal.SIGTERM, before)
            ended.set()
        thread.join(20)
        assert fallen_through == []
        return status, heard[0]

    return run


async def refused(port):
    """Until nobody listens there."""
    while True:
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
        except ConnectionRefusedError:
            return
        writer.close()
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("num_signals", [1, 2])
def test_signal_lets_open_answers_end_and_a_second_one_refuses_them(stopped, rare_looks, num_signals):
    async def play(url, backend, stop):
        go_on = asyncio.Event()
        backend.act = stream(lambda asked: go_on.wait())
        async with (
            httpx2.AsyncClient(base_url=url, trust_env=False) as client,
            client.stream("POST", "/v1/completions") as answer,
        ):
            chunks = answer.aiter_raw()
            assert await anext(chunks) == b"data: 1\n\n"
            stop()
            await refused(int(url.rpartition(":")[2]))
            if num_signals == 1:
                go_on.set()
                assert [chunk async for chunk in chunks] == []
            else:
                stop()
                rest = b"".join([chunk async for chunk in chunks])
                assert (
                    json.loads(rest.strip().removeprefix(b"data: "))["error"]["message"]
                    == "the router is shutting down"
                )
            heard.append("all")

    heard = []
    status, printed = stopped(play)
    assert (status, heard) == (0, ["all"])
    assert re.fullmatch(r"Ready: http://127.0.0.1:\d+ sends requests to 1 prefill and 1 decode servers\n", printed)


def test_second_signal_refuses_a_request_whose_answer_has_not_begun(stopped, rare_looks, caplog):
    async def play(url, backend, stop):
        backend.act = silent
        async with httpx2.AsyncClient(base_url=url, trust_env=False) as client:
            asking = asyncio.ensure_future(client.post("/v1/completions", json={"prompt": "x"}, timeout=60))
            await until(lambda: backend.asked, "the request")
            stop()
            await until(lambda: any("a second signal refuses them" in each for each in caplog.messages), "the log")
            stop()
            answer = await asking
            heard.append((answer.status_code, answer.json()["error"]["message"]))

    heard = []
    assert stopped(play)[0] == 0
    assert heard == [(503, "the router is shutting down")]


@pytest.mark.parametrize(("host", "shown", "is_told"), [("0.0.0.0", "0.0.0.0", True), ("::1", "[::1]", False)])
def test_who_listens_to_the_network_is_told(stopped, caplog, host, shown, is_told):
    async def play(url, backend, stop):
        async with httpx2.AsyncClient(base_url=url, trust_env=False) as client:
            while any(each["answers"] for each in (await client.get("/health")).json()["prefill"].values()):
                await asyncio.sleep(0.01)
        stop()

    status, printed = stopped(play, "--host", host)
    assert (status, printed.startswith(f"Ready: http://{shown}:")) == (0, True)
    assert any(f"listening on {host}: the router has no password" in each for each in caplog.messages) == is_told


REFUSALS = [
    # flags, the one line
    (("--decode", "d0:80"), "a server's URL is http://HOST:PORT, got 'd0:80'"),
    (("--decode", "http://d", "--prefill", "p0"), "a server's URL is http://HOST:PORT, got 'p0'"),
    (("--decode", "http://:80"), "a server's URL is http://HOST:PORT, got 'http://:80'"),
    (("--decode", "http://d:99999"), "a server's URL is http://HOST:PORT, got 'http://d:99999'"),
    (("--decode", "http://a..b"), "a server's URL is http://HOST:PORT, got 'http://a..b'"),
    (("--decode", "http://d:0"), "a server's URL is http://HOST:PORT, got 'http://d:0'"),
    (("--decode", "http://d", "--silence", "0"), "--silence must be above 0, got 0"),
    (("--decode", "http://d", "--silence", "inf"), "--silence must be above 0, got inf"),
    (("--decode", "http://d", "--host", "203.0.113.1", "--port", "0"), "cannot listen on 203.0.113.1:0: "),
]


def test_the_help_says_what_a_router_does_and_needs(capsys):
    with pytest.raises(SystemExit):
        main(["router", "--prefill", "http://p"])
    assert "the following arguments are required: --decode" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["router", "--help"])
    said = " ".join(capsys.readouterr().out.split())
    assert "GET /health shows which servers answer. After SIGTERM, open requests end first." in said
    assert "listen on (127.0.0.1)" in said
    assert "until it is complete (300)" in said


@pytest.mark.parametrize(("flags", "line"), REFUSALS)
def test_wrong_flags_are_one_line(capsys, flags, line):
    assert main(["router", *flags]) == 2
    said = capsys.readouterr().err
    assert line in said
    assert said.count("\n") == 1
