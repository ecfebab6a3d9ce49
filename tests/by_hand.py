"""What an exported or renumbered cache must answer, made by hand: RoPE from its formula, one masked softmax in fp64.

No code of kvshelf but the name of an argument, and no cache logic of transformers but the storage: every token of a
question and its answer runs over the whole document's keys, of which those that were not kept are hidden.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest

import torch
from torch import Tensor
from torch.nn import functional
from transformers import AttentionInterface, DynamicCache

from kvshelf.engine.attention.attached import CACHE_ARGUMENT


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


@dataclass(frozen=True)
class Prefix:
    """Keys and values of each layer, fp64 `[kv_heads, N, D]`, and which of them are visible, `[kv_heads, N]`."""

    layers: list[tuple[Tensor, Tensor]]
    visible: list[Tensor]

    @classmethod
    def kept(cls, full, cache, *, slots_by=None) -> Prefix:
        """`full`: the cache of everything, of which `cache` kept some. `slots_by`: RoPE frequencies to move the kept
        keys to their slots with."""
        layers, masks = [], []
        for record, reduced in zip(full.layers, cache.layers, strict=True):
            keys, values, _ = (tensor.double() for tensor in record.dense())
            visible = torch.zeros(keys.shape[:2], dtype=torch.bool)
            for head, positions in enumerate(reduced.positions):
                positions = positions.long()
                visible[head, positions] = True
                if slots_by is not None:
                    by = torch.arange(len(positions)) - positions
                    keys[head, positions] = turned(keys[head, positions], by, slots_by)
            layers.append((keys, values))
            masks.append(visible)
        return cls(layers, masks)

    @classmethod
    def spelled_out(cls, cache, inv_freq: Tensor) -> Prefix:
        """Every token that a cache of any kind of record stands for, as an entry of its own."""
        layers, masks = [], []
        for record in cache.layers:
            parts = [_tokens(part, inv_freq) for part in getattr(record, "parts", (record,))]
            heads = [[torch.cat(tensors) for tensors in zip(*head, strict=True)] for head in zip(*parts, strict=True)]
            longest = max(len(keys) for keys, _ in heads)
            padded = [[functional.pad(x, (0, 0, 0, longest - len(x))) for x in head] for head in heads]
            layers.append(tuple(torch.stack(tensors) for tensors in zip(*padded, strict=True)))
            masks.append(torch.stack([torch.arange(longest) < len(keys) for keys, _ in heads]))
        return cls(layers, masks)

    def lengths(self, layer: int) -> tuple[int, Tensor]:
        """Entries of a layer, visible or not, and which are."""
        return self.visible[layer].shape[1], self.visible[layer]


def _tokens(part, inv_freq: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Keys and values of each token of a `Kept` or `Merged`, head by head, fp64."""
    heads = []
    for head, (keys, values) in enumerate(zip(*part.plain_heads(), strict=True)):
        keys, values, positions = keys.double(), values.double(), part.positions[head]
        if part.kind == "merged":
            own = slice(part.slot_offsets[head], part.slot_offsets[head + 1])
            classes, positions = part.slot_classes[own].long(), part.slot_positions[own]
            keys, values = part.slot_scales[own].double()[:, None] * keys[classes], values[classes]
        heads.append((turned(keys, positions, inv_freq) if part.rope_mode == "pre" else keys, values))
    return heads


def logits_after(model, prefix: Prefix, tokens: list[int], first_position: int, chosen=None) -> Tensor:
    """Logits `[T, vocabulary]` fp64 of `tokens`, which stand at `first_position` and on behind the prefix. chosen:
    which of the visible entries a token sees, `[q_heads, T, N]` of a layer's number, queries, keys and visible
    entries."""

    def masked(module, query, key, value, _mask, scaling, **_):
        group = query.shape[1] // key.shape[1]
        keys, values = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
        logits = query @ keys.transpose(2, 3) * scaling
        length, width = logits.shape[-2:]
        shown = torch.ones(length, width, dtype=torch.bool).tril(width - length).repeat(logits.shape[1], 1, 1)
        entries, visible = prefix.lengths(module.layer_idx)
        shown[:, :, :entries] = visible.repeat_interleave(group, 0)[:, None]
        if chosen is not None:
            shown[:, :, :entries] &= chosen(module.layer_idx, query[0], key[0, :, :entries], visible)
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
        return model(torch.tensor([tokens]), **{CACHE_ARGUMENT: past}, position_ids=positions).logits[0]


def greedy(
    model, prefix: Prefix, question: list[int], first_position: int, count: int, chosen=None, guess: Sequence[int] = ()
) -> list[int]:
    """The greedy answer of `count` tokens, shorter where the two best logits lie within 1e-4 of each other.

    guess: what it may turn out to be. Its tokens run at once: a token sees none behind it, so up to the first wrong one
    each says what comes next. From there on, or without a guess, every token runs again at every step.
    """
    answer: list[int] = []
    while len(answer) < count:
        ahead = list(guess[len(answer) : count - 1]) if answer == list(guess[: len(answer)]) else []
        rows = logits_after(model, prefix, [*question, *answer, *ahead], first_position, chosen)[-1 - len(ahead) :]
        for row, guessed in zip_longest(rows, ahead):
            best = row.topk(2)
            if float(best.values[0] - best.values[1]) < 1e-4:
                return answer
            answer.append(int(best.indices[0]))
            if answer[-1] != guessed:
                break
    return answer


def drawn(seed: int, layer: int, head: int, position: int) -> float:
    """SplitMix64's mixing function over each of the four, with Python's integers."""
    mask, x = 2**64 - 1, 0
    for part in (seed, layer, head, position):
        x = (x + part + 0x9E3779B97F4A7C15) & mask
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
        x ^= x >> 31
    return (x >> 11) / 2**53
