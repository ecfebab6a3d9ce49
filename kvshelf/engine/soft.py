"""Replacements of tokens' embeddings in a pass of the model: learned tokens, with low-rank additions for their rows
alone (LookaheadKV, arXiv 2603.10899), and images."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from torch import Tensor, nn

from kvshelf.engine.progress import Checkpoint
from kvshelf.kernels.staging import carried
from kvshelf.model.images import ImageEncoder, PlacedImage, Scaled

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ALPHA: Final = 32.0
"""An addition of rank r is multiplied by this / r."""

_PAUSE_S: Final = 0.002
"""Between two checkpoints while an image is scaled."""

_BESIDE: Final = ThreadPoolExecutor(1, thread_name_prefix="images")
"""One thread for all documents, so that one image is scaled at a time, also where its caller has left."""


class Soft(NamedTuple):
    """Learned tokens, and which tokens of a pass they are. tensors: by their names in a gate file."""

    tensors: Mapping[str, Tensor]
    rows: slice


class Placed(NamedTuple):
    """States in the place of embeddings. rows: the tokens of a pass, `[n]`; states: theirs, `[n, width]`."""

    rows: Tensor
    states: Tensor


def placed_images(
    encoder: ImageEncoder | None, images: Sequence[PlacedImage], token_ids: Sequence[int], checkpoint: Checkpoint
) -> tuple[Placed | None, float]:
    """The states of the images of a document, None where it has none, and the seconds that they took. token_ids: of the
    document.

    A file is decoded a second time here: while the document waited only the file was in memory, which is a tenth of its
    pixels. Decoding and scaling run beside this thread; `checkpoint` is called meanwhile and behind each image, and may
    raise. Then the image is still scaled to its end, before another of any document.
    """
    if not images or encoder is None:
        return None, 0.0

    def scale(data: bytes, ids: Sequence[int], param: str) -> tuple[Scaled, float]:
        started = time.perf_counter()
        return encoder.scaled(data, ids, param), time.perf_counter() - started

    states, rows, seconds = [], list[int](), 0.0
    for number, image in enumerate(images):
        param, ids = f"images[{number}]", token_ids[image.first : image.end]
        scaling = _BESIDE.submit(scale, image.data, ids, param)
        try:
            while wait([scaling], _PAUSE_S).not_done:
                checkpoint()
        finally:
            scaling.cancel()  # a document whose caller has left does not hold up the model
        scaled, scaled_s = scaling.result()
        started = time.perf_counter()
        states.append(encoder.states(scaled, param))
        rows += [at for at, token in enumerate(ids, image.first) if token == encoder.token_id]
        seconds += scaled_s + time.perf_counter() - started
        checkpoint()
    return Placed(torch.tensor(rows), torch.cat(states)), seconds


def decoder_of(model: PreTrainedModel) -> nn.Module:
    """The model without its head. For Llama 4's text model transformers takes the whole for its base."""
    base: nn.Module = model.base_model
    return base if base is not model else model.get_submodule("model")


Change = Callable[[Any, Tensor], Tensor]
"""The output of a module in place of its own, from its arguments and its own output."""


@contextmanager
def _changed(model: PreTrainedModel, changes: Iterable[tuple[nn.Module, Change]]) -> Iterator[None]:
    """Inside the block these modules have other outputs in the pass that runs, but not in passes inside it: between two
    layers of a prefill the questions of others are answered, by the same modules. So it counts how deep the calls of
    the decoder are nested."""
    decoder, depth = decoder_of(model), 0

    def count(step: int) -> None:
        nonlocal depth
        depth += step

    def hook(change: Change, _module: nn.Module, arguments: Any, out: Tensor) -> Tensor:
        return change(arguments, out) if depth == 1 else out

    handles = [
        decoder.register_forward_pre_hook(lambda *_: count(1)),
        decoder.register_forward_hook(lambda *_: count(-1), always_call=True),
        *(module.register_forward_hook(partial(hook, change)) for module, change in changes),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def placed_states(model: PreTrainedModel, placed: Placed) -> Iterator[None]:
    """Inside the block the model's modules run with these states in the place of the embeddings at `placed.rows`;
    passes that run inside one of them are as without."""

    def put(_arguments: Any, out: Tensor) -> Tensor:
        return out.index_copy(1, placed.rows.to(out.device), placed.states.to(out).expand(len(out), -1, -1))

    with _changed(model, [(model.get_input_embeddings(), put)]):
        yield


@contextmanager
def soft_tokens(model: PreTrainedModel, soft: Soft) -> Iterator[None]:
    """Inside the block the model's modules run with learned tokens in the place of those at `soft.rows`; the rows of
    others, and passes that run inside one of them, are as without. The model is as before when the block ends."""
    embeddings = model.get_input_embeddings()
    tensors, device = dict(soft.tensors), embeddings.weight.device
    if device.type == "cuda":  # together, and queued
        tensors = dict(zip(tensors, carried(list(tensors.values()), device, {}), strict=True))

    def put(_arguments: Any, out: Tensor) -> Tensor:
        return _replaced(out, soft.rows, tensors["soft"].to(out).expand(len(out), -1, -1))

    def add(down: Tensor, up: Tensor, arguments: Any, out: Tensor) -> Tensor:
        inputs = arguments[0][:, soft.rows]
        added = inputs @ down.to(inputs).T @ up.to(inputs).T * (ALPHA / len(down))
        return _replaced(out, soft.rows, out[:, soft.rows] + added)

    changes: list[tuple[nn.Module, Change]] = [(embeddings, put)]
    for name, down in tensors.items():
        if name.endswith(".a"):
            index, _, module = name.removesuffix(".a").partition(".")
            change = partial(add, down, tensors[name.removesuffix("a") + "b"])
            changes.append((model.base_model.layers[int(index)].get_submodule(module), change))
    with _changed(model, changes):
        yield


def _replaced(states: Tensor, rows: slice, others: Tensor) -> Tensor:
    """`states` `[B, T, n]` with others at `rows`. Copied: gradients go through them."""
    return torch.cat([states[:, : rows.start], others, states[:, rows.stop :]], dim=1)
