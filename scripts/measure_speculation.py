"""Which keys a query's cheap stand-ins name, InfiniGen's among them: docs/internals/selectors.md has the numbers.

    python -m scripts.measure_speculation

InfiniGen (arXiv 2406.19707) chooses a layer's entries before the layer runs: by the input of the layer before in place
of the layer's own, and by 30 % of the channels in a basis of each head's queries (the singular vectors of those of
another text). Printed is the share of the sixteenth of the keys of greatest product that each stand-in names, too, in
the mean over the layers but the first, their query heads and rows of the second half of a document.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import mean
from typing import Final

import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from kvshelf import Engine
from kvshelf.engine.attention.function import Attended, ForwardContext
from kvshelf.engine.forward.calls import Calls, with_layers
from kvshelf.samples.tasks import make_document
from kvshelf.training.chunk_search import agreement

MODELS: Final = ("kvshelf-tiny", "smollm2")
TOKENS: Final = 1024
ROWS: Final = 32
CHANNELS: Final = 0.3
"""Of the skewed ones, as in the paper."""
SEEDS: Final = (1, 2, 3)
OF_ANOTHER_TEXT: Final = 100


@dataclass(frozen=True, eq=False)
class Layer:
    """What a layer saw of a document. queries, guessed: `[q_heads, N, D]`, its own and those that it would have made of
    the input of the layer before; None in the first. keys: `[kv_heads, N, D]`."""

    queries: Tensor
    keys: Tensor
    guessed: Tensor | None


class Watching(ForwardContext):
    """Takes the layers of one pass of a model like Llama."""

    def __init__(self, calls: Calls) -> None:
        self.layers: list[Layer] = []
        self._calls = calls
        self._before: Tensor | None = None

    def after_attention(self, layer: Attended) -> None:
        arguments = self._calls.take(layer.module).arguments

        def queries_of(states: Tensor) -> Tensor:
            made: Tensor = (
                layer.module.get_submodule("q_proj")(states)
                .view(*states.shape[:2], -1, layer.queries.shape[-1])
                .transpose(1, 2)
            )
            turned: Tensor = apply_rotary_pos_emb(made, made, *arguments["position_embeddings"])[0]
            return turned[0]

        own = arguments["hidden_states"]
        torch.testing.assert_close(queries_of(own), layer.queries[0], rtol=1e-3, atol=1e-3)
        guessed = None if self._before is None else queries_of(self._before)
        self.layers.append(Layer(layer.queries[0], layer.keys[0], guessed))
        self._before = own


def layers_of(engine: Engine, seed: int) -> list[Layer]:
    assert engine.text is not None
    text = make_document("multikey", "prose", TOKENS, seed, engine.text.count_tokens).text
    calls = Calls(engine.model, with_layers(engine.model))
    watching = Watching(calls)
    engine.passes.causal(
        engine.prepare(text, policy="full").inputs(engine.passes.devices.inputs), watching, calls=calls
    )
    return watching.layers


def named(queries: Tensor, keys: Tensor, exact: Tensor, top: int) -> float:
    """The share of `exact` `[R, N]` that the keys of greatest product have. queries: `[R, W]`, keys: `[N, W]`."""
    chosen = torch.zeros_like(exact).scatter_(1, (queries @ keys.T).topk(top, dim=1).indices, True)
    return float((chosen & exact).sum() / exact.sum())


def shares(layer: Layer, other: Layer) -> dict[str, float]:
    """Of each stand-in, in the mean over the heads of a layer. other: the same layer over another text."""
    before = layer.keys.shape[1] // 2
    rows = torch.linspace(before, layer.keys.shape[1] - 1, ROWS).long()
    top, group, half = before // 16, len(layer.queries) // len(layer.keys), layer.keys.shape[2] // 2
    chunks = agreement(other.queries.view(len(other.keys), group, *other.queries.shape[1:]), other.keys)
    of_heads: dict[str, list[float]] = {}
    assert layer.guessed is not None
    for head, queries in enumerate(layer.queries):
        keys, guessed = layer.keys[head // group], layer.guessed[head]
        exact = torch.zeros(ROWS, before, dtype=torch.bool)
        exact.scatter_(1, (queries[rows] @ keys[:before].T).topk(top, dim=1).indices, True)
        skew = torch.linalg.svd(other.queries[head], full_matrices=False).Vh.T  # [D, D]
        by_size = ((queries @ skew).abs().sum(0) + (keys @ skew).abs().sum(0)).argsort(descending=True)
        basis, quarter = (skew[:, by_size[: round(share * len(skew))]] for share in (CHANNELS, 0.25))
        best = chunks[head // group].topk(max(1, half // 4)).indices
        columns = torch.cat([best, best + half])
        of_head = {
            "own query, a quarter of the channels, by chunks (fasa)": (queries[:, columns], keys[:, columns]),
            "own query, a quarter of the channels, skewed": (queries @ quarter, keys @ quarter),
            "own query, 30 % of the channels, skewed": (queries @ basis, keys @ basis),
            "query of the layer before, 30 % of the channels, skewed (InfiniGen)": (guessed @ basis, keys @ basis),
            "query of the layer before, all channels": (guessed, keys),
        }
        for name, (asking, asked_of) in of_head.items():
            of_heads.setdefault(name, []).append(named(asking[rows], asked_of[:before], exact, top))
    return {name: mean(values) for name, values in of_heads.items()}


def main() -> None:
    for model in MODELS:
        engine = Engine.load(model, dtype="float32")
        with torch.no_grad():
            others = layers_of(engine, OF_ANOTHER_TEXT)
            of_layers = [
                shares(*pair) for seed in SEEDS for pair in list(zip(layers_of(engine, seed), others, strict=True))[1:]
            ]
        for name in of_layers[0]:
            print(f"{model}: {name}: {mean(of_layer[name] for of_layer in of_layers):.1%}", flush=True)


if __name__ == "__main__":
    main()
