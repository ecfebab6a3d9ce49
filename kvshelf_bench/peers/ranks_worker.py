"""A process that measures one engine, of one process or of several that share the model: `python ranks_worker.py SOURCE
DTYPE DEVICE THREADS RANKS`. It gets token ids of documents, a JSON line each, and answers with seconds and memory.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from pathlib import Path
from typing import Any

import torch
import transformers

from kvshelf.engine.engine import Engine
from kvshelf.engine.parallel.engine import ParallelEngine

QUESTIONS = 8
NEW_TOKENS = 32


def main(source: str, dtype: str, device: str, threads: int, ranks: int) -> None:
    """Measure until standard input ends."""
    torch.set_num_threads(threads)
    transformers.utils.logging.disable_progress_bar()
    engine = _loaded(source, dtype, device, ranks)
    engine.answer(engine.compress(list(range(64))), [1, 2], max_new_tokens=2)
    _say(versions={"torch": torch.__version__, "transformers": transformers.__version__})
    for line in sys.stdin:
        _say(**measured(engine, json.loads(line)["token_ids"]))


def _loaded(source: str, dtype: str, device: str, ranks: int) -> Engine:
    if ranks > 1:
        return ParallelEngine.load(source, device=device, dtype=dtype, ranks=ranks)
    return Engine.load(source, device=device, dtype=dtype)


def measured(engine: Engine, token_ids: list[int]) -> dict[str, Any]:
    """Wall seconds of a prefill under keydiff that removes half, and of answers of `NEW_TOKENS` to `QUESTIONS`
    questions behind it; and each process's bytes of memory then, without the pages of files that it has mapped."""
    began = time.perf_counter()
    cache = engine.compress(token_ids, policy="keydiff", compression_ratio=0.5)
    prefilled = time.perf_counter()
    engine.answer_all([(cache, token_ids[n : n + 16]) for n in range(QUESTIONS)], max_new_tokens=NEW_TOKENS)
    answered = time.perf_counter()
    others = engine.lead.pids if isinstance(engine, ParallelEngine) else []
    private = [_private_bytes(pid) for pid in (os.getpid(), *others)]
    return {"prefill_s": prefilled - began, "answers_s": answered - prefilled, "held_bytes": private}


def _private_bytes(pid: int) -> int:
    match = re.search(r"^RssAnon:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    return int(match[1]) * 1024 if match else 0


def _say(**answer: Any) -> None:
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]), int(sys.argv[5]))
