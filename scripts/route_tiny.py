"""Fine-tune kvshelf-tiny so that layers read the keys and values of others: Stochastic KV Routing, arXiv 2604.22782.

    python scripts/route_tiny.py                        # layers 1 and 3 read those of 0 and 2; about 15 minutes
    kvshelf bench quality --model .train/routed --size core --policies full,kvzip

In half of the steps each layer reads, with probability `--random`, the keys and values of a random layer before it, as
in the paper; in the others layers read what the deployed model will (`--map`). The model that is written has
`layer_map` in its configuration, and its own keys and values in layers that read themselves alone. It does not ship.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import save
from tokenizers import Tokenizer
from torch import Tensor
from train_tiny import (
    MODEL_FOLDER,
    RECIPES,
    REPORT_EVERY,
    WORK_FOLDER,
    Encoder,
    Progress,
    Stage,
    blocked_attention,
    make_batch,
    step_loss,
)
from transformers import AttentionInterface, LlamaForCausalLM
from transformers.cache_utils import Cache

from kvshelf.engine.attention.attached import CACHE_ARGUMENT, PassingLayer

FOLDER: Final = WORK_FOLDER / "routed"
BATCHES: Final = 10**6  # numbers of steps that the training of kvshelf-tiny never came to


class RoutedLayer(PassingLayer):
    """A layer that reads the keys and values of `other`, which makes its own in any case; None: of itself."""

    def __init__(self, other: RoutedLayer | None) -> None:
        super().__init__()
        self._other = other
        self.own: tuple[Tensor, Tensor]

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        self.own = key_states, value_states
        return self.own if self._other is None else self._other.own


class RoutedPass:
    """A model as `step_loss` runs it, each layer reading the one that `reads` names."""

    def __init__(self, model: LlamaForCausalLM, reads: Sequence[int]) -> None:
        self.lm_head = model.lm_head
        self._model = model
        self._layers: list[RoutedLayer] = []
        for layer, read in enumerate(reads):
            self._layers.append(RoutedLayer(None if read == layer else self._layers[read]))

    def model(self, input_ids: Tensor, **_: Any) -> Any:
        """The base model's pass."""
        given = {"use_cache": True, CACHE_ARGUMENT: Cache(layers=self._layers)}
        return self._model.model(input_ids=input_ids, **given)


def routes(rng: random.Random, deployed: Sequence[int], probability: float) -> list[int]:
    """What each layer reads in a step."""
    if rng.random() < 0.5:
        return list(deployed)
    return [rng.randrange(layer) if layer and rng.random() < probability else layer for layer, _ in enumerate(deployed)]


def fine_tune(
    model: LlamaForCausalLM, encoder: Encoder, deployed: Sequence[int], steps: int, probability: float
) -> None:
    """Train all weights, in place."""
    stage = Stage(steps, 8192, {512: 1, 1024: 2, 2048: 2}, copying=0.05, rate=4e-4, last_rate=2e-5)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, betas=(0.9, 0.98), weight_decay=0.01)
    progress, began = Progress(), time.monotonic()
    for step in range(steps):
        reads = routes(random.Random(f"routes/{step}"), deployed, probability)
        batch = make_batch(RECIPES["tiny"], stage, BATCHES + step, encoder, model.config.vocab_size)
        torch.autograd.backward(step_loss(RoutedPass(model, reads), *batch, progress))  # type: ignore[arg-type]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.param_groups[0]["lr"] = stage.rate_at(step) * min(1.0, (step + 1) / 50)
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % REPORT_EVERY == 0:
            print(f"step {step + 1}  {time.monotonic() - began:6.0f} s  {progress}", flush=True)
            progress = Progress()


def export(model: LlamaForCausalLM, deployed: Sequence[int], folder: Path) -> None:
    """Write the model with its map; the weights appear in one rename."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        (folder / name).write_bytes((MODEL_FOLDER / name).read_bytes())
    config = json.loads((MODEL_FOLDER / "config.json").read_text()) | {"layer_map": list(deployed)}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    tensors = {name: weight.detach().contiguous() for name, weight in model.named_parameters()}
    (folder / "model.safetensors.part").write_bytes(save(tensors, metadata={"format": "pt"}))
    os.replace(folder / "model.safetensors.part", folder / "model.safetensors")


def main() -> None:
    """Fine-tune and export."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--map", default="0,0,2,2", help="the layer that each layer reads")
    parser.add_argument("--random", type=float, default=0.75, help="probability of reading a random layer before")
    parser.add_argument("--steps", type=int, default=700)
    parser.add_argument("--folder", type=Path, default=FOLDER)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    deployed = [int(layer) for layer in arguments.map.split(",")]
    AttentionInterface.register("blocked", blocked_attention)
    model = LlamaForCausalLM.from_pretrained(MODEL_FOLDER, dtype=torch.float32, attn_implementation="blocked")
    encoder = Encoder(Tokenizer.from_file(str(MODEL_FOLDER / "tokenizer.json")))
    fine_tune(model, encoder, deployed, arguments.steps, arguments.random)
    export(model, deployed, arguments.folder)


if __name__ == "__main__":
    main()
