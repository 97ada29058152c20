"""Mistakes in the C++ of GPU copies: each a text of one file and what takes its place. All must be noticed."""

from __future__ import annotations

from typing import NamedTuple


class NativeMutation(NamedTuple):
    """Each text of `changes` stands once in `file`, below `custom_ops/cuda`, and becomes the one beside it."""

    name: str
    file: str
    changes: tuple[tuple[str, str], ...]

    def applied_to(self, text: str) -> str:
        """Raises `LookupError` when a text is not in `text`, once."""
        for was, now in self.changes:
            if text.count(was) != 1:
                raise LookupError(f"{self.file} has {text.count(was)} times, not once: {was!r}")
            text = text.replace(was, now)
        return text

    @property
    def compiled(self) -> tuple[str, ...]:
        """Sources that have to be compiled again."""
        return (self.file,) if self.file.endswith(".cc") else ("runs.cc", "costs.cc")


def _mutation(name: str, file: str, *texts: str) -> NativeMutation:
    """`texts`: was, now, was, now."""
    return NativeMutation(name, file, tuple(zip(texts[::2], texts[1::2], strict=True)))


_WAIT = 'check(copy.driver, copy.driver.wait_event(copy.stream, staging().left, 0), "cuStreamWaitEvent");'
_RECORD = "copy_.driver.event_record(staging().left, copy_.stream);"
_GATHER = "  if (!copy_by_kernel(first)) return false;\n"

NATIVE_MUTATIONS = [
    # ---- staging
    _mutation("a copy does not wait for the staging memory", "staged.cc", _WAIT, ""),
    _mutation(
        "the staging memory is free when its copy begins", "staged.cc", _WAIT, _WAIT + _RECORD, f"{{ {_RECORD} }}", "{}"
    ),
    _mutation("nobody says when the staging memory is free", "staged.cc", _RECORD, ""),
    _mutation(
        "a piece is larger than the staging memory",
        "staged.cc",
        "block_bytes(copy.entries);\n  if (capacity",
        "block_bytes(copy.entries) + 1;\n  if (capacity",
    ),
    _mutation(
        "blocks leave the staging memory before they are in it",
        "staged.cc",
        _GATHER,
        "",
        "copy.has_alias, copy.stream});\n  return true;",
        "copy.has_alias, copy.stream});\n  return copy_by_kernel(first);",
    ),
    _mutation(
        "the second piece of a run lands on the first",
        "staged.cc",
        "run.target + some, run.blocks",
        "run.target, run.blocks",
    ),
    _mutation(
        "what is gathered goes to another stream",
        "staged.cc",
        "gathered, false, true, false, copy.stream}",
        "gathered, false, true, false, nullptr}",
    ),
    # ---- rectangles
    _mutation(
        "the source of a rectangle has the target's pitch",
        "runs.cc",
        "made.source_pitch = static_cast<size_t>(rectangle.source_pitch)",
        "made.source_pitch = static_cast<size_t>(rectangle.target_pitch)",
    ),
    _mutation(
        "a rectangle lacks its last row",
        "runs.cc",
        "static_cast<size_t>(rectangle.rows)",
        "static_cast<size_t>(rectangle.rows - 1)",
    ),
    _mutation(
        "memory with another address is taken for the host's", "runs.cc", "if (copy.has_alias) {", "if (false) {"
    ),
    _mutation(
        "ranges are copied on the default stream",
        "runs.cc",
        "rectangle.source, nbytes, copy.stream)",
        "rectangle.source, nbytes, nullptr)",
    ),
    _mutation(
        "rectangles are copied on the default stream",
        "runs.cc",
        "copy_2d(&made, copy.stream)",
        "copy_2d(&made, nullptr)",
    ),
    _mutation(
        "across the runs the rows are neighbours",
        "rectangles.h",
        "width, grid.count, source_step,\n                        target_step}",
        "width, grid.count, source_pitch,\n                        target_pitch}",
    ),
    _mutation(
        "of a dense run the first block is copied", "rectangles.h", "range = width * grid.blocks;", "range = width;"
    ),
    # ---- batches
    _mutation(
        "a batch reads its source at any time", "batch.cc", "= kInStreamOrder;", "= static_cast<SourceAccess>(3);"
    ),
    _mutation("every batch starts with the first copy", "batch.cc", " sources.data() + first", " sources.data()"),
    _mutation("batches run on the default stream", "batch.cc", "&failed, stream)", "&failed, nullptr)"),
    # ---- kernel
    _mutation(
        "the kernel runs on the default stream",
        "launches.cc",
        "kKernelWarps * kLanes, copy.stream)",
        "kKernelWarps * kLanes, nullptr)",
    ),
    _mutation(
        "a launch counts the blocks of those before",
        "launches.cc",
        "arguments.runs = arguments.blocks = 0;",
        "arguments.runs = 0;",
    ),
    _mutation(
        "tensors behind the eighth are left out",
        "launches.cc",
        "first += kKernelEntries)",
        "first += 2 * kKernelEntries)",
    ),
    _mutation(
        "a pitch does not count for the width of accesses",
        "launches.cc",
        "static_cast<uint64_t>(entry.target.pitch) | static_cast<uint64_t>(entry.source.pitch);",
        "0;",
    ),
    # ---- ranges
    _mutation("ranges may write a byte twice", "ranges.cc", "written[i].first < written[i - 1].second", "false"),
    _mutation(
        "a range may begin in what another one writes", "ranges.cc", "std::prev(next)->second > range.source", "false"
    ),
    _mutation(
        "a range may end in what another one writes",
        "ranges.cc",
        "next->first < range.source + range.blocks",
        "false",
    ),
    _mutation(
        "the source of equally spaced ranges has the target's pitch",
        "ranges.cc",
        "made.source_pitch = static_cast<size_t>(grid.source_step)",
        "made.source_pitch = static_cast<size_t>(grid.target_step)",
    ),
    _mutation(
        "equally spaced ranges lack the last one",
        "ranges.cc",
        "static_cast<size_t>(grid.count)",
        "static_cast<size_t>(grid.count - 1)",
    ),
    _mutation("ranges further apart than a 2D copy may go by one", "ranges.cc", "|| !fits(grid)", ""),
    _mutation(
        "a single range is copied on the default stream",
        "ranges.cc",
        "(grid.blocks), stream)",
        "(grid.blocks), nullptr)",
    ),
    _mutation(
        "equally spaced ranges are copied on the default stream", "ranges.cc", "(&made, stream)", "(&made, nullptr)"
    ),
    _mutation(
        "ranges go by batches that were forbidden",
        "ranges.cc",
        "(allowed_paths() & 1 << KVSWAP_PATH_BATCH) != 0",
        "true",
    ),
    # ---- memory of other processes
    _mutation("an allocation begins at the tensor", "ipc.cc", "made.base = base;", "made.base = address;"),
    _mutation("every GPU reaches every other", "ipc.cc", "return can == 0 ? 0 : 1;", "return 1;"),
    _mutation("a GPU does not reach itself", "ipc.cc", "    if (other == own) return 1;\n", ""),
    _mutation("a GPU that is not seen is out of reach", "ipc.cc", "  return -1;\n", "  return 0;\n"),
    # ---- addresses
    _mutation("host memory is named as the host does", "copy.cc", "    if (known) host = found;\n", ""),
]
