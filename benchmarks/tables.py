"""Writes the tables of docs/ from benchmarks/results/*.json, between their markers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from _support import RESULTS, ROOT

DOCS = ROOT / "docs" / "benchmarks.md"

Row = tuple[str, str, str]
"""What was measured, the result, the target."""


def control_plane(result: dict[str, Any]) -> list[Row]:
    contenders = result["against_naive"]
    rows = [("time per request, naive reference", f"{contenders['naive']['median_us']:.0f} us", "")]
    for name, row in contenders.items():
        if name == "naive":
            continue
        target = 1.5 if name == "one tier" else 2.5
        value = (
            f"{row['median_us']:.0f} us = {row['ratio_to_naive']:.2f}x, p99 {row['p99_over_median']:.1f}x the median"
        )
        rows.append((f"time per request, {name}", value, f"<= {target}x, p99 <= 10x"))
    sizes = result["over_sizes"]["one tier"]
    first, *_, last = (f"{int(size):,}" for size in sizes["median_us"])
    rows.append((f"growth, {first} to {last} blocks", f"{sizes['growth']:.2f}x", "<= 1.3x"))
    windows = [row["median_us"] for name, row in result["over_windows"].items() if name.startswith("two tiers")]
    rows.append(("window 1, 32, 128, two tiers", " / ".join(f"{value:.0f}" for value in windows) + " us", "alike"))
    for name, row in result["memory"].items():
        rows.append((f"manager memory per cached block, {name}", f"{row['bytes_per_block']:.0f} bytes", "<= 400"))
    return rows


def hashing(result: dict[str, Any]) -> list[Row]:
    value = f"{result['prompt_ms']:.2f} ms ({result['digests_alone_ms']:.2f} for the digests alone)"
    tokens = result["generated_token_us"]
    return [
        (f"hashing a prompt of {result['prompt_tokens']:,} tokens", value, "<= 3 ms"),
        (
            "one more generated token, 1,024 / 131,072 before",
            f"{tokens['1024']:.2f} / {tokens['131072']:.2f} us",
            "O(1)",
        ),
    ]


def import_time(result: dict[str, Any]) -> list[Row]:
    return [("import of the scheduler half", f"{result['import_ms']:.0f} ms", "< 150 ms")]


def _span(values: list[float], digits: int = 2) -> str:
    return f"{min(values):.{digits}f}-{max(values):.{digits}f}x"


def copy_ops(result: dict[str, Any]) -> list[Row]:
    """Blocks from 64 KB; the smaller ones are in the JSON."""
    cases = [case for case in result["cases"] if case["block_bytes"] >= 64 << 10]

    def span(key: str) -> str:
        return _span([case[key] for case in cases])

    return [
        ("CPU copies of 64 KB-1 MB blocks in C over memcpy, one thread each", span("c_over_memcpy"), ">= 0.9x"),
        ("the same by NumPy", span("numpy_over_memcpy"), ""),
        ("in C over NumPy fancy indexing", span("c_over_fancy_indexing"), ">= 2x"),
    ]


def server(result: dict[str, Any]) -> list[Row]:
    rows = []
    for source, target in (("device", "<= 0.25x"), ("host", "<= 0.5x")):
        row = result["first_token"][source]
        value = f"{row['ratio_to_computed']:.3f}x ({row['first_token_ms']:.0f} ms)"
        what = f"first token of a repeated {result['prompt_tokens']:,}-token prompt from the {source} tier"
        rows.append((f"{what}, SmolLM2", value, target))
    copies = result["copies"]
    value = f"{copies['exposed_share']:.0%} of {copies['swap_in_ms']:.0f} ms"
    return [*rows, ("exposed swap-in wait, SmolLM2", value, "<= 20 %")]


def cpu_model(result: dict[str, Any]) -> list[Row]:
    rows = []
    for threads, measured in result["threads"].items():
        clock = "cpu" if threads == "1" else "wall"
        for work, ratio in measured.get("speed_over_transformers", {}).items():
            seconds = measured["ours"][work][clock]
            value = f"{ratio:.2f}x ({seconds:.1f} s)" if seconds >= 1 else f"{ratio:.2f}x ({1000 * seconds:.0f} ms)"
            what = f"prefill of {result['prompt_tokens']:,} tokens" if work == "prefill" else f"{work} tokens"
            count = "one thread" if threads == "1" else f"{threads} threads"
            rows.append((f"speed of {what} over transformers, 135M model, {count}", value, ">= 0.7x"))
    return rows


def storage_mooncake(result: dict[str, Any]) -> list[Row]:
    rows = []
    for case in result["cases"]:
        ratios, rates = case["over_direct"], case["direct_gb_per_s"]
        size = f"{case['block_bytes'] >> 10} KiB"
        value = f"{ratios['get']:.2f}x, {ratios['put']:.2f}x (of {rates['get']:.2f}, {rates['put']:.2f} GB/s)"
        rows.append((f"mooncake, 32 blocks of {size}: get, put over its own client", value, ">= 0.9x"))
    asked = result["question"]
    value = f"{asked['ours_ms']:.1f} ms, its own client {asked['direct_ms']:.1f} ms"
    rows.append((f"mooncake, question for {result['question_keys']:,} keys", value, "one round trip"))
    return rows


def transfer(result: dict[str, Any]) -> list[Row]:
    rows = []
    for case in result["socket"]:
        value = f"{case['over_plain']:.2f}x, with checksums {case['with_checksums_over_plain']:.2f}x"
        size = f"{case['blocks']} scattered blocks of {case['block_bytes'] >> 10} KiB"
        rows.append((f"socket plane, {size}, over a plain socket", value, ">= 0.8x without"))
    for case in result["mooncake"]:
        size = f"{case['blocks']} scattered blocks of {case['block_bytes'] >> 10} KiB"
        rows.append((f"mooncake plane, {size}, over its own engine", f"{case['over_direct']:.2f}x", ">= 0.9x"))
    return rows


def roles(result: dict[str, Any]) -> list[Row]:
    over = f"{result['first_token_over_mixed']:.2f}x"
    value = f"{over} ({result['roles_first_token_ms']:,.0f} of {result['mixed_first_token_ms']:,.0f} ms)"
    name = f"first token of {result['prompt_tokens']:,} tokens, prefill and decode servers over a mixed one"
    rows = [(name, value, "<= 1.1x")]
    if "roles_second_token_ms" in result:
        gaps = f"{result['roles_second_token_ms']:.0f}, {result['mixed_second_token_ms']:.0f} ms"
        rows.append(("from the first to the second token, prefill and decode servers, a mixed one", gaps, ""))
    return rows


def transfer_overlap(result: dict[str, Any]) -> list[Row]:
    return [
        (
            f"share of a transfer that is hidden, half as long as the prefill, told {way}",
            f"{told['hidden_share']:.0%} ({told['exposed_ms']:.0f} of {result['transfer_ms']:,.0f} ms are left)",
            ">= 70 %" if way == "layer by layer" else "",
        )
        for way, told in result["told"].items()
        if told["hidden_share"]
    ]


def storage_server(result: dict[str, Any]) -> list[Row]:
    rows = []
    for length, times in result["first_token"].items():
        value = f"{times['stored_over_computed']:.2f}x ({times['stored_ms']:.0f} of {times['computed_ms']:.0f} ms)"
        target = "< 1x" if int(length) >= 2000 else ""
        rows.append((f"first token of {int(length):,} stored tokens over computing them, SmolLM2", value, target))
    value = f"{result['hits_after_restart_over_warm']:.0%} within {result['seconds_after_restart']:.0f} s"
    rows.append(("hits after a restart over those before", value, ">= 95 % within 60 s"))
    steps = result["steps"]
    medians = f"{steps['median_us']['without']:.0f}, {steps['median_us']['with']:.0f} us"
    value = f"{steps['ratio_of_means']:.2f}x (medians {medians})"
    rows.append(("scheduler time per step, with storage over without", value, "< 1.2x"))
    return rows


SECTIONS = {
    "control_plane": control_plane,
    "hashing": hashing,
    "import_time": import_time,
    "copy_ops": copy_ops,
    "server": server,
    "cpu_model": cpu_model,
    "storage_mooncake": storage_mooncake,
    "transfer": transfer,
    "transfer_overlap": transfer_overlap,
    "roles": roles,
    "storage_server": storage_server,
}


def growth() -> str:
    """Costs by size, one row an operation."""
    result = json.loads((RESULTS / "growth.json").read_text(encoding="utf-8"))
    lines = ["| operation; what grows | us at size | largest / smallest |", "|---|---|---|"]
    for name, row in result["rows"].items():
        medians = " / ".join(f"{us:,.0f}" if us >= 100 else f"{us:.3g}" for us in row["median_us"].values())
        sizes = " / ".join(f"{int(size):,}" for size in row["median_us"])
        ratio = f"{row['largest_over_smallest']:.2f}x" + (" (the work itself grows)" if row["work_grows"] else "")
        lines.append(f"| {name} | {medians} at {sizes} | {ratio} |")
    return "\n".join(lines)


def worker_steps() -> str:
    """CPU of the worker's thread per step before and after, one row per amount of copies and rows."""
    before, after = (
        json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
        for name in ("worker_steps_before", "worker_steps")
    )
    lines = [
        "| slots | blocks per step | rows | all of a step, us: before, now | least: before, now | now / before |",
        "|---|---|---|---|---|---|",
    ]
    for old, new in zip(before["cases"], after["cases"], strict=True):
        assert [old[key] for key in ("pools", "copies", "rows")] == [new[key] for key in ("pools", "copies", "rows")]
        cells = [" + ".join(f"{slots:,}" for slots in after["pools"][new["pools"]]), new["copies"], str(new["rows"])]
        for number in ("median_us", "least_us"):
            first, last = (sum(case[part][number] for part in PARTS) for case in (old, new))
            cells.append(f"{first:,.0f}, {last:,.0f}")
        lines.append(f"| {' | '.join(cells)} | {last / first:.2f} |")
    return "\n".join(lines)


PARTS = ("receive", "pass", "layer waits")


def storage() -> str:
    """The stores over plain reads and writes, one row a block size; and what asking for keys takes."""
    result = json.loads((RESULTS / "storage.json").read_text(encoding="utf-8"))
    lines = [
        "| block | plain read, write | `get`, files | `get`, LMDB | `put`, files | `put`, LMDB | creating a file |",
        "|---|---|---|---|---|---|---|",
    ]
    for case in result["cases"]:
        size, rates = case["block_bytes"] >> 10, case["plain_gb_per_s"]
        cells = [f"{size} KiB" if size < 1024 else f"{size >> 10} MiB"]
        cells.append(f"{rates['read']:.1f}, {rates['write']:.1f} GB/s")
        for ratios in (case["get_over_plain"], case["put_over_plain"]):
            cells += [_with_and_without_checksums(ratios, store) for store in ("files", "lmdb")]
        cells.append(f"{case['create_file_us']:.0f} us")
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", f"| `count_stored` of {result['counted_keys']:,} keys | all stored | the first half | none |"]
    lines.append("|---|---|---|---|")
    for store, ms in result["count_stored_ms"].items():
        times = " | ".join(f"{ms[name]:.2g} ms" for name in ("all", "half", "none"))
        lines.append(f"| {'LMDB' if store == 'lmdb' else store} | {times} |")
    return "\n".join(lines)


def _with_and_without_checksums(ratios: dict[str, float], store: str) -> str:
    if store not in ratios:
        return ""
    return f"{ratios[f'{store}, checksums']:.2f}x ({ratios[store]:.2f}x)"


def table() -> str:
    """All results there are, as one Markdown table, and the machines they come from."""
    lines = ["| what | measured | target |", "|---|---|---|"]
    machines = set()
    for name, rows_of in SECTIONS.items():
        path = RESULTS / f"{name}.json"
        if path.exists():
            result = json.loads(path.read_text(encoding="utf-8"))
            lines += [f"| {what} | {value} | {target} |" for what, value, target in rows_of(result)]
            machine = result["machine"]
            machines.add(f"{machine['cores']} cores of {machine['cpu']}, Python {machine['python']}")
    return "\n".join([*lines, "", f"Machine: {'; '.join(sorted(machines))}. No GPU."])


def update(page: Path, name: str, text: str) -> None:
    """Put `text` between the markers `name` of `page`."""
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    before, found, rest = page.read_text(encoding="utf-8").partition(begin)
    _, closed, after = rest.partition(end)
    if found and closed:
        page.write_text(f"{before}{begin}\n{text}\n{end}{after}", encoding="utf-8")


def main() -> None:
    text = table()
    update(DOCS, "benchmarks", text)
    update(DOCS, "growth", growth())
    update(DOCS, "worker_steps", worker_steps())
    if (RESULTS / "storage.json").exists():
        update(DOCS, "storage", storage())
    print(text)


if __name__ == "__main__":
    main()
