"""Bodies that do harm, by name: each a function of its size in bytes. One table for the tests of the parser alone and
for those of a whole service."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Final

Body = Callable[[int], bytes]


def filled(before: bytes, piece: bytes, after: bytes, size: int) -> bytes:
    return before + piece * ((size - len(before) - len(after)) // len(piece)) + after


def _in(*around: bytes) -> Callable[[bytes, bytes, bytes], Body]:
    """Makes bodies with a filling at one place. around: what stands before and after it."""
    before, after = around
    return lambda opening, piece, closing: lambda size: filled(before + opening, piece, closing + after, size)


def _inside(before: bytes, after: bytes) -> Callable[[bytes, bytes, bytes], Body]:
    """As `_in`, where the place is inside a text: quotes and backslashes are escaped."""

    def escaped(opening: bytes, piece: bytes, closing: bytes) -> Body:
        said = [json.dumps(part.decode())[1:-1].encode() for part in (opening, piece, closing)]
        return lambda size: filled(before + said[0], said[1], said[2] + after, size)

    return escaped


_CUT: Final[dict[str, Body]] = {
    "a cut text of escaped quotes": lambda size: filled(b'{"document":"', b'\\"', b"", size),
    "a cut text of quotes and backslashes": lambda size: filled(b'{"document":"', b'\\"\\\\', b"", size),
    "quotes": lambda size: filled(b"{", b'"', b"}", size),
    "escaped quotes outside": lambda size: filled(b"{", b'\\"', b"", size),
    "keys without an end": lambda size: filled(b'{"a":', b'"\\', b"", size),
    "a key": lambda size: filled(b'{"', b"k", b'":1}', size),
    "a long number": lambda size: filled(b'{"ttl_s":', b"9", b"}", size),
    "long numbers": lambda size: filled(b'{"policy_params":{"a":[', b"9" * 4200 + b",", b"1]}}", size),
    "exponents": lambda size: filled(b'{"policy_params":{"a":[', b"1e-99999999999999999999,", b"1e999999999]}}", size),
    "minus signs": lambda size: filled(b'{"ttl_s":', b"-", b"1}", size),
    "a codec": lambda size: filled(b'{"codec":"int4:', b"a=1,", b'!"}', size),
    "a role": lambda size: filled(b'{"messages":[{"role":"', b"u", b'","content":"x"}]}', size),
}

_CACHE: Final = b'{"cache_id":"kvs_0","model":"kvshelf-tiny","max_tokens":1,'
_CHAT: Final = (
    _CACHE + b'"messages":[{"role":"assistant","content":null,"tool_calls":[{"id":"a","type":"function","function":'
    b'{"name":"f","arguments":"',
    b'"}}]},{"role":"tool","tool_call_id":"a","content":"x"}],"tools":[{"type":"function","function":{"name":"f"}}]}',
)
_RESPONSE: Final = (
    b'{"cache_id":"kvs_0","input":[{"type":"function_call","call_id":"a","name":"f","arguments":"',
    b'"},{"type":"function_call_output","call_id":"a","output":"x"}],"tools":[{"type":"function","name":"f"}]}',
)
_MESSAGES: Final = (
    _CACHE + b'"messages":[{"role":"user","content":"x"},{"role":"assistant","content":[{"type":"tool_use","id":"a",'
    b'"name":"f","input":',
    b'}]},{"role":"user","content":[{"type":"tool_result","tool_use_id":"a","content":"x"}]}],'
    b'"tools":[{"name":"f","input_schema":{"type":"object"}}]}',
)
_FILLINGS: Final[dict[str, tuple[bytes, bytes, bytes]]] = {
    "zeros": (b'{"a":[', b"0,", b"0]}"),
    "fractions": (b'{"a":[', b"0.12345678901234567890,", b"0]}"),
    "lists": (b'{"a":[', b"[],", b"[]]}"),
    "a text": (b'{"a":"', b"word ", b'"}'),
    "long integers": (b'{"a":[', b"9" * 1000 + b",", b"0]}"),
    "depth": (b'{"a":', b"[", b"}"),
}


def _calls() -> dict[str, Body]:
    """JSON in the arguments of calls, and in what Anthropic's API has in their place."""
    made: dict[str, Body] = {}
    for name, filling in _FILLINGS.items():
        made[f"chat: arguments of {name}"] = _inside(*_CHAT)(*filling)
        made[f"responses: arguments of {name}"] = _inside(*_RESPONSE)(*filling)
        made[f"messages: an input of {name}"] = _in(*_MESSAGES)(*filling)
    for name in ("zeros", "a text"):
        made[f"chat: a schema of {name}"] = _in(
            _CACHE + b'"messages":[{"role":"user","content":"x"}],"tools":[{"type":"function","function":{"name":"f",'
            b'"parameters":',
            b"}}]}",
        )(*_FILLINGS[name])
        made[f"responses: a format of {name}"] = _in(
            b'{"cache_id":"kvs_0","input":"x","text":{"format":{"type":"json_schema","name":"f","schema":', b"}}}"
        )(*_FILLINGS[name])
        made[f"messages: a schema of {name}"] = _in(
            _CACHE + b'"messages":[{"role":"user","content":"x"}],"tools":[{"name":"f","input_schema":', b"}]}"
        )(b'{"type":"object",' + _FILLINGS[name][0][1:], *_FILLINGS[name][1:])
    made["chat: many calls"] = lambda size: filled(
        _CACHE + b'"messages":[{"role":"assistant","tool_calls":[',
        b'{"id":"a","type":"function","function":{"name":"f","arguments":"{}"}},',
        b'{"id":"a","type":"function","function":{"name":"f","arguments":"{}"}}]}]}',
        size,
    )
    made["chat: texts"] = _in(_CACHE + b'"messages":[{"role":"user","content":"', b'"}]}')(b"", b"word ", b"")
    made["responses: texts"] = _in(b'{"cache_id":"kvs_0","input":"', b'"}')("😀".encode(), b"word ", b"")
    made["messages: texts"] = _in(_CACHE + b'"messages":[{"role":"user","content":"', b'"}]}')(
        "😀".encode(), b"word ", b""
    )
    made["messages: a beginning"] = _in(
        b'{"model":"kvshelf-tiny","max_tokens":1,"messages":[{"role":"user","content":[{"type":"text","text":"',
        b'","cache_control":{"type":"ephemeral"}},{"type":"text","text":"x"}]}]}',
    )("😀".encode(), b"word ", b"")
    return made


_PUT: Final = (
    b'{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"put","arguments":{',
    b"}}}",
)
MCP: Final[dict[str, Body]] = {
    "a text": _in(*_PUT)(b'"text":"', b"word ", b'"'),
    "a wide text": _in(*_PUT)('"text":"😀'.encode(), b"word ", b'"'),
    "escapes": _in(*_PUT)(b'"text":"', b"\\u00e9", b'"'),
    "labels as a text of zeros": _in(*_PUT)(b'"text":"x","labels":"[', b"0,", b'0]"'),
    "a policy as a text of zeros": _in(*_PUT)(b'"text":"x","policy":"[', b"0,", b'0]"'),
    "labels": _in(*_PUT)(b'"text":"x","labels":{"a":[', b"0,", b"0]}"),
    "a key": _in(*_PUT)(b'"', b"k", b'":1'),
    "zeros": lambda size: filled(b'{"jsonrpc":"2.0","id":1,"method":"x","params":{"a":[', b"0,", b"0]}}", size),
    "lists": lambda size: filled(b'{"jsonrpc":"2.0","id":1,"method":"x","params":{"a":[', b"[],", b"[]]}}", size),
    "an id": lambda size: filled(b'{"jsonrpc":"2.0","method":"tools/list","id":"', b"1", b'"}', size),
    "messages": lambda size: filled(b"[", b'{"jsonrpc":"2.0","id":1,"method":"ping"},', b"1]", size),
    "a cut text of escaped quotes": _in(*_PUT)(b'"text":"', b'\\"', b""),
    "no JSON": lambda size: filled(b"", b"\0", b"", size),
}
"""Messages for `kvshelf mcp --http`."""

ROUTES: Final = {
    "chat": "/v1/chat/completions",
    "responses": "/v1/responses",
    "messages": "/v1/messages",
}

CREATIONS: Final = _CUT
CALLS: Final = _calls()


def route_of(name: str) -> str:
    """The route that a body is for: that of its name, or the creation of a cache."""
    return ROUTES.get(name.partition(":")[0], "/v1/caches")
