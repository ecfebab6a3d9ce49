"""The rows of a batch that are questions: asked as the live route asks them, with results in OpenAI's shape."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from kvshelf.api import ErrorBody
from kvshelf.api.batches import UNDONE
from kvshelf.api.openai import ChatCompletionRequest
from kvshelf.artifact.identity import ModelIdentity
from kvshelf.corpus.row import Row
from kvshelf.corpus.run.caller import PREFIX, RowAnswer, request_id
from kvshelf.errors import by_code
from kvshelf.service.dialects.completions import Completion, require_model
from kvshelf.service.engines import each_alone, require_adapter, serving_all
from kvshelf.service.http.errors import error_json
from kvshelf.store.base import Store
from kvshelf.workers.cluster.remote import RemoteEngine
from kvshelf.workers.replica.api import ReplicaApi
from kvshelf.workers.replica.calls import Caller


@dataclass(frozen=True)
class BatchAsker:
    """Asks a question of the replicas, behind the questions of users. identities: of served models."""

    identities: Mapping[str, ModelIdentity]

    async def __call__(
        self,
        question: ChatCompletionRequest,
        engines: Mapping[str, RemoteEngine],
        store: Store,
        *,
        tenant: str,
        deadline_s: float,
    ) -> RowAnswer:
        """Raises as the live route does."""
        ids = question.cache_ids or [str(question.cache_id)]
        manifests = await asyncio.to_thread(lambda: [store.stat(cache_id, tenant=tenant) for cache_id in ids])
        model = serving_all(self.identities, manifests)
        require_adapter(engines, self.identities, question, ids[0], model)
        names = (manifests[0].model, model, question.adapter and engines[model].parent)
        require_model(question.model, manifests[0].id, names)
        caller = Caller(tenant, deadline_s)
        answers = [
            await engines[model].call(ReplicaApi.query, ids, single, caller=caller, of_batch=True)
            for single in each_alone(question.asking)
        ]
        used = sum(answer.usage.prefill_tokens + answer.usage.completion_tokens for answer in answers)
        completion = Completion(model, together=question.cache_ids is not None)
        return RowAnswer(completion.whole(answers), used)


def result_line(row: Row, batch_id: str) -> dict[str, Any]:
    """The line of a question in the output or the error file, as OpenAI's batches have it: with a response, unless the
    batch left the question undone. Where there is no custom id, it has the number of the line."""
    ask_id = request_id(batch_id, row.line)
    undone = row.error if row.error is not None and row.error.code in UNDONE.values() else None
    return {
        "id": f"batch_req_{ask_id.removeprefix(PREFIX)}",
        "custom_id": row.custom_id,
        **({"line": row.line} if row.custom_id is None else {}),
        "response": None if undone else _response(row, ask_id),
        "error": asdict(undone) if undone else None,
    }


def _response(row: Row, ask_id: str) -> dict[str, Any]:
    """The response of the live route to such a question."""
    if row.error is None:
        return {"status_code": 200, "request_id": ask_id, "body": row.answer}
    kind = by_code()[row.error.code]
    error = ErrorBody(message=row.error.message, type=kind.type, param=None, code=row.error.code)
    return {"status_code": kind.status, "request_id": ask_id, "body": {"error": error_json(error)}}
