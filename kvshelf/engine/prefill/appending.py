"""The cache of a document and of tokens that were appended to it, once these have been read and reduced."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from kvshelf.artifact.cache import CompressedCache
from kvshelf.artifact.growth import grown
from kvshelf.artifact.identity import Identity
from kvshelf.artifact.records import LayerRecord
from kvshelf.engine.inputs.job import Parent
from kvshelf.engine.summary import packed, unpacked
from kvshelf.methods.policies.view import MAX_SENTENCES


def continued(parent: Parent, appended: CompressedCache, identity: Identity, budget_tokens: int) -> CompressedCache:
    """The cache of a document with tokens appended to it, under the codec of its parent.

    appended: of these tokens alone, not encoded, its entries at their places in the whole document. identity: of the
    result. budget_tokens: of the appended tokens. Raises `InvalidRequest` as `grown` and `CompressedCache.encoded`.
    """
    before, codec = parent.cache, parent.cache.codec
    alone = replace(identity, budget_tokens=budget_tokens)  # shares of klt's classes are of the appended tokens

    def encode(layers: Sequence[LayerRecord]) -> Sequence[LayerRecord]:
        cache = replace(appended, layers=tuple(layers), identity=alone)
        return cache.encoded(codec, parent.coder, whole_groups=True).layers

    device = "cpu"  # where stored caches are; they move to the layers' devices when they are attached
    return CompressedCache(
        tuple(grown(before.to(device).layers, appended.to(device).layers, codec, encode)),
        identity.num_tokens,
        identity.num_tokens,
        identity,
        codec,
        _sentence_ends(before, appended),
        _summary(before.summary, appended.summary),
    )


def resumed(parent: Parent, read: CompressedCache, identity: Identity) -> CompressedCache:
    """As `continued`, where the policy of the parent went on reading. read: the entries of the whole document, not
    encoded, in place of those of the parent. Raises `InvalidRequest` as `CompressedCache.encoded`."""
    ends = _sentence_ends(parent.cache, read)
    whole = replace(
        read, num_tokens=identity.num_tokens, next_position=identity.num_tokens, identity=identity, sentence_ends=ends
    )
    return whole.encoded(parent.cache.codec, parent.coder)


def _sentence_ends(before: CompressedCache, appended: CompressedCache) -> tuple[int, ...]:
    """Of both; of neither where those of one are not known. Where there are too many, neighbours become one."""
    if not (before.sentence_ends and appended.sentence_ends):
        return ()
    ends = before.sentence_ends + tuple(before.num_tokens + end for end in appended.sentence_ends)
    while len(ends) > MAX_SENTENCES:
        ends = ends[::-2][::-1]  # with the last, which ends the document
    return ends


def _summary(before: Sequence[bytes], appended: Sequence[bytes]) -> tuple[bytes, ...]:
    """The codes of both, by layer; none where one has none."""
    if len(before) != len(appended):
        return ()
    pairs = zip(unpacked(before), unpacked(appended), strict=True)
    return tuple(packed(np.concatenate(pair)) for pair in pairs)
