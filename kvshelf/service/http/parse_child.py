"""Parses and validates one large request body, from standard input to standard output, in an expendable process."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any, Final

import msgpack

from kvshelf.api.strict import RequestBody, parse_request
from kvshelf.corpus.input.extract_child import bound
from kvshelf.errors import InvalidRequest

_TOO_MUCH: Final = {"refused": ["to parse the body takes too much memory; send a smaller one", None]}


def parsed(model: type[RequestBody], body: bytes) -> dict[str, Any]:
    """The output for a body of this type, as msgpack: the fields that the body has, or `refused`: message and param."""
    try:
        request = parse_request(model, body)
    except InvalidRequest as error:
        return {"refused": [error.message, error.param]}
    return {"fields": request.model_dump(exclude_unset=True)}


if __name__ == "__main__":
    module, name, memory_bytes, cpu_s = sys.argv[1:]
    model = getattr(import_module(module), name)
    bound(int(memory_bytes), int(cpu_s))
    try:
        output = msgpack.packb(parsed(model, sys.stdin.buffer.read()))
    except OverflowError:
        output = msgpack.packb({"refused": ["an integer has more than 64 bits", None]})
    except BaseException:  # pydantic panics with one of these where Python raises MemoryError
        output = msgpack.packb(_TOO_MUCH)
    sys.stdout.buffer.write(output)
