"""Layers on their way to a card that is not there: which wait for what, and what becomes of those nobody waits for."""

from __future__ import annotations

import gc
import weakref
from concurrent.futures import Future
from dataclasses import replace
from unittest.mock import Mock

import pytest
import torch

from kvshelf.artifact.cache import CompressedCache
from kvshelf.engine.attention.attached import CACHE_ARGUMENT
from kvshelf.engine.attention.sending import Sending
from kvshelf.engine.engine import Engine
from kvshelf.errors import CacheCorrupt
from kvshelf.kernels import staging
from kvshelf.model import loading
from scripts.card import CARD, Card
from tests.amounts import few
from tests.store.caches import make_cache, require_equal_records

TEXT = "The access code of the amber falcon is 482913. " + "The tide turns and the boats wait."
QUESTION = [5, 6, 7, 8]


@pytest.fixture
def card():
    with Card():
        yield


def futures(cache: CompressedCache) -> list[Future]:
    return [Future() for _ in cache.layers]


def sending_of(records: list[Future], heads: tuple[int, int] | None = None) -> Sending:
    return Sending(records, [CARD] * len(records), heads)


@pytest.mark.usefixtures("card")
def test_a_layer_is_received_while_the_next_one_has_not_arrived():
    cache = make_cache()
    records = futures(cache)
    sending = sending_of(records)
    records[0].set_result(cache.layers[0])
    layer = sending.received(0)
    assert layer.keys.device == CARD
    assert not sending.sent[1].done()
    require_equal_records(layer.to("cpu"), cache.layers[0])
    records[1].set_result(cache.layers[1])
    require_equal_records(sending.received(1).to("cpu"), cache.layers[1])


@pytest.mark.usefixtures("card")
def test_a_layer_that_cannot_be_sent_fails_alone(monkeypatch):
    cache = make_cache()
    records = futures(cache)
    sending = sending_of(records)
    records[0].set_exception(CacheCorrupt("layer 0"))
    with pytest.raises(CacheCorrupt, match="layer 0"):
        sending.received(0)
    monkeypatch.setattr(staging.arriving(CARD), "send", Mock(side_effect=MemoryError("no room")))
    records[1].set_result(cache.layers[1])
    with pytest.raises(MemoryError, match="no room"):
        sending.received(1)


@pytest.mark.usefixtures("card")
def test_what_nobody_waits_for_is_not_sent():
    cache = make_cache()
    records = futures(cache)
    sending = sending_of(records)
    gone = weakref.ref(sending)
    del sending
    gc.collect()
    assert gone() is None
    stream = staging.arriving(CARD).stream
    for record, layer in zip(records, cache.layers, strict=True):
        record.set_result(layer)
    assert not stream.record_event().seen, "it was given nothing"


@pytest.fixture(scope="module")
def engines():
    """Of the same model, on the CPU and on the card, which stays until the module's end."""
    here = Engine(*loading.load("kvshelf-tiny", device="cpu", dtype="float32"), name="kvshelf-tiny")
    model, tokenizer = loading.load("kvshelf-tiny", device="cpu", dtype="float32")
    with Card() as card:
        card.put(model)
        yield card, here, Engine(model, tokenizer, name="kvshelf-tiny")


def logits(engine: Engine, cache: CompressedCache) -> torch.Tensor:
    device = next(iter(engine.model.parameters())).device
    with engine.attached(cache) as past, torch.no_grad():
        return engine.model(torch.tensor([QUESTION]).to(device), **{CACHE_ARGUMENT: past}).logits.cpu()


@pytest.mark.slow
@pytest.mark.parametrize("codec", few(1, ["none", "int4", "klt", "lossless"]))
def test_a_question_reads_each_layer_behind_its_event_and_waits_for_none(engines, codec):
    """Whatever reads one too early is refused by the card. Positions are only checked of calls from outside."""
    card, here, there = engines
    cache = here.encoded(here.compress(TEXT, policy="keydiff", compression_ratio=0.5), codec)
    logits(there, replace(cache))  # what is made once
    card.waits.clear()
    ours = logits(there, replace(cache))
    of_layers = [place for place, count in card.waits.items() if count >= len(cache.layers)]
    assert all("engine/attention/attached.py" in place for place in of_layers), card.waits
    assert torch.allclose(ours, logits(here, cache), rtol=1e-3, atol=1e-3)


def test_a_document_that_could_not_be_sent_is_sent_anew(engines, monkeypatch):
    _, here, there = engines
    cache = here.compress(TEXT, policy="keydiff", compression_ratio=0.5)
    with monkeypatch.context() as full:
        full.setattr(staging.arriving(CARD), "send", Mock(side_effect=MemoryError("no room")))
        with pytest.raises(MemoryError, match="no room"):
            logits(there, cache)
    assert torch.allclose(logits(there, cache), logits(here, cache), rtol=1e-3, atol=1e-3)


@pytest.mark.slow
def test_streams_are_decoded_behind_positions_that_are_on_the_card(engines):
    _, here, there = engines
    cache = here.encoded(here.compress(TEXT, policy="keydiff", compression_ratio=0.5), "klt")
    assert torch.allclose(logits(there, cache.to(CARD)), logits(here, cache), rtol=1e-3, atol=1e-3)


def test_a_cache_that_is_on_the_card_is_not_sent(engines):
    _, here, there = engines
    cache = here.compress(TEXT, policy="keydiff", compression_ratio=0.5).to(CARD)
    before = staging.arriving(CARD).stream.record_event().seen
    logits(there, cache)
    assert staging.arriving(CARD).stream.record_event().seen == before
