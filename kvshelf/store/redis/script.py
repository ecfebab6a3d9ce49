"""A Lua file as a set of operations, each of which the server runs as one atomic step."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import resources
from typing import Any

from kvshelf.errors import StoreUnavailable
from kvshelf.store.redis.link import RedisLink
from kvshelf.store.redis.wire import Part

Value = str | bytes | int | float | None


class Script:
    """Operations on keys in the slot of `key`. Each takes some words, then names and values in turn. The first word of
    its reply names the kind of reply."""

    def __init__(self, link: RedisLink, file: str, key: str, replies: Mapping[str, int]) -> None:
        """file: in this module's folder. replies: the words that replies begin with, and how many parts follow each."""
        self._link = link
        self._source = resources.files(__package__).joinpath(file).read_text()
        self._key = key
        self._replies = replies

    def run(self, *words: str, **values: Value) -> list[Any]:
        """The reply of an operation; its first word is text. Leaves out values that are None.

        Also raises `StoreUnavailable` for a reply of an unknown form.
        """
        args: list[Part] = [*words]
        for name, value in values.items():
            if value is not None:
                args += (name, _part(value))
        match self._link.script(self._source, [self._key], args):
            case [bytes(first), *rest] if self._replies.get(first.decode(errors="replace")) == len(rest):
                return [first.decode(), *rest]
        raise StoreUnavailable(
            f"the server of {self._key} does not reply as Redis does; check the address of the store"
        )


def _part(value: str | bytes | int | float) -> str | bytes:
    if isinstance(value, bool):
        return str(int(value))
    return value if isinstance(value, str | bytes) else repr(value)
