"""`replay --compare --picture`: a line per pair of policies between the bounds, over all sizes."""

import re
import shlex
import xml.etree.ElementTree as ET
from html import unescape
from pathlib import Path

import pytest

from fastdeploy_kvcache_v1.cli import main
from fastdeploy_kvcache_v1.lab.replay.curve import drawn, page

from ..demo.browser import browser, program

SVG = "{http://www.w3.org/2000/svg}"


def at(device, host, rates, *, clairvoyant=0.9, one=0.5):
    """A capacity, with a run for each of `rates`, by the policies of a pair."""
    runs = [
        {
            "options": {"write_policy": write, "eviction_policy": eviction, "told": "trace", "host_blocks": host},
            "hit_rate": {"total": rate},
        }
        for (write, eviction), rate in rates.items()
    ]
    return {"device_blocks": device, "host_blocks": host, "clairvoyant": clairvoyant, "one_lru_tier": one, "runs": runs}


LARGE = at(100, 300, {("auto", "adaptive"): 0.8, ("auto", "lru"): 0.7})
SMALL = at(100, 0, {("write_back", "adaptive"): 0.2, ("write_back", "lru"): 0.1}, clairvoyant=0.4, one=0.1)


def spots(svg):
    """Titles of the points, line by line, as a reader sees them under the pointer."""
    return [title.text for title in ET.fromstring(svg).iter(f"{SVG}title")]


def test_each_line_goes_from_the_smallest_size_to_the_largest():
    svg = drawn({"capacities": [LARGE, SMALL]})
    assert spots(svg) == [
        *("clairvoyant bound: 40.0% with 100 blocks", "clairvoyant bound: 90.0% with 400 blocks"),
        *("one LRU tier of both sizes: 10.0% with 100 blocks", "one LRU tier of both sizes: 50.0% with 400 blocks"),
        *("auto adaptive: 20.0% with 100 blocks", "auto adaptive: 80.0% with 400 blocks"),
        *("auto lru: 10.0% with 100 blocks", "auto lru: 70.0% with 400 blocks"),
    ]
    assert len(list(ET.fromstring(svg).iter(f"{SVG}polyline"))) == 4


def test_axes_are_linear_and_begin_at_zero():
    circles = list(ET.fromstring(drawn({"capacities": [LARGE, SMALL]})).iter(f"{SVG}circle"))
    (x1, y1), (x2, y2) = ((float(each.get("cx")), float(each.get("cy"))) for each in circles[4:6])
    left, bottom = x1 - (x2 - x1) / 3, y1 + (y1 - y2) / 3
    texts = {text.text: text for text in ET.fromstring(drawn({"capacities": [LARGE, SMALL]})).iter(f"{SVG}text")}
    assert float(texts["0"].get("x")) == pytest.approx(left, abs=0.2)
    assert float(texts["0%"].get("y")) - 4 == pytest.approx(bottom, abs=0.2)


@pytest.mark.parametrize("rate", [0.0, 1.0])
def test_extreme_rates_are_drawn_inside_the_picture(rate):
    sizes = [at(size, 0, {("auto", "lru"): rate}, clairvoyant=rate, one=rate) for size in (1, 2**26)]
    root = ET.fromstring(drawn({"capacities": sizes}))
    width, height = float(root.get("width")), float(root.get("height"))
    for circle in root.iter(f"{SVG}circle"):
        assert 0 < float(circle.get("cx")) < width
        assert 0 < float(circle.get("cy")) < height


def test_closed_loop_has_no_bound():
    sizes = [at(size, 0, {("auto", "lru"): 0.5}, clairvoyant=None) for size in (1, 2)]
    assert not any("clairvoyant" in spot for spot in spots(drawn({"capacities": sizes})))


SIZES = ("--device-blocks", "300", "--host-blocks", "0,400")


def test_the_command_writes_the_picture_of_its_table(synthetic_trace, tmp_path, capsys):
    path = tmp_path / "curve.svg"
    words = ["replay", str(synthetic_trace), "--compare", "--policies", "auto,adaptive,lru", *SIZES]
    assert main([*words, "--picture", str(path)]) == 0
    found = spots(path.read_text())
    assert len(found) == 8
    table = capsys.readouterr().out
    for spot in found[4:]:
        assert spot.split(": ")[1].split()[0] in table


def test_the_page_has_a_line_per_told_name_and_the_table(synthetic_trace, tmp_path, capsys):
    path = tmp_path / "curve.html"
    words = ["replay", str(synthetic_trace), "--compare", "--limit", "60", "--policies", "auto,adaptive,lru", *SIZES]
    assert main([*words, "--told", "none,last,all", "--html", str(path)]) == 0
    text = path.read_text()
    picture = text[text.index("<svg") : text.index("</svg>") + len("</svg>")]
    names = [f"auto adaptive, told: {told}" for told in ("none", "last", "all")]
    assert [spot.rpartition(": ")[0] for spot in spots(picture)[4::2]] == [*names, "auto lru, told: none"]
    assert unescape(text[text.index("<pre>") + 5 : text.index("</pre>")]) == capsys.readouterr().out.rstrip("\n")
    assert not re.findall(r"(?:href|src)=|@import|url\(", text), "nothing to load"


@pytest.mark.skipif(program() is None, reason="no Chromium: apt-get install chromium")
@pytest.mark.process
@pytest.mark.parametrize("width", [390, 1400])
def test_the_page_is_as_wide_as_its_window(tmp_path, monkeypatch, width):
    """On a phone too: picture and tables scroll, and their text keeps its size."""
    monkeypatch.setattr("fastdeploy_kvcache_v1.lab.replay.curve.comparison_table", lambda result: "word " * 200)
    path = tmp_path / "curve.html"
    path.write_text(page({"capacities": [LARGE, SMALL]}))
    (tmp_path / "profile").mkdir()
    with browser(tmp_path / "profile") as tab:
        tab.open(path, width=width)
        assert tab.value("[innerWidth, document.documentElement.scrollWidth]") == [width, width]
        assert tab.value("document.querySelector('svg').getBoundingClientRect().width") == 720
        assert tab.errors == []


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (("--picture", "x.svg"), "--picture needs --compare and several sizes"),
        (("--compare", *SIZES, "--picture", "x.svg"), "a picture shows up to 4 lines of policies, got "),
        (("--compare", "--policies", "auto,lru", "--picture", "x.svg"), "a picture needs several sizes: give"),
        (("--html", "x.html"), "--html needs --compare and several sizes"),
        (("--compare", "--policies", "auto,lru", "--html", "x.html"), "a picture needs several sizes: give"),
        (("--compare", "--policies", "auto,lru", *SIZES, "--html", "no/x.html"), "--html no/x.html cannot be written"),
        (("--compare", "--policies", "auto,lru", *SIZES, "--picture", "no/x.svg"), "no/x.svg cannot be written: No su"),
    ],
)
def test_a_picture_that_cannot_be_drawn_is_one_line(synthetic_trace, tmp_path, monkeypatch, capsys, words, error):
    monkeypatch.chdir(tmp_path)
    assert main(["replay", str(synthetic_trace), *words]) == 2
    assert error in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


PAGE = Path(__file__).parents[3] / "docs" / "lab" / "replay.md"


def test_the_picture_on_the_page_is_what_its_commands_draw(tmp_path, capsys):
    text = PAGE.read_text(encoding="utf-8").replace("\\\n", " ").replace("~/", f"{tmp_path}/")
    commands = re.findall(r"^\.venv/bin/fastdeploy-kvcache (.*)$", text, re.M)
    making, comparing = commands[0], next(line for line in commands if "--picture" in line)
    words, trace = making.split(" >")
    assert main(shlex.split(words)) == 0
    Path(trace).write_text(capsys.readouterr().out)
    assert main(shlex.split(comparing)) == 0
    assert (tmp_path / "curve.svg").read_text() == (PAGE.parent / "replay.svg").read_text(), "draw it anew"
