"""A metric is a field, and the docs show every one."""

from dataclasses import dataclass, fields, is_dataclass
from types import SimpleNamespace

import pytest

from fastdeploy_kvcache_v1.telemetry import metrics
from fastdeploy_kvcache_v1.telemetry.metrics import (
    PREFIX,
    SOURCES,
    Kind,
    counter,
    gauge,
    gauge_of,
    histogram,
    observe,
    part,
    source,
    source_of,
)
from tests.telemetry import metrics_page


def fields_of(each):
    return (each.help, each.kind, each.label_names, each.buckets)


def test_metrics_of_one_name_are_one_family_of_one_source():
    for each in metrics_page.sources():
        by_name = {}
        for metric in (*each.numbers, *each.histograms):
            by_name.setdefault(metric.name, []).append(metric)
        for family in by_name.values():
            assert len({fields_of(metric) for metric in family}) == 1
            assert len({tuple(metric.labels.values()) for metric in family}) == len(family)
    names = [{metric.name for metric in (*each.numbers, *each.histograms)} for each in metrics_page.sources()]
    assert sum(map(len, names)) == len(set().union(*names)), "a name has one source"


def undeclared(cls):
    """Numbers of a dataclass that no server shows, those of its parts included."""
    for each in fields(cls) if is_dataclass(cls) else ():
        if "metric" not in each.metadata:
            yield each.name
    for _, declared in metrics._declarations(cls):
        if isinstance(declared, metrics._Part):
            yield from undeclared(declared.cls)


def test_every_number_of_a_source_is_a_metric():
    """But for a list of sources in another one."""
    assert [name for each in metrics_page.sources() for name in undeclared(each.cls)] == ["copies"]


@dataclass
class Moves:
    blocks: int = counter("Blocks")
    lost: int = counter("Lost ones", "losses")


@pytest.fixture
def made(monkeypatch):
    """A source with every kind of declaration."""
    monkeypatch.setattr(metrics, "SOURCES", [])

    @source("base", "rank")
    class Base:
        ways: tuple = gauge("Ways", each=("way",))
        tell: object = histogram("Times", "seconds", each=("what",), buckets=(1.0,))
        into: Moves = part(Moves, "move_", direction="in")
        out: Moves = part(Moves, "move_", direction="out")
        early: int = counter("Ends", "ends", by="when")
        late: int = counter("Ends", "ends", by="when")
        plain = 7

        @property
        @gauge_of("Size", "size", of="it")
        def num(self):
            return 5

    class Derived(Base):
        def __init__(self):
            self.ways = (SimpleNamespace(is_used=True),)
            self.into, self.out, self.early, self.late = Moves(1, 2), Moves(3, 4), 5, 6

    return Derived()


def test_a_source_has_the_fields_of_its_class_and_of_its_parts(made):
    numbers = [(each.name, each.label_names, dict(each.labels)) for each in source_of(made).numbers]
    assert sorted(numbers, key=str) == [
        ("ends", ("when", "rank"), {"when": "early"}),
        ("ends", ("when", "rank"), {"when": "late"}),
        ("losses", ("direction", "rank"), {"direction": "in"}),
        ("losses", ("direction", "rank"), {"direction": "out"}),
        ("move_blocks", ("direction", "rank"), {"direction": "in"}),
        ("move_blocks", ("direction", "rank"), {"direction": "out"}),
        ("size", ("of", "rank"), {"of": "it"}),
        ("ways", ("way", "rank"), {}),
    ]
    (times,) = source_of(made).histograms
    assert (times.full_name, times.attribute, times.kind) == (f"{PREFIX}seconds", "tell", Kind.HISTOGRAM)
    assert source_of(made) in metrics.SOURCES
    assert source_of(made) not in SOURCES


def test_a_sample_is_the_number_that_the_object_has_now(made):
    class Way(tuple):
        is_used = False

    def samples():
        return {(each.name, *labels): value for each in source_of(made).numbers for labels, value in each.samples(made)}

    made.ways = (Way(["slow"]),)
    assert samples() == {
        ("ways", "slow"): 0.0,
        ("move_blocks", "in"): 1,
        ("losses", "in"): 2,
        ("move_blocks", "out"): 3,
        ("losses", "out"): 4,
        ("ends", "early"): 5,
        ("ends", "late"): 6,
        ("size", "it"): 5,
    }
    made.late += 10
    assert samples()["ends", "late"] == 16


def test_an_observer_takes_the_values_of_its_labels_before_the_number():
    seen = []

    class Histogram:
        def labels(self, *values):
            return SimpleNamespace(observe=lambda number: seen.append((*values, number)))

        def observe(self, number):
            seen.append(number)

    observe(Histogram(), "load", 0.5)
    observe(Histogram(), 0.25)
    assert seen == [("load", 0.5), 0.25]
