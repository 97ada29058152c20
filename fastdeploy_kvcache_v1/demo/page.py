"""The page that the demo leaves behind: two plots, a table, the answers, and how to repeat it, in one HTML file."""

from __future__ import annotations

import io
import os
import platform
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import jinja2
import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from .. import __version__
from .player import Outcome
from .scenario import Request
from .setups import Setup
from .verdict import Results

SETUP_COLORS = ("#9e9e9e", "#e0a030", "#4a90d9", "#2e7d32")
SOURCE_COLORS = {"computed": "#c4c4c4", "device tier": "#4a90d9", "host tier": "#2e7d32"}

STYLE: Any = {"svg.fonttype": "none", "svg.hashsalt": "kvcache", "font.family": "sans-serif", "font.size": 9}
"""Text stays text, and the same results make the same file."""


def picture(results: Results) -> str:
    """Both plots beside each other, as SVG."""
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(10, 3.6), layout="constrained")
        first, second = figure.subplots(1, 2, width_ratios=(3, 2))
        _plot_first_tokens(first, results)
        _plot_sources(second, results)
        svg = io.StringIO()
        figure.savefig(svg, format="svg", facecolor="white", metadata={"Date": None})
    return svg.getvalue()


def _plot_first_tokens(axes: Axes, results: Results) -> None:
    width = 0.8 / len(results)
    for place, ((name, outcomes), color) in enumerate(zip(results.items(), SETUP_COLORS, strict=True)):
        left = [number - 0.4 + (place + 0.5) * width for number in range(len(outcomes))]
        axes.bar(left, [outcome.first_token_s for outcome in outcomes], width, label=name, color=color)
    labels = [outcome.label.replace(" ", "\n") for outcome in next(iter(results.values()))]
    axes.set_xticks(range(len(labels)), labels)
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set_title("Seconds to the first token (logarithmic)")
    axes.legend(fontsize=7, frameon=False, ncols=2)
    axes.margins(y=0.25)
    axes.spines[["top", "right"]].set_visible(False)


def _plot_sources(axes: Axes, results: Results) -> None:
    names, begin = list(results), [0] * len(results)
    for source, color in SOURCE_COLORS.items():
        counts = [sum(_tokens(outcome)[source] for outcome in outcomes) for outcomes in results.values()]
        axes.barh(names, counts, left=begin, label=source, color=color)
        begin = [before + count for before, count in zip(begin, counts, strict=True)]
    axes.invert_yaxis()
    axes.set_title("Where the prompt tokens came from")
    axes.legend(fontsize=7, frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.08), ncols=3)
    axes.spines[["top", "right"]].set_visible(False)


def _tokens(outcome: Outcome) -> dict[str, int]:
    return {
        "computed": outcome.computed_tokens,
        "device tier": outcome.device_tokens,
        "host tier": outcome.host_tokens,
    }


def page(results: Results, requests: Sequence[Request], setups: Sequence[Setup], verdicts: Sequence[str]) -> str:
    """One HTML document that needs no other file."""
    template = jinja2.Environment(autoescape=True).from_string(
        (files(__package__) / "page.html.jinja").read_text(encoding="utf-8")
    )
    rows = [
        (request, [outcomes[number] for outcomes in results.values()])
        for number, request in enumerate(requests)
        if all(number < len(outcomes) for outcomes in results.values())
    ]
    return template.render(
        rows=rows, setups=setups, verdicts=verdicts, picture=picture(results), version=__version__, machine=_machine()
    )


def _machine() -> str:
    return f"{len(os.sched_getaffinity(0))} cores ({_cpu_name()}), Python {platform.python_version()}"


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
