"""Policy and selector infllm: what an index holds, answers against one masked forward in fp64, and reading in part."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import pytest
import torch

from kvshelf.artifact import blob
from kvshelf.artifact.cache import CompressedCache
from kvshelf.artifact.opened.partial import PartialCache
from kvshelf.artifact.records import Indexed, parts_of
from kvshelf.engine.attention.attachment import JointAttachment, PartialAttachment
from kvshelf.engine.decode.generation import Sampling
from kvshelf.engine.engine import Engine
from kvshelf.errors import CacheCorrupt, InvalidRequest, PolicyUnsupported
from kvshelf.methods.selectors.infllm import InfLLM
from kvshelf.store.disk import DiskStore
from tests.amounts import in_turn
from tests.by_hand import Prefix, frequencies, greedy, turned
from tests.store.places import DiskPlace
from tests.store.test_parts import CountedFile

BLOCK, RECENT, BUDGET = 16, 16, 96
CODECS = ("none", "int4:group=16,residual=10")
QUESTIONS = (slice(3, 14), slice(100, 107), slice(90, 91))
SELECT = {"select": "infllm", "select_tokens": BUDGET}


@pytest.fixture(scope="module")
def caches(llama) -> list[CompressedCache]:
    cache = llama.engine.compress(llama.ids[:230], policy="infllm", block=BLOCK, representatives=3)
    return [cache.encoded(codec) for codec in CODECS]


def with_summaries(index: Indexed) -> Indexed:
    """The same entries with summaries that are no keys."""
    return replace(index, summaries=index.summaries[:, :-1].contiguous())


def index_of(cache: CompressedCache, layer: int) -> Indexed:
    (found,) = (part for part in parts_of(cache.layers[layer]) if isinstance(part, Indexed))
    return found


def opened(engine: Engine, cache: CompressedCache) -> tuple[PartialAttachment, CountedFile]:
    data = cache.to_bytes()
    file = CountedFile(data)
    document = engine.attachments.of_part(PartialCache(blob.inspect(data), file, nullcontext))
    assert document is not None
    return document, file


def asked(engine: Engine, document, question: list[int], count: int = 12, **select):
    """The answer of a question of its own batch, by a selector."""
    chosen = engine.select(document, "infllm", question_tokens=len(question), tokens=BUDGET, params=select)
    generation, batch = engine.start(document, question, Sampling(count), chosen), engine.batch()
    while not generation.finished:
        (told,) = batch.step([generation])
        if isinstance(told, Exception):
            raise told
    return generation.answer()


def test_an_index_has_the_keys_that_later_tokens_attend_to_most(llama, caches):
    full = llama.engine.compress(llama.ids[:230], policy="full")
    inv_freq = frequencies(llama.model)
    for layer, record in enumerate(full.layers):
        sums = column_sums_by_hand(llama, layer)  # [q_heads, N]
        index = index_of(caches[0], layer)
        summaries = index.summaries.float().view(-1, index.kv_heads, 3, index.key_dim)
        group = len(sums) // index.kv_heads
        for head, (keys, _) in enumerate(record.heads()):
            received = sums[head * group : (head + 1) * group].sum(0)
            unrotated = turned(keys, -torch.arange(230), inv_freq)
            for number, start in enumerate(range(0, 230, BLOCK)):
                rows = received[start : start + BLOCK].argsort(descending=True)[:3] + start
                right = unrotated[rows].sum(0)
                assert torch.allclose(summaries[number, head].sum(0).double(), right, atol=0.1), (layer, head, number)


def column_sums_by_hand(llama, layer: int) -> torch.Tensor:
    model = llama.model
    ids = torch.tensor([llama.ids[:230]])
    implementation = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        with torch.no_grad():
            weights = model(ids, output_attentions=True).attentions[layer]
    finally:
        model.set_attn_implementation(implementation)
    return weights[0].double().sum(1)


def blocks_by_hand(cache: CompressedCache, question_tokens: int, inv_freq: torch.Tensor, *, every_token: bool):
    """What the selector shows each token: the question's last one chooses for all, or each of the answer for itself."""

    def seen_by(layer: int, query: torch.Tensor, position: int) -> torch.Tensor:
        index, tokens = index_of(cache, layer), cache.num_tokens
        heads = turned(query, torch.tensor([-position]), inv_freq).view(index.kv_heads, -1, index.key_dim)
        keys = index.summaries.double().view(-1, index.kv_heads, 3, index.key_dim)
        scores = torch.einsum("hgd,bhrd->bhgr", heads, keys).amax(3).sum((1, 2)).tolist()
        rows, seen = index.lengths[0], torch.zeros(tokens, dtype=torch.bool)
        starts = list(range(0, rows, BLOCK))
        seen[rows:] = True
        for start in starts:
            if start == 0 or start + BLOCK > tokens - RECENT:
                seen[start : min(start + BLOCK, rows)] = True
        for place in sorted(range(len(starts)), key=lambda n: -scores[n]):
            own = slice(starts[place], min(starts[place] + BLOCK, rows))
            if not seen[own.start]:
                if int(seen.sum()) + own.stop - own.start > BUDGET:
                    break
                seen[own] = True
        return seen

    def chosen(layer, queries, keys, visible):  # noqa: ARG001
        q_heads, tokens, _ = queries.shape
        shown = torch.ones(q_heads, tokens, keys.shape[1], dtype=torch.bool)
        for token in range(tokens):
            chooses = token if every_token and token >= question_tokens else question_tokens - 1
            shown[:, token] = seen_by(layer, queries[:, chooses], cache.next_position + chooses)
        return shown

    return chosen


@in_turn({"refresh": ["question", "step"], "number": range(len(CODECS))})
def test_it_is_one_masked_forward_over_the_chosen_blocks(llama, caches, number, refresh):
    cache, inv_freq = caches[number], frequencies(llama.model)
    prefix = Prefix.spelled_out(cache, inv_freq)
    compared, differ = 0, 0
    params = {"recent": RECENT, "refresh": refresh}
    for question in (llama.ids[own] for own in QUESTIONS):
        by_hand = partial(greedy, llama.model, prefix, question, cache.next_position, 12)
        right = by_hand(blocks_by_hand(cache, len(question), inv_freq, every_token=refresh == "step"))
        ours = llama.engine.answer(cache, question, max_new_tokens=12, **SELECT, select_params=params)
        right = right[: len(ours.token_ids)]
        assert ours.token_ids[: len(right)] == right
        assert ours.usage.read_tokens <= BUDGET
        compared += len(right)
        differ += right != by_hand()[: len(right)]
    assert compared > 20
    assert differ, "the choice changed no answer, and a selector that reads all would pass"


def test_a_budget_for_all_is_the_dense_answer(llama, caches):
    for cache in caches:
        dense = llama.engine.answer(cache, llama.ids[3:14], max_new_tokens=12)
        whole = {"select": "infllm", "select_tokens": 230}
        assert llama.engine.answer(cache, llama.ids[3:14], max_new_tokens=12, **whole) == dense


def test_a_larger_budget_reads_the_same_blocks_and_more(llama, caches):
    """In the first layer: behind it, the question's queries differ by what its tokens have read."""
    document, question = llama.engine.attach(caches[1]), llama.ids[3:14]
    before: set[int] = set()
    for budget in (80, 96, 128, 200):
        chosen = llama.engine.select(
            document, "infllm", question_tokens=len(question), tokens=budget, params={"recent": RECENT}
        )
        generation = llama.engine.start(document, question, Sampling(1), chosen)
        llama.engine.batch().step([generation])
        first, *_ = chosen.prefixes(0)
        rows = set(first.chosen.rows[0, : int(first.chosen.counts[0])].tolist())
        assert torch.equal(first.chosen.rows[0], first.chosen.rows[1]), "heads share a choice"
        assert before < rows
        before = rows


def test_an_answer_is_the_same_alone_and_in_a_batch(llama, caches):
    """Also that of a question that takes several steps, beside others."""
    asks = [(caches[0], llama.ids[own]) for own in QUESTIONS] + [(caches[1], llama.ids[:230] * 3)]
    params = {"select_params": {"recent": RECENT}, "max_new_tokens": 6}
    alone = [llama.engine.answer(cache, question, **SELECT, **params).token_ids for cache, question in asks]
    for order in (asks, asks[::-1]):
        together = llama.engine.answer_all(order, **SELECT, **params)
        found = [answer.token_ids for answer in together]
        assert (found if order is asks else found[::-1]) == alone


def test_a_document_read_in_part_answers_as_the_whole_one(llama, caches):
    cache, question = caches[1], llama.ids[3:14]
    right = llama.engine.answer(cache, question, max_new_tokens=12, **SELECT, select_params={"recent": RECENT})
    document, file = opened(llama.engine, cache)
    assert asked(llama.engine, document, question, recent=RECENT) == right
    assert not document.arrived
    assert file.count < 0.8 * file.nbytes
    read = file.count
    assert asked(llama.engine, document, question, recent=RECENT) == right
    assert file.count == read, "what is here is not read again"
    for refresh in ("step", "question"):
        select = {"recent": RECENT, "refresh": refresh}
        for other in (llama.ids[own] for own in QUESTIONS):
            whole = llama.engine.answer(cache, other, max_new_tokens=12, **SELECT, select_params=select)
            assert asked(llama.engine, document, other, **select) == whole
    generation = llama.engine.start(document, question, Sampling(12))
    batch = llama.engine.batch()
    while not generation.finished:
        batch.step([generation])
    assert generation.answer() == llama.engine.answer(cache, question, max_new_tokens=12)
    assert document.arrived
    header = blob.inspect(file.data).header
    assert file.count == header.body_bytes, "every byte is read once"


def test_summaries_are_read_where_they_lie(llama, caches):
    """An answer holds the ends of blocks beside them, no copy."""
    (part,) = llama.engine.attach(caches[1]).parts
    for _, units in part.units(InfLLM(), 0):
        assert units.nbytes == units.ends.nbytes + units.forced.nbytes


def test_passages_have_what_the_question_read(llama, caches):
    """Also of an answer of one token, which the question's last token gives."""
    cache, engine, question = caches[1], llama.engine, llama.ids[3:14]
    document = engine.attach(cache)
    chosen = engine.select(document, "infllm", question_tokens=len(question), tokens=BUDGET, params={"recent": RECENT})
    generation = engine.start(document, question, Sampling(1), chosen, passages=True)
    engine.batch().step([generation])
    reads = torch.zeros(cache.num_tokens)
    for layer in range(document.num_layers):
        blocks, rest = chosen.prefixes(layer)
        reads[blocks.chosen.rows[0, : int(blocks.chosen.counts[0])].long()] += 1
        reads[-rest.lengths[0] :] += 1
    (shares,) = generation.answer().passages
    assert list(shares) == (255 * reads / document.num_layers).round().int().tolist()
    assert 0 < sum(map(bool, shares)) < cache.num_tokens


def test_several_documents_are_read_in_part_together(llama, caches):
    """The budget is shared: no document has blocks that are always read."""
    other = llama.engine.compress(llama.ids[200:400], policy="infllm", block=BLOCK, representatives=3)
    question = llama.ids[3:14]
    whole = llama.engine.answer([caches[1], other], question, max_new_tokens=8, **SELECT)
    (first, one), (second, two) = (opened(llama.engine, cache) for cache in (caches[1], other))
    document = llama.engine.joined([first, second])
    assert isinstance(document, JointAttachment)
    answer = asked(llama.engine, document, question, 8)
    assert answer == whole
    assert answer.usage.read_tokens <= BUDGET
    assert sum(answer.sources) == pytest.approx(1)
    assert one.count + two.count < 0.8 * (one.nbytes + two.nbytes)


def test_a_damaged_block_is_named_once_it_is_read(llama, caches, tmp_path):
    """And an answer that does not read it is right."""
    cache, question = caches[1], llama.ids[3:14]
    right = llama.engine.answer(cache, question, max_new_tokens=4, **SELECT, select_params={"recent": RECENT})
    probe, _ = opened(llama.engine, cache)
    asked(llama.engine, probe, question, 4, recent=RECENT)
    layer = probe._cache.layer(0)
    unread = min(set(range(layer.num_runs)) - layer.fetched)
    with DiskStore.open(tmp_path / "home") as store:
        manifest = store.put(cache)
        header = blob.inspect(cache.to_bytes()).header
        at = manifest.bytes_stored - 40 - header.body_bytes + header.layers[0].run_spans(unread)[0].offset
        DiskPlace(tmp_path / "home").change(manifest, lambda data: data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        with store.open_parts(manifest.id) as parts:
            document = llama.engine.attachments.of_part(parts)
            assert asked(llama.engine, document, question, 4, recent=RECENT) == right
            assert not document.failed
            generation = llama.engine.start(document, question, Sampling(4))
            with pytest.raises(CacheCorrupt, match=f"run {unread} of segment 0"):
                llama.engine.batch().step([generation])
            assert document.failed
        with pytest.raises(CacheCorrupt):
            store.open_parts(manifest.id)


def test_nothing_is_stored_for_the_last_tokens_of_a_short_block(llama):
    """Fewer tokens than representatives: one stands in for the others."""
    cache = llama.engine.compress(llama.ids[:33], policy="infllm", block=16, representatives=4)
    summaries = index_of(cache, 0).summaries.view(3, -1, 4, index_of(cache, 0).key_dim)
    assert torch.equal(summaries[2, :, :1].expand(-1, 4, -1), summaries[2])
    assert not torch.equal(summaries[1, :, :1].expand(-1, 4, -1), summaries[1])


def test_what_has_no_index_is_refused(llama, caches):
    full = llama.engine.compress(llama.ids[:230], policy="full")
    with pytest.raises(PolicyUnsupported, match="no index, which selector infllm chooses by") as error:
        llama.engine.answer(full, llama.ids[3:14], **SELECT)
    assert error.value.param == "select.method"
    with pytest.raises(InvalidRequest, match="always reads"):
        llama.engine.answer(caches[0], llama.ids[3:14], select="infllm", select_tokens=16)
    strange = replace(caches[0], layers=tuple(with_summaries(layer) for layer in caches[0].layers))
    with pytest.raises(PolicyUnsupported, match="which are no keys of"):
        llama.engine.answer(strange, llama.ids[3:14], **SELECT)
    assert (
        llama.engine.attachments.of_part(PartialCache(blob.inspect(full.to_bytes()), CountedFile(b""), nullcontext))
        is None
    )


@pytest.mark.parametrize(
    ("codec", "problem"),
    [
        ("mixed", "stores some entries of a block apart"),
        ("klt:classes=1.5/4,shares=25/25", "stores some entries of a block apart"),
        ("int4:group=64", "64 entries share a scale, and blocks of an index have 16"),
    ],
)
def test_codecs_that_part_a_block_are_refused_before_the_prefill(codec, problem):
    engine = Engine.load("kvshelf-tiny")
    job = engine.prepare("A text. " * 50, policy="infllm", policy_params={"block": 16})
    with pytest.raises(InvalidRequest, match=problem):
        engine.compressor.level(job, codec)
    with pytest.raises(InvalidRequest, match=problem):
        engine.encoded(engine.run(job).cache, codec)
