"""kvpress on the same rows, by its own pipeline in a Python of its own."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

from kvshelf.errors import InvalidRequest, WorkerCrashed
from kvshelf.model.loading import chosen_device, readable
from kvshelf_bench.engines import EngineOptions
from kvshelf_bench.quality.dataset.documents import Document
from kvshelf_bench.quality.dataset.measuring import Asking, score_of
from kvshelf_bench.quality.grid import BASELINE, Row
from kvshelf_bench.quality.outcome import Outcome

PRESSES: Final = {
    BASELINE: "",
    "expected_attention": "ExpectedAttentionPress",
    "keydiff": "KeyDiffPress",
    "knorm": "KnormPress",
    "kvzip": "KVzipPress",
    "lagkv": "LagKVPress",
    "pyramidkv": "PyramidKVPress",
    "snapkv": "SnapKVPress",
    "streaming_llm": "StreamingLLMPress",
    "tova": "TOVAPress",
}
"""The press of each policy that both have; each with the defaults of its own package."""

_ALONE: Final = "-I"
"""Without the paths of our Python, and without the folder of the script, whose modules would hide others."""

_CHILD: Final = Path(__file__).with_name("kvpress_child.py")


@dataclass(frozen=True)
class Kvpress:
    """A Python that has kvpress, and what its runs share with ours."""

    python: Path
    options: EngineOptions
    asking: Asking

    @classmethod
    def of(cls, baseline: str, python: Path | None, options: EngineOptions, asking: Asking) -> Kvpress | None:
        """None where no baseline is asked for. Raises `InvalidRequest` where kvpress cannot be run."""
        if not baseline and python is None:
            return None
        if baseline != "kvpress":
            raise InvalidRequest(f"--baseline is {baseline!r}; there is kvpress", param="baseline")
        if python is None:
            raise InvalidRequest("--baseline kvpress needs --kvpress-python, a Python that has it", param="baseline")
        if asking.turns:
            raise InvalidRequest("kvpress keeps no turns; leave --turns or --baseline out", param="baseline")
        tried = _started([str(python), _ALONE, "-c", "import kvpress"])
        if tried.returncode:
            last = (tried.stderr.strip().splitlines() or ["it ended without a word"])[-1]
            raise InvalidRequest(f"--kvpress-python {python} cannot import kvpress: {last}", param="kvpress_python")
        return cls(python, options, asking)

    def taken(self, rows: Sequence[Row]) -> list[Row]:
        """The rows that kvpress has: presses by a share removed, with their defaults, and no codec."""
        return [
            row
            for row in rows
            if row.variant.policy in PRESSES
            and not row.variant.params
            and row.codec == "none"
            and row.select is None
            and row.budget is None
        ]

    def run(
        self, documents: Sequence[Document], rows: Sequence[Row], progress: Callable[[], None]
    ) -> dict[Row, list[Outcome]]:
        """The outcomes of the rows that kvpress has, in the order of `documents`. Raises `WorkerCrashed`."""
        taken = self.taken(rows)
        by_id = {document.id: document for document in documents}
        found: dict[tuple[int, str], Outcome] = {}
        command = [str(self.python), _ALONE, str(_CHILD)]
        child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert child.stdin is not None
        assert child.stdout is not None
        with child:
            child.stdin.write(json.dumps(self._task(documents, taken)))
            child.stdin.close()
            for line in child.stdout:
                told = json.loads(line)
                found[told["row"], told["document"]] = _outcome(by_id[told["document"]], told)
                progress()
        if child.returncode:
            raise WorkerCrashed(f"kvpress ended with exit code {child.returncode}; its own message stands above")
        return {row: [found[place, document.id] for document in documents] for place, row in enumerate(taken)}

    def _task(self, documents: Sequence[Document], rows: Sequence[Row]) -> Mapping[str, Any]:
        presses = [
            {"row": place, "class": PRESSES[row.variant.policy], "ratio": row.removed} for place, row in enumerate(rows)
        ]
        asked = [
            {
                "id": document.id,
                "context": document.context,
                "questions": [
                    {"text": one.text, "prefix": one.prefix, "max_new_tokens": self.asking.tokens(one)}
                    for one in document.questions
                ],
            }
            for document in documents
        ]
        device = chosen_device(self.options.device)
        dtype = self.options.dtype
        if dtype == "auto":
            dtype = "float32" if device.type == "cpu" else str(torch.bfloat16).removeprefix("torch.")
        return {
            "model": readable(self.options.model),
            "device": str(device),
            "dtype": dtype,
            "threads": self.options.threads,
            "known": self.asking.known,
            "documents": asked,
            "presses": presses,
        }


def _outcome(document: Document, told: Mapping[str, Any]) -> Outcome:
    if "refused" in told:
        return Outcome("", refused=told["refused"])
    answers = tuple(one["answer"] for one in told["answers"])
    scores = tuple(score_of(question, text) for question, text in zip(document.questions, answers, strict=True))
    return Outcome(
        key="",
        exact=tuple(int(score == 1) for score in scores),
        partial=scores,
        document_tokens=told["tokens"],
        stored_bytes=round(sum(one["bytes"] for one in told["answers"]) / len(answers)),
        answer_s=sum(one["seconds"] for one in told["answers"]),
        answers=answers,
    )


def _started(command: list[str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise InvalidRequest(f"--kvpress-python {command[0]} cannot be run: {error}", param="kvpress_python") from error
