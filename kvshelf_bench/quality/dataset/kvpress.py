"""kvpress on the same rows, by its own pipeline in a Python of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kvshelf.errors import InvalidRequest
from kvshelf.model.loading import chosen_device, readable
from kvshelf.model.weights.adapter import require_none
from kvshelf_bench.engines import EngineOptions
from kvshelf_bench.options import counted
from kvshelf_bench.peers.peer import Peer, require_kvpress, running
from kvshelf_bench.quality.dataset.documents import Document
from kvshelf_bench.quality.dataset.measuring import Asking, score_of
from kvshelf_bench.quality.grid import Row
from kvshelf_bench.quality.outcome import Outcome


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
        require_none(options.model, "kvpress")
        require_kvpress(python)
        return cls(python, options, asking)

    def run(self, documents: Sequence[Document], rows: Sequence[Row]) -> dict[Row, list[Outcome]]:
        """The outcomes of the rows that kvpress has, in the order of `documents`. Raises `WorkerCrashed`."""
        device, dtype = chosen_device(self.options.device), self.options.dtype
        if dtype == "auto":
            dtype = "float32" if device.type == "cpu" else str(torch.bfloat16).removeprefix("torch.")
        arguments = (readable(self.options.model), dtype, str(device), str(self.options.threads))
        with running(str(self.python), "kvpress", arguments, "kvpress") as peer:
            by_row: dict[Row, list[Outcome]] = {row: [] for row in rows if _has(peer, row)}
            with counted("kvpress", len(documents) * len(by_row)) as step:
                for document in documents:
                    for row, outcomes in by_row.items():
                        outcomes.append(self._ask(peer, document, row))
                        step()
        return by_row

    def _ask(self, peer: Peer, document: Document, row: Row) -> Outcome:
        questions = [
            {"text": one.text, "prefix": one.prefix, "max_new_tokens": self.asking.tokens(one)}
            for one in document.questions
        ]
        about = {"context": document.context, "questions": questions, "known": self.asking.known}
        return _outcome(document, peer.ask(method=row.variant.policy, removed=row.removed, **about))


def _has(peer: Peer, row: Row) -> bool:
    """Whether kvpress has the row: a press by a share removed, with its defaults, and no codec."""
    kvshelf_alone = row.codec != "none" or row.select is not None or row.budget is not None
    return row.variant.policy in peer.ready["methods"] and not row.variant.params and not kvshelf_alone


def _outcome(document: Document, reply: Mapping[str, Any]) -> Outcome:
    if "refused" in reply:
        return Outcome("", refused=reply["refused"])
    answers = tuple(one["text"] for one in reply["answers"])
    scores = tuple(score_of(question, text) for question, text in zip(document.questions, answers, strict=True))
    return Outcome(
        key="",
        exact=tuple(int(score == 1) for score in scores),
        partial=scores,
        document_tokens=reply["tokens"],
        stored_bytes=round(sum(one["bytes"] for one in reply["answers"]) / len(answers)),
        answer_s=sum(one["seconds"] for one in reply["answers"]),
        answers=answers,
    )
