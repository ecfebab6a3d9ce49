"""A conversation about a stored document, which its client sends whole at every turn: with and without `store`."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import httpx
from rich.table import Table

from kvshelf.client import Client


@dataclass(frozen=True)
class Turned:
    """Turn `number`, counted from 1. read: tokens from the shelf. prefilled: tokens that went through the model before
    the first one of the answer. first_s: wall seconds to it. answered: tokens of the answer."""

    number: int
    read: int
    prefilled: int
    first_s: float
    answered: int


def conversation(
    client: Client, base_url: str, document: str, questions: list[str], *, store: bool, progress: Callable[[], None]
) -> tuple[list[Turned], list[str]]:
    """Each turn, and its answer's text. The document is compressed under policy full, once."""
    cache = client.caches.create(document=document, policy="full", ttl_s=3600)
    messages: list[dict[str, str]] = []
    turns = []
    with httpx.Client(base_url=base_url, timeout=120) as http:
        for number, question in enumerate(questions, 1):
            messages.append({"role": "user", "content": question})
            turn, text = _turn(http, cache.id, messages, number, store=store)
            messages.append({"role": "assistant", "content": text})
            turns.append(turn)
            progress()
    return turns, [message["content"] for message in messages[1::2]]


def _turn(
    http: httpx.Client, cache_id: str, messages: list[dict[str, str]], number: int, *, store: bool
) -> tuple[Turned, str]:
    body = {
        "cache_id": cache_id,
        "messages": messages,
        "max_tokens": 24,
        "stream": True,
        "stream_options": {"include_usage": True},
        "store": store,
    }
    text, first_s = "", 0.0
    usage: dict[str, Any] = {}
    started = time.perf_counter()
    with http.stream("POST", "/v1/chat/completions", json=body) as response:
        response.raise_for_status()
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            for choice in event["choices"]:
                piece = choice["delta"].get("content") or ""
                first_s = first_s or (time.perf_counter() - started if piece else 0.0)
                text += piece
            usage = event.get("usage") or usage
    read = usage["prompt_tokens_details"]["cached_tokens"]
    return Turned(number, read, usage["prompt_tokens"] - read, first_s, usage["completion_tokens"]), text


def turns_table(stored: Sequence[Turned], resent: Sequence[Turned], same: int) -> Table:
    table = Table("turn", "from the shelf", "prefilled", "first token", "without store: prefilled", "first token")
    table.title = f"a conversation that is sent whole at every turn; {same} of {len(stored)} answers the same"
    for row, plain in zip(stored, resent, strict=True):
        table.add_row(
            f"{row.number}", f"{row.read}", f"{row.prefilled}", f"{1000 * row.first_s:.0f} ms",
            f"{plain.prefilled}", f"{1000 * plain.first_s:.0f} ms",
        )  # fmt: skip
    return table
