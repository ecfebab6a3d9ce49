"""Codec klt: how fast a cache is encoded and decoded, and whether every reader gives the same numbers.

Two layers of the 8B shape: each layer has its own transforms, so a second tells what a thirty-second would.
"""

from __future__ import annotations

import os
import tempfile
from dataclasses import replace
from statistics import median
from unittest.mock import patch

import torch
from torch import Tensor

from kvshelf.artifact.cache import CompressedCache
from kvshelf.artifact.coder import Coder, plain_layers
from kvshelf.artifact.records import Kept, entries_of
from kvshelf.artifact.transforms import Transforms
from kvshelf.kernels import ans
from kvshelf.kernels.compiling import CannotCompile, compile_all, levels, library_path
from kvshelf.kernels.dispatch import cpu_form
from kvshelf.kernels.rates import cost
from kvshelf.store.url import open_store
from kvshelf.training.transform_search import find_transforms
from kvshelf_bench.speed.compression import plain_prefill
from kvshelf_bench.speed.first_token import first_token
from kvshelf_bench.speed.subject import QUESTION_TOKENS
from scripts.gpu_parts.models import llama_8b
from scripts.gpu_parts.part import Part

_LAYERS, _OF_LAYERS = 2, 32
_WANTED = 5e10
_ROUNDS = 3


def measure(part: Part) -> None:
    _compile(part)
    if not part.toy:
        torch.set_num_threads(os.cpu_count() or 1)
    subject = llama_8b(part, _LAYERS)
    engine = subject.engine
    tokens, learned = (256, 96) if part.toy else (8192, 1024)
    learnt = find_transforms(engine, [subject.tokens(learned, seed=20 + i) for i in range(2)])
    engine.coders.learn(learnt)
    coder = engine.coders.with_transforms(Transforms.from_bytes(learnt).digest)
    document = subject.tokens(tokens, seed=2)
    plain = engine.compress(document, policy="full")
    encoded: list[CompressedCache] = []
    spent = cost(lambda: encoded.append(plain.encoded("klt", coder)))
    cache = encoded[0]
    numbers = sum(layer.entries * (layer.key_dim + layer.value_dim) for layer in plain.reduced)
    note = (
        f"{numbers / 1e6:.0f} million of {len(plain.layers)} layers, to 1/{2 * numbers / cache.nbytes:.1f} of 16 bits"
    )
    part.row("encoded, by the CPU", numbers / spent.wall_s, "symbols/s", note=note)
    with part.trying("decoded by the CPU"):
        rate = _decoded(part, cache, coder, numbers)
        whole_s = numbers / len(plain.layers) * _OF_LAYERS * (32768 / tokens) / rate
        part.row("32k tokens of 32 layers, by that rate", whole_s, "s", note="estimated; decoding alone")
    with part.trying("decoded on the card"):
        _decoded_on_the_card(part, cache, coder, numbers)
    with part.trying("readers agree"):
        _agree(part, cache, coder)
    with part.trying("what is attached"):
        _attached(part, subject.engine.attach(replace(cache)), cache, coder)
    with part.trying("first token"), tempfile.TemporaryDirectory(prefix="kvshelf-gpu-") as folder:
        question = subject.tokens(QUESTION_TOKENS, seed=3)
        plain_prefill(subject, document + question)
        again_s = median(plain_prefill(subject, document + question).wall_s for _ in range(_ROUNDS))
        with open_store(f"disk://{folder}/shelf") as store:
            stored = store.put(cache).id
            first_token(subject, lambda: store.get(stored), question)
            first_s = median(first_token(subject, lambda: store.get(stored), question).wall_s for _ in range(_ROUNDS))
        note = f"{first_s * 1e3:.1f} ms beside {again_s * 1e3:.1f}, of {len(plain.layers)} layers and {tokens} tokens"
        part.row("first token from a file, klt, over prefilling again", again_s / first_s, "times", note=note)


def _compile(part: Part) -> None:
    """The C reader, where this checkout has none yet: a card's machine has never installed kvshelf."""
    if all(library_path(level).exists() for level in levels().values()):
        return
    try:
        compile_all()
    except CannotCompile as reason:
        part.row("C reader compiled", None, note=str(reason).splitlines()[0])


def _decoded(part: Part, cache: CompressedCache, coder: Coder, numbers: int) -> float:
    """Symbols a second of the CPU's reader, with all of torch's threads at one layer after the other."""
    runs = [cost(lambda: cache.decoded(coder)).wall_s for _ in range(_ROUNDS + 1)][1:]
    rate = numbers / median(runs)
    threads = torch.get_num_threads()
    part.row("decoded by the CPU", rate, "symbols/s", note=f"{threads} threads, {rate / threads:.2e} a thread")
    return rate


def _decoded_on_the_card(part: Part, cache: CompressedCache, coder: Coder, numbers: int) -> None:
    """Symbols a second of all layers together: streams, products and rotations, from the host's memory to plain rows;
    and of the kernels alone."""
    if not ans.side_by_side(part.device):
        part.row("decoded on the card", None, "symbols/s", at_least=_WANTED, note="there is no card, or no Triton")
        return
    layers = dict(enumerate(cache.layers))

    def run() -> object:
        return plain_layers(layers, coder, cache.repositioned, part.device)

    seconds = part.seconds(run, _ROUNDS, warm_up=2).median
    device_ms = part.device_ms(run)
    note = f"{seconds * 1e3:.1f} ms with all that the host does"
    if device_ms is not None:
        note += f"; the card works {device_ms:.1f} ms, {numbers / device_ms * 1e3:.2e} symbols/s"
    part.row("decoded on the card", numbers / seconds, "symbols/s", at_least=_WANTED, note=note)


def _agree(part: Part, cache: CompressedCache, coder: Coder) -> None:
    """The reader in C and the library's give the same values, bit for bit: keys are rotated behind it, in either form's
    own way."""
    numbers = []
    for form in ("", "eager"):
        with patch.dict(os.environ, KVSHELF_KERNELS=form):
            numbers.append([_rows(layer)[1] for layer in cache.decoded(coder).layers])
    part.row("numbers of the C reader that differ from the library's", _differing(*numbers), at_most=0, note=cpu_form())


def _attached(part: Part, document: object, cache: CompressedCache, coder: Coder) -> None:
    """What a question reads on the card is what the C reader gives, but for the rounding of products: their codes are
    compared by the part `oracles`."""
    further = 0
    for index, layer in enumerate(cache.decoded(coder).layers):
        (prefix,) = document.prefixes(index)  # type: ignore[attr-defined]
        for rows, expected in zip((prefix.keys, prefix.values), _rows(layer), strict=True):
            allowed = expected.float().abs() / 64 + 1e-4 * expected.float().abs().max()  # two units of bfloat16
            further += int(((rows.cpu().float() - expected.float()).abs() > allowed).sum())
    part.row("numbers on the device further from the C reader's than rounding", further, at_most=0)


def _rows(layer: object) -> list[Tensor]:
    entries = entries_of(layer)  # type: ignore[arg-type]
    assert isinstance(entries, Kept)
    assert isinstance(entries.keys, Tensor)
    assert isinstance(entries.values, Tensor)
    return [entries.keys, entries.values]


def _differing(decoded: list[Tensor], expected: list[Tensor]) -> int:
    return sum(int((one != other).sum()) for one, other in zip(decoded, expected, strict=True))
