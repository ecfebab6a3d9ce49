"""Selector sentencekv: answers against one masked forward in fp64, which sentences are read, and where they end."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import chain

import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from kvshelf.artifact.cache import CompressedCache
from kvshelf.engine.decode.batch import DecodeBatch
from kvshelf.engine.decode.generation import Sampling
from kvshelf.engine.decode.slots.slots import Slots
from kvshelf.engine.engine import Engine
from kvshelf.errors import InvalidRequest, PolicyUnsupported
from tests.amounts import in_turn
from tests.by_hand import Prefix, frequencies, greedy
from tests.engine.decode.slots.test_slots import Tape
from tests.engine.test_selecting import read_positions

KINDS = (
    ({"policy": "full"}, "none"),
    ({"policy": "keydiff", "compression_ratio": 0.25}, "int4:group=16,residual=16"),
    ({"policy": "ada", "base": "keydiff", "compression_ratio": 0.25}, "mixed:group=16"),  # sentences in two records
)
BUDGET = 60
PARAMS = {"sink": 8, "recent": 8}


def ends_one(token: int) -> bool:
    """Whether a token of `engine` ends a sentence."""
    return token % 5 == 0


@pytest.fixture(scope="module")
def engine(llama) -> Engine:
    """The recorded Llama with a tokenizer: the text of every fifth token ends with a point."""
    words = {f"w{i}{'.' if ends_one(i) else ''}": i for i in range(llama.model.config.vocab_size)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w1"))
    tokenizer.decoder = decoders.Fuse()
    return Engine(llama.model, PreTrainedTokenizerFast(tokenizer_object=tokenizer))


@pytest.fixture(scope="module")
def caches(engine, llama) -> list[CompressedCache]:
    made = [engine.compress(llama.ids[i * 9 : i * 9 + 230], **kind) for i, (kind, _) in enumerate(KINDS)]
    return [cache.encoded(codec) for cache, (_, codec) in zip(made, KINDS, strict=True)]


def sentences_by_hand(cache, question_tokens: int, answer: list[int], step: bool):
    """What the selector shows each token of this answer, computed from its definition."""

    def rows_of_mean(number: int) -> slice | None:
        """Of the tokens whose queries choose for a token of the answer; None: it reads all."""
        begins = max((at + 1 for at in range(number) if ends_one(answer[at])), default=0)
        if begins == number > 0:
            return None
        first = question_tokens + begins if begins else question_tokens - 1
        return slice(first, question_tokens + number if step else first + 1)

    def read(keys, positions, queries):
        of_row = torch.bucketize(positions, torch.tensor(cache.sentence_ends))
        seen = (positions < PARAMS["sink"]) | (positions >= cache.num_tokens - PARAMS["recent"])
        scores = {int(s): float((queries @ keys[of_row == s].mean(0)).mean()) for s in of_row.unique()}
        for sentence in sorted(scores, key=lambda s: -scores[s]):
            free = ((of_row == sentence) & ~seen).nonzero().flatten()
            seen[free[: BUDGET - int(seen.sum())]] = True
        return seen

    def chosen(layer, queries, keys, visible):
        q_heads, tokens, _ = queries.shape
        shown = torch.ones(q_heads, tokens, keys.shape[1], dtype=torch.bool)
        group = q_heads // len(keys)
        parts = getattr(cache.layers[layer], "parts", (cache.layers[layer],))
        for head, there in enumerate(visible):
            positions = torch.cat([part.positions[head] for part in parts]).long()
            heads = slice(head * group, (head + 1) * group)
            for t in range(question_tokens, tokens):
                rows = rows_of_mean(t - question_tokens)
                if rows is not None:
                    mean = queries[heads, rows].mean(1)
                    seen = torch.zeros(len(there), dtype=torch.bool)
                    seen[: len(positions)] = read(keys[head, : len(positions)], positions, mean)
                    shown[heads, t] = seen
        return shown

    return chosen


@in_turn({"refresh": ["sentence", "step"], "number": [0, 1]})
def test_it_is_one_masked_forward_over_the_chosen_sentences(engine, llama, caches, number, refresh):
    cache, params = caches[number], PARAMS | {"refresh": refresh}
    prefix = Prefix.spelled_out(cache, frequencies(llama.model))
    compared, behind, differ = 0, 0, 0
    for question in (llama.ids[3:14], llama.ids[100:107], llama.ids[90:91], llama.ids[40:52]):
        ours = engine.answer(
            cache, question, max_new_tokens=14, select="sentencekv", select_tokens=BUDGET, select_params=params
        ).token_ids
        by_hand = partial(greedy, llama.model, prefix, question, cache.next_position, len(ours), guess=ours)
        right = by_hand(sentences_by_hand(cache, len(question), ours, refresh == "step"))
        assert ours[: len(right)] == right
        compared += len(right)
        behind += sum(map(ends_one, right[:-2]))
        differ += right != by_hand()[: len(right)]
    assert compared > 24
    assert behind, "no answer had a second sentence"
    assert differ, "the choice changed no answer, and a selector that reads all would pass"


def stepped(engine, cache, question, count, tokens=BUDGET, **params):
    """An answer token by token: its tokens so far, and what the one that ran last has read of each layer and head."""
    document = engine.attach(cache)
    selection = engine.select(
        document, "sentencekv", question_tokens=len(question), tokens=tokens, params=PARAMS | params
    )
    generation, batch = engine.start(document, question, Sampling(count), selection), engine.batch()
    batch.step([generation])
    while not generation.finished:
        seen, ran = generation.seen, list(generation.token_ids)
        read = [read_positions(seen, document, n, len(layer)) for n, layer in enumerate(kept(cache))]
        yield ran, read
        batch.step([generation])


def kept(cache) -> list[list[list[int]]]:
    """The positions of each layer and head."""
    layers = [getattr(layer, "parts", (layer,)) for layer in cache.layers]
    return [
        [sorted(torch.cat(head).tolist()) for head in zip(*(part.positions for part in parts), strict=True)]
        for parts in layers
    ]


@pytest.mark.parametrize("number", range(3), ids=["full", "int4", "ragged"])
def test_a_token_behind_a_sentence_reads_all_and_the_others_their_budget(engine, llama, caches, number):
    """The first and the last tokens that the cache has are among them, at their positions, not their rows."""
    all_of_it, behind = kept(caches[number]), 0
    for question in (llama.ids[3:14], llama.ids[100:107], llama.ids[40:52]):
        for answer, read in stepped(engine, caches[number], question, 16):
            if len(answer) > 1 and ends_one(answer[-2]):
                assert read == all_of_it
                behind += 1
                continue
            for positions, there in zip(chain.from_iterable(read), chain.from_iterable(all_of_it), strict=True):
                always = {at for at in there if at < 8 or at >= caches[number].num_tokens - 8}
                assert always <= set(positions) <= set(there)
                assert len(positions) == min(BUDGET, len(there))
    assert behind


def test_whole_sentences_are_read_and_the_last_one_is_cut(engine, llama, caches):
    """Of the sentences that are read in part, one is the last, and its first tokens are read."""
    ends, tokens = torch.tensor(caches[0].sentence_ends), caches[0].num_tokens
    cut = 0
    for _, read in stepped(engine, caches[0], llama.ids[3:14], 4):
        for positions in chain.from_iterable(read):
            free = [at for at in range(tokens) if 8 <= at < tokens - 8]
            found = {}
            for at in free:
                found.setdefault(int(torch.bucketize(at, ends)), []).append(at in positions)
            parts = [flags for flags in found.values() if any(flags) and not all(flags)]
            assert len(parts) <= 1
            assert all(flags == sorted(flags, reverse=True) for flags in parts)
            cut += len(parts)
    assert cut


@pytest.mark.parametrize("params", [{}, {"refresh": "step"}])
def test_alone_in_a_batch_and_twice_it_is_the_same(engine, llama, caches, params):
    chosen = {"select": "sentencekv", "select_tokens": BUDGET, "select_params": PARAMS | params}
    asked = [(caches[i % 3], llama.ids[7 * i : 7 * i + 4 + 9 * i]) for i in range(6)]
    alone = [engine.answer(cache, question, max_new_tokens=12, **chosen) for cache, question in asked]
    assert engine.answer_all(asked, max_new_tokens=12, **chosen) == alone
    assert engine.answer_all(asked[::-1], max_new_tokens=12, **chosen) == alone[::-1]
    dense = [engine.answer(cache, question, max_new_tokens=12) for cache, question in asked]
    assert [each.token_ids for each in alone] != [each.token_ids for each in dense]


def test_a_budget_for_all_is_the_dense_answer(engine, llama, caches):
    for cache in caches:
        dense = engine.answer(cache, llama.ids[3:14], max_new_tokens=12)
        assert engine.answer(cache, llama.ids[3:14], max_new_tokens=12, select="sentencekv", select_tokens=230) == dense


@pytest.mark.parametrize(("select", "params"), [("sentencekv", PARAMS | {"refresh": "step"}), ("sage", {})])
def test_a_step_that_was_abandoned_does_not_count(engine, llama, caches, select, params):
    """It ran some layers, whose queries would be taken twice."""
    document, question = engine.attach(caches[0]), llama.ids[3:14]

    def answer(abandon: bool) -> list[int]:
        selection = engine.select(document, select, question_tokens=11, tokens=BUDGET, params=params)
        generation, batch = engine.start(document, question, Sampling(12), selection), engine.batch()
        while not generation.finished:
            if abandon:
                with pytest.raises(InterruptedError):
                    batch.step([generation], checkpoint=_raise)
            batch.step([generation])
        return generation.token_ids

    assert answer(abandon=True) == answer(abandon=False)


def _raise() -> None:
    raise InterruptedError


def test_several_documents_share_a_budget(engine, llama, caches):
    asked = [caches[0], caches[1]]
    answer = engine.answer(asked, llama.ids[3:14], max_new_tokens=3, select="sentencekv", select_tokens=96)
    assert answer.usage.read_tokens == 96


def test_the_ends_of_sentences_are_stored(engine, llama, caches):
    ids = llama.ids[:230]
    right = tuple(sorted({at for at, token in enumerate(ids) if ends_one(token)} | {229}))
    assert caches[0].sentence_ends == right
    long = engine.compress([1] * 600 + [5] + [1] * 10, policy="full")
    assert long.sentence_ends == (255, 511, 600, 610)
    for codec in ("none", "int8", "int4", "int2", "mixed:high=none"):
        cache = engine.encoded(engine.compress(ids, policy="keydiff"), codec)
        assert CompressedCache.from_bytes(cache.to_bytes()).sentence_ends == right
    assert caches[0].identity == replace(caches[0], sentence_ends=()).identity


def test_texts_and_conversations_have_ends_and_token_ids_alone_have_none(llama):
    tiny = Engine.load("kvshelf-tiny")
    text = "The mill closed in 1841. Who lit the lamp? Nobody knows.\nThe pi of the baker is 3.14 at most"
    for document in (text, [{"role": "user", "content": text}]):
        cache = tiny.encoded(tiny.compress(document, policy="full"), "klt")
        pieces, begin = [], 0
        for end in CompressedCache.from_bytes(cache.to_bytes()).sentence_ends:
            ids = tiny.encode_document(document).token_ids[begin : end + 1]
            pieces.append(tiny.text.decode(ids))
            begin = end + 1
        assert "".join(pieces) == tiny.text.decode(tiny.encode_document(document).token_ids)
        assert [p.rstrip("\n") for p in pieces if "lamp" in p or "Nob" in p] == [" Who lit the lamp?", " Nobody knows."]
        assert any("The pi of the baker is 3.14 at most" in piece for piece in pieces)
    assert llama.engine.compress(llama.ids[:230], policy="full").sentence_ends == ()


def test_what_has_no_sentences_is_refused_by_name(engine, llama, caches):
    without = llama.engine.compress(llama.ids[:230], policy="full")
    with pytest.raises(PolicyUnsupported, match="no sentence ends: it was made from token ids; take selector quest"):
        engine.answer(without, llama.ids[3:14], select="sentencekv", select_tokens=64)
    with pytest.raises(PolicyUnsupported, match="no sentence ends"):
        engine.answer([caches[0], without], llama.ids[3:14], select="sentencekv", select_tokens=64)
    with pytest.raises(PolicyUnsupported, match=r"'sentencekv' needs the text of answers.*no tokenizer") as refused:
        llama.engine.answer(caches[0], llama.ids[3:14], select="sentencekv", select_tokens=64)
    assert refused.value.param == "select.method"
    with pytest.raises(InvalidRequest, match="always reads 64 entries"):
        engine.answer(caches[0], llama.ids[3:14], select="sentencekv", select_tokens=63)


def test_a_recording_that_writes_its_queries_again_changes_no_choice(engine, llama, caches, monkeypatch):
    monkeypatch.setenv("KVSHELF_KERNELS", "eager")
    monkeypatch.setitem(vars(engine.passes), "program", None)  # a tape sees what torch computes
    document, question, tape, read = engine.attach(caches[0]), llama.ids[90:91], Tape(), []
    for slots in (None, Slots(torch.device("cpu"), tape)):
        params = PARAMS | {"refresh": "step"}
        selection = engine.select(document, "sentencekv", question_tokens=1, tokens=BUDGET, params=params)
        row, batch, rows = (
            engine.start(document, question, Sampling(14), selection),
            DecodeBatch(engine.passes, slots),
            [],
        )
        while not row.finished:
            batch.step([row])
            rows += [prefix.chosen.rows.clone() for layer in range(2) for prefix in selection.prefixes(layer)]
        read.append((row.token_ids, torch.stack(rows)))
    (alone, chosen), (recorded, again) = read
    assert tape.recorded
    assert recorded == alone
    assert torch.equal(chosen, again)
