"""What a document leaves of each token for an answer (`keep_scores`): by a pass of the model in fp64, and loops over
its numbers."""

from __future__ import annotations

import copy
import math

import torch
from transformers import AttentionInterface

from tests.by_hand import frequencies, turned
from tests.methods.policies.test_precision import claim_in_lists


class LeftByHand:
    """Of each layer the weights `[q_heads, N, N]` of a document and its states `[heads, N, D]`, fp64."""

    def __init__(self, model, ids):
        self.model, self.layers, self.inv_freq = copy.deepcopy(model).double(), [], frequencies(model)
        AttentionInterface.register("test_left_by_hand", self.attend)
        self.model.set_attn_implementation("test_left_by_hand")
        with torch.no_grad():
            self.model(torch.tensor([ids]), use_cache=False)

    def attend(self, _module, query, key, value, _mask, scaling, **_):
        group = query.shape[1] // key.shape[1]
        keys, values = (states[0].repeat_interleave(group, 0) for states in (key, value))
        later = torch.ones(keys.shape[1], keys.shape[1]).triu(1).bool()
        weights = (query[0] @ keys.mT * scaling).masked_fill(later, -torch.inf).softmax(-1)
        self.layers.append((weights, query[0], key[0], value[0]))
        return (weights @ values).transpose(0, 1)[None], None

    def sums(self, layer, head, rows=None):
        """What each token received, of the last `rows` rows, in the mean over a group."""
        weights, _, keys, _ = self.layers[layer]
        group = len(weights) // len(keys)
        return weights[head * group : (head + 1) * group, -(rows or 0) :].sum(1).mean(0).tolist()

    def claim(self, layer, params):
        """Of policy `arkv`."""
        weights, rows = self.layers[layer][0], params["window"]
        return claim_in_lists(weights[:, -rows:, :-rows].tolist(), [params[f"tau{i}"] for i in (1, 2, 3)])

    def rates(self, layer, head, gate):
        """log beta of each token by a gate, fp64 by name."""
        _, query, key, value = self.layers[layer]
        back = -torch.arange(key.shape[1])
        states = [turned(states, back, self.inv_freq) for of in (query, key) for states in of] + [*value]
        inputs = (torch.cat(states, dim=1) - gate["mean"]) * gate["scale"]
        hidden = inputs @ gate["up"].T
        outputs = (hidden * torch.sigmoid(hidden)) @ gate["down"][head] + gate["bias"][head]
        return [-math.log1p(math.exp(-number)) for number in outputs.tolist()]

    def threshold(self, layer, kept):
        """The mean over what heads drop of the cosine to the nearest kept key. kept: the positions of each head."""
        cosines = []
        for keys, own in zip(self.layers[layer][2], kept, strict=True):
            unit = keys / keys.norm(dim=1, keepdim=True)
            gone = sorted({*range(len(keys))} - {*own})
            cosines += (unit[gone] @ unit[own].T).max(1).values.tolist()
        return sum(cosines) / len(cosines)
