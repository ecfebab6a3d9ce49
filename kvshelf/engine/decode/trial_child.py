"""Compiles grammars, each with a limit of processor time, from standard input to standard output; see `trial`.

It imports llguidance alone, and lives until a grammar goes beyond the limits or its input ends. Each text of the input
has its length before it; the first is the tokenizer. The answer to each grammar is a line: empty, or the error as JSON.
"""

from __future__ import annotations

import json
import math
import os
import resource
import struct
import sys
from typing import BinaryIO, Final

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

LENGTH: Final = struct.Struct("<Q")


def texts(source: BinaryIO) -> list[str]:
    """The next text, or none at the end."""
    head = source.read(LENGTH.size)
    return [] if len(head) < LENGTH.size else [source.read(*LENGTH.unpack(head)).decode()]


def allow(seconds: int) -> None:
    """So many seconds of processor time from now on."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    until = math.ceil(used.ru_utime + used.ru_stime) + seconds
    resource.setrlimit(resource.RLIMIT_CPU, (until, resource.RLIM_INFINITY))


if __name__ == "__main__":
    seconds, memory_bytes, states = map(int, sys.argv[1:])
    os.nice(10)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    tokenizer = LLTokenizer(texts(sys.stdin.buffer)[0])
    limits = LLParserLimits(max_lexer_states=states)
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    while grammar := texts(sys.stdin.buffer):
        allow(seconds)
        matcher = LLMatcher(tokenizer, grammar[0], log_level=0, limits=limits)
        print(json.dumps(matcher.get_error()) if matcher.is_error() else "", flush=True)
        del matcher
