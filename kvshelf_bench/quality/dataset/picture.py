"""Score over bytes: a point with its interval for each way, and the steps of the best score within so many bytes."""

from __future__ import annotations

from pathlib import Path

from matplotlib.figure import Figure

from kvshelf_bench.quality.dataset.summary import DatasetSummary
from kvshelf_bench.quality.picture import COLOURS, MARKERS, REST, set_scales, spread_down
from kvshelf_bench.quality.summary import pareto

_LABEL_HEIGHT = 0.03


def draw(summary: DatasetSummary, path: Path, title: str) -> None:
    """Write the picture in the format of the suffix of `path`."""
    ways = [way for way in summary.ways if way.documents]
    figure = Figure(figsize=(11, 6.5), layout="constrained")
    axes = figure.add_subplot()
    front = pareto((way.bytes, way.score) for way in ways)
    if front:
        axes.step(*zip(*front, strict=True), where="post", color="#D9D9D9", linewidth=7, zorder=1)
    policies = list(dict.fromkeys(way.name.partition("@")[0].partition("/")[0] for way in ways))
    for way in ways:
        place = policies.index(way.name.partition("@")[0].partition("/")[0]) - 1  # the full cache is black
        colour = "black" if place < 0 else COLOURS[place] if place < len(COLOURS) else REST
        marker = "*" if place < 0 else MARKERS[place % len(MARKERS)]
        bars = [[max(0.0, way.score - way.low)], [max(0.0, way.high - way.score)]]  # a bound at 0 or 1 is rounded
        axes.errorbar(way.bytes, way.score, bars, color=colour, marker=marker, elinewidth=0.6, zorder=2)
    set_scales(axes, (1, 2, 5), lambda value: f"{value / 1000:,.0f} kB")
    axes.set_ylim(bottom=0)
    bottom, top = axes.get_ylim()
    ordered = sorted(ways, key=lambda way: -way.score)
    heights = spread_down([(way.score - bottom) / (top - bottom) for way in ordered], _LABEL_HEIGHT)
    for way, height in zip(ordered, heights, strict=True):
        arrow = {"arrowstyle": "-", "color": "#BBBBBB", "linewidth": 0.5}
        where = (way.bytes, way.score)
        axes.annotate(
            way.name, where, (1.02, height), textcoords="axes fraction", fontsize=8, va="center", arrowprops=arrow
        )
    axes.set_xlabel("stored bytes of a document (log scale)")
    axes.set_ylabel("mean score, 95 % interval over documents")
    axes.set_title(title, fontsize=10, loc="left")
    axes.grid(True, which="major", color="#EDEDED", zorder=0)
    figure.savefig(path, dpi=160)
