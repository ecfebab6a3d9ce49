"""Which rows a batch's input has: line and custom id of each, from standard input to standard output, as JSON lines.

`kvshelf.service.jobs.batch_files` starts it for a batch that ended before its rows did. A line may have 64 MiB, and who
parses it holds the interpreter: in a thread of the front end that would silence all tenants.
"""

from __future__ import annotations

import json
import sys

from kvshelf.corpus.input.extract_child import bound
from kvshelf.corpus.input.rows import parse_jsonl

if __name__ == "__main__":
    endpoint, memory_bytes, cpu_s = sys.argv[1:]
    bound(int(memory_bytes), int(cpu_s))
    for row in parse_jsonl(sys.stdin.buffer, "", {}, endpoint=endpoint):  # type: ignore[arg-type]
        print(json.dumps([row.line, row.custom_id]))
