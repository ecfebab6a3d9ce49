"""Chooses the rows of a batch that are measured where they do not say: a sample that costs a tenth of its prefills."""

from __future__ import annotations

from typing import Final

SHARE: Final = 0.1
_CUE: Final = 58
"""Tokens that a cue runs behind the full cache and the compressed one."""
_TOKENS_OF_A_CUE, _FEWEST, _MOST = 128, 10, 48
"""As of a fast probe (`kvshelf.engine.quality`, which needs torch; a front end has none)."""


class Sample:
    """The rows of one caller, in the order in which they begin. A systematic sample: a row is measured when a tenth of
    the work on rows like it since the last one would pay for it, so that short rows do not take what long ones cost. If
    the cues of all measured rows would cost more than `SHARE` of the work on all rows, a later row is measured instead:
    the sample alone would hold that bound only on average.

    Until rows have ended, a token of a cue counts as much as one of a document; then their seconds count.
    """

    def __init__(self) -> None:
        self._due = 0.0  # rows that are to be measured
        self._read = self._cued = 0.0  # tokens of documents, of cues
        self._timed_read = self._timed_cued = 0.0  # those of rows that have ended
        self._worked_s = self._probed_s = 0.0

    def begins(self, tokens: float) -> bool:
        """Whether a row of so many tokens, which begins now, is measured."""
        cost = cue_tokens(tokens)
        self._read, self._due = self._read + tokens, self._due + min(1.0, SHARE * tokens / (cost * self._dearer))
        is_measured = self._due >= 1 and (self._cued + cost) * self._dearer <= SHARE * self._read
        self._due, self._cued = self._due - is_measured, self._cued + cost * is_measured
        return is_measured

    def ended(self, tokens: float, worked_s: float, probe_s: float) -> None:
        """A row of so many tokens has ended. worked_s: without measuring; 0 if its cache was there before or it failed:
        no work of which a tenth could be taken. probe_s: of measuring; 0 if nobody measured."""
        if not worked_s:
            self._read -= tokens
            return
        self._timed_read, self._worked_s = self._timed_read + tokens, self._worked_s + worked_s
        if probe_s:
            self._timed_cued, self._probed_s = self._timed_cued + cue_tokens(tokens), self._probed_s + probe_s

    @property
    def _dearer(self) -> float:
        """Seconds of a token of a cue over those of a token of a document."""
        if not self._timed_cued:
            return 1.0
        return self._probed_s / self._timed_cued / (self._worked_s / self._timed_read)


def cue_tokens(tokens: float) -> float:
    """Tokens of the cues of a document of so many tokens."""
    return _CUE * min(max(tokens // _TOKENS_OF_A_CUE, _FEWEST), _MOST)
