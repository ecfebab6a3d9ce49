"""Tokens appended to a stored cache: read behind it, reduced by themselves, stored beside records that stay."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kvshelf.artifact.cache import CompressedCache
from kvshelf.artifact.growth import MAX_RECORDS, joined
from kvshelf.artifact.records import Parts, Recent, entries_of, parts_of, states_of
from kvshelf.engine.attention.attached import CACHE_ARGUMENT
from kvshelf.engine.attention.states import SUPPORTED
from kvshelf.engine.decode.generation import Sampling
from kvshelf.engine.decode.turns import Turn
from kvshelf.engine.engine import Engine
from kvshelf.errors import DocumentTooLong, DocumentTooShort, InvalidRequest, ModelMismatch, PolicyUnsupported
from kvshelf.kernels.quantize.rows import QuantizedRows
from kvshelf.methods.policies import POLICIES, build
from kvshelf.methods.policies.budgets import LayerBudget
from kvshelf.methods.policies.gate_file import gate_path
from kvshelf.methods.policies.view import DocumentView, LayerView
from kvshelf_bench.models.small import small_model
from tests.amounts import few
from tests.engine.asking import ids
from tests.methods.policies.gates import random_gates

NEWER = pytest.mark.skipif(not SUPPORTED, reason="this transformers has caches of its own for recurrent states")
LATENTS = pytest.mark.skipif(CACHE_ARGUMENT != "cache", reason="older transformers cache expanded keys")
FAMILIES = [
    "llama", "qwen3", "gpt2", "gemma2", "gemma3_text", "llama4_text",
    pytest.param("qwen3_next", marks=NEWER), pytest.param("falcon_h1", marks=NEWER),
    pytest.param("deepseek_v3", marks=LATENTS),
]  # fmt: skip


def engine_of(family: str) -> Engine:
    return Engine(small_model(family), name="m")


def records_of(cache: CompressedCache, layer: int = 0) -> list[Any]:
    entries = entries_of(cache.layers[layer])
    return [] if entries is None else list(parts_of(entries))


@pytest.mark.parametrize("family", few(5, FAMILIES))
@pytest.mark.parametrize("steps", [(40,), (1, 25, 14)])
def test_what_is_appended_to_a_full_cache_is_what_one_pass_makes(family: str, steps: tuple[int, ...]) -> None:
    engine, tokens = engine_of(family), ids(100)
    whole = engine.compress(tokens, policy="full")
    grown = engine.compress(tokens[:60], policy="full")
    end = 60
    for step in steps:
        grown = engine.extend(grown, tokens[end : end + step])
        end += step
    assert (grown.num_tokens, grown.next_position, grown.shape) == (100, 100, whole.shape)
    for mine, other in zip(grown.layers, whole.layers, strict=True):
        own, expected = entries_of(mine), entries_of(other)
        for a, b in zip(states_of(mine), states_of(other), strict=True):
            torch.testing.assert_close(a.tensor, b.tensor, rtol=1e-4, atol=1e-5)
        assert (own is None) == (expected is None)
        if own is not None and expected is not None:
            assert [p.tolist() for p in own.positions] == [p.tolist() for p in expected.positions]
            for a, b in zip(own.dense(), expected.dense(), strict=True):
                torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    asked = [ids(9, seed=3), ids(30, seed=4)]
    told = [[engine.answer(cache, one, max_new_tokens=6).token_ids for one in asked] for cache in (grown, whole)]
    assert told[0] == told[1]
    assert CompressedCache.from_bytes(grown.to_bytes()).to_bytes() == grown.to_bytes()


@pytest.mark.parametrize(
    "policy",
    [name for name, cls in POLICIES.items() if not (cls.indexes or cls.has_residuals or name == "lookaheadkv")],
)
def test_a_policy_reduces_what_is_appended_and_nothing_else(policy: str, tiny: Engine) -> None:
    parent = tiny.compress("The mill by the river has 12 wheels. " * 12, policy="keydiff", compression_ratio=0.5)
    more = "Anna keeps 37 keys in a tin box. Nobody has counted the stairs of the tower. " * 6
    options: dict[str, Any] = {"compression_ratio": 0.5} if POLICIES[policy].takes_budget else {}
    before = [[p.tolist() for p in layer.positions] for layer in parent.layers]
    grown = tiny.extend(parent, more, policy=policy, **options)
    first, appended = parent.num_tokens, grown.num_tokens - parent.num_tokens
    assert appended == tiny.encoder.require_text("document").count_tokens(more)
    kept = 0
    for layer, old in zip(grown.layers, before, strict=True):
        for head, own in zip(layer.positions, old, strict=True):
            assert head[: len(own)].tolist() == own, "the parent's entries are all there"
            new = head[len(own) :]
            assert new.numel() == 0 or (int(new.min()) >= first and int(new.max()) < grown.num_tokens)
            kept += new.numel()
    heads = sum(layer.kv_heads for layer in grown.layers)
    expected = appended if not POLICIES[policy].takes_budget else appended // 2
    assert abs(kept / heads - expected) <= 20, "of 132, as its granularity allows"
    assert grown.identity.parent == parent.identity.as_parent("none")
    assert (grown.identity.policy, grown.identity.prefill) == (policy, "appended")


@pytest.mark.parametrize(("policy", "params"), [("expected_attention", {}), ("ems", {"pos": "pre"})])
def test_a_policy_that_undoes_rope_knows_where_the_tokens_stand(policy: str, params: dict[str, Any]) -> None:
    """Turning keys and queries on by as many positions as stand before the tokens changes no score."""
    engine = engine_of("llama")
    assert engine.rope is not None
    made = torch.Generator().manual_seed(5)
    heads, dim, shift = 2, engine.passes.layer_shapes[0].key_dim, 60
    queries, keys, values = (torch.randn(n, 100, dim, generator=made) for n in (4, heads, heads))
    places = torch.arange(100)
    scores = []
    for first in (0, shift):
        turned = [engine.rope.rotate(states, places + first) for states in (queries, keys)]
        document = DocumentView(token_ids=ids(100), first_position=first)
        layer = LayerView(0, turned[1], values, turned[0], dim**-0.5, document, rope=engine.rope)
        record = build(policy, params).reduce(layer, LayerBudget.uniform(heads, 50))
        scores.append(record)
    one, other = scores
    assert [p.tolist() for p in one.positions] == [p.tolist() for p in other.positions]
    if policy == "ems":
        torch.testing.assert_close(one.dense()[0], other.dense()[0], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("policy", ["kvzip", "snapkv", "dapq", "kvcues"])
def test_probes_stand_behind_what_is_appended(policy: str, tiny: Engine) -> None:
    parent = tiny.compress("The lamp is green. " * 20, policy="full")
    job = tiny.prepare_append(parent, "The door is red. " * 20, policy=policy)
    assert job.passes
    assert all(each.first_position >= parent.num_tokens + job.num_tokens for each in job.passes)


def test_appended_tokens_see_what_the_parent_kept_and_no_more() -> None:
    """Keys of the second layer depend on what the first attended to: behind a reduced parent they are those of a pass
    in which the evicted entries are hidden, as a question's are."""
    engine, tokens = engine_of("llama"), ids(120)
    parent = engine.compress(tokens[:80], policy="keydiff", compression_ratio=0.75)
    grown = engine.extend(parent, tokens[80:], policy="full")
    with torch.no_grad(), engine.attached(parent) as past:
        engine.model(torch.tensor([tokens[80:]]), **{CACHE_ARGUMENT: past})
        for layer, held in zip(grown.layers, past.layers, strict=True):
            keys, values, valid = layer.dense()
            own = int(valid[0].sum()) - 40
            torch.testing.assert_close(keys[:, own:], held.keys[0, :, :40], rtol=1e-5, atol=1e-6)
            torch.testing.assert_close(values[:, own:], held.values[0, :, :40], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("codec", ["int8", "int4", "int2:group=16,residual=48", "int4:residual=0"])
def test_under_a_quantizing_codec_old_groups_stay_and_new_ones_are_whole(codec: str) -> None:
    engine, tokens = engine_of("llama"), ids(400)
    cache = engine.encoded(engine.compress(tokens[:110], policy="full"), codec)
    group = 16 if "16" in codec else 32
    ends = list(range(150, 401, 50))
    for start, end in zip([110, *ends], ends, strict=False):
        before, cache = records_of(cache), engine.extend(cache, tokens[start:end])
        after = records_of(cache)
        kept = [part for part in before if part.quantized]
        for old, new in zip(kept, after, strict=False):
            assert torch.equal(old.keys.codes, new.keys.codes), "no entry is coded twice"
        assert all(n % group == 0 for part in after[1:] if part.quantized for n in part.lengths)
        assert sum(part.lengths[0] for part in after) == end
    plain = engine.compress(tokens, policy="full")
    short = joined(records_of(cache))
    assert len(short) <= 3 < len(records_of(cache)) + 3
    dense = [Parts(parts).dense() if len(parts) > 1 else parts[0].dense() for parts in (short, records_of(cache))]
    for a, b in zip(*dense, strict=True):
        assert torch.equal(a, b), "joined records have the same numbers"
    error = (dense[0][0] - plain.layers[0].dense()[0]).abs().max() / plain.layers[0].dense()[0].abs().max()
    assert error < {"8": 0.01, "4": 0.1, "2": 0.5}[codec[3]]
    assert CompressedCache.from_bytes(cache.to_bytes()).to_bytes() == cache.to_bytes()


def test_many_small_appends_do_not_add_up_to_many_records() -> None:
    engine, tokens = engine_of("llama"), ids(140)
    cache = engine.compress(tokens[:60], policy="full")
    for start in range(60, 140, 2):
        cache = engine.extend(cache, tokens[start : start + 2])
        assert len(records_of(cache)) < 12 <= MAX_RECORDS
    whole = engine.compress(tokens, policy="full")
    for a, b in zip(cache.layers[1].dense(), whole.layers[1].dense(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_a_codec_that_cannot_join_says_so_before_the_blob_would() -> None:
    engine, tokens = engine_of("llama"), ids(200)
    cache = engine.encoded(engine.compress(tokens[:60], policy="keydiff"), "mixed:share=0.3")

    def grow_on() -> None:
        nonlocal cache
        for start in range(60, 200, 10):
            cache = engine.extend(cache, tokens[start : start + 10], policy="keydiff")

    with pytest.raises(InvalidRequest, match="appended to so often"):
        grow_on()
    assert 12 <= len(records_of(cache)) <= MAX_RECORDS
    cache.to_bytes()


def test_texts_and_turns_go_on_where_the_cache_ends(tiny: Engine) -> None:
    text = tiny.encoder.require_text("document")
    document = tiny.compress("The lamp is green.", policy="full")
    more = tiny.extend(document, " The door is red.")
    assert more.identity.boundary == "document"
    question = [{"role": "user", "content": "Which door?"}]
    turns = [*question, {"role": "assistant", "content": "The red one."}]
    talk = tiny.extend(more, turns)
    assert talk.identity.boundary == "after_assistant"
    assert talk.num_tokens == more.num_tokens + len(text.turns("document", turns, opening=False))
    # What the template writes is what it writes for the conversation at once.
    whole = text.turns("document", [*turns, *question])
    parts = text.turns("document", turns, opening=False) + tiny.encode_query(talk, question)
    assert parts == whole
    plain = tiny.compress("one two", layout="plain", policy="full")
    assert tiny.extend(plain, " three").num_tokens == 2 + text.count_tokens(" three") + plain.num_tokens - 2
    with pytest.raises(InvalidRequest, match="append messages"):
        tiny.extend(talk, "more text")
    with pytest.raises(InvalidRequest, match="append a text"):
        tiny.extend(plain, turns)
    assert tiny.extend(plain, " three").sentence_ends[-1] == tiny.extend(plain, " three").num_tokens - 1


@pytest.mark.parametrize("codec", ["none", "int8", "klt"])
def test_a_conversation_goes_on_under_one_budget(tiny: Engine, codec: str) -> None:
    """Turns of a text under every kind of codec; then an answer shrinks together with the entries of all of them."""
    params = {"prefill": "chunked", "chunk": 64, "keep_scores": True}
    first = tiny.compress("The lamp is green. " * 30, policy="make_each_token_count", budget_tokens=80, **params)
    cache = tiny.encoded(first, codec)
    for number in (37, 58):
        turns = [{"role": "user", "content": f"Room {number}? "}, {"role": "assistant", "content": "Dark. " * 40}]
        before = cache
        cache = tiny.extend(before, turns, prefill="chunked", budget_tokens=80)
        assert (cache.kept_tokens, cache.codec, cache.identity.transforms) == (80, codec, before.identity.transforms)
        assert cache.identity.parent == before.identity.as_parent(codec)
        assert cache.sentence_ends[-1] == cache.num_tokens - 1
        assert CompressedCache.from_bytes(cache.to_bytes()).to_bytes() == cache.to_bytes()
    newest = [int(head.max()) for layer in cache.layers for head in layer.positions]
    assert max(newest) >= before.num_tokens, "the last turn has entries"
    suffix = {"policy": "trimkv", "scope": "cache", "params": {"gates": "make_each_token_count"}}
    answer = tiny.answer(cache, "Which lamp?", max_new_tokens=8, suffix=suffix)
    assert answer.usage.cache_read_tokens == cache.num_tokens


@pytest.mark.parametrize(
    ("size", "words"),
    [
        ({"budget_tokens": 6}, "budget_tokens is 6, .* first 6 tokens .*; raise it so that more than 6"),
        ({"compression_ratio": 0.99}, "compression_ratio 0.99 leaves 2 entries .* first 6 tokens .*; lower it"),
    ],
)
def test_a_budget_below_what_the_cache_always_keeps_is_refused_by_the_size_that_was_given(
    tiny: Engine, size: dict[str, Any], words: str
) -> None:
    params = {"prefill": "chunked", "chunk": 64, "keep_scores": True, "sink": 6}
    parent = tiny.compress("The lamp is green. " * 30, policy="trimkv", budget_tokens=80, **params)
    on = {"prefill": "chunked"}
    with pytest.raises(PolicyUnsupported, match=words) as refused:
        tiny.prepare_append(parent, " More." * 40, policy_params=on, **size)
    assert refused.value.param == next(iter(size))
    assert tiny.prepare_append(parent, " More." * 40, policy_params=on, budget_tokens=7).budget.tokens == 7


def test_gates_that_were_trained_anew_are_not_said_to_be_a_parameter_of_the_append(
    tiny: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = {"prefill": "chunked", "chunk": 64, "keep_scores": True}
    parent = tiny.compress("The lamp is green. " * 30, policy="trimkv", budget_tokens=80, **params)
    monkeypatch.setenv("KVSHELF_GATES", str(tmp_path))
    weights = tiny.identity.weights
    gates = random_gates("trimkv", tiny.preparer.geometry, weights=weights)
    gate_path(weights, "trimkv").write_bytes(gates.to_bytes())
    with pytest.raises(PolicyUnsupported, match="put their file back, or take prefill=whole") as refused:
        tiny.prepare_append(parent, " More." * 40, policy_params={"prefill": "chunked"}, budget_tokens=80)
    assert refused.value.param == "policy_params.prefill"


@pytest.mark.parametrize("codec", ["mixed:share=0.3", "klt:classes=0.5/1.5,shares=20/30"])
def test_no_policy_goes_on_from_entries_that_classes_hold_apart(tiny: Engine, codec: str) -> None:
    params = {"prefill": "chunked", "chunk": 64, "keep_scores": True}
    first = tiny.compress("The lamp is green. " * 30, policy="make_each_token_count", budget_tokens=80, **params)
    coded, on = tiny.encoded(first, codec), {"prefill": "chunked"}
    with pytest.raises(PolicyUnsupported, match="and codecs of classes") as refused:
        tiny.prepare_append(coded, " More.", budget_tokens=80, policy_params=on)
    assert refused.value.param == "policy_params.prefill"


def test_quality_of_what_is_appended_is_measured_behind_the_parent(tiny: Engine) -> None:
    facts = [f"The code of gate {n} is {n * 7919 % 9973}. " for n in range(120)]
    parent = tiny.compress("".join(facts[:60]), policy="full")
    measured = []
    for ratio in (0.25, 0.9):
        job = tiny.prepare_append(parent, "".join(facts[60:]), policy="streaming_llm", compression_ratio=ratio)
        (made,) = tiny.run_levels([tiny.compressor.level(job)])
        assert made.quality is not None
        assert made.quality.cues > 50
        measured.append(made.quality.agreement)
    assert measured[0] > measured[1] + 0.1
    job = tiny.prepare_append(parent, "".join(facts[60:]), policy="full")
    (made,) = tiny.run_levels([tiny.compressor.level(job)])
    assert made.quality is not None
    assert made.quality.agreement == 1


def test_a_search_finds_what_was_appended(tiny: Engine) -> None:
    parent = tiny.compress("The kitchen has a blue stove and nine chairs. " * 4, policy="keydiff")
    grown = tiny.extend(parent, "The observatory keeps a brass telescope. " * 4)
    assert all(set(old) != set(new) for old, new in zip(parent.summary, grown.summary, strict=True))
    alone = tiny.compress("The kitchen has a blue stove and nine chairs. " * 8, policy="keydiff")
    from kvshelf.engine.summary import score, unpacked

    asked = tiny.searcher.codes(tiny.searcher.encode("brass telescope of the observatory"))
    found = score(asked, [unpacked(grown.summary), unpacked(alone.summary)])
    assert found[0] > found[1] + 0.2


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"policy": "streaming_llm", "policy_params": {"positions": "cache"}}, PolicyUnsupported, "counts positions"),
        (
            {"policy": "lagkv", "policy_params": {"prefill": "chunked"}},
            PolicyUnsupported,
            "chunk by chunk itself .* of 'full', read 'whole'",
        ),
        ({"policy": "infllm"}, PolicyUnsupported, "makes an index"),
        ({"policy": "lookaheadkv"}, PolicyUnsupported, "runs learned tokens"),
        ({"policy": "keydif"}, InvalidRequest, "keydiff"),
        ({"policy": "full", "compression_ratio": 0.5}, InvalidRequest, "takes no compression_ratio"),
        ({"policy": "keydiff", "budget_tokens": 0}, InvalidRequest, "budget_tokens"),
    ],
)
def test_a_policy_that_cannot_go_on_is_refused_by_name(
    tiny: Engine, change: dict[str, Any], error: type[Exception], message: str
) -> None:
    parent = tiny.compress("The lamp is green. " * 20, policy="full")
    with pytest.raises(error, match=message):
        tiny.prepare_append(parent, "The door is red. " * 20, **change)


def test_a_parent_that_cannot_go_on_is_refused_by_name(tiny: Engine) -> None:
    text = "The lamp is green. " * 30
    moved = tiny.compress(text, policy="streaming_llm", positions="cache")
    with pytest.raises(PolicyUnsupported, match="counted its positions within the cache"):
        tiny.prepare_append(moved, "more")
    indexed = tiny.compress(text, policy="infllm")
    with pytest.raises(PolicyUnsupported, match="index of the whole document"):
        tiny.prepare_append(indexed, "more")
    with pytest.raises(DocumentTooShort, match="empty"):
        tiny.prepare_append(tiny.compress(text), "")
    with pytest.raises(DocumentTooLong, match="beyond the"):
        tiny.prepare_append(tiny.compress(text), ids(tiny.max_tokens))
    with pytest.raises(ModelMismatch):
        engine_of("llama").prepare_append(tiny.compress(text), ids(4))


def test_an_append_has_an_id_of_its_own_by_parent_and_content(tiny: Engine) -> None:
    one, other = (tiny.compress("The lamp is green. " * 20, policy=policy) for policy in ("keydiff", "full"))
    jobs = [
        tiny.prepare_append(parent, text, policy="full").identity
        for parent, text in ((one, "a"), (one, "b"), (other, "a"), (tiny.encoded(one, "int4"), "a"), (one, "a"))
    ]
    assert jobs[0] == jobs[4]
    assert len({(each.parent, each.document) for each in jobs}) == 4
    assert replace(jobs[0], parent="") != jobs[0]


def test_windows_move_on_and_records_of_the_parent_are_the_same_objects() -> None:
    engine, tokens = engine_of("gemma3_text"), ids(120)
    parent = engine.compress(tokens[:90], policy="keydiff")
    grown = engine.extend(parent, tokens[90:])
    for old, new in zip(parent.layers, grown.layers, strict=True):
        entries, own = entries_of(new), entries_of(old)
        if isinstance(entries, Recent):
            assert int(entries.positions[0][-1]) == 119
        else:
            assert isinstance(entries, Parts)
            assert entries.parts[0] is own
            assert not isinstance(entries.parts[0].keys, QuantizedRows)


def kept_turn(engine: Engine, cache: CompressedCache, prompt: Any, beside: int = 0, count: int = 12) -> Any:
    """The finished answer to a prompt, with its turn, in a batch with others."""
    document, batch = engine.attach(cache), engine.batch()
    query = engine.encode_query(document, prompt)
    made = engine.start(document, query, Sampling(count))
    others = [engine.start(document, ids(5 + n, seed=n), Sampling(40)) for n in range(beside)]
    while not made.finished:
        told = batch.step([made, *(other for other in others if not other.finished)])
        assert not any(isinstance(each, Exception) for each in told)
    made.close(engine.turns.ids(document, prompt, made.text, made.token_ids))
    while made.pending:
        batch.step([made, *(other for other in others if not other.finished)])
    batch.keep(made)
    batch.leave(made)
    return made


@pytest.mark.parametrize("family", FAMILIES)
def test_a_kept_turn_is_what_appending_it_makes(family: str) -> None:
    engine, tokens = engine_of(family), ids(90)
    for policy in ("full", "streaming_llm"):
        if policy != "full" and family == "falcon_h1":
            continue
        parent = engine.compress(tokens, policy=policy)
        asked = ids(9, seed=8)
        answer = kept_turn(engine, parent, asked, beside=2)
        assert isinstance(answer.turn, Turn)
        (kept,) = engine.turns.caches(parent, [list(answer.turn.token_ids)], answer.turn)
        expected = engine.extend(parent, [*asked, *answer.token_ids], policy="full")
        assert kept.identity == expected.identity
        assert kept.shape == expected.shape
        for mine, other in zip(kept.layers, expected.layers, strict=True):
            for a, b in zip(states_of(mine), states_of(other), strict=True):
                torch.testing.assert_close(a.tensor, b.tensor, rtol=1e-4, atol=1e-5)
            own, entries = entries_of(mine), entries_of(other)
            if own is not None and entries is not None:
                for a, b in zip(own.dense(), entries.dense(), strict=True):
                    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
        assert kept.to_bytes() == CompressedCache.from_bytes(kept.to_bytes()).to_bytes()


@pytest.mark.parametrize("codec", ["none", "int4", "klt"])
def test_turns_are_kept_as_a_client_sends_them_again(codec: str, tiny: Engine) -> None:
    facts = "The code of the red gate is 4711. The code of the blue gate is 1234. " * 3
    parent = tiny.encoded(tiny.compress(facts, policy="full"), codec)
    talk: list[dict[str, str]] = []
    cache, caches = parent, []
    for question in ("What is the code of the red gate?", "What is the code of the blue gate?", "And the red one?"):
        asked = [{"role": "user", "content": question}]
        answer = kept_turn(tiny, cache, asked)
        turn = [*asked, {"role": "assistant", "content": answer.text}]
        expected = tiny.turns.identity(cache.identity, cache.codec, cache.kept_tokens, turn)
        (cache,) = tiny.turns.caches(cache, [turn], answer.turn)
        assert cache.identity == expected, "its id is known before it is looked for"
        talk += turn
        caches.append(cache)
    # The same three turns at once: from one row, cut where turns end.
    count = tiny.encoder.require_text("document").count_tokens
    first = kept_turn(tiny, parent, talk[:-1], count=count(talk[-1]["content"]) + 1)
    again = [*talk[:-1], {"role": "assistant", "content": first.text}]
    made = tiny.turns.caches(parent, [again[:2], again[2:4], again[4:]], first.turn)
    assert [each.identity for each in made][:2] == [each.identity for each in caches][:2]
    assert (made[2].identity == caches[2].identity) == (first.text == talk[-1]["content"])
    final = [{"role": "user", "content": "What is the code of the blue gate?"}]
    assert tiny.answer(cache, final).text == "1234"
    ids_at_once = tiny.encode_query(parent, [*talk, *final])
    assert cache.num_tokens + len(tiny.encode_query(cache, final)) == parent.num_tokens + len(ids_at_once)


def test_a_turn_whose_text_is_encoded_otherwise_runs_again_from_there(tiny: Engine) -> None:
    parent = tiny.compress("The lamp is green. " * 5, policy="full")
    document, batch = tiny.attach(parent), tiny.batch()
    asked = [{"role": "user", "content": "What?"}]
    made = tiny.start(document, tiny.encode_query(document, asked), Sampling(4))
    while not made.finished:
        batch.step([made])
    ran = made.row.logical
    said = "The lamp is green, they say, and so it is."
    made.close(tiny.turns.ids(document, asked, said, made.token_ids))
    assert made.row.logical < ran or made.pending
    batch.step([made])
    batch.keep(made)
    turn = [*asked, {"role": "assistant", "content": said}]
    (kept,) = tiny.turns.caches(parent, [turn], made.turn)
    expected = tiny.extend(parent, turn, policy="full")
    for a, b in zip(kept.layers[-1].dense(), expected.layers[-1].dense(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_a_turn_that_cannot_be_kept_says_why(tiny: Engine) -> None:
    document = tiny.attach(tiny.compress("The lamp is green. " * 5, policy="full"))
    with pytest.raises(InvalidRequest, match="the answer is empty"):
        tiny.turns.ids(document, "What?", "", [1])
    with pytest.raises((InvalidRequest, DocumentTooLong), match=f"takes {tiny.max_tokens}"):
        tiny.turns.ids(document, "What?", "word " * tiny.max_tokens, [1])


def test_a_stored_conversation_answers_as_plain_transformers_do_over_the_same_tokens(tiny: Engine) -> None:
    facts = "The code of the red gate is 4711. The code of the blue gate is 1234. " * 4
    encoded = tiny.encode_document(facts)
    cache, tokens = tiny.compress(facts, policy="full"), list(encoded.token_ids)
    for question in ("What is the code of the red gate?", "And of the blue one?", "What is the code of the red gate?"):
        asked = [{"role": "user", "content": question}]
        query = tiny.encode_query(cache, asked)
        answer = kept_turn(tiny, cache, asked, beside=1)
        ids_so_far = torch.tensor([[*tokens, *query]])
        for said in answer.token_ids:
            with torch.no_grad():
                logits = tiny.model(ids_so_far, use_cache=False).logits[0, -1]
            assert said == int(logits.argmax())
            ids_so_far = torch.cat([ids_so_far, torch.tensor([[said]])], dim=1)
        tokens += tiny.turns.ids(tiny.attach(cache), asked, answer.text, answer.token_ids)
        (cache,) = tiny.turns.caches(cache, [[*asked, {"role": "assistant", "content": answer.text}]], answer.turn)
        assert cache.num_tokens == len(tokens)


def test_the_largest_record_of_a_layer_stays_alone() -> None:
    engine, tokens = engine_of("llama"), ids(190)
    root = engine.compress(tokens[:100], policy="full")
    cache = root
    for start in range(100, 190, 6):
        cache = engine.extend(cache, tokens[start : start + 6])
    first = records_of(cache)[0]
    assert first is records_of(root)[0]
    assert len(records_of(cache)) < 12
