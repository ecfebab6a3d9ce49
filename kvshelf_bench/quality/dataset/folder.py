"""The results of a dataset as a folder: one of kvpress's form for each way, and all as our JSON, table and picture."""

from __future__ import annotations

import csv
import json
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Any, Final

from kvshelf.errors import InvalidRequest
from kvshelf_bench.quality.dataset.documents import Document
from kvshelf_bench.quality.dataset.summary import DatasetSummary, WayScore
from kvshelf_bench.quality.outcome import Outcome

REPORT: Final = "results.json"

_COLUMNS: Final = (
    *("id", "task", "question", "answer_prefix", "answer", "max_new_tokens", "predicted_answer"),
    *("compression_ratio", "scorer", "score"),
)


def require_new(path: Path) -> None:
    """Raises `InvalidRequest` for a folder that cannot be made, or that exists: before any work."""
    if path.exists():
        raise InvalidRequest(f"--results {path} exists; give a folder that does not", param="results")
    if not path.absolute().parent.is_dir() or not os.access(path.absolute().parent, os.W_OK):
        raise InvalidRequest(f"--results {path} cannot be made there: no folder that may be written", param="results")


def write(path: Path, report: Mapping[str, Any], summary: DatasetSummary, text: str, draw: Any = None) -> None:
    """Write the folder as a whole, or nothing of it. draw: called with the path of the picture."""
    folder = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.absolute().parent))
    try:
        (folder / REPORT).write_text(json.dumps(report, indent=2, default=asdict) + "\n")
        (folder / "table.txt").write_text(text)
        if draw is not None:
            draw(folder / "score.svg")
        for way in summary.ways:
            _write_way(folder / _folder_name(report, way), report, summary, way)
        folder.chmod(0o755)
        folder.rename(path)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def read_report(path: Path) -> dict[str, Any]:
    """The JSON of a folder that `write` made. Raises `InvalidRequest`."""
    try:
        report = json.loads((path / REPORT).read_text())
        for way in report["ways"]:
            _ = way["way"], way["bytes"], [(one["id"], one["scores"]) for one in way["outcomes"]]
        _ = [(one["id"], [question["text"] for question in one["questions"]]) for one in report["documents"]]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise InvalidRequest(
            f"--compare {path} is no folder that --results made: {error or type(error).__name__}", param="compare"
        ) from error
    return dict(report)


def _folder_name(report: Mapping[str, Any], way: WayScore) -> str:
    """As kvpress's `evaluate.py` names it: data set, model, press and what follows from the options."""
    model = str(report["model"]).replace("/", "--")
    fraction = f"fraction{report['fraction']:.3f}" if report.get("fraction", 1.0) < 1 else ""
    known = "query_aware" if report["asking"]["known"] else ""
    parts = (Path(str(report["dataset"])).stem, model, way.name.replace("/", "--"), fraction, known)
    return "__".join(filter(None, (part.replace("/", "--") for part in parts)))


def _write_way(folder: Path, report: Mapping[str, Any], summary: DatasetSummary, way: WayScore) -> None:
    folder.mkdir()
    outcomes, row = summary.outcomes[way.name], summary.rows[way.name]
    with (folder / "predictions.csv").open("w", newline="", encoding="utf-8") as file:
        table = csv.writer(file)
        table.writerow(_COLUMNS)
        for document, outcome in zip(summary.documents, outcomes, strict=True):
            table.writerows(_predictions(document, outcome, row.removed))
    (folder / "metrics.json").write_text(json.dumps(_metrics(summary.documents, outcomes), indent=4) + "\n")
    config = {
        "dataset": report["dataset"],
        "data_dir": None,
        "model": report["model"],
        "device": report["device"],
        "press_name": row.variant.label,
        "compression_ratio": row.removed,
        "budget_tokens": row.budget,
        "codec": row.codec,
        "fraction": report.get("fraction", 1.0),
        "max_new_tokens": report["asking"]["max_new_tokens"] or None,
        "max_context_length": report["truncate"].partition(":")[2] or None,
        "query_aware": report["asking"]["known"],
        "seed": report.get("seed", 0),
        "bytes_per_document": way.bytes,
    }
    lines = (f"{name}: {json.dumps(value)}\n" for name, value in config.items())  # JSON's values are YAML's
    (folder / "config.yaml").write_text("".join(lines))


def _predictions(document: Document, outcome: Outcome, removed: float) -> list[tuple[Any, ...]]:
    if outcome.refused is not None:
        return []
    return [
        (
            *(document.id, question.task, question.text, question.prefix, json.dumps(question.answers)),
            *(question.max_new_tokens or "", answer, removed, question.scorer, score),
        )
        for question, answer, score in zip(document.questions, outcome.answers, outcome.partial, strict=True)
    ]


def _metrics(documents: Sequence[Document], outcomes: Sequence[Outcome]) -> dict[str, dict[str, float]]:
    """By task and scorer, in percent, as the metrics of RULER in kvpress; `string_match` is its name for both."""
    scores: dict[str, dict[str, list[float]]] = {}
    for document, outcome in zip(documents, outcomes, strict=True):
        for question, score in zip(document.questions, outcome.partial, strict=False):
            metric = question.scorer.replace("string_match_all", "string_match").replace("_match_part", "_match")
            scores.setdefault(question.task or "all", {}).setdefault(metric, []).append(score)
    return {
        task: {metric: round(100 * fmean(values), 2) for metric, values in metrics.items()}
        for task, metrics in scores.items()
    }
