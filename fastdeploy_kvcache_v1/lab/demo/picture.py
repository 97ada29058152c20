"""README's picture: seconds to the first token, and where the prompt tokens came from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from .scene import ASKED, Results

SETUP_COLORS = ("#9e9e9e", "#e0a030", "#4a90d9", "#2e7d32")
SOURCE_COLORS = ("#c4c4c4", "#4a90d9", "#2e7d32")

STYLE: Any = {"svg.fonttype": "none", "svg.hashsalt": "kvcache", "font.family": "sans-serif", "font.size": 9}
"""Text stays text, and the same results make the same file."""


def write_picture(path: Path, results: Results) -> None:
    """As SVG. `results` by the names of the set-ups. Raises `OSError`."""
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(10, 3.6), layout="constrained")
        first, second = figure.subplots(1, 2, width_ratios=(3, 2))
        _plot_first_tokens(first, results)
        _plot_sources(second, results)
        figure.savefig(path, format="svg", facecolor="white", metadata={"Date": None})


def _plot_first_tokens(axes: Axes, results: Results) -> None:
    width = 0.8 / len(results)
    for place, ((name, played), color) in enumerate(zip(results.items(), SETUP_COLORS, strict=True)):
        left = [number - 0.4 + (place + 0.5) * width for number in range(len(ASKED))]
        axes.bar(left, [answer.first_token_s for answer in played.answers], width, label=name, color=color)
    axes.set_xticks(range(len(ASKED)), [label.replace(" ", "\n") for label in ASKED])
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set_title("Seconds to the first token (logarithmic)")
    axes.legend(fontsize=7, frameon=False, ncols=2)
    axes.margins(y=0.25)
    axes.spines[["top", "right"]].set_visible(False)


def _plot_sources(axes: Axes, results: Results) -> None:
    names, begin = list(results), [0] * len(results)
    sources = zip(*(played.sources for played in results.values()), strict=True)
    for source, counts, color in zip(("computed", "device tier", "host tier"), sources, SOURCE_COLORS, strict=True):
        axes.barh(names, counts, left=begin, label=source, color=color)
        begin = [before + count for before, count in zip(begin, counts, strict=True)]
    axes.invert_yaxis()
    axes.set_title("Where the prompt tokens came from")
    axes.legend(fontsize=7, frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.08), ncols=3)
    axes.spines[["top", "right"]].set_visible(False)
