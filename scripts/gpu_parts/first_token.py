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
from scripts.gpu_parts.part import Part

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
                _report(part, subject, f"memory, {codec}", lambda c=cache: c, question, again_s, note=size)
                if host_rate is not None:
                    size += f", whose copy alone takes {cache.nbytes / host_rate * 1e3:.0f} ms"
                    back_s = part.seconds(lambda c=cache: c.to("cpu")).median
                    part.row(f"copy to the host through pinned buffers, {codec}", cache.nbytes / back_s / 1e9, "GB/s")
                for way, fetch in _from_host(cache.to("cpu"), part.device).items():
                    goal = None if way else 50
                    _report(part, subject, f"host memory{way}, {codec}", fetch, question, again_s, goal, size)
                del fetch
                started = time.perf_counter()
                cache_id = store.put(cache).id
                written_s = time.perf_counter() - started
                note = f"{size}; written and verified in {written_s:.1f} s; the page cache has it"
                goal = 30 if codec == "int4" else None
                _report(part, subject, f"file, {codec}", lambda i=cache_id: store.get(i), question, again_s, goal, note)
    part.row("file, klt", None, note="at two layers: see the part klt")


def _report(
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


def _from_host(cache: CompressedCache, device: torch.device) -> dict[str, Callable[[], CompressedCache]]:
    """A new cache each time, as an attachment would keep what has been copied: attached layer by layer through pinned
    memory while earlier layers attend, and copied in one stream from where it is, before the question."""
    return {
        "": lambda: replace(cache),
        " in one stream": lambda: replace(cache, layers=tuple(layer.to(device) for layer in cache.layers)),
    }


def _copy_to_device(part: Part) -> float | None:
    """Bytes a second; None where there is nothing to copy to."""
    if part.device.type != "cuda":
        return None
    pinned = torch.empty(1 << 30, dtype=torch.uint8).pin_memory()
    return pinned.nbytes / part.seconds(lambda: pinned.to(part.device, non_blocking=True)).median
