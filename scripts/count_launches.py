"""What a decode step launches and moves on a card, and where a prefill waits for it, counted without one.

`python -m scripts.count_launches`: models of one and of three small Llama layers step in bf16 with Triton's kernels
under its interpreter; half of the difference is a layer's. A recorded pass is one launch, which is not counted.
`python -m scripts.count_launches waits [POLICY ...]`: a table of how often kvshelf-tiny's prefill and the encoding of
its cache wait for each layer, and beside them, by policy and codec.
"""

from __future__ import annotations

import os
import sys

os.environ["TRITON_INTERPRET"] = "1"  # before the first import of a kernel

from collections import Counter
from collections.abc import Callable, Iterable

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from kvshelf.engine.decode.batch import DecodeBatch
from kvshelf.engine.decode.slots.seating import PassOutcome, Replay
from kvshelf.engine.decode.slots.slots import Slots
from kvshelf.engine.engine import Engine
from kvshelf.errors import KvshelfError
from kvshelf.methods.policies.registry import POLICIES
from kvshelf.model import loading
from kvshelf_bench.speed.selecting import selection_of, stepping
from kvshelf_bench.speed.subject import Subject
from scripts.card import Card
from scripts.launch_counts import Counts

CPU = torch.device("cpu")
_TOKENS = 64
_CODECS = "int8", "int4", "klt"
_DOCUMENT = "The access code of the amber falcon is 482913. " + "The tide turns and the boats wait. " * 12


def main() -> None:
    if sys.argv[1:2] == ["waits"]:
        _waits(sys.argv[2:] or POLICIES)
    else:
        _launches()


def _waits(policies: Iterable[str]) -> None:
    """Print a table of policies and codecs."""
    model, tokenizer = loading.load("kvshelf-tiny", device="cpu", dtype="float32")
    with Card() as card:
        card.put(model)
        engine = Engine(model, tokenizer, name="kvshelf-tiny")
        card.compression(engine, _DOCUMENT, "full", _CODECS)  # what is made once
        print("| policy | prefill |", " | ".join(_CODECS), "|")
        print("|---|---|" + "---|" * len(_CODECS))
        for policy in policies:
            try:
                shown = [str(waits) for waits in card.compression(engine, _DOCUMENT, policy, _CODECS).values()]
            except KvshelfError as error:
                shown = [str(error).partition(";")[0]]
            print(f"| `{policy}` |", " | ".join(shown), "|", flush=True)


def _launches() -> None:
    os.environ["KVSHELF_KERNELS"] = "triton"
    subjects = [_subject(layers) for layers in (1, 3)]
    for selector in ("", "quest"):
        for way in ("", ", in slots", ", recorded"):
            # Slots are one model's.
            slots = [Slots(CPU, _graph if way == ", recorded" else None) if way else None for _ in subjects]
            fewer, more = map(_step, subjects, [selector] * 2, slots)
            launches = Counter({name: (count - fewer.launches[name]) // 2 for name, count in more.launches.items()})
            count, nbytes = launches.total(), (more.nbytes - fewer.nbytes) // 2
            name, beside = f"{selector or 'all entries'}{way}", fewer.total - count
            print(f"{name}: {count} launches and {nbytes} bytes a layer, {beside} beside")
            for counts in (launches, fewer.launches - launches):
                print("   ", ", ".join(f"{name} {count}" for name, count in counts.most_common() if count))


def _graph(forward: Callable[[], PassOutcome]) -> Replay:
    """A recording that a card would launch as one, so that what is counted stands beside it."""
    outcome = forward()
    return lambda: outcome


def _step(subject: Subject, selector: str, slots: Slots | None) -> Counts:
    """Of a decode step of one answer."""
    cache = subject.engine.compress(subject.tokens(_TOKENS, seed=1), policy="full")
    selections = [selection_of(subject, cache, selector, _TOKENS // 2)] if selector else None
    batch = DecodeBatch(subject.engine.passes, slots)
    with stepping(subject, [cache], selections, batch) as step:
        for _ in range(3):  # behind which a pass is recorded
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
