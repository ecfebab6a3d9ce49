"""The documents of the bench of batches, without torch: the process that reads the corpus imports no model."""

from __future__ import annotations

import io
import json
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from kvshelf.corpus.input.rows import parse_jsonl
from kvshelf.corpus.row import Row, Shard

SHORTEST: Final = 200
LONGEST: Final = 6000
"""Most tokens of a document; lengths are evenly spread on a logarithmic scale."""

POLICY: Final = "knorm"


def made_corpus(documents: int) -> list[list[int]]:
    """Random token ids."""
    chance = random.Random(0)
    low, high = math.log(SHORTEST), math.log(LONGEST)
    return [
        [chance.randrange(20, 500) for _ in range(round(math.exp(chance.uniform(low, high))))] for _ in range(documents)
    ]


@dataclass(frozen=True)
class Lines(Shard):
    data: bytes
    rows: int | None

    @property
    def nbytes(self) -> int:  # type: ignore[override]  # the bytes it holds
        return len(self.data)

    def read(self) -> Iterator[Row]:
        return parse_jsonl(io.BytesIO(self.data), "corpus", {"policy": POLICY})


def shard_of(corpus: Sequence[list[int]]) -> Lines:
    lines = [json.dumps({"custom_id": str(number), "token_ids": ids}) for number, ids in enumerate(corpus)]
    return Lines("\n".join(lines).encode(), len(lines))
