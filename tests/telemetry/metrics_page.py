"""The tables of docs/reference/metrics.md, made from the fields of their sources."""

from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import fastdeploy_kvcache_v1
from fastdeploy_kvcache_v1.telemetry.metrics import SOURCES, Kind, Metric, Source

SERVERS = ("both servers", "FastDeploy", "embedded server")


def sources() -> list[Source]:
    """Of the whole package, by servers and title."""
    package = Path(fastdeploy_kvcache_v1.__file__).parent
    for path in sorted(package.rglob("*.py")):
        if "\n@source(" in path.read_text(encoding="utf-8"):
            import_module(".".join(path.relative_to(package.parent).with_suffix("").parts))
    ours = [each for each in SOURCES if each.cls.__module__.startswith(f"{package.name}.")]
    return sorted(ours, key=lambda each: (SERVERS.index(each.servers), each.title))


def table(source: Source) -> list[str]:
    lines = ["| name | kind | meaning |", "|---|---|---|"]
    families: dict[str, list[Metric]] = {}
    for each in (*source.numbers, *source.histograms):
        families.setdefault(each.name, []).append(each)
    for name, (first, *others) in families.items():
        labels = [
            f'{label}="{"|".join([value, *(each.labels[label] for each in others)])}"'
            for label, value in first.labels.items()
        ]
        labels += [*first.each, *first.added]
        full = name + ("_total" if first.kind is Kind.COUNTER else "")
        braces = f"{{{','.join(labels)}}}".replace("|", "\\|") if labels else ""
        lines.append(f"| `{full}{braces}` | {first.kind.value} | {first.help} |")
    return lines


def metrics() -> Iterator[str]:
    for each in sources():
        yield from ("", f"## {each.title.capitalize()}, {each.servers}", "", *table(each))
    yield ""
