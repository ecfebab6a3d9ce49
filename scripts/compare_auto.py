"""What choosing for each document saves: the policy "auto" beside the best fixed choice.

    python scripts/compare_auto.py --documents 6 --output auto.jsonl    # 60 documents, half an hour on one core

Every candidate of "auto" is made and measured on documents of ten kinds, with 30 facts each. "auto" takes the
smallest that reaches the floor on the document; a fixed choice is one candidate for all documents, and is allowed only
if it reaches the floor on each. docs/internals/probe.md shows what came out.
"""

from __future__ import annotations

import argparse
import json
import random
import sysconfig
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from importlib.metadata import distributions
from pathlib import Path
from statistics import fmean
from typing import Final

import torch

from kvshelf.engine.engine import Engine
from kvshelf.samples.tasks import distinct_facts, haystack_pieces, make_facts, spread
from kvshelf.workers.replica.create.auto import MIN_QUALITY, SizeTarget, auto
from kvshelf_bench.quality.retrieval import counter

SEED = 30_261_125
FACTS: Final = 30


def licences(rng: random.Random) -> str:
    """A licence of an installed package."""
    files = [
        file for distribution in distributions() for file in distribution.files or () if "LICENSE" in file.name.upper()
    ]
    paths = sorted({path for file in files if (path := Path(str(file.locate()))).is_file()})
    return rng.choice([path for path in paths if path.stat().st_size > 5_000]).read_text(errors="replace")


def code(rng: random.Random) -> str:
    """A module of Python's standard library."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    paths = sorted(path for path in folder.glob("*.py") if path.stat().st_size > 20_000)
    return rng.choice(paths).read_text(errors="replace")


def logs(rng: random.Random) -> str:
    """Lines with times, services, numbers of requests and durations."""
    second, lines = rng.randrange(10**6), []
    for _ in range(400):
        second += rng.randrange(1, 90)
        time = f"{second // 3600 % 24:02d}:{second // 60 % 60:02d}:{second % 60:02d}"
        service = rng.choice(("api", "db", "worker", "cache", "auth", "mailer"))
        what = rng.choice(("started", "finished", "retried", "dropped", "accepted", "refused", "timed out"))
        lines.append(f"{time} {service}: request {rng.randrange(10**6)} {what} after {rng.randrange(9_999)} ms")
    return "\n".join(lines)


def tables(rng: random.Random) -> str:
    """Rows of a Markdown table."""
    rows = ["| site | part | count | cost | year |", "|---|---|---|---|---|"]
    for _ in range(400):
        site = rng.choice(("north", "south", "east", "west", "upper", "lower", "harbor", "ridge"))
        part = rng.choice(("pump", "valve", "motor", "sensor", "panel", "relay", "fan", "filter"))
        cost = f"{rng.randrange(99_999) / 100:.2f}"
        rows.append(f"| {site} | {part} | {rng.randrange(999)} | {cost} | {rng.randrange(1990, 2027)} |")
    return "\n".join(rows)


def prose(rng: random.Random) -> str:
    """Documentation: the docstrings of a module of the standard library."""
    parts = code(rng).split('"""')[1::2]
    return "\n".join(parts) or prose(rng)


TEXTS: Final[dict[str, Callable[[random.Random], str]]] = {
    "licence": licences, "code": code, "log": logs, "table": tables, "documentation": prose,
}  # fmt: skip
BENCH: Final = {
    "multikey, filler": ("filler", None), "multikey, prose": ("prose", None), "multikey, dense": ("dense", None),
    "digits32, dense": ("dense", 32), "digits64, prose": ("prose", 64),
}  # fmt: skip


def make(kind: str, tokens: int, seed: int, count: Callable[[str], int]) -> str:
    """A document of a kind with `FACTS` facts in it."""
    rng = random.Random(f"{kind}/{tokens}/{seed}")
    haystack, digits = BENCH.get(kind, ("", None))
    facts = make_facts(rng, [digits or rng.randint(3, 9) for _ in range(FACTS)])
    if haystack == "dense":
        names = {fact.thing for fact in facts}
        more = distinct_facts(rng, iter(lambda: digits or rng.randint(3, 9), None))
        pieces: Iterator[str] = (" " + fact.sentence(rng) for fact in more if fact.thing not in names)
    elif haystack in ("filler", "prose"):
        pieces = haystack_pieces(rng, haystack, [fact.thing for fact in facts])  # type: ignore[arg-type]
    else:
        lines = TEXTS[kind](rng).split("\n")
        start = rng.randrange(max(1, len(lines) // 2))
        pieces = ("\n" + line for line in lines[start:] + lines[:start])
    return spread(rng, [fact.sentence(rng) for fact in facts], pieces, tokens, count)


def measured(engine: Engine, kind: str, number: int, tokens: int) -> dict[str, list[float]]:
    """Bytes per document token of each candidate, and 1 if it reaches the floor."""
    text = make(kind, tokens, SEED + number, counter(engine))
    selection, target = auto(engine, text), SizeTarget(MIN_QUALITY)
    figures = {}
    for level, compression in zip(selection.levels, engine.run_levels(selection.levels), strict=True):
        assert compression.quality is not None
        good = level.keeps_all or target.good(compression.quality)
        ratio = level.job.budget.compression_ratio
        name = f"{level.job.policy.name} {ratio:g} {level.codec}"
        figures[name] = [compression.cache.pack().nbytes / level.job.num_tokens, float(good)]
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="kvshelf-tiny")
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--documents", type=int, default=6, help="of each kind")
    parser.add_argument("--output", type=Path, required=True, help="every measurement, a line of JSON for a document")
    options = parser.parse_args()
    torch.set_num_threads(1)
    engine = Engine.load(options.model)
    with options.output.open("a") as out:
        for number in range(options.documents):
            for kind in (*TEXTS, *BENCH):
                figures = measured(engine, kind, number, options.tokens)
                out.write(json.dumps({"kind": kind, "number": number, "found": figures}) + "\n")
                out.flush()
    show([json.loads(line)["found"] for line in options.output.read_text().splitlines()])


def show(documents: list[dict[str, list[float]]]) -> None:
    chosen, sizes = Counter[str](), []
    every: dict[str, list[list[float]]] = defaultdict(list)
    for document in documents:
        name, (size, _) = min(((n, one) for n, one in document.items() if one[1]), key=lambda pair: pair[1][0])
        chosen[name] += 1
        sizes.append(size)
        for policy, one in document.items():
            every[policy].append(one)
    print(f"auto: {fmean(sizes):.0f} B a token over {len(documents)} documents; it chose")
    for name, count in chosen.most_common():
        print(f"  {count:3d}  {name}")
    print("| fixed | B a token | reaches the floor |\n|---|---|---|")
    for name, rows in sorted(every.items(), key=lambda item: fmean(one[0] for one in item[1])):
        print(f"| {name} | {fmean(one[0] for one in rows):.0f} | {sum(one[1] for one in rows):.0f} of {len(rows)} |")


if __name__ == "__main__":
    main()
