"""The first token over a document that is not in memory: reading all of it, and what a question selects."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial

from kvshelf.engine.attention.attachment import Attachment
from kvshelf.engine.decode.generation import Sampling
from kvshelf.kernels.rates import Cost
from kvshelf.store.base import Store
from kvshelf.store.disk import DiskStore
from kvshelf_bench.measure import Spread, interleaved, ratios, timed
from kvshelf_bench.speed.first_token import put
from kvshelf_bench.speed.subject import QUESTION_TOKENS, Subject

_CODEC = "int4"
_SHARE = 16
_SELECTOR = "infllm"


@dataclass(frozen=True)
class Cold:
    """A question of `QUESTION_TOKENS` behind a document of `tokens` under int4, of which it reads 1 / 16.

    place: where the document lies; "disk, uncached" is a disk whose page cache has none of the file. all_s, part_s:
    wall seconds to the first token; ratio: the second over the first within a round. all_bytes, part_bytes: read of the
    blob's layers.
    """

    place: str
    tokens: int
    all_s: Spread
    part_s: Spread
    ratio: Spread
    all_bytes: int
    part_bytes: int


def colds(subject: Subject, stores: Mapping[str, Store], lengths: Sequence[int], rounds: int) -> Iterator[Cold]:
    """Every length from every place. Each question is to a document that this process has not in memory."""
    question = subject.tokens(QUESTION_TOKENS, seed=3)
    with ExitStack() as cleanup:
        for tokens in lengths:
            compressed = subject.engine.compress(subject.tokens(tokens, seed=2), policy=_SELECTOR)
            cache = subject.engine.encoded(compressed, _CODEC)
            for place, store, before in _places(stores):
                cache_id = put(store, cache, cleanup)
                yield _measure(subject, place, store, before, cache_id, question, tokens, rounds)


def _places(stores: Mapping[str, Store]) -> Iterator[tuple[str, Store, Callable[[], None]]]:
    """The stores, and what to do before each question."""
    for name, store in stores.items():
        yield name, store, lambda: None
        if isinstance(store, DiskStore):
            yield f"{name}, uncached", store, partial(_forget, store)


def _forget(store: DiskStore) -> None:
    """Take the files of blobs out of the page cache."""
    for path in (store.home / "blobs").glob("*.kvb"):
        file = os.open(path, os.O_RDONLY)
        try:
            os.fdatasync(file)  # pages that are still to be written stay
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(file)


def _measure(
    subject: Subject,
    place: str,
    store: Store,
    before: Callable[[], None],
    cache_id: str,
    question: list[int],
    tokens: int,
    rounds: int,
) -> Cold:
    def whole() -> int:
        with store.open_cache(cache_id) as arriving:
            reader = threading.Thread(target=arriving.read)
            reader.start()
            _first_token(subject, subject.engine.attach(arriving), question, None)
            reader.join()
            return arriving.nbytes

    def part() -> int:
        with store.open_parts(cache_id) as parts:
            document = subject.engine.attachments.of_part(parts)
            assert document is not None, "this process reads rows in place"
            with closing(document):
                _first_token(subject, document, question, tokens // _SHARE)
            return parts.read_bytes

    def cold(ask: Callable[[], int]) -> tuple[int, Cost]:
        before()
        return timed(ask, subject.device)

    runs = interleaved({"all": partial(cold, whole), "part": partial(cold, part)}, rounds)
    all_s, part_s = ([spent.wall_s for _, spent in runs[way]] for way in ("all", "part"))
    return Cold(
        place=place,
        tokens=tokens,
        all_s=Spread.of(all_s),
        part_s=Spread.of(part_s),
        ratio=ratios(part_s, all_s),
        all_bytes=runs["all"][-1][0],
        part_bytes=runs["part"][-1][0],
    )


def _first_token(subject: Subject, document: Attachment, question: list[int], budget: int | None) -> None:
    engine, selection = subject.engine, None
    if budget is not None:
        selection = engine.select(document, _SELECTOR, question_tokens=len(question), tokens=budget)
    answer = engine.start(document, question, Sampling(max_tokens=1), selection)
    engine.batch().step([answer])
    assert answer.finished
