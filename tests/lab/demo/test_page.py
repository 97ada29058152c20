"""The demo's page and README's picture: what they say, and how they look in a real browser."""

import hashlib
import re
import xml.etree.ElementTree as ET
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from fastdeploy_kvcache_v1.lab.demo.findings import differences, headlines, verdicts
from fastdeploy_kvcache_v1.lab.demo.page import write_page, write_picture
from fastdeploy_kvcache_v1.lab.demo.scenario import ASKED, COMPUTED, HOST, LARGE

from .browser import browser, program
from .canned import SETUPS, results

needs_browser = pytest.mark.skipif(program() is None, reason="no Chromium: apt-get install chromium")

EVIL = "<script>alert(1)</script>&amp;\"'"


def page(tmp_path, found):
    path = tmp_path / "page.html"
    write_page(path, SETUPS, found)
    return path


def answered(found, name, number, **changes):
    """`found` with another answer."""
    seen = found[name][number]
    found[name][number] = replace(seen, answer=replace(seen.answer, **changes))
    return found


LOOKED_AT = {"page.html": "20a9b6718b306caa", "picture.svg": "b9cfa7a132739c74"}
"""Digests of page and picture of the canned results, as seen and found right in a browser."""


def test_page_and_picture_are_drawn_as_they_were_when_looked_at(tmp_path):
    """Places and sizes of marks have no law but that they look right."""
    page(tmp_path, results())
    write_picture(tmp_path / "picture.svg", results())
    drawn = {}
    for name in LOOKED_AT:
        text = re.sub("Made by [^<]*", "", (tmp_path / name).read_text())  # names version and machine
        drawn[name] = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
    assert drawn == LOOKED_AT, f"look at {tmp_path} in a browser; if it is right, write these digests"


# ---- what they say


def test_a_headline_compares_with_the_server_without_a_cache():
    assert [each.numbers for each in headlines(results())] == ["12 s → 0.25 s", "12 s → 0.50 s", "12 s → 1.0 s"]
    assert "48x sooner" in headlines(results())[0].words
    slow = answered(answered(results(), LARGE, 2, first_token_s=11.0), LARGE, 4, first_token_s=11.0)
    assert headlines(slow)[0].words == "from the device (no sooner)"


def test_a_page_without_a_faster_hit_says_why(tmp_path):
    found = results()
    assert "computes next to nothing" not in page(tmp_path, found).read_text()
    for seen in found[COMPUTED]:
        seen.answer.first_token_s = 0.2
    assert "computes next to nothing" in page(tmp_path, found).read_text()


def test_the_verdict_counts_what_host_memory_saves():
    assert "computes 3,600 prompt tokens; with host memory behind it, 600" in verdicts(results())[1]
    assert verdicts(results())[2:] == ["All answers are the same in all set-ups"]


def test_another_answer_is_named():
    found = answered(results(), HOST, 3, text="other")
    expected = "small + host, chat 2: got 'other', expected 'answer to chat 2'"
    assert differences(found) == [expected]
    assert verdicts(found)[2:] == [expected]


class Tags(HTMLParser):
    """Names of all elements, and texts."""

    def __init__(self, html):
        super().__init__()
        self.names, self.texts = [], []
        self.feed(html)

    def handle_starttag(self, tag, attributes):
        self.names.append(tag)

    def handle_data(self, data):
        self.texts.append(data)


def test_the_page_needs_no_script_and_no_other_file_and_escapes_texts(tmp_path):
    found = answered(results(), COMPUTED, 0, text=EVIL)
    html = page(tmp_path, found).read_text()
    tags = Tags(html)
    assert not {"script", "link", "img", "iframe"} & set(tags.names)
    assert EVIL in tags.texts
    assert not re.findall(r"""(?:src|href)=|url\(|@import|\son\w+=["']""", html)
    text = " ".join(tags.texts)
    for words in (*ASKED, *ASKED.values(), *found, "--swap-space 0.5", "12 s → 0.25 s", "host, 150 slots, the first"):
        assert words in text


def test_a_server_that_reports_less_has_a_page_that_says_so(tmp_path):
    assert "so the bars have one part" in page(tmp_path, results(is_known=False)).read_text()


def test_the_picture_is_one_svg_and_the_same_for_the_same_results(tmp_path):
    for name in ("one.svg", "other.svg"):
        write_picture(tmp_path / name, results())
    write_picture(tmp_path / "shorter.svg", results(is_known=False))
    assert "each tier" not in (tmp_path / "shorter.svg").read_text()
    svg = (tmp_path / "one.svg").read_text()
    assert ET.fromstring(svg.encode()).tag.endswith("svg")
    assert (tmp_path / "other.svg").read_text() == svg
    for word in ("cache off", "host", "Time to the first token", "prefers-color-scheme"):
        assert word in svg


# ---- how they look

FAULTS = """(() => {
    const faults = [], box = each => each.getBoundingClientRect();
    for (const each of document.querySelectorAll("details")) each.open = true;
    if (document.documentElement.scrollWidth > innerWidth) faults.push("wider than the window");
    for (const cell of document.querySelectorAll("td, th"))
        for (const word of cell.textContent.matchAll(/\\w+/g)) {
            const range = document.createRange();
            range.setStart(cell.firstChild, word.index);
            range.setEnd(cell.firstChild, word.index + word[0].length);
            if (range.getClientRects().length > 1) faults.push(`"${word[0]}" is broken`);
        }
    const figures = document.querySelectorAll("svg");
    if (!figures.length) faults.push("no figure");
    for (const figure of figures) {
        const name = figure.getAttribute("aria-label"), frame = box(figure);
        const inside = (at, slack) => at.left >= frame.left - slack && at.right <= frame.right + slack &&
            at.top >= frame.top - slack && at.bottom <= frame.bottom + slack;
        const marks = [...figure.querySelectorAll("rect:not(.paper), path:not(.line)")];
        if (!marks.some(each => box(each).width > 0 && box(each).height > 0)) faults.push(`${name}: no marks`);
        for (const each of marks) if (!inside(box(each), 1)) faults.push(`${name}: a mark is cut off`);
        const texts = [...figure.querySelectorAll("text")].filter(each => each.textContent);
        for (const each of texts) {
            const size = parseFloat(getComputedStyle(each).fontSize) * frame.width / figure.viewBox.baseVal.width;
            if (size < 12) faults.push(`${name}: "${each.textContent}" has ${size} pixels`);
            if (!inside(box(each), 1)) faults.push(`${name}: "${each.textContent}" is cut off`);
        }
        for (const one of texts) for (const other of texts) {
            const a = box(one), b = box(other);
            const wide = Math.min(a.right, b.right) - Math.max(a.left, b.left);
            const high = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
            if (one !== other && wide > 1 && high > 3)
                faults.push(`${name}: "${one.textContent}" lies on "${other.textContent}"`);
        }
    }
    return faults;
})()"""
"""What a reader would complain of. The heights of two lines of text may overlap by 3 pixels of their line spacing."""


@pytest.fixture(scope="module")
def tab(tmp_path_factory):
    with browser(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


@needs_browser
@pytest.mark.process
@pytest.mark.parametrize("width", [390, 1400])
@pytest.mark.parametrize("is_known", [True, False])
def test_the_page_is_whole_in_a_browser(tab, tmp_path, width, is_known):
    tab.open(page(tmp_path, results(is_known=is_known)), width=width)
    assert tab.value(FAULTS) == []
    assert tab.errors == []
    assert tab.value("innerWidth") == width
    num_maps = tab.value("document.querySelectorAll('svg[aria-label^=\"Blocks in each tier\"]').length")
    assert num_maps == (4 if is_known else 0)
    assert tab.value("document.querySelectorAll('svg rect').length") > (1000 if is_known else 30)


@needs_browser
@pytest.mark.process
@pytest.mark.parametrize("dark", [False, True])
def test_readmes_picture_is_whole_in_a_browser(tab, tmp_path, dark):
    """As wide as a README, and as an image: its text is at least 12 pixels high."""
    write_picture(tmp_path / "picture.svg", results())
    path = tmp_path / "readme.html"
    path.write_text((tmp_path / "picture.svg").read_text())
    tab.open(path, width=930, dark=dark)
    assert tab.value(FAULTS) == []
    paper, ink = (tab.value(f"getComputedStyle(document.querySelector('{each}')).fill") for each in ("rect", "text"))
    brightness = [sum(map(int, re.findall(r"\d+", colour)[:3])) for colour in (paper, ink)]
    assert abs(brightness[0] - brightness[1]) > 400
    assert (brightness[0] < brightness[1]) == dark


@needs_browser
@pytest.mark.process
@pytest.mark.parametrize(
    ("old", "new", "fault"),
    [
        (">document 1</text>", ">document 1 with a name that is far too long</text>", "is cut off"),
        (">doc 1</text>", ">doc 1, the first</text>", "lies on"),
        ("</h1>", "</h1><div style='width:2000px'>wide</div>", "wider than the window"),
        ("<h2>", "<svg viewBox='0 0 9 9' aria-label='empty'><path class='line' d='M0 0V9'/></svg><h2>", "no marks"),
        ("font:13px", "font:11px", "pixels"),
        ("overflow-wrap:break-word", "", "is broken"),
        ("</body>", "<script>undefined_name()</script></body>", "undefined_name"),
    ],
)
def test_the_browser_test_notices_a_fault(tab, tmp_path, old, new, fault):
    path = page(tmp_path, results())
    html = path.read_text()
    assert old in html
    path.write_text(html.replace(old, new, 1))
    tab.open(path, width=390)
    found = [*tab.value(FAULTS), *map(str, tab.errors)]
    tab.errors.clear()
    assert re.search(fault, "\n".join(found)), found
