"""The rows of docs/benchmarks.md: per benchmark, what its result says and the target of each value."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

MOST_DEVICE_BLOCKS = 40_000
"""Device blocks that a profiled server of FastDeploy 2.5 or 2.6 has at most (`worker_process.py`)."""

TOO_LARGE = "larger than a FastDeploy device tier can be"

Result = dict[str, Any]


class Target(NamedTuple):
    sign: str
    bound: float
    unit: str = "x"

    def __str__(self) -> str:
        bound = f"{100 * self.bound:.3g}%" if self.unit == "%" else f"{self.bound:g}{self.unit}"
        return f"{self.sign} {bound}"

    def is_met(self, number: float) -> bool:
        return {"<=": number <= self.bound, ">=": number >= self.bound, "<": number < self.bound}[self.sign]


def at_most(bound: float, unit: str = "x") -> Target:
    return Target("<=", bound, unit)


def at_least(bound: float, unit: str = "x") -> Target:
    return Target(">=", bound, unit)


def below(bound: float, unit: str = "x") -> Target:
    return Target("<", bound, unit)


class Row(NamedTuple):
    what: str
    value: str
    number: float | None = None
    """What the target is compared with."""

    target: Target | None = None
    device_blocks: int = 0
    """Of the cache that was measured."""

    @property
    def is_missed(self) -> bool:
        return self.target is not None and self.number is not None and not self.target.is_met(self.number)

    def __str__(self) -> str:
        value = f"{self.value}; {TOO_LARGE}" if self.device_blocks > MOST_DEVICE_BLOCKS else self.value
        verdict = "" if self.target is None else f"{self.target}: {'**missed**' if self.is_missed else 'met'}"
        return f"| {self.what} | {value} | {verdict} |"


class Table(NamedTuple):
    title: str
    """Empty for the only table of a benchmark."""

    rows: list[Row]


def x(number: float) -> str:
    """A ratio, of three digits."""
    return f"{number:,.0f}x" if number >= 1000 else f"{number:.3g}x"


def ratio(what: str, number: float, target: Target | None = None, more: str = "", device_blocks: int = 0) -> Row:
    return Row(what, f"{x(number)} ({more})" if more else x(number), number, target, device_blocks)


def control_plane(result: Result) -> Iterator[Row]:
    contenders, size = result["against_naive"], result["device_blocks"]
    yield Row("naive reference: one dict, LRU, no checks", f"{contenders['naive']['median_us']:.0f} us")
    for name, row in contenders.items():
        if name != "naive":
            target = at_most(1.5 if name == "one tier" else 2.5)
            yield ratio(f"{name}, over naive", row["ratio_to_naive"], target, f"{row['median_us']:.0f} us", size)
            yield ratio(f"{name}, p99 over median", row["p99_over_median"], at_most(10), device_blocks=size)
    sizes = result["over_sizes"]["one tier"]
    first, *_, last = map(int, sizes["median_us"])
    yield ratio(f"{last:,} over {first:,} blocks", sizes["growth"], at_most(1.3), device_blocks=last)
    windows = [row["median_us"] for name, row in result["over_windows"].items() if name.startswith("two tiers")]
    values = " / ".join(f"{value:.0f}" for value in windows)
    size = result.get("window_blocks", 60_000)
    yield ratio("1, 32, 128 open requests: slowest over fastest", max(windows) / min(windows), at_most(1.1),
                f"{values} us", size)  # fmt: skip
    for name, row in result["memory"].items():
        number = row["bytes_per_block"]
        size = row.get("device_blocks", 100_000 if name == "one tier" else 20_000)
        yield Row(f"memory per cached block, {name}", f"{number:.0f} bytes", number, at_most(400, " bytes"), size)


def hashing(result: Result) -> Iterator[Row]:
    alone, ms = result["digests_alone_ms"], result["prompt_ms"]
    yield Row(f"prompt of {result['prompt_tokens']:,} tokens", f"{ms:.2f} ms ({alone:.2f} for SHA-256 alone)", ms,
              at_most(3, " ms"))  # fmt: skip
    lengths = list(result["generated_token_us"])
    values = " / ".join(f"{us:.2f}" for us in result["generated_token_us"].values())
    yield ratio(f"a generated token behind {int(lengths[-1]):,} over {int(lengths[0]):,} tokens",
                result["generated_token_growth"], at_most(1.2), f"{values} us")  # fmt: skip


def import_time(result: Result) -> Iterator[Row]:
    ms = result["import_ms"]
    yield Row("import of the scheduler half", f"{ms:.0f} ms", ms, below(150, " ms"))


def growth(result: Result) -> Iterator[Row]:
    for name, row in result["rows"].items():
        medians = " / ".join(f"{us:,.0f}" if us >= 100 else f"{us:.3g}" for us in row["median_us"].values())
        sizes = [int(size) for size in row["median_us"]]
        at = f"{medians} us at {' / '.join(f'{size:,}' for size in sizes)}"
        target = None if row["work_grows"] else at_most(2)
        blocks = max(sizes) if name.endswith(("blocks in the cache", "its blocks")) else 0
        yield ratio(name + (" (the work grows)" if row["work_grows"] else ""), row["largest_over_smallest"], target, at,
                    blocks)  # fmt: skip


def eviction_time(result: Result) -> Iterator[Row]:
    for case in result["cases"]:
        costs = case["policies"]["adaptive"]
        size = f"{case['device']:,}" + (f" + {case['host']:,}" if case["host"] else "")
        what = f"{case['traffic']}, {size} blocks, {case['window']} open"
        more = f"{costs['median_us']:.0f} us, with the step {x(costs['ratio_with_step'])}"
        yield ratio(f"{what}: median", costs["ratio"], at_most(1.25), more, case["device"])
        yield ratio(f"{what}: mean", costs["ratio_of_means"], at_most(1.25), device_blocks=case["device"])


OURS = "ours, adaptive"


def peers(result: Result) -> Iterator[Table]:
    """A table per case, a row per contender."""
    for name, contenders in result["cases"].items():
        yield Table(name, [*(_peer(each, row) for each, row in contenders.items()), *_over_fastest(contenders)])
    yield Table("Memory per cached block", [
        Row(name, row.get("why") or f"{row['bytes_per_block']:,.0f} bytes, {row['cached_blocks']:,} blocks")
        for name, row in result["memory"].items()
    ])  # fmt: skip
    yield Table("What the times contain", [
        Row("calls", "match, allocate, commit of the computed prompt, free; a step's copies are planned, not made"),
        Row("hashes", "block hashes of the prompt, where the engine makes them before it asks its manager"),
        Row("calls and hashes", "the fair sum: other engines hash or compare tokens inside their calls"),
        Row("left out", "requests' objects, lists of tokens, decoding, and the check of what was matched"),
        Row("SGLang", "its index tensors lie on the CPU, in a server on the GPU; `alone` leaves out its table of rows"),
        Row("FastDeploy", "all logs off"),
        Row("two tiers", "planned copies are taken as done at once; blocks copied out and in are means per request"),
        Row("vLLM, CPU offloading", "the connector's half in the scheduler; a request that loads takes two steps"),
        Row("SGLang, HiCache", "its controller over a host pool without memory, for one layer"),
        Row("threads", "one computes in each contender, also in PyTorch; contenders never play at the same time"),
        Row("plays", f"each case is played {result.get('plays', 1)} times; a request counts its least time"),
        Row("warm-up", f"the first {result['warm_up']:.0%} of the requests are played and not counted"),
        Row("blocks", f"{result['block_size']} tokens in every contender"),
    ])  # fmt: skip


def _peer(name: str, row: Result) -> Row:
    if why := row.get("why"):
        return Row(name, why)
    times = " / ".join(f"{row[key]:,.0f}" for key in ("median_us", "mean_us", "p99_us"))
    cpu = f"CPU {row['cpu_us']:,.0f} + {row['hash_cpu_us']:,.0f} us"
    value = f"calls {times} us, hashes {row['hash_us']:,.0f} us, {cpu}, hits {row['hit_share']:.1%}"
    if row["blocks_out"]:
        value += f", copied {row['blocks_out']:,.1f} blocks out and {row['blocks_in']:,.1f} in"
    return Row(name, f"{value}; **matched what was not computed**: {row['lie']}" if row["lie"] else value)


def _over_fastest(contenders: dict[str, Result]) -> Iterator[Row]:
    """Means of ours over the least of the peers that tell the truth."""
    peers = {name: row for name, row in contenders.items() if not (name[:4] == "ours" or "why" in row or row["lie"])}
    for what, keys in {
        "calls": ["mean_us"], "calls, CPU time": ["cpu_us"], "calls and hashes": ["mean_us", "hash_us"],
        "calls and hashes, CPU time": ["cpu_us", "hash_cpu_us"],
    }.items():  # fmt: skip
        sums = {name: sum(row[key] for key in keys) for name, row in peers.items()}
        if sums and keys[0] in contenders.get(OURS, {}):
            fastest = min(sums, key=sums.__getitem__)
            ours = sum(contenders[OURS][key] for key in keys)
            yield ratio(f"`adaptive` over the fastest peer, mean: {what}", ours / sums[fastest], at_most(0.75), fastest)


def policies(result: Result) -> Iterator[Table]:
    """Shares of tokens that hit, and blocks copied to the host."""
    for title, cases in result["tables"].items():
        rows = []
        for case in cases:
            device, host = case["device_blocks"], case["host_blocks"]
            size = f"{case['traffic']}, {device:,}" + (f" + {host:,}" if host else "")
            shown = [run for run in case["runs"] if "auto" in run.values() or "adaptive" in run.values()]
            runs = [_policy(run, host) for run in shown]
            if host:
                runs.append(("one LRU tier of the same total", f"{case['one_lru_tier']:.1%}"))
            runs.append(("clairvoyant bound", f"{case['clairvoyant']:.1%}"))
            rows += [Row(f"{size}: {name}", value, device_blocks=device) for name, value in runs]
        yield Table(title, rows)


def _policy(run: Result, host: int) -> tuple[str, str]:
    if not host:
        return f"`{run['eviction_policy']}`", f"{run['hit_share']:.1%}"
    copied = f"{run['blocks_out'] / 1e6:.2f} M blocks copied"
    return f"`{run['write_policy']}`, `{run['eviction_policy']}`", f"{run['hit_share']:.1%}, {copied}"


HIT_TARGETS = {
    ("Mooncake conversations", 1_000): {"untold": 0.077},
    ("Mooncake conversations", 2_500): {"untold": 0.116},
    ("Mooncake conversations", 5_000): {"untold": 0.16, "last turns": 0.27},
    ("Mooncake conversations", 12_500): {"untold": 0.264},
    ("Mooncake conversations", 20_000): {"untold": 0.25},
    ("agents", 1_000): {"untold": 0.19, "every return": 0.29},
    ("agents", 2_000): {"untold": 0.41, "every return": 0.57},
    ("agents", 16_000): {"untold": 0.885},
}
"""By traffic and device blocks: shares of tokens that hit."""

WRONG = ("wrong by 10", "lies")
"""Claims that count for the least gain alone."""

WAY_TARGETS = {"untold": 1 / 3, "every return": 0.9}
"""Shares of the way from LRU to the bound, on generated sessions."""


def hits(result: Result) -> Iterator[Table]:
    """Shares of tokens that hit by what clients tell, never below those of LRU."""
    shares, small = list[Row](), list[Row]()
    least: dict[str, tuple[float, str]] = {}
    for case in result["cases"]:
        device, traffic = case["device"], case["traffic"]
        size = f"{device:,}" + (f" + {case['host']:,}" if case["host"] else "") + f" blocks of {case['block_size']}"
        gain = min((100 * (found - case["lru"]), f"{size}, {told}") for told, found in case["shares"].items())
        least[traffic] = min(gain, least.get(traffic, gain))
        if case["made_small"] is not None:
            points = 100 * abs(case["made_small"])
            small.append(Row(f"{traffic}, {size}", f"{points:.2f} points", points, at_most(0.1, " points"), device))
        if "lies" in case["shares"] or case["host"]:
            shares += [_told(f"{traffic}, {size}", case, told) for told in case["shares"] if told not in WRONG]
    yield Table("Shares by what clients tell", shares)
    points = at_least(-0.3, " points")
    yield Table("Least gain over LRU, wrong and false claims included", [
        Row(name, f"{gain:+.2f} points ({where})", gain, points) for name, (gain, where) in least.items()
    ])  # fmt: skip
    yield Table("A manager made small and resized, against one made large", small)


def _told(name: str, case: Result, told: str) -> Row:
    found, lru, bound = case["shares"][told], case["lru"], case["bound"]
    way = (found - lru) / (bound - lru) if bound > lru else 1.0
    value = f"{found:.1%}, {way:.0%} of the way from LRU's {lru:.1%} to the bound, {bound:.1%}"
    if "percent_of_live" in case:
        name = f"{name} ({case['percent_of_live']}% of the live sessions)"
        number, target = way, WAY_TARGETS.get(told)
    else:
        number, target = round(found, 3), HIT_TARGETS.get((case["traffic"].split(",")[0], case["device"]), {}).get(told)
    return Row(f"{name}: {told}", value, number, None if target is None else at_least(target, "%"), case["device"])


def overlay_scheduler(result: Result) -> Iterator[Row]:
    for release, measured in result["releases"].items():
        for case in measured["sizes"]:
            for kind, what in (("cache", "cache manager"), ("step", "whole step")):
                logs = "with its logs" if case["host_logs"] else "all logs off"
                ours, host = (case[kind][f"{name}_us"]["median"] for name in ("ours", "host"))
                yield ratio(f"{release}, {case['blocks']:,} blocks, {what}, {logs}", case[kind]["ratio_of_medians"],
                            more=f"{ours:,.0f} of {host:,.0f} us", device_blocks=case["blocks"])  # fmt: skip


def worker_steps(result: Result) -> Iterator[Row]:
    for case in result["cases"]:
        device, host = result["pools"][case["pools"]]
        parts = [case[part] for part in ("receive", "pass", "layer waits")]
        median, least = (sum(part[number] for part in parts) for number in ("median_us", "least_us"))
        what = f"blocks a step: {case['copies']}; {case['rows']} rows, {device:,} + {host:,} slots"
        yield Row(what, f"{median:,.0f} us, least {least:,.0f}", device_blocks=device)


def copy_ops(result: Result) -> Iterator[Row]:
    """The worst of all patterns and directions, for blocks from 64 KiB."""
    cases = [case for case in result["cases"] if case["block_bytes"] >= 64 << 10]
    for key, what, target in (
        ("c_over_memcpy", "rate in C over memcpy, worst case", at_least(0.9)),
        ("numpy_over_memcpy", "rate by NumPy over memcpy, worst case", None),
        ("c_over_fancy_indexing", "rate in C over NumPy's fancy indexing, worst case", at_least(2)),
    ):
        numbers = [case[key] for case in cases]
        yield ratio(what, min(numbers), target, f"best {x(max(numbers))}")


def copy_gpu(result: Result) -> Iterator[Table]:
    """As the worker uses them: in layer by layer, out at once. Targets are those of the kernel."""
    yield Table("Rates", [*_gpu_rates(result["copies"])])
    yield Table("A pass beside copies", [*_gpu_beside(result["beside"])])


def _gpu_rates(cases: Result) -> Iterator[Row]:
    for name, ways in cases.items():
        direction, _, pattern = name.partition(", ")
        if name.endswith("by layer" if direction == "in" else "at once") and "in 16s" not in pattern:
            values = (
                f"{way} {found['gb_per_s']:.1f} GB/s, {found['us_per_layer']:.0f} us" for way, found in ways.items()
            )
            yield Row(name, "; ".join(values))
    scattered, contiguous = (
        max(found["gb_per_s"] for way, found in cases[f"in, 2000 x 16 KB {pattern}, by layer"].items() if way in among)
        for pattern, among in (("scattered", {"kernel"}), ("contiguous", {"batch", "spans"}))
    )
    yield ratio("scattered 16 KB by the kernel over contiguous ones by a copy engine", scattered / contiguous,
                at_least(0.9), f"{scattered:.1f} of {contiguous:.1f} GB/s")  # fmt: skip


def _gpu_beside(cases: Result) -> Iterator[Row]:
    for name, ways in cases.items():
        what = "the longer of both alone" if "waits" in name else "the pass alone"
        for way, found in ways.items():
            alone = f"pass {found['compute_ms']:.1f}, copies of {found['gib']:g} GiB {found['copies_ms']:.1f}"
            beside = f"pass {found['both_ms']:.1f}, copies {found['copies_beside_ms']:.1f} ms"
            target = at_most(1.25 if "waits" in name else 1.1) if way == "kernel" and "by layer" not in name else None
            yield ratio(f"{name}, {way}: over {what}", found["over"], target, f"alone {alone}; together {beside}")


def first_touch(result: Result) -> Iterator[Row]:
    times = f"{result['copy_with_first_touch_ms']:.0f} of {result['copy_ms']:.0f} ms"
    yield ratio("first copy into untouched memory over touched", result["median_ratio"], more=times)
    loads = result["loads"]
    times = f"{loads['load_with_first_use_ms']:.0f} of {loads['load_ms']:.0f} ms; mapping: {loads['map_ms']:.0f} ms"
    yield ratio("first load of a store process into pages that it has not mapped, over mapped", loads["median_ratio"],
                more=times)  # fmt: skip


def server(result: Result) -> Iterator[Row]:
    for source, target in (("device", at_most(0.25)), ("host", at_most(0.5))):
        row = result["first_token"][source]
        yield ratio(f"first token of {result['prompt_tokens']:,} tokens from the {source} tier, over computing them",
                    row["ratio_to_computed"], target, f"{row['first_token_ms']:.0f} ms")  # fmt: skip
    copies = result["copies"]
    exposed = copies["exposed_share"]
    yield Row("share of the copy time for which compute waits", f"{exposed:.1%} of {copies['swap_in_ms']:.0f} ms",
              exposed, at_most(0.2, "%"))  # fmt: skip


def cpu_model(result: Result) -> Iterator[Row]:
    for threads, measured in result["threads"].items():
        clock = "cpu" if threads == "1" else "wall"
        speeds = measured.get("speed_over_transformers", {})
        for work, times in measured["ours"].items():
            seconds = times[clock]
            time = f"{seconds:.1f} s" if seconds >= 1 else f"{1000 * seconds:.0f} ms"
            what = f"prefill of {result['prompt_tokens']:,} tokens" if work == "prefill" else f"{work} tokens"
            what += f", threads: {threads}"
            if work in speeds:
                yield ratio(f"speed over transformers, {what}", speeds[work], at_least(0.7), time)
            else:
                yield Row(what, time)


def storage(result: Result) -> Iterator[Row]:
    for case in result["cases"]:
        rates, size = case["plain_gb_per_s"], f"{case['block_bytes'] >> 10:,} KiB"
        for name, key, rate, bound in (("get", "get_over_plain", "read", 0.6), ("put", "put_over_plain", "write", 0.3)):
            for store in ("files", "lmdb"):
                if store in case[key]:
                    more = f"plain: {rates[rate]:.1f} GB/s, without checksums {x(case[key][store])}"
                    yield ratio(f"`{name}` of {size} over a plain {rate}, {store}", case[key][f"{store}, checksums"],
                                at_least(bound) if store == "files" else None, more)  # fmt: skip
    for store, ms in result["count_stored_ms"].items():
        what = f"lookup of {result['counted_keys']:,} keys, {store}: all, half, none stored"
        yield Row(what, " / ".join(f"{ms[name]:.2g}" for name in ("all", "half", "none")) + " ms")


def storage_large(result: Result) -> Iterator[Row]:
    counting, lookup, evicted = result["counting"], result["lookup_ms"], result["eviction"]
    start = result["start_to_first_answer_s"]
    yield Row("start to first answer", f"{start:.3f} s", start, at_most(2, " s"))
    slowest = f"{counting['slowest_put_s']:.2f} s, the slowest of {counting['puts']}"
    yield Row("puts that count all values after a loss of the sizes", slowest)
    p99 = f"{lookup['p99']:.1f} ms (median {lookup['median']:.1f} ms)"
    yield Row(f"lookup of {result['looked_up']} keys, p99", p99, lookup["p99"], at_most(25, " ms"))
    cold = result["cold_gb_per_s"]
    yield ratio("`get` of 32 values that the page cache lacks, over plain reads", cold["get"] / cold["plain"],
                more=f"{cold['get']:.2f} GB/s")  # fmt: skip
    yield Row(f"eviction of {evicted['evicted']:,} values", f"{evicted['seconds']:.1f} s")
    for what in ("lock", "listing"):
        longest = evicted[f"longest_{what}_ms"]
        yield Row(f"longest {what} in it", f"{longest:.1f} ms", longest, at_most(50, " ms"))
    yield Row("longest pause of another thread", f"{evicted['longest_gap_ms']:.1f} ms")
    puts = f"{evicted['failed_puts']} of {evicted['puts_meanwhile']} (slowest: {evicted['slowest_put_ms']:.1f} ms)"
    yield Row("failed puts of another server meanwhile", puts, evicted["failed_puts"], at_most(0, ""))


def peers_store(result: Result) -> Iterator[Table]:
    """A table per size, a row per contender, and ours over the fastest peer."""
    for size, contenders in result["cases"].items():
        title = f"{result['values']} values of {int(size) >> 10:,} KiB at once"
        rates = {name: row["gb_per_s"] for name, row in contenders.items() if not (row.get("why") or row["lie"])}
        yield Table(title, [*map(_store, contenders, contenders.values()), *_over_fastest_store(rates)])
    yield Table(f"A new process' first hit among {result['filled']:,} values, after its imports", [
        Row(name, row.get("why") or _marked("none" if row["ms"] is None else f"{row['ms']:.1f} ms", row["lie"]))
        for name, row in result["first_hits"].items()
    ])  # fmt: skip
    yield Table("What the stores do", [
        Row("checksum", "made and compared in `ours`, by nobody else"),
        Row("fsync", "nobody"),
        Row("rename of a finished file", "all except `local_disk`"),
        Row("limit of the directory's size", "`ours` and `local_disk`"),
        Row("values of an earlier process", "found by all except `local_disk`, whose index ends with its process"),
        Row("threads", "one in `fs` and in puts of `ours`, else four"),
        Row("an empty file", "created where the store creates its own: what a file system costs before `put` writes"),
        Row("cold", "`get` after a sync, without the files' pages in this machine's page cache; disks may have theirs"),
    ])  # fmt: skip


def _store(name: str, row: Result) -> Row:
    if why := row.get("why"):
        return Row(name, why)
    cpu = row["cpu_s_per_gb"]
    rates = (f"{verb} {rate:.2f} GB/s (CPU {cpu[verb]:.2f} s/GB)" for verb, rate in row["gb_per_s"].items())
    more = f"lookup {row['lookup_us']:,.0f} us, an empty file {row['create_file_us']:,.0f} us"
    return Row(name, _marked(f"{', '.join(rates)}, {more}", row["lie"]))


def _marked(value: str, lie: str) -> str:
    return f"{value}; **wrong**: {lie}" if lie else value


def _over_fastest_store(rates: dict[str, dict[str, float]]) -> Iterator[Row]:
    peers = {name: rate for name, rate in rates.items() if not name.startswith("ours")}
    for ours in [name for name in rates if name not in peers and peers]:
        for verb in rates[ours]:
            fastest = max(peers, key=lambda name: peers[name].get(verb, 0))
            if verb in peers[fastest]:
                yield ratio(f"`{verb}`, {ours}, over the fastest peer", rates[ours][verb] / peers[fastest][verb],
                            more=fastest)  # fmt: skip


def storage_mooncake(result: Result) -> Iterator[Row]:
    for case in result["cases"]:
        for name, number in case["over_direct"].items():
            more = f"its client: {case['direct_gb_per_s'][name]:.2f} GB/s"
            yield ratio(f"`{name}` of 32 blocks of {case['block_bytes'] >> 10:,} KiB over Mooncake's client", number,
                        at_least(0.9), more)  # fmt: skip
    asked = result["question"]
    what = f"lookup of {result['question_keys']:,} keys, over Mooncake's client"
    yield ratio(what, asked["ours_ms"] / asked["direct_ms"], more=f"{asked['ours_ms']:.1f} ms")


def transfer(result: Result) -> Iterator[Row]:
    for case in result["socket"]:
        checked = f"with checksums {x(case['with_checksums_over_plain'])}"
        yield ratio(f"socket plane over a plain socket, {_blocks(case)}", case["over_plain"], at_least(0.8), checked)
    for case in result["mooncake"]:
        yield ratio(f"mooncake plane over its engine, {_blocks(case)}", case["over_direct"], at_least(0.9))


def _blocks(case: Result) -> str:
    return f"{case['blocks']} scattered blocks of {case['block_bytes'] >> 10} KiB"


def transfer_overlap(result: Result) -> Iterator[Row]:
    for way, told in result["told"].items():
        share = told["hidden_share"]
        left = f"{told['exposed_ms']:.0f} of {result['transfer_ms']:,.0f} ms are left"
        target = at_least(0.7, "%") if way == "layer by layer" else None
        yield Row(f"hidden share, announced {way}", f"{share:.1%} ({left})", share, target)


def roles(result: Result) -> Iterator[Row]:
    times = f"{result['roles_first_token_ms']:,.0f} of {result['mixed_first_token_ms']:,.0f} ms"
    yield ratio(f"first token of {result['prompt_tokens']:,} tokens, two servers over a mixed one",
                result["first_token_over_mixed"], at_most(1.1), times)  # fmt: skip
    two, mixed = result["roles_second_token_ms"], result["mixed_second_token_ms"]
    yield ratio(
        "from the first to the second token, over a mixed one", two / mixed, more=f"{two:.0f} of {mixed:.0f} ms"
    )


def storage_server(result: Result) -> Iterator[Row]:
    for length, times in result["first_token"].items():
        target = below(1) if int(length) >= 2000 else None
        more = f"{times['stored_ms']:.0f} of {times['computed_ms']:.0f} ms"
        yield ratio(f"first token of {int(length):,} stored tokens, over computing them",
                    times["stored_over_computed"], target, more)  # fmt: skip
    hits, seconds = result["hits_after_restart_over_warm"], result["seconds_after_restart"]
    yield Row("hits after a restart over those before", f"{hits:.1%}", hits, at_least(0.95, "%"))
    yield Row("time to serve all stored prompts after a restart", f"{seconds:.0f} s", seconds, at_most(60, " s"))
    steps = result["steps"]
    medians = " and ".join(f"{us:.0f}" for us in steps["median_us"].values())
    yield ratio("mean scheduler time a step, with storage over without", steps["ratio_of_means"], below(1.2),
                f"medians {medians} us")  # fmt: skip


def stored_hits(result: Result) -> Iterator[Row]:
    for case in result["cases"]:
        device, host = case["sizes"]
        soon = f"{case['soon']:.1%} in the first {result['after_restart']} requests"
        yield Row(
            f"{case['traffic']}, {device:,} + {host:,}: {case['policy']}",
            f"{case['after']:.1%} after a restart, {soon}; {case['written'] / 1000:,.0f} k blocks written",
            device_blocks=device,
        )


def load_or_compute_stored(result: Result) -> Iterator[Row]:
    for rate in result["rates"]:
        disk = "no limit" if rate["mb_s"] >= 1e6 else f"{rate['mb_s']:.0f} MB/s"
        for case in rate["lengths"]:
            loaded, computed = f"loads {case['loads_ms']:,.0f}", f"computes {case['computes_ms']:,.0f} ms"
            yield ratio(f"{disk}, {case['length']:,} tokens: over the better server", case["over_better"],
                        at_most(1.05), f"{loaded}, {computed}")  # fmt: skip


ROWS: dict[str, Callable[[Result], Iterator[Row] | Iterator[Table]]] = {
    each.__name__: each
    for each in (
        control_plane, peers, policies, hits, eviction_time, growth, hashing, import_time, overlay_scheduler,
        worker_steps, copy_ops, copy_gpu, first_touch, server, cpu_model, storage, storage_large, peers_store,
        stored_hits, storage_server, load_or_compute_stored, storage_mooncake, transfer, transfer_overlap, roles,
    )
}  # fmt: skip


def tables_of(name: str, result: Result) -> list[Table]:
    found: list[Any] = list(ROWS[name](result))
    return found if found and isinstance(found[0], Table) else [Table("", found)]
