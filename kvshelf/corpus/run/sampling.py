"""Which rows of a batch are measured where they do not say: a sample that costs a tenth of the batch's time."""

from __future__ import annotations

from typing import Final

from kvshelf.corpus.row import CHARS_PER_TOKEN

_SHARE: Final = 0.1
_CUE: Final = 58
"""Tokens that a cue runs behind the full cache and the compressed one."""
_TOKENS_OF_A_CUE, _FEWEST, _MOST = 128, 10, 48
"""As of a fast probe (`kvshelf.engine.quality`, which needs torch; a front end has none)."""
_DIGITS: Final = 8


def is_measured(row_id: str, characters: int) -> bool:
    """Whether the row with this id is of the sample: each with the probability at which measuring all rows like it
    would take a tenth of their prefills. Drawn by the id, so that a batch that goes on has the same sample."""
    tokens = characters / CHARS_PER_TOKEN
    cost = _CUE * min(max(tokens // _TOKENS_OF_A_CUE, _FEWEST), _MOST)
    return int(row_id[-_DIGITS:], 16) / 16**_DIGITS < _SHARE * tokens / cost
