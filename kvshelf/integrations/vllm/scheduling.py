"""The connector's part in vLLM's scheduler: which requests load, and which are refused."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from copy import copy
from dataclasses import replace
from hashlib import sha256
from typing import Any

import structlog

from kvshelf.errors import InternalError, InvalidRequest, KvshelfError, PolicyUnsupported, StateConflict
from kvshelf.integrations.vllm.ragged.pages import full_of
from kvshelf.integrations.vllm.request import FIELD, ID_PREFIX, CacheReference, ShelfRequest, require_places
from kvshelf.integrations.vllm.service import ServiceShelf
from kvshelf.integrations.vllm.settings import NO_TABLES, ShelfSettings
from kvshelf.integrations.vllm.step import ConnectorStep, Load
from kvshelf.integrations.vllm.tenants import Tenants
from kvshelf.store.manifest import Manifest

log = structlog.get_logger("kvshelf.vllm")

_REFUSED = 1, True
"""To vLLM, a refused request loads a token between two steps, and its workers report that the load has failed: no other
answer of a connector ends one request without ending the server."""


class ShelfScheduler:
    """Decides by the index of the shelf alone. page: tokens of a page. rows: whether heads can have page tables."""

    def __init__(self, settings: ShelfSettings, page: int, *, rows: bool) -> None:
        self._store = settings.open()
        self._tenants = Tenants(settings)
        self._page = page
        self._has_rows = rows and settings.service is None
        self._roots: dict[str, str] = {}
        self._named: dict[str, CacheReference | KvshelfError] = {}
        self._decided: dict[str, ShelfRequest | KvshelfError] = {}
        self._ragged: dict[str, tuple[int, str]] = {}
        self._step = ConnectorStep()

    def arrived(self, request: Any) -> None:
        """Find out which cache of which tenant a request names, and let go of its key, which the workers are not to
        get. Have vLLM ask for every request of ours. It would not for prompt logprobs, and compute the stand-ins."""
        if not _is_ours(request):
            return
        request.skip_reading_prefix_cache = False
        try:
            named = CacheReference.parse(_params(request).get(FIELD))
            named = replace(named, api_key=None, tenant=self._tenants.of(named))
            if named.ragged is not None:
                self._keep_apart(request, named, named.ragged)
            self._named[request.request_id] = named
        except KvshelfError as error:
            self._named[request.request_id] = error
        _without_params(request)

    def matched(self, request: Any, computed: int) -> tuple[int, bool]:
        """Entries that the shelf has behind the `computed` in vLLM's pages, and whether they come between steps."""
        named = self._named.get(request.request_id)
        if named is None:
            return 0, False
        try:
            if isinstance(named, KvshelfError):
                raise named
            decision = self._decided[request.request_id] = self._checked(request, named)
        except KvshelfError as error:
            self._decided[request.request_id] = error
            return _REFUSED
        return max(0, decision.entries - computed), False

    def _checked(self, request: Any, named: CacheReference) -> ShelfRequest:
        sampling = request.sampling_params
        if request.lora_request is not None:
            raise InvalidRequest("an adapter changes the keys and values of the document", param="lora_request")
        if sampling is None or sampling.skip_reading_prefix_cache:
            raise InvalidRequest("a stored document has no logprobs and gives no embedding", param="prompt_logprobs")
        assert named.tenant is not None, "as `arrived` writes it"
        cache = self._store.stat(named.cache_id, tenant=named.tenant)
        if isinstance(cache, Manifest):
            if named.ragged is not None and self._roots[request.request_id] != cache.blob_digest:
                raise StateConflict(f"{cache.id} was made again after vLLM got the request; ask once more")
            if not isinstance(self._store, ServiceShelf):
                require_places(self._store, cache)
        prompt = request.prompt_token_ids or ()
        return ShelfRequest.parse(cache, prompt, request.cache_salt, named.ragged, self._page)

    def _keep_apart(self, request: Any, named: CacheReference, places: str) -> None:
        """Have vLLM share the pages with full head pages alone, and with requests to the same blob: the entries on
        later ones lie where only this request finds them. Answers of one request (`n`) are requests of their own with
        the same tokens."""
        if not self._has_rows:
            raise PolicyUnsupported(NO_TABLES, param="cache_id")
        assert named.tenant is not None, "as `arrived` writes it"
        cache = self._store.stat(named.cache_id, tenant=named.tenant)
        assert isinstance(cache, Manifest), "as a store has it"
        hashes, prompt = request.block_hashes, len(request.prompt_token_ids or ())
        if not (places.isdecimal() and len(places) < 10) or len(hashes) not in (0, prompt // self._page):
            raise InvalidRequest(
                f"kv_transfer_params.{FIELD}.ragged is {places!r}; it must be a number, and pages must be hashed whole",
                param="kv_transfer_params",
            )
        shared = max(0, full_of(int(places), self._page))
        root = self._roots[request.request_id] = cache.blob_digest
        of_blob = [f"{cache.id} {root} {number}".encode() for number in range(len(hashes[:shared]))]
        hashes[:] = [*(sha256(text).digest() for text in of_blob), *(os.urandom(32) for _ in hashes[shared:])]

    def allocated(self, request: Any, pages: list[int], tokens: int) -> None:
        """`tokens` of a request are to be loaded in this step."""
        decision = self._decided.get(request.request_id)
        if isinstance(decision, KvshelfError):
            log.error("refused", request_id=request.request_id, code=decision.code, error=str(decision))
            self._step.refused.append(request.request_id)
            return
        if decision is not None and decision.ragged:
            self._ragged[request.request_id] = pages[0], self._roots[request.request_id]
        if decision is not None and tokens:
            assert decision.tenant is not None, "as its manifest names it"
            with suppress(KvshelfError):  # a use that is not counted harms no answer
                self._store.touch(decision.cache_id, tenant=decision.tenant)
            first, entries = decision.entries - tokens, decision.entries
            name, of = request.request_id, (decision.cache_id, decision.tenant)
            root = self._roots[name] if decision.ragged else ""
            self._step.loads.append(Load(name, *of, first, entries, tuple(pages), root))

    def take_step(self, computed: Iterable[str]) -> ConnectorStep:
        """What the workers are told. computed: requests of the step. Raises `InternalError`, which ends vLLM, if one of
        them is refused: its document would be stand-ins."""
        for request_id in computed:
            if isinstance(self._decided.get(request_id), KvshelfError):
                raise InternalError(f"vLLM computes the request {request_id}, which was refused; take a tested version")
            if request_id in self._ragged:
                page, root = self._ragged[request_id]
                self._step.ragged[page] = root
        self._step.unfinished = frozenset(root for _, root in self._ragged.values())
        step, self._step = self._step, ConnectorStep()
        return step

    def finished(self, request: Any) -> None:
        for requests in (self._named, self._decided, self._ragged, self._roots):
            requests.pop(request.request_id, None)

    def close(self) -> None:
        self._store.close()


def _is_ours(request: Any) -> bool:
    """Also with the salt alone: the pages of a document are for those who name it to the shelf."""
    return FIELD in _params(request) or (request.cache_salt or "").startswith(ID_PREFIX)


def _params(request: Any) -> Mapping[str, Any]:
    params = request.kv_transfer_params
    return params if isinstance(params, Mapping) else {}


def _without_params(request: Any) -> None:
    """Copies, because vLLM in one process shares them with its caller, who may send them again."""
    request.kv_transfer_params = {}
    if request.sampling_params is not None and request.sampling_params.extra_args is not None:
        request.sampling_params = copy(request.sampling_params)
        request.sampling_params.extra_args = dict(request.sampling_params.extra_args, kv_transfer_params={})
