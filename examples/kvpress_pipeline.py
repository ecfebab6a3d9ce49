"""A stored cache under kvpress's pipeline: the document is compressed once, and kvpress's own loop answers from it.

`Engine.export` gives the `DynamicCache` that the pipeline takes, with the keys where they stood in the document, as
under a press.

    pip install 'kvpress==0.5.5' 'transformers>=5.2,<5.3'
    python examples/kvpress_pipeline.py [FOLDER OR HUB ID]      # default: the bundled model
"""

import sys
from collections.abc import Sequence
from typing import Any

import torch
from kvpress import KVPressTextGenerationPipeline
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvshelf import CompressedCache, Engine
from kvshelf.model.source import bundled_folder


def answers(
    pipeline: KVPressTextGenerationPipeline,
    engine: Engine,
    cache: CompressedCache,
    questions: Sequence[str],
    **how: Any,
) -> list[str]:
    """What kvpress answers to each question behind a cache. how: `max_new_tokens`."""
    texts = []
    for question in questions:
        ids = torch.tensor([engine.encode_query(cache, question)])
        # its own copy for each question: the loop appends to it
        past = engine.export(cache, positions="absolute")
        with torch.no_grad():
            texts.append(pipeline.generate_answer(ids, past, context_length=cache.next_position, **how))
    return texts


def main(name: str) -> None:
    model, tokenizer = AutoModelForCausalLM.from_pretrained(name), AutoTokenizer.from_pretrained(name)
    pipeline = KVPressTextGenerationPipeline(model=model, tokenizer=tokenizer)
    engine = Engine(model, tokenizer, name=name)
    document = "The access code of the amber falcon is 482913. " + "The tide turns and the boats wait. " * 40
    stored = engine.compress(document, policy="keydiff", compression_ratio=0.5).to_bytes()  # or a shelf's
    cache = CompressedCache.from_bytes(stored)
    for answer in answers(pipeline, engine, cache, ["What is the access code of the amber falcon?"], max_new_tokens=16):
        print(answer)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else bundled_folder("kvshelf-tiny"))
