"""Does the figure tell which answers a cache has lost? Real documents with questions, kept in several ways.

    kvshelf bench quality --model smollm2 --dataset documents.jsonl --ways ... --cues 0 --output results.jsonl
    python -m scripts.validate_figure results.jsonl --dataset documents.jsonl --model smollm2 --output figures.jsonl
    python -m scripts.validate_figure --report figures.jsonl --picture figures.png
    python -m scripts.validate_figure --dataset documents.jsonl --model smollm2 --lengths 500 2000 6000

The first command asks every cache its questions, the second measures the figure of the same caches, the third shows
both: a table, and a picture of the share of the full cache's right answers that are lost over the figure. The last one
measures what a figure takes beside the prefill of a document of so many tokens.
docs/internals/probe.md shows what came out.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import torch

from kvshelf.api.creation import DEFAULT_CODEC
from kvshelf.engine.engine import Engine
from kvshelf.engine.inputs.job import Level, shared
from kvshelf.engine.quality import How, cue_count
from kvshelf_bench.quality.dataset.documents import Document, read_documents

FLOOR: Final = 0.95
LEAST_RIGHT: Final = 2
"""Right answers of the full cache below which a document tells nothing of a share."""


@dataclass(frozen=True)
class Measured:
    """One document kept in one way. right: answers of the full cache, of which this one has `lost`. Seconds of one
    processor: measuring the figure, and prefilling the document without it."""

    model: str
    document: str
    tokens: int
    way: str
    right: int
    lost: int
    agreement: float | None
    low: float | None
    cues: int
    asked: int
    kl: float
    quality_s: float
    prefill_s: float


def lost_answers(results: Path) -> dict[str, dict[tuple[str, float, str], tuple[int, int]]]:
    """Of each document and way (policy, removed, codec): right answers of the full cache, and those lost."""
    rows = [json.loads(line) for line in results.read_text().splitlines()]
    exact: dict[str, dict[tuple[str, float, str], list[int]]] = {}
    for row in rows:
        if row["refused"] is None:
            exact.setdefault(row["document"], {})[row["policy"], row["removed"], row["codec"]] = row["exact"]
    by_document = {}
    for document, ways in exact.items():
        full = ways.pop(("full", 0.0, "none"))
        lost = {way: sum(had > has for had, has in zip(full, own, strict=True)) for way, own in ways.items()}
        by_document[document] = {way: (sum(full), count) for way, count in lost.items()}
    return by_document


def measured(
    engine: Engine, document: Document, ways: Mapping[tuple[str, float, str], tuple[int, int]], how: How
) -> list[Measured]:
    """The figures of a document's caches, all against the answers of one full cache."""
    encoded = engine.encode_document(document.context)
    levels = {}
    for policy, removed, codec in ways:
        job = engine.prepare(encoded, policy=policy, compression_ratio=removed or None)
        levels[policy, removed, codec] = engine.compressor.level(job, codec)
    cues = cue_count(how, len(encoded.token_ids))
    rows = []
    started = time.process_time()
    engine.compressor.prefill([Level(engine.prepare(encoded, policy="full"))])
    prefill_s = time.process_time() - started
    for group in shared(list(levels.values())):
        started = time.process_time()
        prefill = engine.compressor.prefill(group, cues=cues)
        took_s = time.process_time() - started
        assert prefill.reference is not None
        probe_s = prefill.reference.probe_s  # wall time, as the prefill's: only their ratio counts
        in_prefill_s = took_s * probe_s / (probe_s + prefill.compressions[0].prefill_s)
        for level, compression in zip(group, prefill.compressions, strict=True):
            way = next(way for way, one in levels.items() if one is level)
            started = time.process_time()
            quality = engine.compressor.measure(compression.cache, prefill.reference)
            quality_s = in_prefill_s + time.process_time() - started
            right, lost = ways[way]
            policy, removed, codec = way
            named = f"{policy} {removed:g} {codec}" if removed else f"{policy} {codec}"
            about = (engine.name, document.id, len(encoded.token_ids), named, right, lost)
            figure = (quality.agreement, quality.low, quality.cues, quality.asked, quality.kl)
            rows.append(Measured(*about, *figure, quality_s, prefill_s))
    return rows


def costs(engine: Engine, documents: Sequence[Document], tokens: int, how: How) -> str:
    """A line of Markdown: seconds of one processor for the prefill of so many tokens of these documents, kept by the
    default, and for its figure."""
    text, count = (
        "\n".join(document.context for document in documents),
        engine.encoder.require_text("document").count_tokens,
    )
    part = text[: int(len(text) * tokens / count(text))]
    job = engine.prepare(part)
    level, cues = engine.compressor.level(job, DEFAULT_CODEC), cue_count(how, job.num_tokens)
    engine.run_levels([engine.compressor.level(engine.prepare(part[:2000]))], cues=1)  # records the program
    started = time.process_time()
    prefill = engine.compressor.prefill([level], cues=cues)
    took_s = time.process_time() - started
    assert prefill.reference is not None
    share = prefill.reference.probe_s / (prefill.reference.probe_s + prefill.compressions[0].prefill_s)
    started = time.process_time()
    figure = engine.compressor.measure(prefill.compressions[0].cache, prefill.reference)
    quality_s, prefill_s = took_s * share + time.process_time() - started, took_s * (1 - share)
    cells = (engine.name, job.num_tokens, how, figure.asked, figure.cues)
    seconds = (f"{number:.2f}" for number in (prefill_s, quality_s, quality_s / prefill_s))
    return f"| {' | '.join(map(str, (*cells, *seconds)))} |"


def spearman(first: Sequence[float], second: Sequence[float]) -> float:
    """Spearman's rank correlation: equal values share the mean of their ranks."""
    ranks = torch.stack([_ranks(first), _ranks(second)])
    return float(torch.corrcoef(ranks)[0, 1])


def _ranks(values: Sequence[float]) -> torch.Tensor:
    column = torch.tensor(values, dtype=torch.float64)
    below = (column[:, None] > column[None]).sum(dim=1)
    equal = (column[:, None] == column[None]).sum(dim=1)
    return below + (equal - 1) / 2.0


def report(figures: Sequence[Measured]) -> list[str]:
    """Markdown: each way, and how well the figure orders the caches."""
    lines = ["| model | way | documents | lost of right | agreement, mean (least to most) | low, mean |"]
    lines.append("|---|---|---|---|---|---|")
    for model, way in dict.fromkeys((one.model, one.way) for one in figures):
        rows = [one for one in figures if (one.model, one.way) == (model, way)]
        shares = [one.agreement for one in rows if one.agreement is not None]
        lows = [one.low for one in rows if one.low is not None]
        lost, right = sum(one.lost for one in rows), sum(one.right for one in rows)
        lines.append(
            f"| {model} | {way} | {len(rows)} | {lost} of {right} | {_mean(shares):.3f} ({min(shares, default=0):.2f} "
            f"to {max(shares, default=0):.2f}) | {_mean(lows):.3f} |"
        )
    telling = [one for one in figures if one.right >= LEAST_RIGHT and one.low is not None]
    lost = [-one.lost / one.right for one in telling]
    met = [one for one in telling if (one.low or 0) >= FLOOR]
    whole = [one for one in telling if one.lost == 0]
    lines += [
        "",
        f"Caches of documents with at least {LEAST_RIGHT} right answers: {len(telling)}. Rank correlation of the share "
        f"lost with agreement {spearman([one.agreement or 0 for one in telling], lost):.2f}, with low "
        f"{spearman([one.low or 0 for one in telling], lost):.2f}. Above {FLOOR} lie {len(met)}, of which "
        f"{sum(one.lost / one.right > 0.05 for one in met)} lost over 5 %; of {len(whole)} that lost nothing "
        f"{sum(one in met for one in whole)} lie above.",
        "",
        f"Measuring took {_mean([one.quality_s for one in figures]):.2f} s, prefilling "
        f"{_mean([one.prefill_s for one in figures]):.2f} s (means, one processor).",
    ]
    return lines


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def draw(figures: Sequence[Measured], path: Path) -> None:
    """The share of right answers lost over the figure, a colour for each way and a marker for each model."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 6), layout="constrained")
    axes = figure.add_subplot()
    models = list(dict.fromkeys(one.model for one in figures))
    for number, way in enumerate(dict.fromkeys(one.way for one in figures)):
        for model, marker in zip(models, "osD^v", strict=False):
            rows = [one for one in figures if (one.model, one.way) == (model, way) and one.agreement is not None]
            rows = [one for one in rows if one.right >= LEAST_RIGHT]
            shares = [one.agreement for one in rows if one.agreement is not None]
            lost = [one.lost / one.right + 0.006 * number for one in rows]  # so that none hides another
            named = f"{way}, {model}" if len(models) > 1 else way
            axes.scatter(shares, lost, color=f"C{number}", marker=marker, label=named, alpha=0.8)
    axes.set(xlabel="agreement", ylabel="share of the full cache's right answers lost", xlim=(-0.02, 1.02))
    axes.legend(fontsize="small")
    axes.grid(alpha=0.3)
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, nargs="?", help="results of kvshelf bench quality --dataset")
    parser.add_argument("--dataset", type=Path)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--quality", choices=("full", "fast"), default="full")
    parser.add_argument("--output", type=Path, default=Path("figures.jsonl"), help="continued where it exists")
    parser.add_argument("--report", type=Path, nargs="+", help="only show what these files hold")
    parser.add_argument("--picture", type=Path)
    parser.add_argument("--lengths", type=int, nargs="+", help="only measure what a figure takes")
    options = parser.parse_args()
    if options.lengths and options.dataset:
        _costs(options.dataset, options.model, options.lengths)
        return
    files = options.report or [options.output]
    if options.report is None:
        if options.results is None or options.dataset is None:
            parser.error("give the results and --dataset, or --report")
        _measure(options.results, options.dataset, options.model, options.quality, options.output)
    rows: list[dict[str, Any]] = [json.loads(line) for path in files for line in path.read_text().splitlines()]
    measured = [Measured(**row) for row in rows]
    print("\n".join(report(measured)))
    if options.picture is not None:
        draw(measured, options.picture)


def _costs(dataset: Path, model: str, lengths: Sequence[int]) -> None:
    torch.set_num_threads(1)
    engine, documents = Engine.load(model), read_documents(dataset)
    print(
        "| model | tokens | figure | asked | cues | prefill, s | figure, s | ratio |\n|---|---|---|---|---|---|---|---|"
    )
    for tokens in lengths:
        for how in ("fast", "full"):
            print(costs(engine, documents, tokens, how), flush=True)


def _measure(results: Path, dataset: Path, model: str, how: How, output: Path) -> None:
    """Append the figures of documents that are not in `output`, those with most right answers first."""
    lost = lost_answers(results)
    done = {json.loads(line)["document"] for line in output.read_text().splitlines()} if output.exists() else set()
    torch.set_num_threads(1)
    engine = Engine.load(model)
    documents = [one for one in read_documents(dataset) if one.id in lost and one.id not in done]
    for document in sorted(documents, key=lambda one: -max(right for right, _ in lost[one.id].values())):
        rows = measured(engine, document, lost[document.id], how)
        with output.open("a") as file:
            file.writelines(json.dumps(asdict(row)) + "\n" for row in rows)
        print(f"{document.id}: {len(rows)} caches", flush=True)


if __name__ == "__main__":
    main()
