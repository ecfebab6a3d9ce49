"""Does the measured quality tell how many facts a cache has lost? Documents of ten kinds with 30 facts each.

    python scripts/validate_probe.py --documents 20 --output measured.jsonl    # 200 documents, an hour on one core
    python scripts/validate_probe.py --report measured.jsonl

Each document is compressed in a dozen ways, drawn among all policies, ratios and codecs. Each cache is measured by the
probe, which knows nothing of the facts, and asked for each of them. Only facts that the full cache answers count.
docs/internals/probe.md shows what came out.
"""

from __future__ import annotations

import argparse
import json
import random
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import distributions
from pathlib import Path
from typing import Final

import torch

from kvshelf.engine.engine import Engine
from kvshelf.errors import KvshelfError
from kvshelf.methods.policies import POLICIES
from kvshelf.samples.suite import CaseAsk, score
from kvshelf.samples.tasks import Fact, distinct_facts, haystack_pieces, make_facts, spread
from kvshelf_bench.quality.retrieval import counter

FACTS: Final = 30
FLOOR: Final = 0.98
RATIOS: Final = (0.1, 0.25, 0.5, 0.75, 0.875)
CODECS: Final = ("none", "int4", "klt")
CODECS_ALONE: Final = ("int8", "int4", "int2", "klt", "klt:step=3", "klt:step=5")
SEED: Final = 20_261_125


@dataclass(frozen=True)
class Measured:
    """One document kept in one way. kept: the share of the full cache's facts that this cache answers."""

    kind: str
    document: int
    way: str
    agreement: float
    low: float | None
    kl: float
    kept: float
    bytes_per_token: float


# --- documents -------------------------------------------------------------------------------------------------------


def licences(rng: random.Random) -> str:
    """A licence of an installed package."""
    files = [file for found in distributions() for file in found.files or () if "LICENSE" in file.name.upper()]
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


def make(kind: str, tokens: int, seed: int, count: Callable[[str], int]) -> tuple[str, list[CaseAsk]]:
    """A document of a kind with `FACTS` facts in it, and a question for each."""
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
    text = spread(rng, [fact.sentence(rng) for fact in facts], pieces, tokens, count)
    return text, [_asked(rng, fact) for fact in facts]


def _asked(rng: random.Random, fact: Fact) -> CaseAsk:
    question = fact.question(rng)
    return CaseAsk(question.text, (question.answer,))


# --- measuring -------------------------------------------------------------------------------------------------------


def ways(rng: random.Random, count: int) -> list[tuple[str, float | None, str]]:
    """Two codecs alone, and `count` combinations of a policy, a ratio and a codec."""
    policies = sorted(name for name, policy in POLICIES.items() if policy.takes_budget)
    drawn = {(rng.choice(policies), rng.choice(RATIOS), rng.choice(CODECS)) for _ in range(count)}
    return [*(("full", None, codec) for codec in rng.sample(CODECS_ALONE, 2)), *sorted(drawn)]


def measured(engine: Engine, kind: str, number: int, tokens: int, count: int) -> list[Measured]:
    """One document in all its ways. Ways that refuse the document are left out."""
    text, asks = make(kind, tokens, SEED + number, counter(engine))
    encoded = engine.encode_document(text)
    levels, names = [engine.compressor.level(engine.prepare(encoded, policy="full"))], ["full"]
    for policy, removed, codec in ways(random.Random(f"{kind}/{number}"), count):
        try:
            job = engine.prepare(encoded, policy=policy, compression_ratio=removed)
            levels.append(engine.compressor.level(job, codec))
        except KvshelfError:
            continue
        names.append(f"{policy} {removed or 0:g} {codec}")
    longest = 24 + max(len(ask.references[0]) for ask in asks)
    rows, known = [], []
    for way, made in zip(names, engine.run_levels(levels), strict=True):
        answers = engine.answer_all([(made.cache, ask.text) for ask in asks], max_new_tokens=longest)
        right = [bool(score(ask, answer.text).exact) for ask, answer in zip(asks, answers, strict=True)]
        known = known or [at for at, found in enumerate(right) if found]
        if made.quality is None or made.quality.agreement is None or way == "full" or not known:
            continue
        kept, found = sum(right[at] for at in known) / len(known), made.quality
        size = made.cache.nbytes / len(encoded.token_ids)
        assert found.agreement is not None
        rows.append(Measured(kind, number, way, found.agreement, found.low, found.kl, kept, size))
    return rows


# --- what came out ---------------------------------------------------------------------------------------------------


def report(found: Sequence[Measured]) -> list[str]:
    """Markdown: rank correlations, and what a floor lets through."""
    kinds = dict.fromkeys(one.kind for one in found)
    lines = ["| documents | caches | rank correlation of agreement | of KL |", "|---|---|---|---|"]
    for name, rows in {"all": found, **{kind: [one for one in found if one.kind == kind] for kind in kinds}}.items():
        kept = [one.kept for one in rows]
        by_agreement = spearman([one.agreement for one in rows], kept)
        by_kl = spearman([-one.kl for one in rows], kept)
        lines.append(f"| {name} | {len(rows)} | {by_agreement:.2f} | {by_kl:.2f} |")
    lines += ["", "| floor | caches that meet it | of these lose over 5 % | of those that lose at most 1 %, meet it |"]
    lines.append("|---|---|---|---|")
    whole = [one for one in found if one.kept >= 0.99]
    for floor in (FLOOR, 0.95, 0.9, 0.8):
        met = [one for one in found if one.low is not None and one.low >= floor]
        bad = sum(one.kept < 0.95 for one in met) / max(1, len(met))
        share = sum(one in met for one in whole) / max(1, len(whole))
        lines.append(f"| {floor} | {len(met)} | {bad:.1%} | {share:.0%} |".replace("%", " %"))
    return lines


def spearman(first: Sequence[float], second: Sequence[float]) -> float:
    """Spearman's rank correlation: equal values share the mean of their ranks."""
    ranks = torch.stack([_ranks(first), _ranks(second)])
    return float(torch.corrcoef(ranks)[0, 1])


def _ranks(values: Sequence[float]) -> torch.Tensor:
    column = torch.tensor(values, dtype=torch.float64)
    below = (column[:, None] > column[None]).sum(dim=1)
    equal = (column[:, None] == column[None]).sum(dim=1)
    return below + (equal - 1) / 2.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="kvshelf-tiny")
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--documents", type=int, default=20, help="of each kind")
    parser.add_argument("--first", type=int, default=0, help="number of the first document of each kind")
    parser.add_argument("--ways", type=int, default=10, help="policies, ratios and codecs for each document")
    parser.add_argument("--output", type=Path, help="every measurement, a line of JSON each")
    parser.add_argument("--report", type=Path, nargs="+", help="only show what these files hold")
    given = parser.parse_args()
    if given.report:
        lines = [line for path in given.report for line in path.read_text().splitlines()]
        print("\n".join(report([Measured(**json.loads(line)) for line in lines])))
        return
    torch.set_num_threads(1)
    engine = Engine.load(given.model)
    found: list[Measured] = []
    for number in range(given.first, given.first + given.documents):
        for kind in (*TEXTS, *BENCH):
            rows = measured(engine, kind, number, given.tokens, given.ways)
            found += rows
            if given.output:
                with given.output.open("a") as out:
                    out.writelines(json.dumps(asdict(one)) + "\n" for one in rows)
            print(f"{kind} {number}: {len(rows)} caches", flush=True)
    print("\n" + "\n".join(report(found)))


if __name__ == "__main__":
    main()
