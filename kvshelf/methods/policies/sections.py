"""Sections of a document: where they begin."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Final

from kvshelf.artifact.identity import MAX_PROTECTED_SPANS
from kvshelf.errors import InvalidRequest
from kvshelf.methods.policies.view import DocumentView
from kvshelf.model.lines import is_heading, is_numbered, matching

_FORMS: Final = "section, blocks, lines:REGEX or tokens:A-B,C-D"


def require_form(by: str) -> None:
    """Raises `InvalidRequest` for a text that is no `Fair.by`."""
    name, _, rest = by.partition(":")
    if name == "tokens":
        _spans(by, rest)
    elif name == "lines":
        try:
            matching(rest)
        except ValueError as error:
            raise _refused(by, str(error)) from error
    elif by not in ("section", "blocks"):
        raise _refused(by, f"it is none of {_FORMS}")


def section_starts(by: str, document: DocumentView) -> tuple[int, ...]:
    """The first token of each section, ascending from 0, counted among the tokens that a policy judges. Sections
    without such tokens are left out. by: as `Fair.by`. Raises `InvalidRequest` where the document has no such section.
    """
    name, _, rest = by.partition(":")
    ids = document.token_ids if document.whole_ids is None else document.whole_ids
    if name == "tokens":
        starts = [edge for span in _spans(by, rest) for edge in span]
        if starts[-1] > len(ids):
            raise _refused(by, f"the document has {len(ids)} tokens; give some of them, as 0-64")
    else:
        assert document.text is not None, "the policy must say that it observes text"
        starts = list(_starts(name, rest, document.text.lines(ids)))
        if name == "lines" and not starts:
            raise _refused(by, "no line of the document is that")
    if document.places is not None:
        starts = [bisect_left(document.places, start) for start in starts]
    return tuple(sorted({0, *starts} - {document.num_tokens}))


def _starts(name: str, rest: str, lines: Sequence[tuple[int, str]]) -> Iterator[int]:
    """The first token of each line that begins a section."""
    if name == "lines":
        matches = matching(rest)
        yield from (first for first, line in lines if matches(line.strip("\r\n")))
        return
    headings = [
        first
        for (first, line), (_, following) in pairwise([*lines, (0, "")])
        if is_heading(line, following) or is_numbered(line)
    ]
    if name == "section" and len(headings) > 1:
        yield from headings
        return
    blank = False
    for first, line in lines:
        text = line.strip()
        if blank and text:
            yield first
        blank = not text or line[len(line.rstrip()) :].count("\n") > 1


def _spans(by: str, rest: str) -> list[tuple[int, int]]:
    """The spans of a text like A-B,C-D, ascending and apart."""
    spans = []
    if rest.count(",") >= MAX_PROTECTED_SPANS:
        raise _refused(by, f"it has {rest.count(',') + 1} spans, and {MAX_PROTECTED_SPANS} are taken; give fewer")
    for part in rest.split(","):
        first, _, end = part.partition("-")
        if not all(text.isascii() and text.isdigit() and len(text) < 10 for text in (first, end)):
            raise _refused(by, f"{part!r:.40} are no tokens; write the first and the one behind the last, as 0-64")
        spans.append((int(first), int(end)))
    edges = [edge for span in spans for edge in span]
    if any(first >= end for first, end in spans) or edges != sorted(edges):
        raise _refused(by, "its spans do not ascend; write them in their order, as 0-64,64-90")
    return spans


def _refused(by: str, why: str) -> InvalidRequest:
    return InvalidRequest(f"by {by!r:.120}: {why}", param="policy_params.by")
