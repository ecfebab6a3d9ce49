"""Fine-tune kvshelf-tiny so that layers read the keys and values of others: Stochastic KV Routing, arXiv 2604.22782.

    python -m scripts.route_tiny                        # three minutes of one thread
    kvshelf bench quality --model .train/routed --size core --policies full,kvzip

In each step each layer from `OWN` on reads, with probability `--random`, the keys and values of a random layer before
it, as in the paper, so no map is chosen before the end: a table says what each map answers before and after, and the
model is written with that of `--map` in its configuration (`layer_map`). It does not ship.
"""

from __future__ import annotations

import argparse
import random
import shutil
import time
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import torch
from tokenizers import Tokenizer
from torch import Tensor
from transformers import AttentionInterface, LlamaForCausalLM
from transformers.cache_utils import Cache

from kvshelf.engine.attention.attached import CACHE_ARGUMENT, PassingLayer
from scripts import train_tiny as tiny

FOLDER: Final = tiny.WORK_FOLDER / "routed"
BATCHES: Final = 10**6  # numbers of steps that the training of kvshelf-tiny never came to
OWN: Final = 2
"""Layers that keep theirs. Before rotation the keys of layer 0 and of half of layer 1's heads are nearly constant, for
queries that look a fixed distance back (`train_tiny.point_heads_back`). A layer 1 that reads layer 0's learns anew."""


class RoutedLayer(PassingLayer):
    """A layer that reads the keys and values of `other`, which makes its own in any case; None: of itself."""

    def __init__(self, other: RoutedLayer | None) -> None:
        super().__init__()
        self._other = other
        self.own: tuple[Tensor, Tensor]

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        self.own = key_states, value_states
        return self.own if self._other is None else self._other.own


def routed(model: LlamaForCausalLM, reads: Sequence[int]) -> Any:
    """The model as `step_loss` runs it, each layer reading the one that `reads` names."""
    layers: list[RoutedLayer] = []
    for layer, read in enumerate(reads):
        layers.append(RoutedLayer(None if read == layer else layers[read]))
    cache = {CACHE_ARGUMENT: Cache(layers=layers)}
    return SimpleNamespace(
        lm_head=model.lm_head, model=lambda input_ids, **_: model.model(input_ids=input_ids, use_cache=True, **cache)
    )


def routes(rng: random.Random, layers: int, probability: float) -> list[int]:
    """What each layer reads in a step."""
    return [rng.randrange(layer) if layer >= OWN and rng.random() < probability else layer for layer in range(layers)]


def maps(layers: int) -> list[tuple[int, ...]]:
    """All that a model can be served with: each layer reads itself, or one before it that does."""
    reads = product(*(range(layer + 1) if layer >= OWN else (layer,) for layer in range(layers)))
    return [read for read in reads if all(read[leader] == leader for leader in read)]


@torch.no_grad()
def right_answers(model: LlamaForCausalLM, encoder: tiny.Encoder, reads: Sequence[int]) -> float:
    """The share of answers, about documents that are not trained on, with every token right, those before it given."""
    stage, progress = tiny.Stage(1, 8192, {2048: 1}, copying=0.0, rate=0.0), tiny.Progress()
    batch = tiny.make_batch(tiny.RECIPES["tiny"], stage, BATCHES - 1, encoder, model.config.vocab_size)
    tiny.step_loss(routed(model, reads), *batch, progress)
    return progress.right_answers / progress.answers


def fine_tune(model: LlamaForCausalLM, encoder: tiny.Encoder, steps: int, probability: float) -> None:
    """Train all weights, in place."""
    lengths = dict.fromkeys((256, 512, 1024, 2048), 1.0)
    stage = tiny.Stage(steps, 4096, lengths, copying=0.05, rate=1e-3, last_rate=5e-5)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, betas=(0.9, 0.98), weight_decay=0.01)
    progress, began = tiny.Progress(), time.monotonic()
    for step in range(steps):
        reads = routes(random.Random(f"routes/{step}"), model.config.num_hidden_layers, probability)
        batch = tiny.make_batch(tiny.RECIPES["tiny"], stage, BATCHES + step, encoder, model.config.vocab_size)
        torch.autograd.backward(tiny.step_loss(routed(model, reads), *batch, progress))
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.param_groups[0]["lr"] = stage.rate_at(step) * min(1.0, (step + 1) / tiny.WARMUP_STEPS)
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % tiny.REPORT_EVERY == 0:
            print(f"step {step + 1}  {time.monotonic() - began:6.0f} s  {progress}", flush=True)
            progress = tiny.Progress()


def export(model: LlamaForCausalLM, reads: Sequence[int], folder: Path) -> None:
    """Write the model with its map."""
    model.config.layer_map = list(reads)
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(tiny.MODEL_FOLDER / name, folder / name)


def main() -> None:
    """Fine-tune, measure and export."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--map", default="0,1,2,0", help="the layer that each layer of the written model reads")
    parser.add_argument("--random", type=float, default=0.5, help="probability of reading a random layer before")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--folder", type=Path, default=FOLDER)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    AttentionInterface.register("blocked", tiny.blocked_attention)
    model = LlamaForCausalLM.from_pretrained(tiny.MODEL_FOLDER, dtype=torch.float32, attn_implementation="blocked")
    encoder = tiny.Encoder(Tokenizer.from_file(str(tiny.MODEL_FOLDER / "tokenizer.json")))
    choices = maps(model.config.num_hidden_layers)
    before = [right_answers(model, encoder, reads) for reads in choices]
    fine_tune(model, encoder, arguments.steps, arguments.random)
    for reads, right in zip(choices, before, strict=True):
        print(f"{reads}: {right:.0%} right before, {right_answers(model, encoder, reads):.0%} after", flush=True)
    export(model, [int(layer) for layer in arguments.map.split(",")], arguments.folder)


if __name__ == "__main__":
    main()
