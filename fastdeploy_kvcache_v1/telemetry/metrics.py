"""Metrics as fields: the class that counts a number declares its help, name and labels beside it.

    @source("cache manager")
    @dataclass
    class Counters:
        requests_finished: int = counter("Requests that ended")

Both servers export every number of a source, and docs/reference/metrics.md lists them. In a class that is not a
dataclass, a field declares an attribute that `__init__` sets. No Prometheus library is needed.
"""

from __future__ import annotations

import dataclasses
import enum
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, field, replace
from operator import attrgetter
from typing import Any, TypeVar

PREFIX = "fastdeploy:kvcache_v1_"

_DECLARED = "metric"
"""Name of the declaration in a field's metadata, and as an attribute of a property's function."""

T = TypeVar("T")


class Kind(str, enum.Enum):
    COUNTER = "counter"
    """Never falls. Prometheus adds `_total` to its name."""
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, eq=False)
class Metric:
    """One number of a source. Metrics with the same name differ in the values of their labels."""

    kind: Kind
    help: str
    name: str
    """Without `PREFIX`; counters without `_total`."""
    labels: Mapping[str, str] = field(default_factory=dict)
    each: tuple[str, ...] = ()
    """Further labels, whose values the exported tuples hold."""
    added: tuple[str, ...] = ()
    """Further labels, whose values the server sets for each object of the source."""
    by: str = ""
    """The one of `labels` whose value is the field's name."""
    buckets: tuple[float, ...] = ()
    attribute: str = ""
    """Path from an object of the source to the number, for example `swap_in.blocks`."""

    @property
    def full_name(self) -> str:
        return PREFIX + self.name

    @property
    def label_names(self) -> tuple[str, ...]:
        return (*self.labels, *self.each, *self.added)

    def samples(self, of: object) -> list[tuple[tuple[str, ...], float]]:
        """List the numbers of an object of the source, each with the values of all labels except `added`."""
        value: Any = attrgetter(self.attribute)(of)
        fixed = tuple(self.labels.values())
        return [((*fixed, *each), float(each.is_used)) for each in value] if self.each else [(fixed, value)]


@dataclass(frozen=True)
class _Part:
    """A field that holds an object whose class declares metrics."""

    cls: type
    prefix: str
    labels: Mapping[str, str]


def counter(text: str, name: str = "", *, by: str = "") -> Any:
    """Declare a counter from 0, named as its field by default. `by`: a label whose value is the field's name."""
    return field(default=0, metadata={_DECLARED: Metric(Kind.COUNTER, text, name, by=by)})


def gauge(text: str, name: str = "", *, each: tuple[str, ...] = (), default: Any = MISSING) -> Any:
    """Declare a gauge. With `each` it holds named tuples: values of these labels, and the number as `is_used`."""
    return field(default=default, metadata={_DECLARED: Metric(Kind.GAUGE, text, name, each=each)})


def gauge_of(text: str, name: str, **labels: str) -> Callable[[Callable[..., T]], Callable[..., T]]:
    """Declare a property as a gauge: a decorator below `@property`."""

    def declare(function: Callable[..., T]) -> Callable[..., T]:
        setattr(function, _DECLARED, Metric(Kind.GAUGE, text, name, labels))
        return function

    return declare


def histogram(text: str, name: str, *, each: tuple[str, ...] = (), buckets: tuple[float, ...]) -> Any:
    """Declare a field for a function of the values of labels `each` and a number. A server sets it."""
    return field(metadata={_DECLARED: Metric(Kind.HISTOGRAM, text, name, each=each, buckets=buckets)})


def part(cls: type, prefix: str = "", **labels: str) -> Any:
    """Declare a field that holds a `cls`, whose numbers get these labels. `prefix` precedes names taken from fields."""
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
        """The servers that have it, in words."""
        folder = self.cls.__module__.split(".")[1]
        return {"fastdeploy_integration": "FastDeploy", "lab": "embedded server"}.get(folder, "both servers")


SOURCES: list[Source] = []
"""All sources of the modules imported so far."""


def source(title: str, *added: str) -> Callable[[type[T]], type[T]]:
    """Declare a class whose fields are metrics. `added`: labels whose values the server sets for each object."""

    def declare(cls: type[T]) -> type[T]:
        found = list(_metrics(cls, added, "", "", {}))
        numbers = tuple(each for each in found if each.kind is not Kind.HISTOGRAM)
        histograms = tuple(each for each in found if each.kind is Kind.HISTOGRAM)
        SOURCES.append(Source(title, cls, numbers, histograms))
        cls.metrics = SOURCES[-1]  # type: ignore[attr-defined]
        return cls

    return declare


def source_of(exported: object) -> Source:
    """Return the source of an object whose class, or a base class, is a `source`."""
    found: Source = exported.metrics  # type: ignore[attr-defined]
    return found


Parts = Iterable[tuple[object, tuple[str, ...]]]
"""Exported objects, each with the values of the labels that the server adds."""


def samples_of(parts: Parts) -> dict[str, list[tuple[dict[str, str], float]]]:
    """Return labels and numbers by name, as `/metrics` shows them without `PREFIX` and histograms."""
    found: dict[str, list[tuple[dict[str, str], float]]] = defaultdict(list)
    for part, added in parts:
        for metric in source_of(part).numbers:
            name = f"{metric.name}_total" if metric.kind is Kind.COUNTER else metric.name
            for labels, value in metric.samples(part):
                found[name].append((dict(zip(metric.label_names, (*labels, *added), strict=True)), float(value)))
    return found


def observe(histogram: Any, *seen: Any) -> None:
    """Observe the last of `seen` in a Prometheus histogram, with the others as values of its labels."""
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
