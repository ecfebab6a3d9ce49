"""Several processes that share a model, compared with one process that has as many threads as all of them."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from kvshelf.model.source import bundled_folder
from kvshelf_bench.measure import Spread, ratios
from kvshelf_bench.peers.peer import Peer, running
from kvshelf_bench.speed.subject import Subject


@dataclass(frozen=True)
class Sharing:
    """One document, by one process and by `ranks`. prefill_s, answers_s: wall seconds of each way, see
    `ranks_worker.measured`; prefill, answers: how many times as fast as one process. held_bytes: of each process."""

    tokens: int
    ranks: int
    prefill_s: dict[str, Spread]
    answers_s: dict[str, Spread]
    prefill: Spread
    answers: Spread
    held_bytes: dict[str, list[int]]


def sharings(subject: Subject, ranks: int, threads: int, lengths: Sequence[int], rounds: int) -> list[Sharing]:
    """A row for each length. Both ways take turns."""
    for name in ("tokenizer.json", "tokenizer_config.json"):  # a random model has none, and is loaded by its folder
        if Path(subject.source).is_dir() and not (Path(subject.source) / name).exists():
            shutil.copy(Path(bundled_folder("kvshelf-tiny")) / name, subject.source)
    arguments = (subject.source, subject.dtype, str(subject.device), str(threads))
    with ExitStack() as open_peers:
        peers = {
            way: open_peers.enter_context(running(sys.executable, "ranks", (*arguments, str(count)), f"{way} process"))
            for way, count in (("one", 1), ("shared", ranks))
        }
        return [_measured(peers, subject.tokens(tokens, seed=1), ranks, rounds) for tokens in lengths]


def _measured(peers: dict[str, Peer], token_ids: list[int], ranks: int, rounds: int) -> Sharing:
    runs = [{way: peer.ask(token_ids=token_ids) for way, peer in peers.items()} for _ in range(rounds)]
    seconds = {of: {way: [run[way][of] for run in runs] for way in peers} for of in ("prefill_s", "answers_s")}
    spreads = {of: {way: Spread.of(values) for way, values in by_way.items()} for of, by_way in seconds.items()}
    faster = {of: ratios(by_way["one"], by_way["shared"]) for of, by_way in seconds.items()}
    return Sharing(
        tokens=len(token_ids),
        ranks=ranks,
        **spreads,
        prefill=faster["prefill_s"],
        answers=faster["answers_s"],
        held_bytes={way: run["held_bytes"] for way, run in runs[-1].items()},
    )
