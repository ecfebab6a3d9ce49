"""Attaching: equal to re-prefilling, closed to every other attention, and without a trace afterwards."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import DynamicCache

from kvshelf.artifact.cache import CompressedCache
from kvshelf.engine.attention.attached import CACHE_ARGUMENT
from kvshelf.engine.engine import Engine
from kvshelf.errors import InvalidRequest, ModelMismatch, StateConflict
from tests.amounts import amount, few
from tests.store.caches import from_heads

DOCUMENT, QUESTION = 500, 30


def logits_of(model, ids):
    with torch.no_grad():
        return model(torch.tensor([ids])).logits


def relative_error(ours, reference):
    return float((ours - reference).abs().max() / reference.abs().max())


def fp32_bound(model, ids):
    """1e-5, or on processors whose matrix products depend on their shapes twice what fp32 itself is off by: how far the
    model's own logits of `ids` are from those in fp64. An answer without its document is off by 0.1 and more."""
    exact = logits_of(copy.deepcopy(model).double(), ids)[:, DOCUMENT:]
    return max(1e-5, 2 * relative_error(logits_of(model, ids)[:, DOCUMENT:], exact))


@pytest.fixture(scope="module")
def full(oracle):
    """The whole cache of the first 500 tokens, after a trip through bytes."""
    cache = oracle.engine.compress(oracle.ids[:DOCUMENT], policy="full")
    return CompressedCache.from_bytes(cache.to_bytes())


@pytest.mark.parametrize("length", few(2, [1, 2, 30, 200]))
def test_full_cache_equals_prefilling_again(oracle, length):
    """Random models of 512 words: the chance that wrong logits are within the bound of the right ones is nil."""
    cache = oracle.engine.compress(oracle.ids[:DOCUMENT], policy="full")
    ids = oracle.ids[: DOCUMENT + length]
    expected = logits_of(oracle.model, ids)[:, DOCUMENT:]
    for source in (cache, CompressedCache.from_bytes(cache.to_bytes())):
        with oracle.engine.attached(source) as past, torch.no_grad():
            ours = oracle.model(torch.tensor([ids[DOCUMENT:]]), **{CACHE_ARGUMENT: past}).logits
        assert relative_error(ours, expected) < fp32_bound(oracle.model, ids)


def test_question_in_pieces_equals_question_at_once(oracle, full):
    question = oracle.ids[DOCUMENT : DOCUMENT + QUESTION]
    expected = logits_of(oracle.model, oracle.ids[: DOCUMENT + QUESTION])[:, DOCUMENT:]
    with oracle.engine.attached(full) as past, torch.no_grad():
        pieces = [question[:7], question[7:8], question[8:]]
        ours = [oracle.model(torch.tensor([piece]), **{CACHE_ARGUMENT: past}).logits for piece in pieces]
        assert past.get_seq_length() == DOCUMENT + QUESTION
    # The recorded models are badly conditioned: the same pieces under plain transformers are off by 3e-5.
    assert relative_error(torch.cat(ours, dim=1), expected) < 1e-4


def test_generate_is_token_equal(oracle, full):
    whole = torch.tensor([oracle.ids[: DOCUMENT + QUESTION]])
    options = {"max_new_tokens": 24, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    ones = torch.ones_like(whole)
    expected = oracle.model.generate(whole, attention_mask=ones, **options)
    with oracle.engine.attached(full) as past:
        ours = oracle.model.generate(whole, attention_mask=ones, **{CACHE_ARGUMENT: past}, **options)
    assert ours.tolist() == expected.tolist()
    with oracle.engine.attached(full) as past:
        ids = past.with_document(whole[:, DOCUMENT:])
        ours = oracle.model.generate(ids, attention_mask=torch.ones_like(ids), **{CACHE_ARGUMENT: past}, **options)
    assert ours[:, DOCUMENT:].tolist() == expected[:, DOCUMENT:].tolist()


def test_beam_search_runs_on_an_attached_cache(llama):
    cache = llama.engine.compress(llama.ids[:DOCUMENT], policy="full")
    whole = torch.tensor([llama.ids[: DOCUMENT + QUESTION]])
    options = {"max_new_tokens": 8, "num_beams": 3, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    expected = llama.model.generate(whole, attention_mask=torch.ones_like(whole), **options)
    with llama.engine.attached(cache) as past:
        ours = llama.model.generate(whole, attention_mask=torch.ones_like(whole), **{CACHE_ARGUMENT: past}, **options)
    assert ours.tolist() == expected.tolist()


def test_generate_with_the_question_alone_is_refused(llama):
    cache = llama.engine.compress(llama.ids[:DOCUMENT], policy="full")
    question = torch.tensor([llama.ids[DOCUMENT : DOCUMENT + QUESTION]])
    # Older versions of transformers fail by themselves on the empty slice; none may answer.
    with llama.engine.attached(cache) as past, pytest.raises((InvalidRequest, IndexError)):
        llama.model.generate(question, **{CACHE_ARGUMENT: past}, max_new_tokens=4, pad_token_id=0)


def test_ragged_heads_equal_a_mask_over_the_full_cache(oracle):
    """Heads that keep different entries, one of them none: the plain model with the others masked out gives the
    same."""
    model, document = oracle.model, oracle.ids[:DOCUMENT]
    full = oracle.engine.compress(document, policy="full")
    generator = torch.Generator().manual_seed(0)
    layers, kept_masks = [], []
    for record in full.layers:
        masks = torch.rand(record.kv_heads, DOCUMENT, generator=generator) < 0.3
        masks[0] = masks[0] & (record.kv_heads == 1)  # the first head of several keeps nothing
        kept_masks.append(masks)
        heads = [
            (keys[mask], values[mask], mask.nonzero()[:, 0])
            for (keys, values), mask in zip(record.heads(), masks, strict=True)
        ]
        layers.append(from_heads(*zip(*heads, strict=True)))
    ragged = CompressedCache(tuple(layers), full.num_tokens, full.next_position, full.identity)
    question = torch.tensor([oracle.ids[DOCUMENT : DOCUMENT + QUESTION]])
    with oracle.engine.attached(ragged) as past, torch.no_grad():
        ours = model(question, **{CACHE_ARGUMENT: past}).logits
    assert relative_error(ours, masked_logits(model, full, kept_masks, question)) < 1e-5


def masked_logits(model, full, kept_masks, question):
    """The model under its own eager attention, with -inf on the entries that were not kept. No code of kvshelf."""
    from transformers import AttentionInterface

    def masked_attention(module, query, key, value, _mask, scaling, **_):
        group = query.shape[1] // key.shape[1]
        keys, values = key.repeat_interleave(group, 1).double(), value.repeat_interleave(group, 1).double()
        logits = query.double() @ keys.transpose(2, 3) * scaling
        length, width = logits.shape[-2:]
        hidden = (
            torch.ones(length, width, dtype=torch.bool).triu(width - length + 1).expand(logits.shape[1], -1, -1).clone()
        )
        hidden[:, :, :DOCUMENT] |= ~kept_masks[module.layer_idx].repeat_interleave(group, 0)[:, None]
        weights = torch.softmax(logits.masked_fill(hidden, -torch.inf), dim=-1)
        return (weights @ values).to(query.dtype).transpose(1, 2).contiguous(), None

    AttentionInterface.register("test_masked", masked_attention)
    model = copy.deepcopy(model)
    model.set_attn_implementation("test_masked")
    past = DynamicCache()
    for i, record in enumerate(full.layers):
        keys, values, _ = record.dense()
        past.update(keys[None].clone(), values[None].clone(), i)
    positions = torch.arange(DOCUMENT, DOCUMENT + question.shape[1])[None]
    with torch.no_grad():
        return model(question, **{CACHE_ARGUMENT: past}, position_ids=positions).logits


def test_a_batch_of_questions_shares_one_document(oracle, full):
    rows = [oracle.ids[DOCUMENT + i * 10 : DOCUMENT + (i + 1) * 10] for i in range(4)]
    expected = torch.cat([logits_of(oracle.model, oracle.ids[:DOCUMENT] + row)[:, DOCUMENT:] for row in rows])
    with oracle.engine.attached(full) as past, torch.no_grad():
        ours = oracle.model(torch.tensor(rows), **{CACHE_ARGUMENT: past}).logits
    assert relative_error(ours, expected) < 1e-5


def test_two_questions_attached_at_once_do_not_see_each_other(oracle, full):
    first, second = oracle.ids[DOCUMENT : DOCUMENT + 10], oracle.ids[DOCUMENT + 50 : DOCUMENT + 60]
    alone = [oracle.engine.answer(full, ids, max_new_tokens=12).token_ids for ids in (first, second)]
    together = [oracle.engine.start(full, ids) for ids in (first, second)]
    batch = oracle.engine.batch()
    for _ in range(12):
        for generation in together:
            batch.step([generation])
    assert [generation.token_ids for generation in together] == alone


def test_many_answers_leave_the_cache_as_it_was(llama):
    cache = llama.engine.compress(llama.ids, policy="keydiff", compression_ratio=0.5)
    before = cache.to_bytes()
    for i in range(amount(35, 100)):
        llama.engine.answer(cache, llama.ids[i : i + 1 + i % 7], max_new_tokens=1 + i % 5)
    assert cache.to_bytes() == before


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_another_attention_function_refuses(oracle, full, implementation):
    with oracle.engine.attached(full) as past:
        pass
    model = copy.deepcopy(oracle.model)
    model.set_attn_implementation(implementation)
    with pytest.raises(StateConflict, match="does not run kvshelf's attention"), torch.no_grad():
        model(torch.tensor([oracle.ids[:3]]), **{CACHE_ARGUMENT: past})


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_the_model_is_left_as_it_was(llama, implementation):
    model = copy.deepcopy(llama.model)
    model.set_attn_implementation(implementation)
    model.train()
    model.model.layers[0].eval()  # a caller's own mixture of modes
    modes = [module.training for module in model.modules()]
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    engine = Engine(model)
    engine.answer(engine.compress(llama.ids, policy="snapkv"), llama.ids[:5], max_new_tokens=3)
    assert model.config._attn_implementation == implementation
    assert [module.training for module in model.modules()] == modes
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    model.eval()
    assert torch.equal(logits_of(model, llama.ids), logits_of_fresh(llama, implementation))


def logits_of_fresh(llama, implementation):
    fresh = copy.deepcopy(llama.model)
    fresh.set_attn_implementation(implementation)
    return logits_of(fresh, llama.ids)


def test_the_model_is_left_as_it_was_after_an_error(llama):
    def stop():
        raise KeyboardInterrupt

    job = llama.engine.prepare(llama.ids)
    before = llama.model.config._attn_implementation
    with pytest.raises(KeyboardInterrupt):
        llama.engine.run(job, checkpoint=stop)
    assert llama.model.config._attn_implementation == before


def test_the_model_inside_the_block_still_works_without_the_cache(oracle, full):
    expected = logits_of(oracle.model, oracle.ids[:50])
    with oracle.engine.attached(full), torch.no_grad():
        ours = oracle.model(torch.tensor([oracle.ids[:50]])).logits
        cached = DynamicCache()
        first = oracle.model(torch.tensor([oracle.ids[:40]]), **{CACHE_ARGUMENT: cached}).logits
        rest = oracle.model(torch.tensor([oracle.ids[40:50]]), **{CACHE_ARGUMENT: cached}).logits
    assert relative_error(ours, expected) < 1e-5
    assert relative_error(torch.cat([first, rest], dim=1), expected) < 1e-5


def test_left_padding_is_refused(oracle, full):
    rows = torch.tensor([[0, 0, 5, 6], [7, 8, 9, 10]])
    mask = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])
    mask = torch.cat([torch.ones(2, DOCUMENT, dtype=torch.long), mask], dim=1)
    with oracle.engine.attached(full) as past, pytest.raises(InvalidRequest, match="padding"), torch.no_grad():
        oracle.model(rows, attention_mask=mask, **{CACHE_ARGUMENT: past})


def test_a_mask_of_ones_is_accepted(oracle, full):
    row = torch.tensor([oracle.ids[DOCUMENT : DOCUMENT + 4]])
    mask = torch.ones(1, DOCUMENT + 4, dtype=torch.long)
    with oracle.engine.attached(full) as past, torch.no_grad():
        ours = oracle.model(row, attention_mask=mask, **{CACHE_ARGUMENT: past}).logits
    ids = oracle.ids[: DOCUMENT + 4]
    assert relative_error(ours, logits_of(oracle.model, ids)[:, DOCUMENT:]) < fp32_bound(oracle.model, ids)


def test_wrong_positions_are_refused(oracle, full):
    with oracle.engine.attached(full) as past, pytest.raises(InvalidRequest, match="position 500"), torch.no_grad():
        oracle.model(torch.tensor([[5, 6]]), position_ids=torch.tensor([[0, 1]]), **{CACHE_ARGUMENT: past})


def test_an_attached_cache_cannot_be_cropped(llama):
    cache = llama.engine.compress(llama.ids)
    with llama.engine.attached(cache) as past, pytest.raises(StateConflict, match="cropped"):
        past.crop(-1)


def perturbed(llama, change):
    model = copy.deepcopy(llama.model)
    change(model)
    return Engine(model)


def change_one_weight(model):
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 5] += 1e-3


def change_rope(model):
    model.config.rope_parameters = dict(model.config.rope_parameters, rope_theta=5e5)


@pytest.mark.parametrize(
    ("change", "field"),
    [(change_one_weight, "weights"), (change_rope, "rope"), (lambda model: model.to(torch.bfloat16), "weights")],
    ids=["one weight", "rope", "dtype"],
)
def test_a_cache_of_another_model_is_refused(llama, change, field):
    cache = llama.engine.compress(llama.ids)
    other = perturbed(llama, change)
    with pytest.raises(ModelMismatch) as refused, other.attached(cache):
        pass
    assert refused.value.details["field"] == field
    assert refused.value.details["cache_fingerprint"] == llama.engine.identity.fingerprint()
    assert refused.value.details["model_fingerprint"] == other.identity.fingerprint()
    with pytest.raises(ModelMismatch):
        other.answer(cache, [1, 2])


def test_equal_models_share_caches_whatever_they_are_called(llama):
    other = Engine(copy.deepcopy(llama.model), name="another-name")
    cache = llama.engine.compress(llama.ids)
    assert other.answer(cache, [1, 2]).token_ids == llama.engine.answer(cache, [1, 2]).token_ids
