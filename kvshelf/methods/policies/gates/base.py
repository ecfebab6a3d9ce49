"""Bases of policies with trained gates: any gate file (`GatePolicy`), and a network for each token (`TokenGate`)."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Final, Self

import torch
from torch import Tensor

from kvshelf.artifact.identity import ModelIdentity
from kvshelf.errors import PolicyUnsupported
from kvshelf.kernels.select import importance_of
from kvshelf.methods.method import Needs, parameter
from kvshelf.methods.policies.base import Policy, ScoringPolicy
from kvshelf.methods.policies.budgets import Budget, fitted_sink
from kvshelf.methods.policies.chunked import ChunkedPolicy, LayerPast
from kvshelf.methods.policies.gate_file import Family, Form, Gates, Geometry, Shapes, Target, find
from kvshelf.methods.policies.sharing import LayerStats
from kvshelf.methods.policies.view import DocumentView, LayerView
from kvshelf.model.rope import Rope

_TOKENS: Final = 4096
"""Tokens that are read at a time: with a hundred heads of 128 channels their inputs have 200 MiB."""


@dataclass(frozen=True)
class GatePolicy(Policy):
    """A policy that scores by gates trained for the model. Their digest is in a cache's identity.

    family: the kind of gates. target: what they foretell. Raise `gate_revision` when the formula changes.
    """

    family: ClassVar[Family]
    target: ClassVar[Target]
    gate_revision: ClassVar[int] = 1
    needs: ClassVar[Needs] = Needs.QUERIES | Needs.ROPE | Needs.GATES

    gates: str | None = parameter(None, "digest of the gate file to use; null: the one that is there")

    def fitted(self, document: DocumentView, budget: Budget, given: frozenset[str]) -> Self:
        policy = super().fitted(document, budget, given)
        digest = gates_of(document).digest
        if self.gates not in (None, digest):
            raise PolicyUnsupported(
                f"gates {self.gates!r} are not those that are there for this model, {digest!r}; leave them out, or put "
                "their file back",
                param="policy_params.gates",
            )
        return replace(policy, gates=digest)

    def gate_file(self, model: ModelIdentity, folder: str, geometry: Geometry) -> Gates:
        form = Form(self.family, self.gate_revision, lambda width: self.shapes(width, geometry))
        return find(model, folder, self.name, form)

    @classmethod
    @abstractmethod
    def shapes(cls, width: int, geometry: Geometry) -> Shapes:
        """The tensors of a gate file of this width."""


@dataclass(frozen=True)
class TokenGate(GatePolicy, ChunkedPolicy, ScoringPolicy):
    """Scores a token by a network of one hidden layer, which reads the token's query, key and value of all heads before
    RoPE, and nothing of other tokens. So a score depends on no later token, nor on how a document is cut into passes.

    In chunks a token's output is made in the pass that reads it and stays with its entries.
    """

    sink: int = parameter(4, "first tokens, always kept", minimum=0)

    @property
    def first_kept(self) -> int:
        return self.sink

    def fitted(self, document: DocumentView, budget: Budget, given: frozenset[str]) -> Self:
        digest = gates_of(document).digest
        if self.chunked and document.first_position and self.gates not in (None, digest):
            # The parameters of a cache that is resumed are not the caller's to choose.
            raise PolicyUnsupported(
                f"the cache was made by the gates {self.gates!r}, and those that are there for this model are "
                f"{digest!r}; put their file back, or take prefill=whole",
                param="policy_params.prefill",
            )
        policy = super().fitted(document, budget, given)
        sink = fitted_sink(self.sink, budget.tokens, room=budget.tokens - 1, requested="sink" in given)
        return replace(policy, sink=sink)

    @classmethod
    def shapes(cls, width: int, geometry: Geometry) -> Shapes:
        of_layer = cls.of_layer(width, geometry)
        return {f"{layer}.{name}": shape for layer in range(geometry.layers) for name, shape in of_layer.items()}

    @classmethod
    def of_layer(cls, width: int, geometry: Geometry) -> Shapes:
        """The tensors of one layer's gate."""
        return {
            "mean": (geometry.inputs,),
            "scale": (geometry.inputs,),
            "up": (width, geometry.inputs),
            "down": (geometry.kv_heads, width),
            "bias": (geometry.kv_heads,),
        }

    def protected(self, layer: LayerView) -> Tensor:
        return self.stays(layer.positions, layer.protected_prefix, layer.num_tokens, ended=True)

    def stays(self, positions: Tensor, prefix: int, read: int, *, ended: bool) -> Tensor:  # noqa: ARG002
        """Which of the tokens at these positions stay whatever their score, `[n]` bool, when `read` tokens have been
        read. ended: the document has no more."""
        return positions < max(self.sink, prefix)

    def score(self, layer: LayerView) -> Tensor:
        gate = gates_of(layer.document).layer(layer.place, layer.keys.device)
        first = layer.first_kv_head
        outputs = self.outputs(gate, layer)[:, first : first + layer.kv_heads].T.contiguous()
        return self.judged(outputs, layer.positions, layer.num_tokens)

    def take(self, past: LayerPast, chunk: LayerView) -> LayerPast:
        gate = gates_of(chunk.document).layer(chunk.place, chunk.keys.device)
        outputs, note = self.continued(gate, chunk, past.note)
        joined = past.joined(chunk, {"outputs": outputs.T})
        at = joined.record.entry_positions
        scores = self.judged(joined.columns["outputs"], at, joined.read)
        stays = self.stays(at, chunk.protected_prefix, joined.read, ended=joined.ended)
        return joined.judged(importance_of(scores, stays), note)

    def shares(self, pasts: Sequence[LayerPast], budget: Budget) -> Sequence[Sequence[int]]:
        if self.sharing is None:
            return super().shares(pasts, budget)
        device = pasts[0].importance[0].device
        return self.sharing.counts([LayerStats(past.importance).on(device) for past in pasts], budget, len(pasts))

    @classmethod
    def outputs(cls, gate: Mapping[str, Tensor], layer: LayerView) -> Tensor:
        """The outputs of a layer's gate for its tokens: `[N, kv_heads]` fp32, of all heads."""
        return torch.cat([cls.gated(gate, rows) for rows in gate_inputs(layer)])

    @classmethod
    def gated(cls, gate: Mapping[str, Tensor], rows: Tensor) -> Tensor:
        """The outputs of a gate for tokens `[n, inputs]`: `[n, kv_heads]`."""
        return torch.nn.functional.silu(projected(gate, "up", rows)) @ gate["down"].T + gate["bias"]

    def continued(self, gate: Mapping[str, Tensor], chunk: LayerView, note: Any) -> tuple[Tensor, Any]:
        """The outputs of a chunk, as of `outputs`, and its note for the next. note: of the one before, if any."""
        return self.outputs(gate, chunk), note

    def judged(self, outputs: Tensor, positions: Tensor, read: int) -> Tensor:  # noqa: ARG002
        """The scores of outputs `[..., n]` fp32 of tokens at positions `[n]`, when `read` tokens have been read."""
        return outputs


def projected(gate: Mapping[str, Tensor], name: str, rows: Tensor) -> Tensor:
    """W x of tokens `[n, inputs]`, each channel in its own scale: `[n, width]`. W, the smaller factor, is scaled."""
    matrix = gate[name] * gate["scale"]
    return rows @ matrix.T - matrix @ gate["mean"]


def gate_inputs(layer: LayerView) -> Iterator[Tensor]:
    """The inputs of gates: queries, keys and values of all heads of the layer, before RoPE, `[n, inputs]` fp32, some
    thousand tokens at a time."""
    rope = layer.rope
    assert rope is not None, "the policy says that it observes RoPE"
    for first in range(0, layer.num_tokens, _TOKENS):
        block = slice(first, first + _TOKENS)
        queries, keys, values = (states[:, block] for states in (layer.all_queries, layer.keys, layer.values))
        yield token_inputs(queries, keys, values, layer.rotated_to[block], rope, layer.all_heads)


def token_inputs(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    rotated_to: Tensor,
    rope: Rope,
    all_heads: Callable[[Tensor], Tensor] = lambda states: states,
) -> Tensor:
    """The inputs of gates for n tokens, `[n, inputs]` fp32. queries: `[q_heads, n, D]`, keys and values: `[kv_heads, n,
    D]`, rotated to positions `[n]`. all_heads: adds the heads of other processes."""
    states = rope.unrotate(queries, rotated_to), rope.unrotate(keys, rotated_to), values.float()
    return torch.cat([all_heads(of_heads).transpose(0, 1).flatten(1) for of_heads in states], dim=1)


def gates_of(document: DocumentView) -> Gates:
    assert document.gates is not None, "the policy says that it observes gates"
    return document.gates
