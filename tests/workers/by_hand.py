"""What an exported or renumbered cache must answer, made by hand: RoPE from its formula, one masked softmax in fp64.

No code of kvshelf and no cache logic of transformers but the storage: every token runs again at every step, over the
whole document's keys, of which those that were not kept are hidden.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor
from transformers import AttentionInterface, DynamicCache


def frequencies(model) -> Tensor:
    """Angles per position, fp64 `[D / 2]`: from the formula, or the model's table where the config scales them."""
    config = model.config
    if config.rope_parameters["rope_type"] != "default":
        return model.base_model.rotary_emb.inv_freq.double()
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return config.rope_parameters["rope_theta"] ** -(torch.arange(0, dim, 2, dtype=torch.float64) / dim)


def turned(keys: Tensor, by: Tensor, inv_freq: Tensor) -> Tensor:
    """Keys `[N, D]` in the layout of Llama (halves), turned by `by` `[N]` positions: fp64."""
    angles = by.double()[:, None] * inv_freq
    first, second = keys.double().chunk(2, dim=-1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


class Prefix:
    """The whole document's keys and values, layer by layer `[kv_heads, N, D]`, and which of them are visible."""

    def __init__(self, full, cache, *, slots_by=None):
        """`full`: the cache of everything. `slots_by`: RoPE frequencies to move the kept keys to their slots with."""
        self.layers, self.visible = [], []
        for record, reduced in zip(full.layers, cache.layers, strict=True):
            keys, values, _ = (tensor.double() for tensor in record.dense())
            visible = torch.zeros(keys.shape[:2], dtype=torch.bool)
            for head, positions in enumerate(reduced.positions):
                positions = positions.long()
                visible[head, positions] = True
                if slots_by is not None:
                    by = torch.arange(len(positions)) - positions
                    keys[head, positions] = turned(keys[head, positions], by, slots_by)
            self.layers.append((keys, values))
            self.visible.append(visible)

    @property
    def length(self) -> int:
        return self.visible[0].shape[1]


def logits_after(model, prefix: Prefix, tokens: list[int], first_position: int) -> Tensor:
    """Logits `[T, vocabulary]` fp64 of `tokens`, which stand at `first_position` and on behind the prefix."""

    def masked(module, query, key, value, _mask, scaling, **_):
        group = query.shape[1] // key.shape[1]
        keys, values = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
        logits = query @ keys.transpose(2, 3) * scaling
        length, width = logits.shape[-2:]
        shown = torch.ones(length, width, dtype=torch.bool).tril(width - length).repeat(logits.shape[1], 1, 1)
        shown[:, :, : prefix.length] = prefix.visible[module.layer_idx].repeat_interleave(group, 0)[:, None]
        weights = torch.softmax(logits.masked_fill(~shown, -torch.inf), dim=-1)
        return (weights @ values).transpose(1, 2).contiguous(), None

    AttentionInterface.register("test_by_hand", masked)
    model = copy.deepcopy(model).double()
    model.set_attn_implementation("test_by_hand")
    past = DynamicCache()
    for index, (keys, values) in enumerate(prefix.layers):
        past.update(keys[None], values[None], index)
    positions = torch.arange(first_position, first_position + len(tokens))[None]
    with torch.no_grad():
        return model(torch.tensor([tokens]), past_key_values=past, position_ids=positions).logits[0]


def greedy(model, prefix: Prefix, question: list[int], first_position: int, count: int) -> list[int]:
    """The greedy answer of `count` tokens, shorter where the two best logits lie within 1e-4 of each other."""
    tokens = list(question)
    for _ in range(count):
        best = logits_after(model, prefix, tokens, first_position)[-1].topk(2)
        if float(best.values[0] - best.values[1]) < 1e-4:
            break
        tokens.append(int(best.indices[0]))
    return tokens[len(question) :]
