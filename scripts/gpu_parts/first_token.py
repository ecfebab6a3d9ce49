"""A question's first token over a document of 32k tokens, by where its cache is, beside prefilling again."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from statistics import median

import torch

from kvshelf.artifact.cache import CompressedCache
from kvshelf.store.url import open_store
from kvshelf_bench.speed.compression import plain_prefill
from kvshelf_bench.speed.first_token import first_token
from kvshelf_bench.speed.subject import QUESTION_TOKENS, Subject
from scripts.gpu_parts.models import llama_8b
from scripts.gpu_parts.part import Part, mapped

_TOKENS = 32768
_ROUNDS = 3


def measure(part: Part) -> None:
    subject = llama_8b(part)
    tokens = 256 if part.toy else _TOKENS
    document, question = subject.tokens(tokens, seed=2), subject.tokens(QUESTION_TOKENS, seed=3)
    plain_prefill(subject, document[:64])
    again_s = median(plain_prefill(subject, document + question).seconds for _ in range(_ROUNDS))
    part.row(f"prefilling {tokens} tokens and the question again", again_s, "s")
    plain = subject.engine.compress(document, policy="full")
    host_rate = _copy_to_device(part)
    if host_rate is not None:
        part.row("copy from pinned host memory", host_rate / 1e9, "GB/s")
    with tempfile.TemporaryDirectory(prefix="kvshelf-gpu-") as folder, open_store(f"disk://{folder}/shelf") as store:
        for codec in ("int4", "none"):
            with part.trying(f"codec {codec}"):
                cache = plain if codec == "none" else subject.engine.encoded(plain, codec)
                size = f"{cache.nbytes / 1e9:.2f} GB"
                _told(part, subject, f"memory, {codec}", lambda c=cache: c, question, again_s, note=size)
                # A new cache each time: an attachment would keep what has been copied.
                host = mapped(cache.layers, lambda tensor: _pinned(tensor, part))
                if host_rate is not None:
                    size += f", whose copy alone takes {cache.nbytes / host_rate * 1e3:.0f} ms"
                fetch = lambda c=cache, layers=host: replace(c, layers=layers)  # noqa: E731
                _told(part, subject, f"pinned host memory, {codec}", fetch, question, again_s, 50, size)
                del host, fetch
                started = time.perf_counter()
                found = store.put(cache).id
                written_s = time.perf_counter() - started
                note = f"{size}; written and verified in {written_s:.1f} s; the page cache has it"
                goal = 30 if codec == "int4" else None
                _told(part, subject, f"file, {codec}", lambda i=found: store.get(i), question, again_s, goal, note)
    part.row("file, klt", None, note="at two layers: see the part klt")


def _told(
    part: Part,
    subject: Subject,
    name: str,
    fetch: Callable[[], CompressedCache],
    question: list[int],
    again_s: float,
    goal: float | None = None,
    note: str = "",
) -> None:
    part.require_s(3)
    first_token(subject, fetch, question)
    seconds = median(first_token(subject, fetch, question).seconds for _ in range(_ROUNDS))
    part.row(f"from {name}", again_s / seconds, "times", at_least=goal, note=f"{seconds * 1e3:.1f} ms; {note}")


def _pinned(tensor: torch.Tensor, part: Part) -> torch.Tensor:
    held = tensor.cpu()
    return held.pin_memory() if part.device.type == "cuda" else held


def _copy_to_device(part: Part) -> float | None:
    """Bytes a second; None where there is nothing to copy to."""
    if part.device.type != "cuda":
        return None
    held = torch.empty(1 << 30, dtype=torch.uint8).pin_memory()
    return held.nbytes / part.seconds(lambda: held.to(part.device, non_blocking=True)).median
