"""Figures: the axis is linear, texts are escaped, and numbers are those that people read."""

import xml.etree.ElementTree as ET

import pytest

from fastdeploy_kvcache_v1.telemetry.drawing import (
    Band,
    Bar,
    Cell,
    Figure,
    Part,
    bars,
    cell_map,
    legend,
    seconds,
    ticks,
)

SVG = "{http://www.w3.org/2000/svg}"


def elements(figure, tag, **attributes):
    found = ET.fromstring(figure.svg("a figure")).iter(SVG + tag)
    return [each for each in found if attributes.items() <= each.attrib.items()]


def chart(*values):
    rows = [Bar(f"row {value}", [Part(value, "device", "")], "") for value in values]
    return bars(rows, width=400, most=max(values), unit=lambda value: f"{value:g} s")


def test_a_bar_is_as_long_as_its_value():
    short, long = (float(each.get("width")) for each in elements(chart(1.0, 4.0), "rect"))
    assert long == pytest.approx(4 * short, rel=1e-3)


def test_parts_of_a_bar_follow_each_other():
    rows = [Bar("row", [Part(1, "host", "one"), Part(0, "disk", "none"), Part(3, "device", "three")], "4")]
    first, second = elements(bars(rows, width=400, most=4, unit=str), "rect")
    assert (first.get("class"), second.get("class")) == ("host", "device")
    assert float(second.get("x")) == pytest.approx(float(first.get("x")) + float(first.get("width")), abs=0.2)
    assert [each.findtext(SVG + "title") for each in (first, second)] == ["one", "three"]


def test_an_axis_begins_at_zero():
    shown = [each.text for each in elements(chart(1.0, 4.2), "text", **{"class": "quiet"})]
    assert shown == ["0 s", "1 s", "2 s", "3 s", "4 s"]


@pytest.mark.parametrize(
    ("most", "count", "expected"),
    [(4.2, 4, [0, 2, 4]), (1.0, 4, [0, 0.5, 1]), (0.07, 3, [0, 0.05]), (3600, 4, [0, 1000, 2000, 3000]), (0, 4, [0])],
)
def test_ticks_are_round_numbers_up_to_the_most(most, count, expected):
    assert ticks(most, count) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("value", "expected"),
    [(12.34, "12 s"), (2.0, "2.0 s"), (0.114, "0.11 s"), (0.0234, "0.023 s"), (0.0004, "0.000 s"), (0, "0.000 s")],
)
def test_seconds_have_two_digits_that_count(value, expected):
    assert seconds(value) == expected


def test_texts_are_escaped():
    evil = "<script>&\"'"
    figure = bars([Bar(evil, [Part(1, "host", evil)], evil)], width=400, most=1, unit=lambda value: evil)
    assert "<script" not in figure.svg(evil) + legend([(Cell("host"), evil)])
    assert {each.text for each in elements(figure, "text")} == {evil}


def test_a_map_has_a_rect_for_each_cell_and_a_ring_for_each_mark():
    columns = [[Cell("chat"), Cell("free")], [Cell("chat", True), Cell("document", True), Cell("free")]]
    figure = cell_map([("one", "0%"), ("two", "50%")], [Band("device", columns)], width=200, per_row=2)
    kinds = [each.get("class") for each in elements(figure, "rect")]
    assert {kind: kinds.count(kind) for kind in kinds} == {"chat": 2, "free": 2, "document": 1, "paper": 2}
    places = {(each.get("x"), each.get("y")) for each in elements(figure, "rect") if each.get("class") != "paper"}
    assert len(places) == 5
    assert all(float(each.get("y")) < figure.height for each in elements(figure, "rect"))


def test_a_placed_figure_moves_as_a_whole():
    inner, outer = Figure(10, 10), Figure(100, 100)
    inner.rect(1, 2, 3, 4, "host")
    outer.place(inner, 50, 60)
    assert [each.get("transform") for each in elements(outer, "g")] == ["translate(50 60)"]
