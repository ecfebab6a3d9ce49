"""A card that is not there: what waits for it, and that a prefill does not, layer by layer."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch

from kvshelf.api.options import Ask
from kvshelf.engine.decode.batch import DecodeBatch
from kvshelf.engine.decode.generation import Sampling
from kvshelf.engine.decode.grammar import Grammar
from kvshelf.engine.decode.slots.slots import Slots
from kvshelf.engine.engine import Engine
from kvshelf.errors import InvalidRequest
from kvshelf.kernels.row_norms import row_norms
from kvshelf.kernels.select import QueuedCounts, importance_of, keep_best
from kvshelf.kernels.transfer import download, settle, upload
from kvshelf.methods.policies.sharing import flat_counts, flat_shares
from kvshelf.model import loading
from scripts.card import CARD, Card, Waits
from tests.store.caches import make_cache

TEXT = "The access code of the amber falcon is 482913. " + "The tide turns and the boats wait. " * 8


def test_what_the_host_reads_waits():
    with Card() as card:
        rows = torch.arange(6, device=CARD).float().view(2, 3)
        assert (rows.device, rows.is_cuda) == (CARD, True)
        doubled = (rows * 2)[1:].clone().add_(1)
        assert card.waits.total() == 0
        waiting = [
            lambda: doubled.sum().item(),
            lambda: bool((rows > 1).any()),
            lambda: rows[rows > 1],
            lambda: rows.cpu(),
            lambda: torch.ones(2).to(CARD),
            lambda: torch.ones(2).to(CARD, non_blocking=True),  # of memory that is not pinned
            lambda: torch.tensor([1, 2], device=CARD),
            lambda: download([rows, doubled]),
        ]
        for number, wait in enumerate(waiting, 1):
            wait()
            assert card.waits.total() == number
        assert doubled.tolist() == [[7, 9, 11]]
        assert all(place.partition(" at ")[2].startswith((__file__, "kernels/transfer.py:")) for place in card.waits)


def test_what_is_queued_does_not_wait_and_devices_do_not_mix():
    with Card() as card:
        rows = upload([torch.ones(2, 3)], CARD)[0]
        rows[rows > 0] = 2.0
        torch.ones(3).pin_memory().to(CARD, non_blocking=True)
        copied = rows.to("cpu", non_blocking=True)
        assert card.waits.total() == 0
        assert copied.tolist() == [[0, 0, 0], [0, 0, 0]], "nobody has waited for it"
        settle([CARD])
        assert copied.tolist() == [[2, 2, 2], [2, 2, 2]]
        with pytest.raises(RuntimeError, match="host and of the card"):
            rows + torch.ones(3)


def test_a_kernel_starts_on_the_card_of_its_tensors():
    pytest.importorskip("triton")
    from kvshelf.kernels.row_norms import triton as fused

    with Card():
        states = upload([torch.ones(2, 4, 16)], CARD)[0]
        assert row_norms(states).tolist() == [[4.0] * 4] * 2
        with pytest.raises(RuntimeError, match="starts on cuda:0, and its tensors are on cuda:1"):
            fused.row_norms(states)


def test_work_on_streams_that_is_not_behind_what_it_needs_is_refused():
    with Card() as card:
        rows, side = torch.ones(3, device=CARD), torch.cuda.Stream(CARD)
        with torch.cuda.stream(side), pytest.raises(RuntimeError, match="before the event"):
            rows + 1
        side.wait_event(torch.cuda.current_stream(CARD).record_event())
        with torch.cuda.stream(side):
            more = rows + 1
        with pytest.raises(RuntimeError, match="before the event"):
            more.sum()
        torch.cuda.current_stream(CARD).wait_stream(side)
        assert card.waits.total() == 0
        assert more.tolist() == [2, 2, 2]


def test_pinned_memory_is_not_written_to_while_a_copy_needs_it():
    with Card():
        pinned = torch.ones(4, pin_memory=True)
        there = torch.empty(2, device=CARD)
        there.copy_(pinned[:2], non_blocking=True)
        pinned[2:] = 2
        with pytest.raises(RuntimeError, match="before a copy that needs it"):
            pinned[:2] = 3
        event = torch.cuda.current_stream(CARD).record_event()
        event.synchronize()
        pinned[:2].copy_(there * 5, non_blocking=True)
        assert pinned.tolist() == [0, 0, 2, 2], "nobody has waited for it"
        settle([CARD])
        assert pinned.tolist() == [5, 5, 2, 2]


@pytest.mark.parametrize("floor", [0, 5])
def test_entries_are_packed_by_counts_that_the_card_decided(floor):
    generator = torch.Generator().manual_seed(floor)
    keys, values = torch.randn(2, 3, 50, 8, generator=generator)
    scores, protected = torch.randn(3, 50, generator=generator), torch.arange(50) < 2
    scores[1] += 1  # which wins most
    counts = flat_counts(list(importance_of(scores, protected)), 60, [floor] * 3)
    expected = keep_best(keys, values, scores, protected, counts)
    with Card() as card:
        own = [upload([tensor], CARD)[0] for tensor in (keys, values, scores, protected)]
        shares = flat_shares(importance_of(own[2], own[3]), 60, floor)
        kept = keep_best(*own, shares)
        assert card.waits.total() == 0
        assert isinstance(shares, QueuedCounts)
        assert (shares.known(), shares.total) == (counts, sum(counts))
        for ours, other in zip(kept, expected, strict=True):
            assert torch.equal(ours.cpu(), other)


def test_a_list_of_rows_is_brought_to_the_card():
    with Card() as card:
        rows = torch.arange(12, device=CARD).view(4, 3)
        card.waits.clear()
        assert rows[[2, 0]].tolist() == [[6, 7, 8], [0, 1, 2]]
        assert card.waits.total() == 2, "the list, and what was read"


def test_waits_of_a_layer_are_those_of_lines_that_wait_once_for_each():
    assert Waits.of(Counter({"a": 9, "b": 4, "c": 1}), 4) == (3, 2)


@pytest.mark.parametrize("codec", ["none", "int8", "int4:residual=16", "mixed:high=int8,low=int4", "lossless"])
def test_a_card_encodes_as_the_cpu_does_and_what_it_copies_has_arrived(codec):
    """Lengths that are said and not counted, too: on a card nothing checks them."""
    here = ranked(make_cache())
    with Card():
        assert here.to(CARD).encoded(codec).to_bytes() == here.encoded(codec).to_bytes()


@pytest.mark.parametrize("codec", ["int8:residual=0", "mixed:high=int8,low=int4"])
@pytest.mark.parametrize(("value", "message"), [(torch.nan, "layer 1 hold NaN"), (3.38e38, "layer 1 holds numbers")])
def test_what_a_codec_refuses_is_refused_of_a_card_before_anybody_has_the_cache(codec, value, message):
    cache = ranked(make_cache())
    cache.layers[1].keys[:2, 0] = torch.tensor([value, -value])
    with Card(), pytest.raises(InvalidRequest, match=message):
        cache.to(CARD).encoded(codec)


def ranked(cache):
    """The same with an importance of each entry, by which codec mixed chooses, and a column, which goes with it."""
    ranks = [torch.arange(float(layer.entries)) for layer in cache.layers]
    layers = (
        replace(layer, importance=own, columns={"sum": own}) for layer, own in zip(cache.layers, ranks, strict=True)
    )
    return replace(cache, layers=tuple(layers))


@pytest.fixture(scope="module")
def engine():
    """Of a model on the card, which stays until the module's end: tests with a card of their own come before."""
    model, tokenizer = loading.load("kvshelf-tiny", device="cpu", dtype="float32")
    with Card() as card:
        card.put(model)
        engine = Engine(model, tokenizer, name="kvshelf-tiny")
        card.compression(engine, TEXT, "full", ["int4", "klt"])
        yield card, engine


@pytest.mark.parametrize(
    "policy",
    [
        "full",
        "ada",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in (
                "snapkv",
                "streaming_llm",
                "keydiff",
                "lagkv",
                "expected_attention",
                "defensivekv",
                "epicache",
                "arkv",
                "chunkkv",
                "headkv",
                "compresskv",
                "lookaheadkv",
            )
        ),
    ],
)
def test_no_layer_of_a_prefill_waits(engine, policy):
    card, tiny = engine
    counts = card.compression(tiny, TEXT, policy, ["int8", "int4", "mixed:high=int8,low=int4", "klt"])
    assert {codec: waits.layer for codec, waits in counts.items()} == dict.fromkeys(counts, 0)
    assert counts["none"].beside <= 5
    assert all(waits.beside <= 1 for codec, waits in counts.items() if codec != "none"), "looked at together"


def test_a_step_in_slots_waits_once_for_the_tokens_of_all_rows(engine, monkeypatch):
    card, tiny = engine
    monkeypatch.setitem(vars(tiny.passes), "program", None)  # under an interpreter modules are faster
    document = tiny.attach(tiny.compress(TEXT[:80], policy="full"))
    question = tiny.encode_query(document, "What is the access code?")
    grammar = Grammar.of({"grammar": "start: /[0-9 ]{20,30}/"})
    samplings = [  # none of which ends here
        Sampling(9, grammar=grammar),
        Sampling(9, Ask(temperature=9.0, seed=1)),
        Sampling(9, Ask(temperature=9.0, top_p=0.9, seed=2), grammar),
    ]
    batch = DecodeBatch(tiny.passes, Slots(CARD))
    rows = [tiny.start(document, question, sampling) for sampling in samplings]
    for _ in range(3):  # of the question, and of slots as they are made
        batch.step(rows)
    card.waits.clear()
    batch.step(rows)
    assert not any(row.finished for row in rows)
    assert [name.partition(":")[0] for name in card.waits.elements()] == ["copy to the host at engine/decode/batch.py"]


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["sage", "sablock", "kvzip", "cam", "kvmerger", "fair"])
def test_no_layer_of_a_longer_prefill_waits(engine, policy):
    card, tiny = engine
    counts = card.compression(tiny, TEXT, policy, ["int4", "klt"])
    assert {codec: waits.layer for codec, waits in counts.items()} == dict.fromkeys(counts, 0)
