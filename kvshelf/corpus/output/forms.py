"""A report as Markdown, or as a page of HTML that needs nothing but itself. What it says comes from `report`."""

from __future__ import annotations

import html
import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Final

_LONGEST: Final = 200
"""Characters of a text of somebody else's that are shown."""

_MARKUP = re.compile(r"([\\`*_{}\[\]<>()#+!|~&:@-])")
_BLOCKS = 24


@dataclass(frozen=True)
class Table:
    """Headings, and rows of as many cells. Numbers stand right: all columns but the first `texts`."""

    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    texts: int = 1


@dataclass(frozen=True)
class Picture:
    """A histogram: what its bars are called, and how many each stands for. Never empty."""

    title: str
    bars: Sequence[tuple[str, int]]


@dataclass(frozen=True)
class Section:
    """One part of a report. Its texts are plain: nothing in them is markup."""

    title: str
    sentences: Sequence[str] = ()
    picture: Picture | None = None
    tables: Sequence[Table] = ()


def markdown(title: str, sections: Sequence[Section]) -> str:
    """Pictures are tables with bars of blocks: an image in Markdown would need a file of its own."""
    parts = [f"# {_md(title)}"]
    for section in sections:
        parts.append(f"## {_md(section.title)}")
        parts += [_md(sentence) for sentence in section.sentences]
        if section.picture is not None:
            parts.append(_md_picture(section.picture))
        parts += [_md_table(table) for table in section.tables]
    return "\n\n".join(parts) + "\n"


def page(title: str, sections: Sequence[Section]) -> str:
    """A whole document. It runs no script and loads nothing, and tells the browser to allow neither."""
    parts = [f"<h1>{_html(title)}</h1>"]
    for section in sections:
        parts.append(f"<h2>{_html(section.title)}</h2>")
        parts += [f"<p>{_html(sentence)}</p>" for sentence in section.sentences]
        if section.picture is not None:
            parts.append(_svg(section.picture))
        parts += [_html_table(table) for table in section.tables]
    return _PAGE.replace("{title}", _html(title)).replace("{body}", "\n".join(parts))


def _shown(text: str) -> str:
    """One line of bounded length. What cannot be seen, or changes the direction of what follows, is written out."""
    cut = text if len(text) <= _LONGEST else text[: _LONGEST - 1] + "…"
    return "".join(
        char if char == " " or unicodedata.category(char)[0] not in "CZ" else f"\\u{ord(char):04x}" for char in cut
    )


def _md(text: str) -> str:
    return _MARKUP.sub(r"\\\1", _shown(text))


def _md_table(table: Table) -> str:
    rules = ["---" if column < table.texts else "---:" for column in range(len(table.headings))]
    lines = [[_md(cell) for cell in row] for row in (table.headings, *table.rows)]
    lines.insert(1, rules)
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _md_picture(picture: Picture) -> str:
    most = max(count for _, count in picture.bars)
    rows = [(_md(label), f"{count:,}", "█" * -(-count * _BLOCKS // most)) for label, count in picture.bars]
    lines = [(_md(picture.title), "documents", ""), ("---", "---:", "---"), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _html(text: str) -> str:
    return html.escape(_shown(text))


def _html_table(table: Table) -> str:
    def row(cells: Sequence[str], tag: str) -> str:
        kinds = zip_longest(cells, [""] * table.texts, fillvalue=' class="number"')
        return f"<tr>{''.join(f'<{tag}{kind}>{_html(cell)}</{tag}>' for cell, kind in kinds)}</tr>"

    body = "\n".join(row(cells, "td") for cells in table.rows)
    return f"<table><thead>{row(table.headings, 'th')}</thead>\n<tbody>\n{body}\n</tbody></table>"


def _svg(picture: Picture) -> str:
    """Bars side by side, their labels below and their counts above."""
    most = max(count for _, count in picture.bars)
    step, high = 56, 140
    width = step * len(picture.bars)
    marks = []
    for number, (label, count) in enumerate(picture.bars):
        x, tall = number * step, round(high * count / most, 1)
        marks.append(f'<rect x="{x + 4}" y="{20 + high - tall}" width="{step - 8}" height="{tall}"/>')
        marks.append(f'<text x="{x + step / 2}" y="{14 + high - tall}">{count:,}</text>')
        marks.append(f'<text x="{x + step / 2}" y="{high + 36}">{_html(label)}</text>')
    what = _html(picture.title)
    return (
        f'<figure><svg role="img" aria-label="{what}" viewBox="0 0 {width} {high + 44}" width="{width}">'
        f"{''.join(marks)}</svg><figcaption>{what}</figcaption></figure>"
    )


_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width">
<title>{title}</title>
<style>
:root { color-scheme: light dark; --ink: #1a1a1a; --ground: #fff; --line: #d0d0d0; --bar: #0072b2; }
@media (prefers-color-scheme: dark) { :root { --ink: #e8e8e8; --ground: #161616; --line: #444; --bar: #56b4e9; } }
body { max-width: 60rem; margin: 2rem auto; padding: 0 1rem; font: 15px/1.5 system-ui, sans-serif; }
body { color: var(--ink); background: var(--ground); }
table { border-collapse: collapse; margin: 1rem 0; }
th, td { text-align: left; vertical-align: top; padding: .2rem 1rem .2rem 0; border-bottom: 1px solid var(--line); }
td { overflow-wrap: anywhere; }
.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
figure { margin: 1rem 0; overflow-x: auto; }
svg { max-width: none; } rect { fill: var(--bar); }
svg text { font: 11px system-ui, sans-serif; text-anchor: middle; fill: var(--ink); }
figcaption { font-size: 13px; }
</style>
</head>
<body>
{body}
</body>
</html>
"""
