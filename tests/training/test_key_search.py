"""How much keys change under blocks: against a plain model with a mask."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from transformers import DynamicCache

from kvshelf.engine.attention.attached import CACHE_ARGUMENT
from kvshelf.training.key_search import BLOCK, SINK, key_similarities
from tests.recorded import load_oracle


def by_hand(model, ids):
    """Every layer's mean cosine, in loops, of keys in float64 under transformers' own masks."""
    model = copy.deepcopy(model).double()
    model.set_attn_implementation("eager")
    n = len(ids)
    causal = torch.ones(n, n, dtype=torch.bool).tril()
    block = torch.tensor([-1 if at < SINK else (at - SINK) // BLOCK for at in range(n)])
    own = causal & ((block[:, None] == block) | (block == -1))
    passes = []
    for mask in (causal, own):
        past = DynamicCache()
        bias = torch.zeros(1, 1, n, n, dtype=torch.float64).masked_fill(~mask, -math.inf)
        with torch.no_grad():
            model.model(torch.tensor([ids]), attention_mask=bias, position_ids=torch.arange(n)[None],
                        use_cache=True, **{CACHE_ARGUMENT: past})  # fmt: skip
        passes.append([layer.keys[0] for layer in past.layers])
    means = []
    for whole, blocks in zip(*passes, strict=True):
        cosines = []
        for head in range(len(whole)):
            for at in range(SINK, n):
                a, b = whole[head, at].tolist(), blocks[head, at].tolist()
                dot = sum(x * y for x, y in zip(a, b, strict=True))
                cosines.append(dot / math.sqrt(sum(x * x for x in a) * sum(y * y for y in b)))
        means.append(sum(cosines) / len(cosines))
    return means


@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
@pytest.mark.parametrize("tokens", [BLOCK + SINK + 40, BLOCK + SINK])
def test_similarities_are_those_under_a_mask(architecture, tokens):
    oracle = load_oracle(architecture)
    similarities = key_similarities(oracle.engine, oracle.ids[:tokens])
    assert similarities == pytest.approx(by_hand(oracle.model, oracle.ids[:tokens]), abs=1e-5)
    assert similarities[0] == pytest.approx(1, abs=1e-5), "the first layer's keys see no other token"
    assert (min(similarities) < 0.9999) == (tokens > BLOCK + SINK), "one block is the whole document"
