"""What vLLM's pages would take if heads with fewer entries than the longest were padded: docs/internals/engines.md has
the numbers.

    python -m scripts.measure_padding

A request has one list of pages there, for all heads of all layers, so all would be as long as the longest.
"""

from __future__ import annotations

import random
from statistics import mean

from kvshelf import Engine
from kvshelf.artifact.records import entries_of
from kvshelf.samples.tasks import make_facts, write_document

POLICIES = ("ada", "defensivekv", "cake", "kvcues", "kvzip")
RATIOS = (0.5, 0.75, 0.9)
DOCUMENTS = 8


def document(number: int) -> str:
    """About 900 words with four facts, as in the tests of vLLM."""
    chance = random.Random(number)
    return write_document(chance, make_facts(chance, [4] * 4), "prose", 900, lambda text: len(text.split())).text


def main() -> None:
    engine = Engine.load("kvshelf-tiny")
    for policy in POLICIES:
        for ratio in RATIOS:
            shares, padding = [], []
            for number in range(DOCUMENTS):
                cache = engine.compress(document(number), policy=policy, compression_ratio=ratio)
                kept = [entries_of(layer) for layer in cache.layers]
                lengths = [length for entries in kept if entries is not None for length in entries.lengths]
                shares.append(max(lengths) / cache.num_tokens)
                padding.append(max(lengths) / mean(lengths) - 1)
            print(
                f"{policy}, {ratio:.0%} removed: {mean(padding):+.0%}, {mean(shares):.0%} of the document", flush=True
            )


if __name__ == "__main__":
    main()
