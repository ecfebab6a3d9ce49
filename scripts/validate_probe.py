"""Does the measured quality predict what is answered? Ranks of the probe's agreement beside ranks of right answers.

    python scripts/validate_probe.py --tokens 1024 --documents 4

Every document of the quality bench's tasks is kept in several ways, from as few prefills as there are kinds of passes.
Each cache is measured by the probe, which knows nothing of the bench, and asked the bench's questions. docs/quality.md
shows what came out.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from kvshelf.bench.quality.retrieval import EVALUATION_SEED, counter
from kvshelf.bench.quality.suite import Case, HaystackName, TaskName, make_case, score
from kvshelf.workers.engine.decode.generation import Sampling
from kvshelf.workers.engine.engine import Engine
from kvshelf.workers.engine.inputs.job import Level
from kvshelf.workers.engine.quality import QUESTIONS

CELLS: tuple[tuple[TaskName, HaystackName], ...] = (
    ("needle", "filler"),
    ("needle", "prose"),
    ("multikey", "filler"),
    ("multikey", "prose"),
    ("multikey", "dense"),
    ("digits32", "prose"),
    ("digits32", "dense"),
)
WAYS: tuple[tuple[str, float | None, str], ...] = (
    *(("full", None, codec) for codec in ("none", "int4", "int2")),
    *(("keydiff", removed, "none") for removed in (0.5, 0.75, 0.875)),
    *(("kvzip", removed, "none") for removed in (0.5, 0.75, 0.875)),
    *(("layer_defensivekv", removed, "none") for removed in (0.5, 0.75)),
    *(("streaming_llm", removed, "none") for removed in (0.5, 0.75)),
    *((policy, 0.5, "none") for policy in ("lagkv", "snapkv", "tova", "expected_attention", "knorm")),
    ("keydiff", 0.5, "int4"),
    ("kvzip", 0.5, "int4"),
)


@dataclass(frozen=True)
class Measured:
    """One document kept in one way: what the probe said, and the share of the bench's questions answered exactly."""

    cell: str
    document: int
    way: str
    agreement: float
    kl: float
    exact: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="kvshelf-tiny")
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--documents", type=int, default=4, help="per task and haystack")
    parser.add_argument("--questions", type=int, default=QUESTIONS, help="that the probe makes")
    parser.add_argument("--output", type=Path, help="every measurement, as JSON")
    given = parser.parse_args()
    torch.set_num_threads(1)
    engine = Engine.load(given.model)
    found: list[Measured] = []
    for task, haystack in CELLS:
        for document in range(given.documents):
            case = make_case(
                task, haystack, given.tokens, EVALUATION_SEED + document, counter(engine), questions=16
            )  # fmt: skip
            found += measured(engine, case, f"{task}, {haystack}", document, given.questions)
        print(f"{task}, {haystack}: done", flush=True)
    if given.output:
        given.output.write_text(json.dumps([asdict(one) for one in found], indent=1) + "\n")
    print("\n" + "\n".join(report(found)))


def measured(engine: Engine, case: Case, cell: str, document: int, questions: int) -> list[Measured]:
    """One document in every way."""
    encoded = engine.encode_document(case.text)
    jobs = {
        (policy, removed): engine.prepare(encoded, policy=policy, compression_ratio=removed)
        for policy, removed, _ in WAYS
    }
    levels = [Level(jobs[policy, removed], codec) for policy, removed, codec in WAYS]
    sampling = Sampling(24 + max(len(ask.references[0]) for ask in case.asks))
    rows = []
    for way, compression in zip(WAYS, engine.run_levels(levels, questions=questions), strict=True):
        answers = engine.answer_all([(compression.cache, ask.text) for ask in case.asks], sampling)
        exact = fmean(score(ask, answer.text).exact for ask, answer in zip(case.asks, answers, strict=True))
        assert compression.quality is not None, "the documents are long enough to make questions from"
        agreement, kl = compression.quality.agreement, compression.quality.kl
        rows.append(Measured(cell, document, label(*way), agreement, kl, exact))
    return rows


def label(policy: str, removed: float | None, codec: str) -> str:
    ratio = "" if removed is None else f" {removed * 100:g} %"
    return f"`{policy}`{ratio}" + ("" if codec == "none" else f", {codec}")


def report(found: list[Measured]) -> list[str]:
    """Markdown: every way over all cells, then the rank correlations."""
    ways = grouped(found, lambda one: one.way)
    order = sorted(ways, key=lambda way: -fmean(one.agreement for one in ways[way]))
    lines = ["| kept as | agreement | KL, nats | exact answers |", "|---|---|---|---|"]
    for way in order:
        agreement, kl, exact = means(ways[way])
        lines.append(f"| {way} | {agreement:.3f} | {kl:.3f} | {exact:.1%} |".replace("%", " %"))
    cells = grouped(found, lambda one: (one.cell, one.way))
    kinds: dict[str, Iterable[list[Measured]]] = {
        "ways, each over all documents": ways.values(),
        "kinds of document x ways": cells.values(),
        "single documents x ways": ([one] for one in found),
    }
    for name in dict.fromkeys(one.cell for one in found):
        kinds[f"ways, {name}"] = grouped([one for one in found if one.cell == name], lambda one: one.way).values()
    lines += ["", "| ranked | n | agreement | KL |", "|---|---|---|---|"]
    for name, groups in kinds.items():
        points = [means(group) for group in groups]
        by_agreement = spearman([p[0] for p in points], [p[2] for p in points])
        by_kl = spearman([-p[1] for p in points], [p[2] for p in points])
        lines.append(f"| {name} | {len(points)} | {by_agreement:.2f} | {by_kl:.2f} |")
    return lines


def grouped(found: Iterable[Measured], by: Callable[[Measured], Any]) -> dict[Any, list[Measured]]:
    groups: dict[Any, list[Measured]] = {}
    for one in found:
        groups.setdefault(by(one), []).append(one)
    return groups


def means(group: list[Measured]) -> tuple[float, float, float]:
    """Agreement, KL and exact answers."""
    return fmean(one.agreement for one in group), fmean(one.kl for one in group), fmean(one.exact for one in group)


def spearman(first: list[float], second: list[float]) -> float:
    """Spearman's rank correlation: equal values share the mean of their ranks."""
    ranks = torch.stack([_ranks(first), _ranks(second)])
    return float(torch.corrcoef(ranks)[0, 1])


def _ranks(values: list[float]) -> torch.Tensor:
    column = torch.tensor(values, dtype=torch.float64)
    below = (column[:, None] > column[None]).sum(dim=1)
    equal = (column[:, None] == column[None]).sum(dim=1)
    return below + (equal - 1) / 2.0


if __name__ == "__main__":
    main()
