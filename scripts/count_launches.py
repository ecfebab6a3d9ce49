"""What a decode step launches and moves on a card, counted without one: `python -m scripts.count_launches`.

Models of one and of three small Llama layers step in bf16 with Triton's kernels under its interpreter; half of the
difference is a layer's.
"""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"  # before the first import of a kernel

from collections import Counter

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from kvshelf.engine.decode.batch import DecodeBatch
from kvshelf.engine.decode.slots.slots import Slots
from kvshelf.engine.engine import Engine
from kvshelf_bench.speed.selecting import selection_of, stepping
from kvshelf_bench.speed.subject import Subject
from scripts.launch_counts import Counts

_TOKENS = 64


def main() -> None:
    os.environ["KVSHELF_KERNELS"] = "triton"
    subjects = [_subject(layers) for layers in (1, 3)]
    for selector, slots in (("", False), ("", True), ("quest", False), ("quest", True)):
        fewer, more = (_step(subject, selector, slots=slots) for subject in subjects)
        launches = Counter({name: (count - fewer.launches[name]) // 2 for name, count in more.launches.items()})
        own, nbytes = launches.total(), (more.nbytes - fewer.nbytes) // 2
        name = f"{selector or 'all entries'}{', in slots' if slots else ''}"
        print(f"{name}: {own} launches and {nbytes} bytes a layer, {fewer.total - own} beside them")
        print("   ", ", ".join(f"{name} {count}" for name, count in launches.most_common() if count))


def _step(subject: Subject, selector: str, *, slots: bool) -> Counts:
    """Of a decode step of one answer. slots: of a pass that a card would record, and then launch as one graph."""
    cache = subject.engine.compress(subject.tokens(_TOKENS, seed=1), policy="full")
    selections = [selection_of(subject, cache, selector, _TOKENS // 2)] if selector else None
    batch = DecodeBatch(subject.engine.passes, Slots(subject.device) if slots else None)
    with stepping(subject, [cache], selections, batch) as step:
        step()
        with Counts() as counts:
            step()
    return counts


def _subject(layers: int) -> Subject:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=500, num_hidden_layers=layers, hidden_size=64, intermediate_size=128, num_attention_heads=4,
        num_key_value_heads=2, bos_token_id=None, eos_token_id=None, tie_word_embeddings=False,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    return Subject(Engine(model.eval().requires_grad_(False), name=f"llama of {layers} layers"), "")


if __name__ == "__main__":
    main()
