"""Score against bytes: a line per policy and the Pareto front, with a small plot of each cell below."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from textwrap import wrap
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, PercentFormatter

from kvshelf_bench.quality.grid import BASELINE, Cell, Row
from kvshelf_bench.quality.summary import ABLE, Summary, pareto
from kvshelf_bench.quality.tables import removed_label, row_name

# Okabe and Ito (2008): distinct under every common form of colour blindness. The baseline is black, yellow too pale.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7A3E9D")
REST = "#9A9A9A"
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
_PANELS_A_ROW, _MOST_PANELS = 6, 24
_SAME_SIZE = 1.02  # of front points within this ratio of bytes, only the best gets a label
_LABEL_HEIGHT = 0.026
"""Least distance of two labels, as a share of the height of the picture."""


@dataclass(frozen=True)
class _Point:
    row: Row
    bytes_per_token: float
    exact: float


@dataclass(frozen=True)
class _Line:
    name: str
    points: list[_Point]  # ascending in bytes
    colour: str
    marker: str
    best: bool


def draw(summary: Summary, path: Path, title: str) -> bool:
    """Write the picture in the format of the suffix of `path` (.png, .svg, .pdf).

    Returns False, and writes no file, if no row has an overall score: the model can answer none of the common cells.
    """
    means = [(row, summary.overall(row)) for row in summary.rows]
    points = [_Point(row, mean.bytes_per_token, mean.exact) for row, mean in means if mean is not None]
    if not points:
        return False
    shown = summary.cells[:_MOST_PANELS]
    panel_rows = -(-len(shown) // _PANELS_A_ROW)
    figure = Figure(figsize=(11, 7 + 1.9 * panel_rows), layout="constrained")
    panels = figure.add_gridspec(1 + panel_rows, _PANELS_A_ROW, height_ratios=[7, *[1.9] * panel_rows])
    axes = figure.add_subplot(panels[0, :])
    lines = _lines(points)
    _draw_front(axes, points)
    _draw_lines(axes, points, lines)
    _draw_base(axes, summary.full_16bit)
    _finish(axes, summary, title)
    _label(axes, lines)
    for place, cell in enumerate(shown):
        _draw_panel(figure.add_subplot(panels[1 + place // _PANELS_A_ROW, place % _PANELS_A_ROW]), summary, cell, lines)
    figure.savefig(path, dpi=160)
    return True


def _lines(points: Sequence[_Point]) -> list[_Line]:
    """A line per policy without codec; the best seven by mean score in colour, as no palette has twenty-two."""
    plain: dict[str, list[_Point]] = {}
    for point in points:
        if point.row.codec == "none":
            plain.setdefault(row_name(point.row), []).append(point)
    ranked = sorted(plain, key=lambda name: -sum(p.exact for p in plain[name]) / len(plain[name]))
    coloured = [name for name in ranked if name != BASELINE][: len(COLOURS)]
    lines = []
    for name, of_policy in plain.items():
        place = coloured.index(name) if name in coloured else None
        colour = "black" if name == BASELINE else REST if place is None else COLOURS[place]
        marker = "*" if name == BASELINE else "." if place is None else MARKERS[place]
        ordered = sorted(of_policy, key=lambda point: point.bytes_per_token)
        lines.append(_Line(name, ordered, colour, marker, best=place is not None or name == BASELINE))
    return lines


def _draw_front(axes: Axes, points: Sequence[_Point]) -> None:
    """Steps: the best score within so many bytes. Drawn under the lines."""
    front = pareto((point.bytes_per_token, point.exact) for point in points)
    sizes, scores = zip(*front, strict=True)
    axes.step(sizes, scores, where="post", color="#D9D9D9", linewidth=7, solid_capstyle="round", zorder=1)
    named = {(point.bytes_per_token, point.exact): point.row for point in points}
    for place, after in zip(front, [*front[1:], (inf, 1.0)], strict=True):
        if after[0] < place[0] * _SAME_SIZE:
            continue
        row = named[place]
        codec = "" if row.codec == "none" else row.codec
        text = " ".join(filter(None, (row_name(row), removed_label(row), codec)))
        axes.annotate(  # slanted, as the front is often crowded at its left end
            text, place, (-3, 6), textcoords="offset points", fontsize=6.5, color="#444444",
            ha="right", va="bottom", rotation=-35, rotation_mode="anchor",
        )  # fmt: skip
    axes.annotate("Pareto front", front[0], (0, -14), textcoords="offset points", fontsize=8, color="#777777")


def _draw_lines(axes: Axes, points: Sequence[_Point], lines: Sequence[_Line]) -> None:
    """The lines, and points under a codec, hollow and in the colour of their policy."""
    for line in lines:
        size, (width, over) = 12 if line.marker == "*" else 6, (1.8, 3) if line.best else (0.9, 2)
        marks: dict[str, Any] = {"marker": line.marker, "markersize": size, "linewidth": width, "zorder": over}
        axes.plot(*_places(line.points), color=line.colour, **marks)
    colours = {line.name: line.colour for line in lines}
    encoded = [point for point in points if point.row.codec != "none"]
    edges = [colours.get(row_name(point.row), REST) for point in encoded]
    axes.scatter(*_places(encoded), s=16, facecolors="none", edgecolors=edges, linewidths=0.9, zorder=2.5)


def _draw_base(axes: Axes, full_16bit: int) -> None:
    """The full cache in 16 bits; where the model computes in wider numbers, its own point is further right."""
    axes.axvline(full_16bit, color="#777777", linewidth=0.9, linestyle=":", zorder=1)
    place: dict[str, Any] = {"xycoords": axes.get_xaxis_transform(), "textcoords": "offset points", "rotation": 90}
    axes.annotate("full cache in 16 bits", (full_16bit, 0), (-3, 4), ha="right", fontsize=7, color="#777777", **place)


def _places(points: Sequence[_Point]) -> tuple[list[float], list[float]]:
    return [point.bytes_per_token for point in points], [point.exact for point in points]


def _draw_panel(axes: Axes, summary: Summary, cell: Cell, lines: Sequence[_Line]) -> None:
    """One cell; grey if the model itself cannot answer it."""
    able = summary.able(cell)
    for line in lines:
        entries = [summary.entries.get((point.row, cell)) for point in line.points]
        measured = [entry for entry in entries if entry is not None and entry.refused is None]
        sizes, scores = [entry.bytes_per_token for entry in measured], [entry.exact for entry in measured]
        colour = line.colour if able else REST
        axes.plot(sizes, scores, color=colour, marker=line.marker, markersize=3, linewidth=1.1 if line.best else 0.5)
    axes.set_title(cell.label, fontsize=7.5, color="black" if able else REST)
    axes.set_facecolor("white" if able else "#EFEFEF")
    if not able:
        text = f"the model itself:\nunder {ABLE:.0%}"
        axes.text(0.5, 0.5, text, transform=axes.transAxes, fontsize=7, color="#777777", ha="center", va="center")
    set_scales(axes, (1, 4))
    axes.set_ylim(-0.05, 1.05)
    axes.yaxis.set_ticks([0, 0.5, 1])
    axes.tick_params(labelsize=6.5, length=2)


def set_scales(axes: Axes, ticks: tuple[int, ...], shown: Callable[[float], str] = "{:,.0f}".format) -> None:
    """Bytes on a log scale with labels at `ticks` of each power of ten, shares in percent."""
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(base=10, subs=ticks))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: shown(value)))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.spines[["top", "right"]].set_visible(False)


def _finish(axes: Axes, summary: Summary, title: str) -> None:
    cells = ", ".join(cell.label for cell in summary.common())
    below = "\n".join(wrap(f"mean over {cells}; hollow: under a codec", 130))
    axes.set_title(f"{title}\n{below}", fontsize=10, loc="left")
    set_scales(axes, (1, 2, 5))
    axes.set_xlim(left=axes.get_xlim()[0] * 0.75)  # room for the names at the left end of the front
    axes.set_ylim(-0.02, 1.12)
    axes.set_xlabel("stored bytes per document token (log scale)")
    axes.set_ylabel("exact answers")
    axes.grid(True, which="major", color="#EDEDED", zorder=0)


def _label(axes: Axes, lines: Sequence[_Line]) -> None:
    """Names to the right of the plot, joined to the last points of their lines, without overlap."""
    bottom, top = axes.get_ylim()
    ends = sorted(lines, key=lambda line: -line.points[-1].exact)
    heights = [(line.points[-1].exact - bottom) / (top - bottom) for line in ends]
    for line, height in zip(ends, spread_down(heights, _LABEL_HEIGHT), strict=True):
        end = line.points[-1]
        size, weight, colour = (9, "bold", line.colour) if line.best else (8, "normal", "#666666")
        arrow = {"arrowstyle": "-", "color": line.colour, "linewidth": 0.5, "alpha": 0.6, "shrinkB": 4}
        axes.annotate(
            line.name, (end.bytes_per_token, end.exact), (1.02, height), textcoords="axes fraction", va="center",
            fontsize=size, fontweight=weight, color=colour, arrowprops=arrow,
        )  # fmt: skip


def spread_down(heights: Sequence[float], distance: float) -> list[float]:
    """Heights at least `distance` apart, near these descending ones, and from 0 upwards."""
    placed: list[float] = []
    for height in heights:
        placed.append(min(height, placed[-1] - distance) if placed else height)
    floor = 0.0
    for place in reversed(range(len(placed))):
        placed[place] = max(placed[place], floor)
        floor = placed[place] + distance
    return placed
