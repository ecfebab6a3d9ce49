"""Head pages: every entry has a place of its own, on the pages that vLLM gives the request."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from kvshelf import Engine, open_store
from kvshelf.integrations.vllm.ragged.pages import HeadPages, HeadTables, Storage, full_pages, stand_ins
from kvshelf.integrations.vllm.request import is_ragged
from kvshelf.methods.policies.registry import POLICIES
from kvshelf.samples.tasks import make_facts, write_document
from kvshelf.store.manifest import Manifest

LAYERS, HEADS, PAGE, WIDTH, PAGES = 3, 2, 8, 4, 64


def layer_outermost() -> list[Tensor]:
    return list(torch.zeros(LAYERS, PAGES, HEADS, PAGE, WIDTH))


def page_outermost() -> list[Tensor]:
    return list(torch.zeros(PAGES, LAYERS, HEADS, PAGE, WIDTH).transpose(0, 1))


def lengths(seed: int, most: int = 60) -> list[list[int]]:
    chance = random.Random(seed)
    return [[chance.choice([0, 1, PAGE, chance.randrange(most)]) for _ in range(HEADS)] for _ in range(LAYERS)]


def plan(seed: int) -> HeadPages:
    kept = lengths(seed)
    mean = round(sum(map(sum, kept)) / (LAYERS * HEADS))
    return HeadPages.of(kept, stand_ins(mean, PAGE), PAGE)


@pytest.mark.parametrize("caches", [layer_outermost, page_outermost])
@pytest.mark.parametrize("seed", range(20))
def test_each_entry_has_its_place_on_the_requests_pages(caches, seed: int) -> None:
    """Those of two caches, then 21 tokens of three requests, of which one is vLLM's own."""
    layers = caches()
    storage = Storage.of(layers)
    assert storage is not None
    rows = HeadTables(storage, list(map(str, range(LAYERS))))
    plans = [plan(seed), None, plan(seed + 100)]
    totals = [21 + (each.stand_ins if each else 30) for each in plans]
    pages, free = [], random.Random(seed).sample(range(1, PAGES), PAGES - 1)
    for total in totals:
        pages.append([free.pop() for _ in range(-(-total // PAGE))])
    table = torch.zeros(3, max(map(len, pages)), dtype=torch.int32)
    for row, own in zip(table, pages, strict=True):
        row[: len(own)] = torch.tensor(own)
    rows.requests = {own[0]: each for own, each in zip(pages, plans, strict=True) if each is not None}
    starts = torch.tensor([0, 21, 42, 63], dtype=torch.int32)
    step = rows.of(SimpleNamespace(query_start_loc=starts, seq_lens=torch.tensor(totals), block_table=table))
    assert step is not None
    slots: list[int] = []
    for at in range(LAYERS):
        for request, each in enumerate(plans):
            if each is not None:
                assert each.fits
                before = rows.slots(each, at, pages[request])
                slots += before.tolist()
                for head, kept in enumerate(before.split(each.lengths[at].tolist())):
                    assert kept.tolist() == read(step.tables[at, request * HEADS + head], len(kept))
        slots += step.slots[at].tolist()
        for token in range(63):
            for head in range(HEADS):
                row = token // 21 * HEADS + head
                behind = int(step.lengths[at, row]) - 21 + token % 21
                assert step.slots[at, token * HEADS + head] == read(step.tables[at, row], behind + 1)[-1]
    assert len(slots) == len(set(slots))
    marked = storage.rows.view(-1, WIDTH)
    marked[slots] = 1
    own_pages = {page for own in pages for page in own}
    assert {int(page) for layer in layers for page in layer.sum((1, 2, 3)).nonzero()} <= own_pages
    places = torch.arange(63 * HEADS).view(3, 21, HEADS)
    assert step.order.tolist() == places.transpose(1, 2).flatten().tolist()


def read(table: Tensor, count: int) -> list[int]:
    """The slots that attention reads by a row of a table."""
    return [int(table[at // PAGE]) * PAGE + at % PAGE for at in range(count)]


@pytest.mark.parametrize("seed", range(20))
def test_a_cache_lies_on_few_pages(seed: int) -> None:
    kept = lengths(seed, most=4000)
    mean = round(sum(map(sum, kept)) / (LAYERS * HEADS))
    assert full_pages(mean, PAGE) * PAGE <= mean + PAGE
    assert mean < stand_ins(mean, PAGE) < mean + 2 * PAGE
    assert HeadPages.of(kept, stand_ins(mean, PAGE), PAGE).fits


def test_pages_that_are_not_of_one_allocation_have_no_rows() -> None:
    assert Storage.of([torch.zeros(PAGES, HEADS, PAGE, WIDTH) for _ in range(LAYERS)]) is None
    assert Storage.of(list(torch.zeros(LAYERS, PAGES, PAGE, HEADS, WIDTH).transpose(2, 3))) is None


def test_a_pass_without_a_ragged_cache_has_no_rows() -> None:
    rows = HeadTables(Storage(layer_outermost()), ["0", "1", "2"])
    rows.requests = {7: plan(0)}
    one = SimpleNamespace(
        query_start_loc=torch.tensor([0, 1]), seq_lens=torch.tensor([1]), block_table=torch.tensor([[5]])
    )
    assert rows.of(one) is None


MADE: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in POLICIES if POLICIES[name].takes_budget and not POLICIES[name].merges),
    *(("kvzip", {"across": across}) for across in ("layer", "head")),
    ("kvzip", {"prefill": "chunked"}),
    ("ada", {"base": "h2o", "across": "cache"}),
    ("fair", {"base": "snapkv", "by": "blocks"}),
    ("epicache", {"layers": "sensitivity"}),
    ("pyramidkv", {"beta": 1}),
    ("sage", {"union": "ragged"}),
    ("lagkv", {"skip_layers": 1}),
    ("kvzip_gate", {"across": "head"}),
]


@pytest.mark.parametrize(("policy", "params"), MADE, ids=str)
def test_a_policy_says_whether_heads_differ(tiny: Engine, policy: str, params: dict[str, Any], tmp_path: Path) -> None:
    """By what the manifest of its cache has, which earlier versions read: it has no field of later ones."""
    document = write_document(
        random.Random(3), make_facts(random.Random(3), [4] * 2), "prose", 400, lambda text: len(text.split())
    )
    cache = tiny.compress(document.text, policy=policy, compression_ratio=0.5, **params)
    with open_store(f"disk://{tmp_path}/home") as store:
        manifest = store.put(cache)
    kept = {length for layer in cache.reduced for length in layer.lengths}
    assert is_ragged(manifest) == (len(kept) > 1)
    assert not manifest.model_dump().keys() & set(Manifest.LATER)
