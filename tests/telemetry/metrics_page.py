"""The tables of docs/metrics.md, made from the fields: `python -m tests.telemetry.metrics_page` writes them anew."""

from importlib import import_module
from pathlib import Path

import fastdeploy_kvcache_v1
from fastdeploy_kvcache_v1.telemetry.metrics import SOURCES, Kind, Metric, Source

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "metrics.md"
BEGIN, END = "<!-- metrics: begin -->", "<!-- metrics: end -->"
SERVERS = ("both servers", "FastDeploy", "embedded server")


def sources() -> list[Source]:
    """Of the whole package, by servers and title."""
    package = Path(fastdeploy_kvcache_v1.__file__).parent
    for path in sorted(package.rglob("*.py")):
        if "\n@source(" in path.read_text(encoding="utf-8"):
            import_module(".".join(path.relative_to(package.parent).with_suffix("").parts))
    ours = [each for each in SOURCES if each.cls.__module__.startswith(f"{package.name}.")]
    return sorted(ours, key=lambda each: (SERVERS.index(each.servers), each.title))


def table(source: Source) -> str:
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
    return "\n".join(lines)


def generated() -> str:
    return "\n\n".join(f"### {each.title.capitalize()}, {each.servers}\n\n{table(each)}" for each in sources())


def parts() -> tuple[str, str, str]:
    """The page before, between and after the markers."""
    before, begin, rest = PAGE.read_text(encoding="utf-8").partition(f"{BEGIN}\n")
    between, end, after = rest.partition(f"\n{END}")
    assert begin
    assert end
    return before + begin, between, end + after


if __name__ == "__main__":
    before, _, after = parts()
    PAGE.write_text(before + generated() + after, encoding="utf-8")
