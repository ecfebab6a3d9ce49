"""Random models of two architectures and three sizes of a GQA group, and what a policy sees of each of their layers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel

from kvshelf.engine.engine import Engine
from kvshelf.engine.inputs.job import Job
from kvshelf.methods.policies.view import LayerView

SHAPES = [(kind, group) for kind in ("llama", "qwen2") for group in (1, 4, 7)]


def shaped_model(kind: str, group: int, **more: Any) -> PreTrainedModel:
    """A random model of two KV heads with a group of query heads each, in fp32, whose rows attend to something."""
    heads = {"num_attention_heads": 2 * group, "num_key_value_heads": 2, "hidden_size": 32 * group}
    usual = {"vocab_size": 512, "intermediate_size": 64, "num_hidden_layers": 5, "max_position_embeddings": 512}
    torch.manual_seed(group)
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**{**usual, **heads, **more})).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter *= 8 if "q_proj" in name or "k_proj" in name else 2
    return model.requires_grad_(False)


def random_ids(tokens: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 500, (tokens,), generator=generator).tolist()


def seen_by(engine: Engine, job: Job) -> tuple[list[LayerView], list[list[list[int]]]]:
    """The layers as the job's policy saw them, and the positions that each head of each layer keeps."""
    views: list[LayerView] = []

    class Watched(type(job.policy)):  # type: ignore[misc]
        def reduce(self, layer: LayerView, budget: Any) -> Any:
            views.append(layer)
            return super().reduce(layer, budget)

    cache = engine.run(replace(job, policy=Watched(**job.policy.parameters()))).cache
    return views, [[positions.tolist() for positions in record.positions] for record in cache.layers]
