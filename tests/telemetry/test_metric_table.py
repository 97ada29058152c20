"""One table of metrics: nothing is counted that the servers do not export, and the docs show every row."""

from dataclasses import fields
from pathlib import Path

from fastdeploy_kvcache_v1.scheduler.cache_stats import CacheStats, Counters
from fastdeploy_kvcache_v1.storage.engine.counters import MoveTotals, StorageCounters
from fastdeploy_kvcache_v1.telemetry.metric_table import OBSERVED, PREFIX, TABLE, Kind, Source, rows

DOCS = Path(__file__).parents[2] / "docs" / "metrics.md"


def attributes(source):
    return sorted(metric.attribute or metric.name for metric in rows(source))


def test_every_counter_of_the_manager_has_one_row():
    assert attributes(Source.COUNTERS) == sorted(field.name for field in fields(Counters))


def test_every_number_of_the_managers_snapshot_has_one_row():
    assert attributes(Source.STATS) == sorted({field.name for field in fields(CacheStats)} - {"counters"})


def test_every_counter_of_the_storage_tier_has_a_row():
    moved = {f"{direction}.{field.name}" for direction in ("load", "store") for field in fields(MoveTotals)}
    counters = {field.name for field in fields(StorageCounters)} - {"load", "store"}
    found = {name.removeprefix("counters.") for name in attributes(Source.STORAGE)}
    assert found == moved | counters | {"is_left_alone", "num_waiting_requests"}


def test_rows_of_one_name_are_one_family():
    by_name = {}
    for metric in (*TABLE, *OBSERVED):
        by_name.setdefault(metric.name, []).append(metric)
    for family in by_name.values():
        assert len({(metric.help, metric.kind, metric.source, metric.label_names) for metric in family}) == 1
        assert len({tuple(metric.labels.values()) for metric in family}) == len(family)


def documented(metric):
    labels = [f'{name}="{value}"' for name, value in metric.labels.items()]
    labels += [*metric.observed_labels, *metric.source.labels]
    name = metric.name + ("_total" if metric.kind is Kind.COUNTER else "")
    braces = f"{{{','.join(labels)}}}" if labels else ""
    return (
        f"| `{name}{braces}` | {metric.kind.value} | {metric.source.servers} | {metric.source.value} | {metric.help} |"
    )


def test_docs_show_the_table():
    text = DOCS.read_text(encoding="utf-8")
    expected = "\n".join(documented(metric) for metric in (*TABLE, *OBSERVED))
    shown = "\n".join(line for line in text.splitlines() if line.startswith("| `"))
    assert shown == expected, f"paste this into {DOCS.name}:\n{expected}"
    assert f"`{PREFIX}`" in text
