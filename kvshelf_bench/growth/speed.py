"""Appending to a stored cache, beside compressing the whole text anew."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import product

from rich.table import Table

from kvshelf.artifact.records import entries_of
from kvshelf.kernels.rates import cost
from kvshelf.store.base import Store
from kvshelf_bench.measure import Spread, interleaved, ratios
from kvshelf_bench.options import milliseconds
from kvshelf_bench.speed.first_token import put
from kvshelf_bench.speed.subject import Subject

APPENDED = 500
"""Tokens of every append."""

_LEVELS = (("full", None, "none"), ("keydiff", 0.5, "int4"))


@dataclass(frozen=True)
class Growing:
    """`APPENDED` tokens behind a document of `tokens` under a policy, ratio and codec.

    prefilled: tokens that went through the model. append_s, anew_s: to compress them, and the whole text anew, with
    encoding. ratio: the first over the second within a round. new_bytes: of the appended entries in memory.
    written_bytes: that the home takes more. whole_bytes: that the home would take without the parent.
    """

    policy: str
    codec: str
    tokens: int
    prefilled: int
    append_s: Spread
    anew_s: Spread
    ratio: Spread
    new_bytes: int
    written_bytes: int
    whole_bytes: int


def growings(subject: Subject, store: Store, lengths: Sequence[int], rounds: int) -> Iterator[Growing]:
    """Every length at every level. The store is empty."""
    for tokens, level in product(lengths, _LEVELS):
        yield _grown(subject, store, tokens, *level, rounds)


def _grown(
    subject: Subject, store: Store, tokens: int, policy: str, removed: float | None, codec: str, rounds: int
) -> Growing:
    engine, ids = subject.engine, subject.tokens(tokens + APPENDED, seed=2)
    compress = partial(engine.compress, policy=policy, compression_ratio=removed)
    parent = engine.encoded(compress(ids[:tokens]), codec)
    job = engine.prepare_append(parent, ids[tokens:])

    def anew() -> None:
        engine.encoded(compress(ids), codec)

    ways: dict[str, Callable[[], object]] = {"append": partial(engine.extend, parent, ids[tokens:]), "anew": anew}
    runs = interleaved({name: partial(cost, way, subject.device) for name, way in ways.items()}, rounds)
    append_s, anew_s = ([spent.seconds for spent in runs[name]] for name in ("append", "anew"))
    child = engine.extend(parent, ids[tokens:])
    with ExitStack() as cleanup:
        parent_id = put(store, parent, cleanup)
        before = store.usage().bytes
        cleanup.callback(store.delete, store.put(child, codec=codec, parent_id=parent_id).id)
        written = store.usage().bytes - before
    # A residual is quantized with the first tokens behind it, so bytes of both are new.
    new = sum(entries.nbytes for layer in child.layers if (entries := entries_of(layer)) is not None)
    return Growing(
        policy=policy,
        codec=codec,
        tokens=tokens,
        prefilled=job.num_tokens,
        append_s=Spread.of(append_s),
        anew_s=Spread.of(anew_s),
        ratio=ratios(append_s, anew_s),
        new_bytes=new * job.budget.tokens // child.kept_tokens,
        written_bytes=written,
        whole_bytes=before + written,
    )


def growing_table(rows: Sequence[Growing]) -> Table:
    headings = ("tokens", "policy", "codec", "prefilled", "append", "all anew", "append / anew", "written", "of new")
    table = Table(*headings, "of all", title=f"{APPENDED} tokens appended to a stored cache")
    for row in rows:
        table.add_row(
            f"{row.tokens}", row.policy, row.codec, f"{row.prefilled}",
            milliseconds(row.append_s), milliseconds(row.anew_s),
            f"1/{1 / row.ratio.median:.1f}", f"{row.written_bytes / 1e6:.2f} MB",
            f"{row.written_bytes / row.new_bytes:.2f}", f"{row.written_bytes / row.whole_bytes:.1%}",
        )  # fmt: skip
    return table
