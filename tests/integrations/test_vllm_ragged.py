"""Head pages: every entry has a place of its own, on the pages that vLLM gives the request."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from kvshelf import Engine, open_store
from kvshelf.errors import PolicyUnsupported
from kvshelf.integrations.vllm.ragged.pages import HeadPages, HeadTables, Storage, full_of, rows_of, stand_ins
from kvshelf.integrations.vllm.request import is_ragged, require_places
from kvshelf.methods.policies.registry import POLICIES
from kvshelf.samples.tasks import make_facts, write_document
from tests.amounts import few

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


@pytest.mark.parametrize("caches", few(1, [layer_outermost, page_outermost]))
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
                before = rows.slots(each.stored(at), pages[request])
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
    assert full_of(stand_ins(mean, PAGE), PAGE) * PAGE <= mean + PAGE
    assert mean < stand_ins(mean, PAGE) < mean + 2 * PAGE
    assert HeadPages.of(kept, stand_ins(mean, PAGE), PAGE).fits


def test_pages_that_are_not_of_one_allocation_have_no_rows() -> None:
    assert Storage.of([torch.zeros(PAGES, HEADS, PAGE, WIDTH) for _ in range(LAYERS)]) is None
    assert Storage.of(list(torch.zeros(LAYERS, PAGES, PAGE, HEADS, WIDTH).transpose(2, 3))) is None


def test_heads_that_have_numbers_of_their_own_get_no_rows() -> None:
    """Sinks and slopes are of a query head, which vLLM's attention would take for those of another KV head."""
    for other in ({}, {"sinks": torch.zeros(4)}, {"alibi_slopes": torch.zeros(4)}, {"sliding_window": 9}):
        impl = {"rows": None, "sinks": None, "alibi_slopes": None, "sliding_window": -1} | other
        layers = [
            SimpleNamespace(impl=SimpleNamespace(**impl), kv_cache=pages, layer_name=str(at))
            for at, pages in enumerate(layer_outermost())
        ]
        assert (rows_of({layer.layer_name: layer for layer in layers}) is None) == bool(other)


def test_a_plan_has_the_lengths_of_its_heads_alone() -> None:
    """A worker keeps it: the places of all entries would be megabytes."""
    head_pages = plan(3)
    for layer in range(LAYERS):
        head_pages.stored(layer)
    head_pages.spread(900)
    assert vars(head_pages).keys() == {"lengths", "stand_ins", "full", "page"}


def test_tables_that_are_kept_are_those_of_the_pages() -> None:
    """Over 30 tokens of an answer, in which pages come, and other pages after a preemption."""
    caches, head_pages = layer_outermost(), plan(4)
    kept = HeadTables(Storage(caches), list(map(str, range(LAYERS))))
    for token in range(30):
        own = [*range(1, 20)] if token < 20 else [1, *range(30, 48)]
        total = head_pages.stand_ins + 5 + token
        metadata = SimpleNamespace(
            query_start_loc=torch.tensor([0, 1]),
            seq_lens=torch.tensor([total]),
            block_table=torch.tensor([own], dtype=torch.int32),
        )
        new = HeadTables(Storage(caches), list(map(str, range(LAYERS))))
        kept.requests = new.requests = {1: head_pages}
        steps = kept.of(metadata), new.of(metadata)
        assert steps[0] is not None
        assert steps[1] is not None
        assert steps[0].tables.equal(steps[1].tables)
        assert steps[0].slots.equal(steps[1].slots)


def test_the_plug_in_imports_nothing_that_vllm_has_not() -> None:
    """vLLM loads it wherever kvshelf is installed, also without the extra `serve`."""
    code = (
        "import sys; import kvshelf.integrations.vllm.ragged.plugin; "
        "print(*sorted(name for name in sys.modules if name.startswith('kvshelf.')), 'pydantic' in sys.modules)"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    packages = "kvshelf.integrations", "kvshelf.integrations.vllm", "kvshelf.integrations.vllm.ragged"
    assert said == ["kvshelf._extras", "kvshelf.errors", *packages, f"{packages[-1]}.plugin", "False"]


def test_a_pass_without_a_ragged_cache_has_no_rows() -> None:
    rows = HeadTables(Storage(layer_outermost()), ["0", "1", "2"])
    rows.requests = {7: plan(0)}
    one = SimpleNamespace(
        query_start_loc=torch.tensor([0, 1]), seq_lens=torch.tensor([1]), block_table=torch.tensor([[5]])
    )
    assert rows.of(one) is None


MADE: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in POLICIES if POLICIES[name].takes_budget),
    ("d2o", {"prefill": "chunked"}),
    ("kvmerger", {"first": 1}),
    ("kvmerger", {"threshold": 0.75}),
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


@pytest.mark.parametrize(("policy", "params"), few(18, MADE), ids=str)
def test_a_policy_says_whether_heads_differ(tiny: Engine, policy: str, params: dict[str, Any], tmp_path: Path) -> None:
    """By what the manifest of its cache has."""
    document = write_document(
        random.Random(3), make_facts(random.Random(3), [4] * 2), "prose", 400, lambda text: len(text.split())
    )
    size = {} if "threshold" in params else {"compression_ratio": 0.5}
    cache = tiny.compress(document.text, policy=policy, **size, **params)
    with open_store(f"disk://{tmp_path}/home") as store:
        manifest = store.put(cache)
        with store.open_cache(manifest.id) as opened:
            assert opened.lengths == [list(layer.lengths) for layer in cache.reduced]
    kept = {length for layer in cache.reduced for length in layer.lengths}
    assert is_ragged(manifest) == (len(kept) > 1)


@pytest.mark.parametrize(
    ("first", "then", "refused"),
    [("kvzip", "full", True), ("kvzip", "keydiff", True), ("kvzip", "kvzip", False), ("keydiff", "full", False)],
)
def test_what_is_appended_evenly_to_a_ragged_cache_is_refused(
    tiny: Engine, first: str, then: str, refused: bool, tmp_path: Path
) -> None:
    """Also where another piece is between them."""
    document, size = "One code is 17. " * 30, {} if then == "full" else {"compression_ratio": 0.5}
    caches = [tiny.compress(document, policy=first, compression_ratio=0.5)]
    for _ in range(2):
        caches.append(tiny.extend(caches[-1], document, policy=then, **size))
    lengths = {length for layer in caches[-1].reduced for length in layer.lengths}
    with open_store(f"disk://{tmp_path}/home") as store:
        stored = [store.put(caches[0])]
        for cache in caches[1:]:
            stored.append(store.put(cache, parent_id=stored[-1].id))
        assert refused == (len(lengths) > 1 and not is_ragged(stored[-1]))
        if refused:
            with pytest.raises(PolicyUnsupported, match="append by the policy of that cache"):
                require_places(store, stored[-1])
        else:
            require_places(store, stored[-1])
