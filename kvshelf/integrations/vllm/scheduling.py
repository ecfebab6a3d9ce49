"""The connector's part in vLLM's scheduler: which requests load, and which are refused."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import structlog

from kvshelf.errors import InvalidRequest, KvshelfError
from kvshelf.integrations.vllm.request import FIELD, ID_PREFIX, ShelfRequest, cache_id_of
from kvshelf.integrations.vllm.settings import ShelfSettings
from kvshelf.integrations.vllm.step import Load, Step

log = structlog.get_logger("kvshelf.vllm")

_REFUSED = 1, True
"""To vLLM, a refused request loads a token between two steps, and its workers report that the load has failed: no other
answer of a connector ends one request without ending the server."""


class ShelfScheduler:
    """Decides by the index of the shelf alone; no blob is read."""

    def __init__(self, settings: ShelfSettings) -> None:
        self._store = settings.home.open()
        self._tenant = settings.tenant
        self._decided: dict[str, ShelfRequest | KvshelfError] = {}
        self._step = Step()

    def arrived(self, request: Any) -> None:
        """Have vLLM ask for every request of ours. It would not for prompt logprobs, and compute the stand-ins."""
        if _is_ours(request):
            request.skip_reading_prefix_cache = False

    def matched(self, request: Any, computed: int) -> tuple[int, bool]:
        """Entries that the shelf has behind the `computed` in vLLM's pages, and whether they come between steps."""
        if not _is_ours(request):
            return 0, False
        try:
            asked = self._decided[request.request_id] = self._checked(request)
        except KvshelfError as error:
            self._decided[request.request_id] = error
            return _REFUSED
        return max(0, asked.entries - computed), False

    def _checked(self, request: Any) -> ShelfRequest:
        cache_id = cache_id_of((request.kv_transfer_params or {}).get(FIELD))
        sampling = request.sampling_params
        if request.lora_request is not None:
            raise InvalidRequest("an adapter changes the keys and values of the document", param="lora_request")
        if sampling is None or sampling.skip_reading_prefix_cache:
            raise InvalidRequest("a stored document has no logprobs and gives no embedding", param="prompt_logprobs")
        entries = self._store.stat(cache_id, tenant=self._tenant).kept_tokens
        return ShelfRequest.parse(cache_id, entries, request.prompt_token_ids or (), request.cache_salt)

    def allocated(self, request: Any, pages: list[int], tokens: int) -> None:
        """`tokens` of a request are to be loaded in this step."""
        asked = self._decided.get(request.request_id)
        if isinstance(asked, KvshelfError):
            log.error("refused", request_id=request.request_id, code=asked.code, error=str(asked))
            self._step.refused.append(request.request_id)
        elif asked is not None and tokens:
            with suppress(KvshelfError):  # a use that is not counted harms no answer
                self._store.touch(asked.cache_id, tenant=self._tenant)
            first = asked.entries - tokens
            self._step.loads.append(Load(request.request_id, asked.cache_id, first, asked.entries, tuple(pages)))

    def take_step(self) -> Step:
        step, self._step = self._step, Step()
        return step

    def finished(self, request: Any) -> None:
        self._decided.pop(request.request_id, None)

    def close(self) -> None:
        self._store.close()


def _is_ours(request: Any) -> bool:
    """Also with the salt alone: the pages of a document are for those who name it to the shelf."""
    return FIELD in (request.kv_transfer_params or {}) or (request.cache_salt or "").startswith(ID_PREFIX)
