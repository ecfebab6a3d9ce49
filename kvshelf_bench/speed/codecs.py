"""What each codec makes of the full cache of a document: bytes, the speed of both ways, and the first token."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

import torch
import zstandard
from torch import Tensor

from kvshelf.artifact.cache import CompressedCache
from kvshelf.artifact.coder import Coder, plain_layer
from kvshelf.artifact.records import entries_of, parts_of
from kvshelf.engine.engine import Engine
from kvshelf.kernels.quantize.rows import plain
from kvshelf.kernels.rates import Cost, cost
from kvshelf.model import calibration
from kvshelf.samples.suite import make_case
from kvshelf.store.base import Store
from kvshelf.training.transform_search import find_transforms
from kvshelf_bench.measure import Spread, interleaved, ratios
from kvshelf_bench.quality.retrieval import EVALUATION_SEED, counter
from kvshelf_bench.speed.compression import plain_prefill
from kvshelf_bench.speed.first_token import first_token, settled
from kvshelf_bench.speed.subject import QUESTION_TOKENS, Subject, random_layers

GivenT = TypeVar("GivenT")
ResultT = TypeVar("ResultT")
_Seconds = Mapping[tuple[str, str, int], list[float]]

_THREADS: Final = (1, 2)
_ENCODED: Final[tuple[str, ...]] = ("int8", "int4", "lossless", "klt")
_STORED: Final[tuple[str, ...]] = ("none", "int4", "klt")
"""Codecs under which a question is asked from a shelf."""

_ZSTD_LEVEL: Final = 3
_CALIBRATED: Final = (4, 1024)
"""Documents that make the transforms of a random model, and their tokens."""


@dataclass(frozen=True)
class CodecCost:
    """One codec on `threads` threads of torch. Ratios are taken within a round. None: not measured.

    smaller: the cache in 16 bits over the blob. encode_mb_s, decode_mb_s: megabytes (1e6) of the cache in 16 bits a
    second; of_prefill: encoding over the document's prefill, on one thread only. symbols_s: numbers that klt decodes in
    a second. first_s: seconds to the first token of an answer from a disk shelf; over_int4: that over the same under
    int4; decoding: the share of it that decoding klt takes alone.
    """

    codec: str
    threads: int
    bytes_per_token: float
    smaller: float
    encode_mb_s: Spread | None
    decode_mb_s: Spread | None
    of_prefill: Spread | None
    symbols_s: Spread | None
    first_s: Spread | None
    over_int4: Spread | None
    decoding: Spread | None


@dataclass(frozen=True)
class CodecCosts:
    """The codecs on one document, which `document` describes. symbols_per_token: numbers of the cache for each token.

    Seconds on one thread are the bench's; on two they are wall time, as processor time adds up the threads.
    """

    document: str
    tokens: int
    symbols_per_token: int
    prefill_s: Spread
    rows: list[CodecCost]


@dataclass(frozen=True)
class CodecWay:
    """One codec for one cache. nbytes: of the result."""

    nbytes: int
    encode: Callable[[], object]
    decode: Callable[[], list[Any]]


def codec_costs(subject: Subject, store: Store, tokens: int, rounds: int) -> CodecCosts:
    """Every codec on the full cache of a document of at most `tokens` tokens, interleaved with its prefill.

    A random model gets transforms for klt; another one without is measured without klt. The caches stay in `store`.
    Decoding and first tokens are medians of five in a row, as in `first_tokens`; encoding runs once in its turn, as
    after a prefill.
    """
    engine = subject.engine
    _ensure_transforms(subject)
    document, ids = _document(subject, tokens)
    cache = engine.compress(ids, policy="full")
    ways = codec_ways(engine, cache)
    cache_ids = {
        codec: store.put(engine.encoded(cache, codec)).id for codec in _STORED if codec in ways or codec == "none"
    }
    shelved = {codec: partial(store.get, cache_id) for codec, cache_id in cache_ids.items()}
    seconds = _measured(subject, ways, shelved, ids, rounds)
    numbers = sum(layer.entries * (layer.key_dim + layer.value_dim) for layer in cache.reduced)
    sizes = {"none": cache.pack().nbytes} | {codec: way.nbytes for codec, way in ways.items()}
    rows = [
        _row(codec, threads, nbytes, numbers, len(ids), seconds)
        for codec, nbytes in sizes.items()
        for threads in _THREADS
    ]
    return CodecCosts(document, len(ids), numbers // len(ids), Spread.of(seconds["prefill", "", 1]), rows)


def _row(codec: str, threads: int, nbytes: int, numbers: int, tokens: int, seconds: _Seconds) -> CodecCost:
    encode_s, decode_s, first_s = (seconds.get((what, codec, threads)) for what in ("encode", "decode", "first"))
    coded_s = decode_s if codec == "klt" else None
    return CodecCost(
        codec=codec,
        threads=threads,
        bytes_per_token=nbytes / tokens,
        smaller=2 * numbers / nbytes,
        encode_mb_s=_rate(2e-6 * numbers, encode_s),
        decode_mb_s=_rate(2e-6 * numbers, decode_s),
        of_prefill=_ratio(encode_s, seconds.get(("prefill", "", threads))),
        symbols_s=_rate(numbers, coded_s),
        first_s=Spread.of(first_s) if first_s else None,
        over_int4=_ratio(first_s, seconds["first", "int4", threads]),
        decoding=_ratio(coded_s, first_s),
    )


def _rate(amount: float, seconds: list[float] | None) -> Spread | None:
    return Spread.of([amount / second for second in seconds]) if seconds else None


def _ratio(seconds: list[float] | None, others: list[float] | None) -> Spread | None:
    return ratios(seconds, others) if seconds and others else None


def codec_ways(engine: Engine, cache: CompressedCache) -> dict[str, CodecWay]:
    """The codecs of kvshelf that encode a plain cache, and Zstandard on its numbers in bfloat16."""
    ways = {}
    for codec in _ENCODED if engine.coders.writes_klt else _ENCODED[:-1]:
        coded = engine.encoded(cache, codec)
        decode = partial(_plain_rows, coded, engine.coders.own if codec == "klt" else None)
        ways[codec] = CodecWay(coded.pack().nbytes, partial(engine.encoded, cache, codec), decode)
    numbers = [rows.bfloat16().cpu().view(torch.uint8).numpy().tobytes() for rows in _plain_rows(cache, None)]
    compress = partial(_side_by_side, partial(zstandard.compress, level=_ZSTD_LEVEL), numbers)
    frames = compress()
    ways["zstd"] = CodecWay(sum(map(len, frames)), compress, partial(_side_by_side, zstandard.decompress, frames))
    return ways


def _plain_rows(cache: CompressedCache, coder: Coder | None) -> list[Tensor]:
    """Keys and values of every layer, decoded as an `Attachment` decodes: in as many threads as torch has."""

    def decoded(index: int) -> list[Tensor]:
        layer = cache.layers[index]
        entries = entries_of(plain_layer(layer, coder, index, cache.repositioned))
        assert entries is not None
        return [plain(rows) for part in parts_of(entries) for rows in part.rows]

    return [rows for layer in _side_by_side(decoded, range(len(cache.layers))) for rows in layer]


def _side_by_side(run: Callable[[GivenT], ResultT], items: Iterable[GivenT]) -> list[ResultT]:
    with ThreadPoolExecutor(torch.get_num_threads()) as threads:
        return list(threads.map(run, items))


def _ensure_transforms(subject: Subject) -> None:
    """A random model gets transforms from random documents, in its folder, where its engine looks for them."""
    engine = subject.engine
    if random_layers(engine.name) is not None and not engine.coders.has_own:
        count, tokens = _CALIBRATED
        data = find_transforms(engine, [subject.tokens(tokens, seed=20 + index) for index in range(count)])
        path = calibration.paths(engine.identity.weights, Path(subject.source)).transforms
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(data)


def _document(subject: Subject, tokens: int) -> tuple[str, list[int]]:
    """What the document is, and its token ids. Random ids would have other sizes under klt than text has."""
    engine = subject.engine
    if engine.text is None:
        return "random token ids", subject.tokens(tokens, seed=2)
    text = make_case("multikey", "prose", tokens, EVALUATION_SEED, counter(engine)).text
    return "prose with 16 facts", engine.text.encode(text)


def _measured(
    subject: Subject,
    ways: Mapping[str, CodecWay],
    shelved: Mapping[str, Callable[[], CompressedCache]],
    ids: list[int],
    rounds: int,
) -> _Seconds:
    """Seconds of each round, by what was done, codec and threads."""
    question = subject.tokens(QUESTION_TOKENS, seed=3)
    runs: dict[tuple[str, str, int], Callable[[], Cost]] = {("prefill", "", 1): partial(plain_prefill, subject, ids)}
    for threads in _THREADS:
        for codec, way in ways.items():
            runs["encode", codec, threads] = partial(cost, way.encode, subject.device)
            runs["decode", codec, threads] = partial(settled, partial(cost, way.decode, subject.device))
        for codec, fetch in shelved.items():
            runs["first", codec, threads] = partial(settled, partial(first_token, subject, fetch, question))
    costs_by_key = interleaved({key: partial(_on, key[2], run) for key, run in runs.items()}, rounds)
    return {
        key: [spent.seconds if key[2] == 1 else spent.wall_s for spent in costs] for key, costs in costs_by_key.items()
    }


def _on(threads: int, run: Callable[[], ResultT]) -> ResultT:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        return run()
    finally:
        torch.set_num_threads(before)
