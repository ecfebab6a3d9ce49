"""A needle in a haystack, by the length of the document and the depth of the needle in it."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import fmean

from matplotlib.figure import Figure
from rich.table import Table

from kvshelf.errors import InvalidRequest
from kvshelf.model.text import TextFormat
from kvshelf.samples.tasks import SHORT_VALUE_DIGITS, haystacks, make_facts
from kvshelf_bench.quality.dataset.documents import Document
from kvshelf_bench.quality.dataset.rows import Question
from kvshelf_bench.quality.dataset.summary import DatasetSummary
from kvshelf_bench.quality.tables import bare_table

_SENTENCE_ENDS = (". ", ".\n", "! ", "? ", "\n\n")


@dataclass(frozen=True)
class Needle:
    """A sentence to hide, the question about it and its answer."""

    sentence: str
    question: str
    answer: str


@dataclass(frozen=True)
class Cells:
    """The grid. lengths: tokens of a document; depths: percent of the haystack before the needle. documents: of a cell;
    each begins elsewhere in the haystack, and has a fact of its own unless a needle is given."""

    lengths: Sequence[int]
    depths: Sequence[int]
    documents: int = 1
    seed: int = 0

    @property
    def places(self) -> list[tuple[int, int]]:
        return list(product(self.lengths, self.depths))


def make_documents(cells: Cells, form: TextFormat, haystack: str | None, needle: Needle | None) -> list[Document]:
    """The documents, cell by cell. haystack: a text; None: prose that is made. Raises `InvalidRequest` for a haystack
    that is shorter than a document, and for lengths that have no room for the needle."""
    documents = []
    for number in range(cells.documents):
        rng = random.Random(f"needle/{cells.seed}/{number}")
        hidden = needle or _fact(rng)
        for tokens, depth in cells.places:
            text = _hide(form, _hay(form, haystack, tokens, number, cells), hidden, tokens, depth)
            question = Question(hidden.question, (hidden.answer,), task=f"{tokens}")
            documents.append(Document(f"{tokens} tokens, {depth} %, {number}", text, (question,)))
    return documents


def read_haystack(path: Path) -> str:
    """A file, or all `.txt` files of a folder one after another. Raises `InvalidRequest`."""
    try:
        files = sorted(path.glob("*.txt")) if path.is_dir() else [path]
        text = "\n\n".join(file.read_text("utf-8") for file in files)
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"--haystack {path} cannot be read: {error}", param="haystack") from error
    if not text.strip():
        raise InvalidRequest(f"--haystack {path} has no text", param="haystack")
    return text


def grids(summary: DatasetSummary, cells: Cells) -> list[Table]:
    """The mean score of each cell, in percent: a table for each way."""
    tables = []
    for name, scores in _scores(summary, cells).items():
        table = bare_table(name)
        for heading in ("tokens, depth", *(f"{depth} %" for depth in cells.depths)):
            table.add_column(heading, justify="right")
        for tokens in cells.lengths:
            shown = (scores[tokens, depth] for depth in cells.depths)
            table.add_row(f"{tokens}", *("refused" if one is None else f"{100 * one:.0f}" for one in shown))
        tables.append(table)
    return tables


def draw(summary: DatasetSummary, path: Path, title: str, cells: Cells) -> None:
    """A map of each way: depth over length, from red (never found) to green."""
    ways = _scores(summary, cells)
    columns = min(3, len(ways))
    rows = -(-len(ways) // columns)
    figure = Figure(figsize=(1 + 3.6 * columns, 1 + 2.6 * rows), layout="constrained")
    for place, (name, scores) in enumerate(ways.items(), 1):
        axes = figure.add_subplot(rows, columns, place)
        values = [[scores[tokens, depth] for tokens in cells.lengths] for depth in cells.depths]
        shown = [[float("nan") if one is None else one for one in line] for line in values]
        axes.imshow(shown, vmin=0, vmax=1, cmap="RdYlGn", aspect="auto")
        for row, line in enumerate(shown):
            for column, one in enumerate(line):
                axes.text(column, row, "" if one != one else f"{100 * one:.0f}", ha="center", va="center", fontsize=7)
        axes.set_xticks(range(len(cells.lengths)), [f"{tokens}" for tokens in cells.lengths], fontsize=7)
        axes.set_yticks(range(len(cells.depths)), [f"{depth} %" for depth in cells.depths], fontsize=7)
        axes.set_title(name, fontsize=9, loc="left")
    figure.suptitle(f"{title}\nright answers in %, by tokens and depth", fontsize=10)
    figure.savefig(path, dpi=160)


def _scores(summary: DatasetSummary, cells: Cells) -> Mapping[str, Mapping[tuple[int, int], float | None]]:
    count = len(cells.places)
    by_way = {}
    for name, outcomes in summary.outcomes.items():
        of_cell = {place: outcomes[at::count] for at, place in enumerate(cells.places)}
        by_way[name] = {
            place: None if any(one.refused for one in several) else fmean(one.partial[0] for one in several)
            for place, several in of_cell.items()
        }
    return by_way


def _fact(rng: random.Random) -> Needle:
    (fact,) = make_facts(rng, [rng.randint(*SHORT_VALUE_DIGITS)])
    return Needle(fact.sentence(rng), fact.question(rng).text, fact.value)


def _hay(form: TextFormat, haystack: str | None, tokens: int, number: int, cells: Cells) -> list[int]:
    if haystack is None:
        *_, prose = haystacks(cells.seed + number + 1, tokens, form.count_tokens)
        return form.encode(prose)
    ids = form.encode(haystack)
    if len(ids) < tokens:
        raise InvalidRequest(f"the haystack has {len(ids)} tokens, fewer than {tokens}", param="lengths")
    first = number * tokens % (len(ids) - tokens + 1)
    return ids[first : first + tokens]


def _hide(form: TextFormat, hay: list[int], needle: Needle, tokens: int, depth: int) -> str:
    """The needle behind the last sentence that ends before its depth."""
    room = tokens - form.count_tokens(f" {needle.sentence} ")
    if room < 1:
        raise InvalidRequest(f"{tokens} tokens have no room for the needle", param="lengths")
    hay = hay[:room]
    at = len(hay) * depth // 100
    before, after = form.decode(hay[:at]), form.decode(hay[at:])
    if depth < 100:
        cut = max((before.rfind(end) + len(end) for end in _SENTENCE_ENDS if end in before), default=0)
        before, after = before[:cut], before[cut:] + after
    return f"{before.rstrip()} {needle.sentence} {after.lstrip()}".strip()
