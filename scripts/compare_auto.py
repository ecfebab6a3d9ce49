"""What choosing for each document saves: the policy "auto" beside the best fixed choice.

    python scripts/compare_auto.py --documents 6 --output auto.jsonl    # 60 documents, half an hour on one core

Every candidate of "auto" is made and measured on documents of the ten kinds of `validate_probe.py`. "auto" takes the
smallest that reaches the floor on the document; a fixed choice is one candidate for all documents, and is allowed only
if it reaches the floor on each. docs/internals/probe.md shows what came out.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter, defaultdict
from pathlib import Path
from statistics import fmean

import torch
from validate_probe import BENCH, TEXTS, make

from kvshelf.engine.engine import Engine
from kvshelf.workers.replica.create.auto import MIN_QUALITY, SizeTarget, auto
from kvshelf_bench.quality.retrieval import counter

SEED = 30_261_125


def measured(engine: Engine, kind: str, number: int, tokens: int) -> dict[str, list[float]]:
    """Bytes per document token of each candidate, and 1 if it reaches the floor."""
    text, _ = make(kind, tokens, SEED + number, counter(engine))
    selection, target = auto(engine, text), SizeTarget(MIN_QUALITY)
    found = {}
    for level, compression in zip(selection.levels, engine.run_levels(selection.levels), strict=True):
        assert compression.quality is not None
        good = level.keeps_all or target.good(compression.quality)
        ratio = level.job.budget.compression_ratio
        name = f"{level.job.policy.name} {ratio:g} {level.codec}"
        found[name] = [compression.cache.pack().nbytes / level.job.num_tokens, float(good)]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="kvshelf-tiny")
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--documents", type=int, default=6, help="of each kind")
    parser.add_argument("--output", type=Path, required=True, help="every measurement, a line of JSON for a document")
    given = parser.parse_args()
    torch.set_num_threads(1)
    engine = Engine.load(given.model)
    with given.output.open("a") as out:
        for number in range(given.documents):
            for kind in (*TEXTS, *BENCH):
                found = measured(engine, kind, number, given.tokens)
                out.write(json.dumps({"kind": kind, "number": number, "found": found}) + "\n")
                out.flush()
    show([json.loads(line)["found"] for line in given.output.read_text().splitlines()])


def show(documents: list[dict[str, list[float]]]) -> None:
    chosen, sizes = Counter[str](), []
    every: dict[str, list[list[float]]] = defaultdict(list)
    for found in documents:
        name, (size, _) = min(((n, one) for n, one in found.items() if one[1]), key=lambda pair: pair[1][0])
        chosen[name] += 1
        sizes.append(size)
        for each, one in found.items():
            every[each].append(one)
    print(f"auto: {fmean(sizes):.0f} B a token over {len(documents)} documents; it chose")
    for name, count in chosen.most_common():
        print(f"  {count:3d}  {name}")
    print("| fixed | B a token | reaches the floor |\n|---|---|---|")
    for name, rows in sorted(every.items(), key=lambda item: fmean(one[0] for one in item[1])):
        print(f"| {name} | {fmean(one[0] for one in rows):.0f} | {sum(one[1] for one in rows):.0f} of {len(rows)} |")


if __name__ == "__main__":
    main()
