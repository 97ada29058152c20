"""A metric is a field: the class that counts a number declares its help, name and labels beside it.

    @source("cache manager")
    @dataclass
    class Counters:
        requests_finished: int = counter("Requests that ended")

Both servers export every number of a source, and docs/reference/metrics.md lists it. In a class that is no dataclass a
field stands for an attribute that `__init__` sets. Needs no Prometheus library.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, field, replace
from operator import attrgetter
from typing import Any, TypeVar

PREFIX = "fastdeploy:kvcache_v1_"
"""Of every name."""

_DECLARED = "metric"
"""Key of the declaration in a field's metadata, and its name as an attribute of a property's function."""

T = TypeVar("T")


class Kind(str, enum.Enum):
    COUNTER = "counter"
    """Never falls. Prometheus adds `_total` to its name."""
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, eq=False)
class Metric:
    """One number of a source. Metrics of one name differ in the values of their labels."""

    kind: Kind
    help: str
    name: str
    """Without `PREFIX`; counters without `_total`."""
    labels: Mapping[str, str] = field(default_factory=dict)
    each: tuple[str, ...] = ()
    """Further labels, whose values are part of what is exported."""
    added: tuple[str, ...] = ()
    """Further labels, which the server knows: one value for each object of the source."""
    by: str = ""
    """One of `labels`: its value is the field's name."""
    buckets: tuple[float, ...] = ()
    attribute: str = ""
    """Path from an object of the source to the number, `swap_in.blocks` for example."""

    @property
    def full_name(self) -> str:
        return PREFIX + self.name

    @property
    def label_names(self) -> tuple[str, ...]:
        return (*self.labels, *self.each, *self.added)

    def samples(self, of: object) -> list[tuple[tuple[str, ...], float]]:
        """Numbers of an object of the source, each with the values of all labels but the added ones."""
        value: Any = attrgetter(self.attribute)(of)
        fixed = tuple(self.labels.values())
        return [((*fixed, *each), float(each.is_used)) for each in value] if self.each else [(fixed, value)]


@dataclass(frozen=True)
class _Part:
    """A field whose own fields are declared in its class."""

    cls: type
    prefix: str
    labels: Mapping[str, str]


def counter(text: str, name: str = "", *, by: str = "") -> Any:
    """A field that begins at 0. By default its metric has its name. `by`: a label whose value is the field's name; the
    fields of one metric differ in it.
    """
    return field(default=0, metadata={_DECLARED: Metric(Kind.COUNTER, text, name, by=by)})


def gauge(text: str, name: str = "", *, each: tuple[str, ...] = (), default: Any = MISSING) -> Any:
    """A field that rises and falls. With `each` it holds tuples, a sample for each: the tuple has the values of these
    labels, and the number is whether it `is_used`.
    """
    return field(default=default, metadata={_DECLARED: Metric(Kind.GAUGE, text, name, each=each)})


def gauge_of(text: str, name: str, **labels: str) -> Callable[[Callable[..., T]], Callable[..., T]]:
    """As `gauge`, between `@property` and its function."""

    def declare(function: Callable[..., T]) -> Callable[..., T]:
        setattr(function, _DECLARED, Metric(Kind.GAUGE, text, name, labels))
        return function

    return declare


def histogram(text: str, name: str, *, each: tuple[str, ...] = (), buckets: tuple[float, ...]) -> Any:
    """A field that holds a function: it is told the values of the labels `each` and a number, and a server puts its
    own there.
    """
    return field(metadata={_DECLARED: Metric(Kind.HISTOGRAM, text, name, each=each, buckets=buckets)})


def part(cls: type, prefix: str = "", **labels: str) -> Any:
    """A field that holds a `cls`, whose numbers have these labels. `prefix` of names that are names of fields."""
    return field(default_factory=cls, metadata={_DECLARED: _Part(cls, prefix, labels)})


@dataclass(frozen=True, eq=False)
class Source:
    """A class whose objects are exported."""

    title: str
    cls: type
    numbers: tuple[Metric, ...]
    histograms: tuple[Metric, ...]

    @property
    def servers(self) -> str:
        """Which ones have it."""
        folder = self.cls.__module__.split(".")[1]
        return {"fastdeploy_integration": "FastDeploy", "lab": "embedded server"}.get(folder, "both servers")


SOURCES: list[Source] = []
"""Of all modules that were imported."""


def source(title: str, *added: str) -> Callable[[type[T]], type[T]]:
    """Of a class whose fields are metrics. `added`: names of labels whose values the server adds for each object."""

    def declare(cls: type[T]) -> type[T]:
        found = list(_metrics(cls, added, "", "", {}))
        numbers = tuple(each for each in found if each.kind is not Kind.HISTOGRAM)
        histograms = tuple(each for each in found if each.kind is Kind.HISTOGRAM)
        SOURCES.append(Source(title, cls, numbers, histograms))
        cls.metrics = SOURCES[-1]  # type: ignore[attr-defined]
        return cls

    return declare


def source_of(exported: object) -> Source:
    """Of an object whose class, or one above it, is a `source`."""
    found: Source = exported.metrics  # type: ignore[attr-defined]
    return found


def observe(histogram: Any, *seen: Any) -> None:
    """What an attribute that is a `histogram` does, with one of Prometheus."""
    *labels, number = seen
    (histogram.labels(*labels) if labels else histogram).observe(number)


def _metrics(cls: type, added: tuple[str, ...], path: str, prefix: str, labels: Mapping[str, str]) -> Iterator[Metric]:
    for name, declared in _declarations(cls):
        if isinstance(declared, _Part):
            nested = {**labels, **declared.labels}
            yield from _metrics(declared.cls, added, f"{path}{name}.", prefix + declared.prefix, nested)
        else:
            own = {**labels, **declared.labels, **({declared.by: name} if declared.by else {})}
            full = declared.name or prefix + name
            yield replace(declared, name=full, labels=own, added=added, attribute=path + name)


def _declarations(cls: type) -> Iterator[tuple[str, Metric | _Part]]:
    fields = {each.name: each for each in dataclasses.fields(cls)} if dataclasses.is_dataclass(cls) else {}
    inherited = {name: member for base in reversed(cls.__mro__) for name, member in vars(base).items()}
    for name, member in {**fields, **{name: each for name, each in inherited.items() if name not in fields}}.items():
        if isinstance(member, Field) and _DECLARED in member.metadata:
            yield name, member.metadata[_DECLARED]
        elif isinstance(member, property) and hasattr(member.fget, _DECLARED):
            yield name, getattr(member.fget, _DECLARED)
