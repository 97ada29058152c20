"""The live page in a real browser, on the embedded server; and what it names exists."""

import http.server
import re
import threading
import time
from contextlib import contextmanager

import msgspec
import pytest

from fastdeploy_kvcache_v1.config import KVCacheConfig
from fastdeploy_kvcache_v1.contract.misses import MissReason
from fastdeploy_kvcache_v1.contract.plan import Plan, PlannedSize
from fastdeploy_kvcache_v1.page.state import document
from fastdeploy_kvcache_v1.telemetry.metrics import SOURCES, Kind
from tests.lab.demo.browser import browser, program
from tests.lab.server.served import running

KEY = "a-key"
TEXT = "Answer in one short sentence, and say so where you are not sure."


def test_page_needs_nothing_else():
    html = document()
    assert re.findall(r"""(?:src|href)\s*=\s*["']?([^"'>]*)|url\(|@import""", html) == ["data:,"]
    assert re.findall(r"fetch\(.([^`\"]*)", html) == ["../v1/cache/${name}"]
    assert not re.findall(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", html)


def test_page_explains_each_reason_once():
    listed = document().split("const REASONS = {")[1].split("};")[0]
    assert re.findall(r"^ *(\w+):", listed, re.MULTILINE) == [reason.value for reason in MissReason]


def test_page_names_only_metrics_that_exist():
    numbers = [metric for source in SOURCES for metric in source.numbers]
    known = {metric.name + ("_total" if metric.kind is Kind.COUNTER else "") for metric in numbers}
    html = "".join(document().replace("${kind}", kind) for kind in ("swap", "storage"))
    named = set(re.findall(r'["`]([a-z]+(?:_[a-z]+)+)["`]', html)) - {"queue_s", "storage_s", "copies_s", "prefill_s"}
    assert len(named) > 20
    assert named - known == set()


# ---- in a browser


@pytest.fixture(scope="module")
def tab(tmp_path_factory):
    if program() is None:
        pytest.skip("no Chromium: apt-get install chromium")
    with browser(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


@contextmanager
def listening(server, key=None, plans=()):
    """Serve what `server` answers at an address that a browser can reach. Below /v1 a `key` is asked for. `plans` are
    answered in turn, the last one for good.
    """
    left = list(plans)

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            is_locked = key is not None and self.path.startswith("/v1")
            is_refused = is_locked and self.headers["authorization"] != f"Bearer {key}"
            if self.path == "/v1/cache/plan" and left:
                self.send_response(200)
                self.end_headers()
                self.wfile.write(msgspec.json.encode(left.pop(0) if len(left) > 1 else left[0]))
                return
            answer = server.client.get("/missing" if is_refused else self.path)
            self.send_response(401 if is_refused else answer.status_code)
            for name in ("content-type", "content-security-policy"):
                if name in answer.headers:
                    self.send_header(name, answer.headers[name])
            self.end_headers()
            self.wfile.write(answer.content)

        def log_message(self, *given):
            """Say nothing."""

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as listener:
        thread = threading.Thread(target=listener.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.server_port}/debug/cache"
        finally:
            listener.shutdown()
            thread.join()


def text_of(tab, name):
    return tab.value(f"document.getElementById('{name}').innerText")


def wait_for(tab, name, words):
    """Until the element with this id has these words."""
    deadline = time.monotonic() + 30
    while not re.search(words, shown := text_of(tab, name)):
        assert time.monotonic() < deadline, f"{words!r} is not in {shown!r}"
        time.sleep(0.05)


def visit(server, rounds=3):
    for _ in range(rounds):
        for number in range(4):
            server.complete(prompt=f"{number} {TEXT}", max_tokens=1)


FAULTS = """(() => {
    const faults = [], sections = [...document.querySelectorAll("section:not([hidden])")];
    if (document.documentElement.scrollWidth > innerWidth) faults.push("wider than the window");
    for (const each of document.querySelectorAll("section *")) {
        const box = each.getBoundingClientRect();
        if (box.right > innerWidth + 1 && !each.closest(".scroll")) faults.push(`${each.textContent} is cut off`);
        if (each.childElementCount === 0 && each.textContent && !each.closest("svg") &&
            parseFloat(getComputedStyle(each).fontSize) < 12) faults.push(`${each.textContent} is too small`);
    }
    for (const each of sections) if (each.innerText.length < 40) faults.push(`${each.id} is empty`);
    for (const each of document.querySelectorAll(".bar > i, svg rect"))
        if (!/^rgb/.test(getComputedStyle(each).backgroundColor + getComputedStyle(each).fill) ||
            each.getBoundingClientRect().width <= 0) faults.push(`${each.outerHTML} is not seen`);
    const kind = each => getComputedStyle(each).backgroundColor;
    for (const each of document.querySelectorAll(".bar > i, .legend i"))
        if (kind(each) === "rgba(0, 0, 0, 0)") faults.push(`${each.outerHTML} has no colour`);
    if (document.querySelectorAll("section .bar").length < 10) faults.push("bars are missing");
    if (document.querySelectorAll("#blocks svg rect").length < 10) faults.push("blocks are missing");
    return faults;
})()"""


@pytest.mark.process
@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [390, 1400, 2560])
def test_page_is_whole_from_phone_to_wall(tab, width, dark):
    with running(KVCacheConfig(40, 8, block_size=4)) as server, listening(server) as url:
        visit(server)
        tab.open(url, width=width, dark=dark)
        wait_for(tab, "status", "^live")
        assert tab.value("innerWidth") == width
        assert tab.value(FAULTS) == []
        assert tab.errors == []
        paper = tab.value("getComputedStyle(document.body).backgroundColor")
        assert (sum(map(int, re.findall(r"\d+", paper))) < 384) == dark


@pytest.mark.process
def test_page_says_what_explain_says_and_follows_the_server(tab):
    with running(KVCacheConfig(40, block_size=4)) as server, listening(server) as url:
        tab.open(url, width=1400)
        wait_for(tab, "causes", "No request has read the cache yet")
        visit(server)
        wait_for(tab, "causes", r"last 12 requests[^$]*host_too_small\nThere is no host tier[^$]*Do: Raise --swap-")
        assert "evicted_device" in text_of(tab, "reasons")
        assert "no host tier" in text_of(tab, "tiers")
        assert text_of(tab, "requests").count("evicted_device") == 8
        server.client.post("/reset_prefix_cache")
        wait_for(tab, "tiers", "0 of 40 blocks")
        wait_for(tab, "blocks", "No block is cached")
        assert tab.errors == []


@pytest.mark.process
def test_page_asks_for_the_key_and_sends_it(tab):
    with running() as server, listening(server, KEY) as url:
        visit(server)
        tab.open(url, width=390)
        wait_for(tab, "status", "^locked$")
        assert tab.value("document.getElementById('main').hidden")
        for key, status in (("wrong", "the server refuses this key"), (KEY, "^live")):
            tab.value(f"document.getElementById('key').value = '{key}'; document.querySelector('form button').click()")
            wait_for(tab, "status", status)
        assert tab.value("[localStorage.length, document.cookie, location.search]") == [0, "", ""]
        assert "last 12 requests" in text_of(tab, "causes")
    wait_for(tab, "status", "^no answer")
    assert tab.value("document.getElementById('main').className") == "old"
    tab.errors.clear()


PLAN = Plan(
    device_blocks=64,
    host_blocks=16,
    num_requests=2500,
    seconds=600.0,
    hit_share=0.25,
    written_blocks=100,
    evicted_blocks=300,
    sizes=[
        PlannedSize("device", 128, 0.375, 0.01, 50),
        PlannedSize("host", 8, 0.125, 0.02, 120),
        PlannedSize("host", 32, 0.5, 0.03, 90),
    ],
)


def compute(tab):
    tab.value("document.querySelector('#plan button').click()")


@pytest.mark.process
def test_plan_is_asked_for_until_it_is_ready_and_drawn(tab):
    with running() as server, listening(server, plans=[Plan(is_ready=False), PLAN]) as url:
        tab.open(url, width=1400)
        wait_for(tab, "status", "^live")
        assert "at other sizes" in text_of(tab, "plan")
        compute(tab)
        wait_for(tab, "plan", "Computing")
        wait_for(tab, "plan", "From the last 2,500 requests, 10 min. Real hits: 25 %")
        rows = tab.value("[...document.querySelectorAll('#plan tr')].map(each => each.innerText.split('\\t'))")
        device = ["64 blocks (now)", "25.0 %", ""], ["128 blocks", "37.5 %", "± 1.0"]
        host = ["8 blocks", "12.5 %", "± 2.0"], ["16 blocks (now)", "25.0 %", ""], ["32 blocks", "50.0 %", "± 3.0"]
        assert [row[:3] for row in rows if row[0] != "size"] == [*device, *host]
        kinds = "[...document.querySelectorAll('#plan circle')].map(each => each.classList[0])"
        assert tab.value(kinds) == ["ink", "host", "host", "ink", "host"]
        assert tab.value("document.documentElement.scrollWidth") == 1400
        assert tab.errors == []


@pytest.mark.process
@pytest.mark.parametrize(
    ("plans", "words"),
    [
        ([], r"Not known yet: too few requests \(0\) or evicted blocks \(0\)"),
        ([Plan(failure="no memory")], "No answer: no memory"),
    ],
)
def test_plan_that_does_not_come_is_said_in_words(tab, plans, words):
    """The first one is the server's own."""
    with running() as server, listening(server, plans=plans) as url:
        tab.open(url, width=390)
        wait_for(tab, "status", "^live")
        compute(tab)
        wait_for(tab, "plan", words)
        assert tab.value("document.querySelector('#plan button').disabled") is False
        tab.errors.clear()
