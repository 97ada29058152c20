"""The router between fake servers: whom it chooses, what it tells them, and what a client hears when they fail."""

import asyncio
import json

import httpx
import pytest

from fastdeploy_kvcache_v1.cli import main
from fastdeploy_kvcache_v1.embedded.prefill_job import PREFILL_HEADER, PROOF_HEADER, proves
from fastdeploy_kvcache_v1.router.app import RouterSettings, create_app
from fastdeploy_kvcache_v1.router.servers import ServerGroup

SECRET = b"sixteen bytes or more"


class Fleet:
    """Servers by host name. Each answers with its name, unless `broken` says otherwise."""

    def __init__(self):
        self.broken = {}
        self.seen = []
        self.release = asyncio.Event()

    async def __call__(self, request):
        name, broken = request.url.host, self.broken.get(request.url.host)
        if broken == "unreachable":
            raise httpx.ConnectError("connection refused")
        if request.url.path == "/health":
            if broken == "stopped":
                await asyncio.sleep(3600)
            return httpx.Response(503 if broken == "failing" else 200)
        self.seen.append((name, request.headers.get(PREFILL_HEADER), request.headers.get(PROOF_HEADER, "")))
        if broken == "breaks":
            raise httpx.ReadError("reset")
        if broken in ("hangs", "stopped"):
            await self.release.wait()
        if b"stream" in await request.aread():
            return httpx.Response(200, headers={"content-type": "text/event-stream"}, content=self.events(broken))
        return httpx.Response(200, json={"from": name})

    async def events(self, broken):
        yield b"data: 1\n\n"
        if broken == "breaks in the middle":
            raise httpx.ReadError("reset")
        yield b"data: [DONE]\n\n"


class Router:
    """The app over a fleet, with its life span."""

    def __init__(self, fleet, monkeypatch, prefills=("p0", "p1"), decodes=("d0", "d1")):
        transport = httpx.MockTransport(fleet)
        client = httpx.AsyncClient
        monkeypatch.setattr(
            "fastdeploy_kvcache_v1.router.app.httpx.AsyncClient", lambda **options: client(transport=transport)
        )
        settings = RouterSettings(
            prefill_urls=tuple(f"http://{name}" for name in prefills),
            decode_urls=tuple(f"http://{name}" for name in decodes),
            secret=SECRET,
            interval_s=0.01,
            timeout_s=0.3,
            max_request_mib=1.0,
            host="127.0.0.1",
        )
        self.app = create_app(settings)
        monkeypatch.undo()
        self.client = httpx.AsyncClient(transport=httpx.ASGITransport(app=self.app), base_url="http://127.0.0.1")

    async def __aenter__(self):
        self.life = self.app.router.lifespan_context(self.app)
        await self.life.__aenter__()
        return self

    async def __aexit__(self, *error):
        await self.client.aclose()
        await self.life.__aexit__(None, None, None)

    async def knows(self, *names):
        """The router knows that these answer, and no others."""
        deadline = asyncio.get_running_loop().time() + 20
        while True:
            health = (await self.client.get("/health")).json()
            listed = {**health["prefill"], **health["decode"]}
            if {url for url, state in listed.items() if state["answers"]} == {f"http://{name}" for name in names}:
                return health
            assert asyncio.get_running_loop().time() < deadline, health
            await asyncio.sleep(0.01)

    async def ask(self, **body):
        return await self.client.post("/v1/completions", json={"prompt": "x", **body})


@pytest.fixture
def routed(monkeypatch):
    """`routed(scene)` runs `scene(router, fleet)`."""

    def run(scene, **options):
        async def main():
            fleet = Fleet()
            async with Router(fleet, monkeypatch, **options) as router:
                await scene(router, fleet)

        asyncio.run(main())

    return run


ALL = ("p0", "p1", "d0", "d1")


def test_requests_take_turns_and_name_a_prefill_server_with_a_proof(routed):
    async def scene(router, fleet):
        await router.knows(*ALL)
        for _ in range(4):
            assert (await router.ask()).status_code == 200
        assert sorted(name for name, _, _ in fleet.seen) == ["d0", "d0", "d1", "d1"]
        assert sorted(url for _, url, _ in fleet.seen) == ["http://p0"] * 2 + ["http://p1"] * 2
        assert all(proves(SECRET, "url", url.encode(), proof) for _, url, proof in fleet.seen)

    routed(scene)


def test_a_busy_server_gets_no_more_than_the_others():
    group = ServerGroup(["http://a", "http://b", "http://c"])
    for server in group.servers:
        server.set_alive(True)
    group.choose().num_open = 5
    chosen = [group.choose().url for _ in range(4)]
    assert sorted(chosen) == ["http://b", "http://b", "http://c", "http://c"]


def test_without_prefill_servers_decode_servers_are_alone(routed):
    async def scene(router, fleet):
        fleet.broken = {"p0": "unreachable", "p1": "failing"}
        await router.knows("d0", "d1")
        assert (await router.ask()).status_code == 200
        assert fleet.seen[0][1] is None

    routed(scene)


@pytest.mark.parametrize("how", ["unreachable", "breaks"])
def test_a_decode_server_that_breaks_before_it_answers_costs_nothing(routed, how):
    async def scene(router, fleet):
        await router.knows(*ALL)
        fleet.broken = {"d0": how}
        for _ in range(4):
            assert (await router.ask()).json() == {"from": "d1"}

    routed(scene)


def test_a_decode_server_that_stops_loses_its_requests_and_comes_back(routed):
    async def scene(router, fleet):
        await router.knows(*ALL)
        fleet.broken = {"d0": "hangs"}
        waiting = [asyncio.create_task(router.ask()) for _ in range(2)]
        while not any(name == "d0" for name, _, _ in fleet.seen):
            await asyncio.sleep(0.01)
        fleet.broken = {"d0": "stopped"}
        answers = await asyncio.gather(*waiting)
        assert [answer.json() for answer in answers] == [{"from": "d1"}] * 2
        fleet.broken = {}
        health = await router.knows(*ALL)
        assert health["status"] == "ok"
        assert all(state["open_requests"] == 0 for role in ("prefill", "decode") for state in health[role].values())

    routed(scene)


def test_errors_say_who_does_not_answer(routed):
    async def scene(router, fleet):
        fleet.broken = dict.fromkeys(("d0", "d1"), "breaks")
        await router.knows(*ALL)
        answer = await router.ask()
        assert answer.status_code == 502
        assert "http://d0: it broke off: reset" in answer.json()["error"]["message"]
        fleet.broken = dict.fromkeys(("d0", "d1"), "unreachable")
        await router.knows("p0", "p1")
        answer = await router.ask()
        assert answer.status_code == 503
        assert "no decode server answers: http://d" in answer.json()["error"]["message"]
        health = await router.client.get("/health")
        assert (health.status_code, health.json()["status"]) == (503, "no decode server answers")

    routed(scene)


def test_a_stream_that_breaks_ends_with_an_error_event(routed):
    async def scene(router, fleet):
        await router.knows(*ALL)
        assert (await router.ask(stream=True)).text.endswith("data: [DONE]\n\n")
        fleet.broken = dict.fromkeys(("d0", "d1"), "breaks in the middle")
        answer = await router.ask(stream=True)
        first, last = answer.text.split("\n\n", 1)
        assert first == "data: 1"
        error = json.loads(last.strip().removeprefix("data: "))["error"]
        assert "the answer is not complete" in error["message"]
        health = await router.knows(*ALL)
        assert all(state["open_requests"] == 0 for state in health["decode"].values())

    routed(scene)


def test_a_page_of_another_site_cannot_use_the_router(routed):
    async def scene(router, fleet):
        await router.knows(*ALL)
        answer = await router.client.get("/v1/models", headers={"host": "evil.example"})
        assert answer.status_code == 403
        assert fleet.seen == []

    routed(scene)


@pytest.mark.parametrize("turns", range(8))
def test_a_watch_ends_when_it_is_cancelled_while_a_look_ends(turns):
    """However many turns of the event loop lie between the two. Servers and router are often stopped together."""

    class Refused:
        def __init__(self):
            self.is_over = asyncio.Event()

        async def get(self, url):
            await self.is_over.wait()
            raise httpx.ConnectError("refused")

    async def cancel():
        http = Refused()
        watch = asyncio.create_task(ServerGroup(["http://a"]).watch(http, interval_s=0.0, timeout_s=1000.0))
        await asyncio.sleep(0.01)
        http.is_over.set()
        for _ in range(turns):
            await asyncio.sleep(0)
        watch.cancel()
        done, _ = await asyncio.wait({watch}, timeout=5)
        assert done == {watch}
        assert watch.cancelled()

    asyncio.run(cancel())


REFUSALS = [
    # flags, the one line
    (("--decode", "d0:80"), "a server's URL begins with http://, got 'd0:80'"),
    (("--decode", "http://d", "--prefill", "p0"), "a server's URL begins with http://, got 'p0'"),
    (("--decode", "http://d", "--health-interval", "0"), "--health-interval must be above 0, got 0"),
    (("--decode", "http://d", "--health-timeout", "inf"), "--health-timeout must be above 0, got inf"),
    (("--decode", "http://d", "--max-request-mib", "-1"), "--max-request-mib must be above 0, got -1"),
]


@pytest.mark.parametrize(("flags", "line"), REFUSALS)
def test_wrong_flags_are_one_line(capsys, flags, line):
    assert main(["router", *flags]) == 2
    said = capsys.readouterr().err
    assert line in said
    assert said.count("\n") == 1
