"""Answers that read a part of the stored entries, against one masked forward in fp64, and what a selection may not
do."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch

from kvshelf.engine.attention.states import SUPPORTED
from kvshelf.engine.decode.generation import Sampling
from kvshelf.engine.engine import Engine
from kvshelf.errors import InvalidRequest, PolicyUnsupported
from kvshelf.kernels.choose import Choice, Chosen, choose
from kvshelf.kernels.prefix_attention import PackedPrefix, SelectedPrefix
from kvshelf.kernels.quantize.rows import QuantizedRows, plain
from kvshelf.methods.selectors import build, names
from kvshelf.methods.selectors.base import of_pages
from kvshelf.samples.tasks import make_document
from kvshelf_bench.models.small import small_model
from kvshelf_bench.quality.retrieval import counter
from tests.amounts import amount, few
from tests.by_hand import Prefix, frequencies, greedy
from tests.engine.asking import ids
from tests.model.test_rope import random_model

KINDS = (
    ({"policy": "full"}, "none"),
    ({"policy": "keydiff", "compression_ratio": 0.25}, "int4:group=16,residual=16"),
    ({"policy": "ada", "base": "keydiff", "compression_ratio": 0.25}, "none"),  # heads of different lengths
    ({"policy": "lagkv", "compression_ratio": 0.25}, "int8:group=16,residual=0"),
)
BUDGET = 80


@pytest.fixture(scope="module")
def caches(llama):
    made = [llama.engine.compress(llama.ids[i * 9 : i * 9 + 230], **kind) for i, (kind, _) in enumerate(KINDS)]
    return [cache.encoded(codec) for cache, (_, codec) in zip(made, KINDS, strict=True)]


@pytest.fixture(scope="module")
def tiny() -> Engine:
    return Engine.load("kvshelf-tiny")


def in_bf16(numbers: torch.Tensor, direction: int) -> torch.Tensor:
    """fp64 numbers rounded to bf16 upward (1) or downward (-1), in fp64."""
    nearest = numbers.bfloat16()
    wrong = (nearest.double() - numbers) * direction < 0
    return torch.where(wrong, nearest.nextafter(torch.tensor(direction * torch.inf).bfloat16()), nearest).double()


def pages_by_hand(cache, question_tokens, page, budget, whole, every=1):
    """What quest shows each token, computed from its definition; of codes, the bounds are those of their groups, and of
    plain keys those that 8 bits would have. whole: the last entries of a head, always read."""

    def bounds_of(layer, kv_head, rows, start):
        first = getattr(cache.layers[layer], "parts", (cache.layers[layer],))[0]
        if not isinstance(first.keys, QuantizedRows):
            least = in_bf16(rows.amin(0), -1)
            return least, least + 255 * in_bf16((rows.amax(0) - least) / 255, 1)
        coded = first.keys.heads()[kv_head]
        least = coded.zeros[start // page].double()
        return least, least + coded.scales[start // page].double() * (2**coded.bits - 1)

    def chosen(layer, queries, keys, visible):
        q_heads, tokens, _ = queries.shape
        shown = torch.ones(q_heads, tokens, keys.shape[1], dtype=torch.bool)
        group = q_heads // len(keys)
        for kv_head, (head, there) in enumerate(zip(keys, visible, strict=True)):
            length = int(there.sum())
            paged = length - whole
            starts = list(range(0, paged, page))
            for t in range(question_tokens, tokens):
                chooses = t - (t - question_tokens) % every
                asked = queries[kv_head * group : (kv_head + 1) * group, chooses]
                bounds = []
                for start in starts:
                    rows = head[start : min(start + page, paged)]
                    least, most = bounds_of(layer, kv_head, rows, start)
                    bounds.append(torch.maximum(asked * least, asked * most).sum(1).max().item())
                bounds[0] = bounds[-1] = float("inf")
                seen = torch.zeros(keys.shape[1], dtype=torch.bool)
                seen[paged:length] = True
                left = budget - whole - sum(min(start + page, paged) - start for start in {starts[0], starts[-1]})
                for place in sorted(range(len(starts)), key=lambda p: -bounds[p]):
                    rows = slice(starts[place], min(starts[place] + page, paged))
                    size = rows.stop - rows.start
                    if bounds[place] < float("inf"):
                        if size > left:
                            break
                        left -= size
                    seen[rows] = True
                shown[kv_head * group : (kv_head + 1) * group, t] = seen
        return shown

    return chosen


@pytest.mark.parametrize(
    ("number", "whole", "every"),
    few(3, [(0, 0, 1), (1, 16, 1), (2, 0, 1), (3, 0, 1), (0, 0, 3)]),
    ids=["full", "int4", "ragged", "int8", "every third"],
)
def test_quest_is_one_masked_forward_over_the_chosen_pages(llama, caches, number, whole, every):
    """Every answer token chooses by its own query, or every n-th for those that follow. Entries are those that an
    evicting policy left, at their positions."""
    prefix = Prefix.spelled_out(caches[number], frequencies(llama.model))
    lengths, differ = [], 0
    for question in (llama.ids[3:14], llama.ids[100:107], llama.ids[90:91]):
        chosen = {"select": "quest", "select_tokens": BUDGET, "select_params": {"every": every}}
        ours = llama.engine.answer(caches[number], question, max_new_tokens=12, **chosen)
        by_hand = partial(greedy, llama.model, prefix, question, caches[number].next_position, 12, guess=ours.token_ids)
        right = by_hand(pages_by_hand(caches[number], len(question), 16, BUDGET, whole, every))
        right = right[: len(ours.token_ids)]  # by hand, no token ends an answer
        assert ours.token_ids[: len(right)] == right
        assert ours.usage.read_tokens <= BUDGET < llama.engine.attach(caches[number]).read_tokens
        lengths.append(len(right))
        differ += right != by_hand()[: len(right)]
    assert max(lengths) > 8
    assert differ, "the choice changed no answer, and a selector that reads all would pass"


SELECTORS = ("quest", "sage", "policy:snapkv", "policy:tova", "policy:h2o", "policy:ems")


@pytest.mark.parametrize("select", SELECTORS)
def test_a_budget_for_all_is_the_dense_answer(llama, caches, select):
    for cache in (caches[0], caches[1]):
        dense = llama.engine.answer(cache, llama.ids[3:14], max_new_tokens=12)
        assert llama.engine.answer(cache, llama.ids[3:14], max_new_tokens=12, select=select, select_tokens=230) == dense


@pytest.mark.parametrize(("select", "params"), few(3, [*((each, {}) for each in SELECTORS), ("quest", {"every": 3})]))
def test_alone_in_a_batch_and_twice_it_is_the_same(llama, caches, select, params):
    """Beside rows that read all of the same document, and in another order."""
    chosen = {"select": select, "select_tokens": BUDGET, "select_params": params}
    asked = [(caches[i % 2], llama.ids[7 * i : 7 * i + 4 + 9 * i]) for i in range(5)]
    alone = [llama.engine.answer(cache, question, max_new_tokens=12, **chosen) for cache, question in asked]
    assert llama.engine.answer_all(asked, max_new_tokens=12, **chosen) == alone
    assert llama.engine.answer_all(asked[::-1], max_new_tokens=12, **chosen) == alone[::-1]
    beside = []
    batch = llama.engine.batch()
    for (cache, question), selected in [(each, yes) for each in asked for yes in (True, False)]:
        document = llama.engine.attach(cache)
        selection = None
        if selected:
            selection = llama.engine.select(
                document, select, question_tokens=len(question), tokens=BUDGET, params=params
            )
        beside.append(llama.engine.start(document, question, Sampling(12), selection))
    while open_ones := [answer for answer in beside if not answer.finished]:
        assert not [told for told in batch.step(open_ones) if isinstance(told, Exception)]
    assert [answer.answer().token_ids for answer in beside[::2]] == [answer.token_ids for answer in alone]


def test_stored_caches_stay_as_they_are(llama, caches):
    before = [cache.to_bytes() for cache in caches]
    for i in range(amount(48, 1000) // 8):
        asked = [(caches[j % 2], llama.ids[i + j : i + j + 5]) for j in range(8)]
        llama.engine.answer_all(asked, max_new_tokens=3, select=SELECTORS[i % len(SELECTORS)], select_tokens=BUDGET)
    assert [cache.to_bytes() for cache in caches] == before


def test_the_first_and_the_last_tokens_are_always_read(llama, caches):
    for cache in caches[:2]:
        document, question = llama.engine.attach(cache), llama.ids[3:14]
        selection = llama.engine.select(document, "quest", question_tokens=len(question), tokens=BUDGET)
        generation = llama.engine.start(document, question, Sampling(8), selection)
        batch = llama.engine.batch()
        while not generation.finished:
            batch.step([generation])
            for layer, record in enumerate(cache.layers):
                for head, positions in enumerate(read_positions(selection, document, layer, len(record.positions))):
                    if generation.token_ids[1:]:
                        kept = record.positions[head].tolist()
                        assert {*kept[:16], kept[-1]} <= set(positions), (layer, head)


def test_of_as_many_tokens_as_fasa_always_reads_it_reads_no_others(tiny):
    cache = tiny.compress("The tide tables hang beside the door, and the lamp is lit at five. " * 4, policy="full")
    document, question = tiny.attach(cache), tiny.encode_query(cache, "Where do the tide tables hang?")
    selection = tiny.select(document, "fasa", question_tokens=len(question), tokens=6, params={"always": 3})
    generation, batch = tiny.start(document, question, Sampling(2), selection), tiny.batch()
    while not generation.finished:
        batch.step([generation])
    for layer, record in enumerate(cache.layers):
        for head, positions in enumerate(read_positions(selection, document, layer, len(record.positions))):
            kept = record.positions[head].tolist()
            assert positions == kept[:3] + kept[-3:], (layer, head)


def test_with_room_for_all_nothing_is_chosen(llama, caches):
    document = llama.engine.attach(caches[0])
    whole = max(max(layer.lengths) for layer in caches[0].layers)
    for tokens, chooses in ((whole - 1, True), (whole, False)):
        selection = llama.engine.select(document, "quest", question_tokens=11, tokens=tokens)
        assert (selection is not None) is chooses


def read_positions(selection, document, layer, heads):
    """The positions that the last token of an answer read, of each head."""
    found = [[] for _ in range(heads)]
    for prefix, record in zip(selection.prefixes(layer), document.entries(layer), strict=True):
        for head, positions in enumerate(record.positions):
            if isinstance(prefix, SelectedPrefix):
                rows = prefix.chosen.rows[head, : int(prefix.chosen.counts[head])].long()
                positions = positions[rows]
            found[head] += positions.tolist()
    return [sorted(head) for head in found]


@pytest.mark.parametrize("page", [5, 16])
def test_exact_bounds_are_the_least_and_largest_values_of_a_page(caches, page):
    """Section 3.2 of Quest in loops, with fp64 products; rounded bounds are wider."""
    layer = caches[2].layers[0]  # heads of different lengths
    (prefix,) = layer.prefixes()
    units, rounded = of_pages(prefix, page, exact=True), of_pages(prefix, page)
    low, high = units.low.double(), (units.low + units.span).double()
    unit = 0
    for (keys, _), length in zip(prefix.heads, prefix.lengths, strict=True):
        for start in range(0, length, page):
            rows = keys[start : min(length, start + page)]
            assert torch.equal(low[unit], rows.amin(dim=0).double())
            assert torch.allclose(high[unit], rows.amax(dim=0).double(), rtol=1e-6, atol=1e-6)
            unit += 1
    assert unit == len(units.low)
    assert units.scale == 1
    assert bool((rounded.low.double() <= low).all())
    assert bool(((rounded.low.float() + rounded.scale * rounded.span.float()).double() > high).any())
    assert build("quest", {"bounds": "exact"}).bounds == "exact"


def test_bounds_of_codes_are_those_of_the_rows_they_stand_for():
    """Of other pages, and of plain rows, they are made. They bound every key, and hardly more."""
    keys, lengths = torch.randn(150, 32, generator=torch.Generator().manual_seed(1)) * 3, (90, 60)
    for bits in (2, 4, 8):
        rows = QuantizedRows.quantize(keys, lengths, bits=bits, group=16, axis="tokens")
        coded, spelled, other = (
            of_pages(PackedPrefix(each, keys, lengths), page)
            for each, page in ((rows, 16), (plain(rows), 16), (rows, 7))
        )
        assert torch.equal(coded.ends, spelled.ends)
        assert coded.counts == spelled.counts
        assert coded.low.data_ptr() == rows.zeros.data_ptr()
        assert (coded.nbytes, spelled.nbytes) == (coded.ends.nbytes + 10, coded.ends.nbytes + 10 + 2 * 2 * 10 * 32)
        for units, page in ((coded, 16), (spelled, 16), (other, 7)):
            low, high = units.low.float(), units.low.float() + units.scale * units.span.float()
            own = [part for head in torch.split(plain(rows), lengths) for part in torch.split(head, page)]
            least, most = (torch.stack([getattr(part, name)(0) for part in own]) for name in ("amin", "amax"))
            assert (low <= least).all()
            assert (high >= most - 1e-5).all()
            assert (high - low <= 1.1 * (most - least) + 0.02 * low.abs()).float().mean() > 0.9


def chosen_pages(keys, query, budget, page=16):
    prefix = PackedPrefix(keys, keys, (len(keys),))
    parts = of_pages(prefix, page)
    choice = Choice((parts,), (Chosen.room(prefix.lengths, budget, keys.device),), budget, relu=1.0)
    choose(query, choice)
    rows = choice.chosen[0].rows[0, : int(choice.chosen[0].counts[0])]
    return sorted({int(row) // page for row in rows})


@pytest.mark.parametrize("place", [1, 4, 8])
def test_a_page_against_the_query_changes_nothing_among_the_others(place):
    keys, query = (torch.randn(*shape, generator=torch.Generator().manual_seed(3)) for shape in ((160, 32), (2, 32)))
    worst = -10 * query[:1].expand(16, -1)
    query[1] = query[0]
    with_page = torch.cat([keys[: 16 * place], worst, keys[16 * place :]])
    expected = chosen_pages(keys, query, 64)
    assert chosen_pages(with_page, query, 64) == [page + (page >= place) for page in expected]


def test_the_page_of_a_needle_is_chosen_if_its_logit_exceeds_the_bounds_of_the_others():
    generator = torch.Generator().manual_seed(5)
    for _ in range(amount(50, 1000)):
        keys, query = torch.randn(320, 16, generator=generator), torch.randn(1, 16, generator=generator)
        place = int(torch.randint(16, 304, (1,), generator=generator))
        bound = query.abs() @ keys.abs().amax(0)
        keys[place] = query[0] * (1.01 * bound / query.square().sum())
        assert place // 16 in chosen_pages(keys, query, 48)


TASK = make_document("multikey", "prose", 700, 5, counter(Engine.load("kvshelf-tiny")))
AGREEING = (
    ("sage", {}),
    ("policy:sage", {"union": "ragged"}),
    ("policy:snapkv", {"window": 8}),
    ("policy:pyramidkv", {"window": 8}),
    ("policy:tova", {}),
    ("policy:chunkkv", {"window": 8}),
    ("policy:cake", {"window": 8}),
    ("policy:compresskv", {"window": 8}),
    ("policy:defensivekv", {"window": 8}),
    ("policy:layer_defensivekv", {"window": 8}),
)


@pytest.mark.parametrize(("select", "params"), few(5, AGREEING), ids=[name for name, _ in AGREEING])
def test_a_policy_at_the_question_reads_what_it_would_have_kept(tiny, select, params):
    """With this question expected: the same tokens, so the same entries, of every head and layer."""
    full, question = tiny.compress(TASK.text, policy="full"), TASK.questions[0].text
    kept = tiny.compress(
        TASK.text,
        policy=select.removeprefix("policy:"),
        budget_tokens=96,
        expected_questions=[question],
        **params,
    )
    document, query = tiny.attach(full), tiny.encode_query(full, question)
    selection = tiny.select(document, select, question_tokens=len(query), tokens=96, params=params)
    generation = tiny.start(document, query, Sampling(2), selection)
    tiny.batch().step([generation])
    for layer, record in enumerate(kept.layers):
        assert read_positions(selection, document, layer, 2) == [head.tolist() for head in record.positions]


def test_a_joint_question_shares_one_budget_over_its_documents(llama, caches):
    together = [caches[0], caches[3]]
    answer = llama.engine.answer(together, llama.ids[3:14], max_new_tokens=6, select="quest", select_tokens=96)
    assert 64 <= answer.usage.read_tokens <= 96
    document = llama.engine.joined([llama.engine.attach(cache) for cache in together])
    assert document.read_tokens > 390
    everything = llama.engine.answer(together, llama.ids[3:14], max_new_tokens=6)
    assert everything.usage.read_tokens == document.read_tokens
    both = llama.engine.answer(together, llama.ids[3:14], max_new_tokens=6, select="sage", select_tokens=96)
    assert both.usage.read_tokens == 96
    assert sum(both.sources) == pytest.approx(1)


def test_what_cannot_be_selected_is_refused_by_name(llama, caches):
    asked = partial(llama.engine.answer, caches[1], llama.ids[3:14])
    for method in ("ques", "policy:keydiff", "policy:kvzip", "policy:mikv", "policy:"):
        with pytest.raises(InvalidRequest, match="unknown selector") as refused:
            asked(select=method)
        assert refused.value.param == "select.method"
    with pytest.raises(InvalidRequest, match=r"'quest' has no parameter 'pages' .did you mean 'page'") as refused:
        asked(select="quest", select_params={"pages": 4})
    assert refused.value.param == "select.params.pages"
    with pytest.raises(InvalidRequest, match="it must be int or null from 1"):
        asked(select="quest", select_params={"page": 0})
    with pytest.raises(InvalidRequest, match="tokens is 0; it must be an integer from 1"):
        asked(select="quest", select_tokens=0)
    with pytest.raises(InvalidRequest, match="always reads 44 entries") as refused:
        asked(select="quest", select_tokens=43)
    assert refused.value.param == "select.tokens"
    with pytest.raises(PolicyUnsupported, match=r"nobody has measured them.*--only chunks"):
        asked(select="fasa")
    ems = llama.engine.compress(llama.ids[:200], policy="ems", compression_ratio=0.5)
    with pytest.raises(PolicyUnsupported, match="merged tokens"):
        llama.engine.answer(ems, llama.ids[3:14], select="quest", select_tokens=64)
    with pytest.raises(PolicyUnsupported, match="heads of layer 0 keep"):
        llama.engine.answer(caches[2], llama.ids[3:14], select="sage", select_tokens=64)


@pytest.mark.parametrize("model", few(2, ["window", "gemma3_text", "qwen3_next", "deepseek_v3"]))
def test_models_of_other_layers(model):
    """A layer with a window is read whole, and latents as keys are; states are the row's own."""
    if model in ("qwen3_next", "deepseek_v3") and not SUPPORTED:
        pytest.skip("this transformers has caches of its own for each of these models")
    made = random_model("mistral", sliding_window=24) if model == "window" else small_model(model)
    engine = Engine(made.eval())
    document, question, other = ([i % 60 for i in ids(*given)] for given in ((150,), (7, 3), (9,)))
    cache = engine.compress(document, policy="full")
    ask = partial(engine.answer, cache, question, max_new_tokens=6)
    dense, part = ask(), ask(select="quest", select_tokens=48)
    assert ask(select="quest", select_tokens=150) == dense
    assert part == ask(select="quest", select_tokens=48)
    several = engine.answer_all([(cache, question), (cache, other)], max_new_tokens=6, select="quest", select_tokens=48)
    assert several[0] == part
    if model == "window":  # no layer sees all
        assert part == dense
    else:
        assert part.usage.read_tokens < dense.usage.read_tokens
    if model == "deepseek_v3":
        with pytest.raises(PolicyUnsupported, match="share latents"):
            ask(select="sage", select_tokens=48)
    elif model != "window":
        assert ask(select="sage", select_tokens=48).usage.read_tokens < dense.usage.read_tokens


def test_every_selector_is_built_by_its_name():
    assert {"quest", "fasa", "sage", "policy:snapkv", "policy:layer_defensivekv"} <= set(names())
    for name in names():
        assert build(name, {})


def test_a_document_that_keeps_nothing_in_a_layer_is_chosen_from_beside_another(llama, caches):
    """As where all layers share one budget."""
    first, *others = caches[0].layers
    nothing = first.select(torch.zeros(first.entries, dtype=torch.bool))
    empty = replace(caches[0], layers=(nothing, *others))
    document = llama.engine.joined([llama.engine.attach(cache) for cache in (empty, caches[1])])
    question = llama.ids[3:14]
    selection = llama.engine.select(document, "quest", question_tokens=len(question), tokens=BUDGET)
    answer, batch = llama.engine.start(document, question, Sampling(6), selection, passages=True), llama.engine.batch()
    while not answer.finished:
        (told,) = batch.step([answer])
        assert not isinstance(told, Exception)
    assert answer.answer().usage.read_tokens <= BUDGET
    assert [sum(map(bool, shares)) > 0 for shares in answer.answer().passages] == [True, True]
