"""Documents that kernels read by tables: those of other compositions of a class take the same recording."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch

from kvshelf.api.options import Ask
from kvshelf.engine.decode.batch import DecodeBatch
from kvshelf.engine.decode.generation import Generation, Sampling
from kvshelf.engine.decode.slots import slots
from kvshelf.engine.decode.slots.seating import PassOutcome, Replay
from kvshelf.engine.decode.slots.slots import Slots
from kvshelf.engine.engine import Engine
from kvshelf.kernels.native import library
from kvshelf.kernels.prefix_attention import PackedPrefix, work
from kvshelf.kernels.prefix_attention.prefixes import BatchLayout
from tests.engine.asking import ids
from tests.engine.forward.test_program import made

CPU = torch.device("cpu")
LENGTHS = (40, 40, 57, 33, 40, 64)
"""Tokens of the documents: some in as many splits as others."""


class Again:
    """A recorder that runs a pass anew from what it was recorded with: its documents are those that it read then, but
    for what has been copied over them."""

    def __init__(self) -> None:
        self.recorded = 0

    def __call__(self, forward: Callable[[], PassOutcome]) -> Replay:
        self.recorded += 1
        return forward


def answers(engine: Engine, documents: list[Any], slots: Slots | None) -> list[list[int]]:
    """Of one document after the other, then of two at a time. The next ones begin before the last ones leave, so that
    their slab stays."""
    batch, seen = DecodeBatch(engine.passes, slots), list[list[int]]()
    groups = [[document] for document in documents] + [list(pair) for pair in pairwise(documents)]
    before: list[Generation] = []
    for number, group in enumerate(groups):
        sampling = Sampling(5, Ask(temperature=0.8, seed=number) if number % 2 else Ask())
        rows = [engine.start(document, ids(3, seed=number), sampling) for document in group]
        while not rows[0].finished:
            batch.step(rows)
        for row in before:
            batch.leave(row)
        before = rows
        seen += [row.token_ids for row in rows]
    return seen


@pytest.mark.parametrize(
    ("form", "policy", "layers"),
    [("native", "full", 2), ("native", "keydiff", 2), pytest.param("triton", "full", 1, marks=pytest.mark.slow)],
)
def test_a_recording_is_of_all_compositions_of_its_class(
    monkeypatch: pytest.MonkeyPatch, form: str, policy: str, layers: int
) -> None:
    if form == "native" and library() is None:
        pytest.skip("no C form was compiled")
    if form == "triton":
        pytest.importorskip("triton")
    monkeypatch.setenv("KVSHELF_KERNELS", form)
    engine = Engine(made("llama", num_hidden_layers=layers, vocab_size=512), name="m")
    documents = [engine.attach(engine.compress(ids(tokens, seed=i), policy=policy)) for i, tokens in enumerate(LENGTHS)]
    if form == "triton":
        documents = documents[:2]
    recorder = Again()
    assert answers(engine, documents, Slots(CPU, recorder)) == answers(engine, documents, None)
    assert 2 <= recorder.recorded <= 6, "of one answer and of two, greedy and drawn, in a slab and one that has grown"


def test_tables_that_stay_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of compositions and those of seatings."""
    if library() is None:
        pytest.skip("no C form was compiled")
    monkeypatch.setenv("KVSHELF_KERNELS", "native")
    engine = Engine(made("llama", num_hidden_layers=2, vocab_size=512), name="m")
    documents = [engine.attach(engine.compress(ids(tokens, seed=i), policy="full")) for i, tokens in enumerate(LENGTHS)]

    def kept() -> int:
        seated = Slots(CPU, Again())
        assert answers(engine, documents, seated) == answers(engine, documents, None)
        return seated.table_bytes

    assert kept() > 2 * 6000
    monkeypatch.setattr(slots, "MOST_TABLE_BYTES", 6000)
    assert 0 < kept() <= 2 * 6000


def test_a_table_that_is_copied_over_another_of_its_class_is_that_table() -> None:
    setting = work.Setting(kv_heads=2, group=2, itemsize=2, places=264, least_split=64)
    batches = []
    for tokens in (200, 250):
        prefix = PackedPrefix(*torch.randn(2, 2 * tokens, 8), (tokens, tokens))
        batches.append((prefix, work.work_of([(prefix,)], BatchLayout((3,), (), CPU), setting)))
    (first, one), (second, other) = batches
    assert work.table_of([first]) is one
    assert work.table_of([second, first]) is None
    of = work.TableClass.of([one, other], 5)
    assert of is not None
    numbers = of.numbers(one)
    table = of.table(numbers)
    for source in (one, other):
        numbers.copy_(of.numbers(source))
        ((_, items),) = table.launches
        ((_, expected),) = source.launches
        assert torch.equal(items[: len(expected)], expected)
        assert (items[len(expected) :, 1] == 0).all()
        assert torch.equal(table.shares[:1], source.shares)
    assert work.work_of([(work.TabledPrefix(table),)], BatchLayout((3,), (), CPU), setting) is table
