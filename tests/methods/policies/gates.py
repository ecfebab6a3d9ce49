"""Random gates for layers that no model made."""

from __future__ import annotations

from dataclasses import replace

import torch

from kvshelf.methods.policies import POLICIES, LayerView
from kvshelf.methods.policies.gate_file import GateHeader, Gates, Geometry, Training
from kvshelf.methods.policies.gates.base import GatePolicy

TRAINING = Training(model="random", steps=1, length=1, data="none", seed=0, loss=0.0, held_out=0.0)
GATED = [name for name, policy in POLICIES.items() if issubclass(policy, GatePolicy)]


def header(name, *, weights="none", width=8, **changed):
    policy = POLICIES[name]
    about = {"policy": name, "family": policy.family, "revision": policy.gate_revision}
    return GateHeader(weights=weights, width=width, training=TRAINING, **(about | changed))


def random_gates(name, geometry, *, width=8, seed=0, **changed):
    """Gates of a policy whose outputs differ from token to token."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        part: torch.ones(shape) if part.endswith("scale") else torch.randn(shape, generator=generator)
        for part, shape in POLICIES[name].shapes(width, geometry).items()
    }
    return Gates.of(header(name, width=width, **changed), tensors)


def with_gates(name: str, layer: LayerView, **options) -> LayerView:
    """The layer with random gates of the policy, if it reads any."""
    if name not in GATED:
        return layer
    heads, _, size = layer.queries.shape
    geometry = Geometry(layer.num_layers, heads, layer.kv_heads, size, heads * size, 16)
    return replace(layer, document=replace(layer.document, gates=random_gates(name, geometry, **options)))
