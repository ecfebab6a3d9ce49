"""Whose caches a request to vLLM may ask."""

from __future__ import annotations

import logging
import re
import time
from typing import Final

from kvshelf.errors import Forbidden, InvalidRequest, Unauthorized
from kvshelf.integrations.vllm.request import FIELD, CacheReference
from kvshelf.integrations.vllm.settings import ShelfSettings
from kvshelf.service.access.keyfile import KeyFile
from kvshelf.service.access.keys import REREAD_S, LiveKeys

_KEY: Final = re.compile(r"kvsk_\w+")


class Tenants:
    """Tells the tenant of a request: by its key, by its own word, or the one that vLLM's settings name. Raises
    `InvalidRequest` if the key file cannot be used."""

    def __init__(self, settings: ShelfSettings) -> None:
        self._keys = None if settings.api_key_file is None else LiveKeys(KeyFile(settings.api_key_file))
        self._read_at = time.monotonic()
        self._trusting = settings.trust_tenant
        self._only = settings.tenant or "default"

    def of(self, named: CacheReference) -> str:
        """Raises `Unauthorized` and `Forbidden` for a key as the service does, `Forbidden` for another tenant than the
        only one, and `InvalidRequest` for a request without its tenant."""
        if self._keys is not None:
            return self._holder(self._keys, named.api_key)
        if self._trusting:
            if not named.tenant:
                raise InvalidRequest(f"kv_transfer_params.{FIELD} must name the tenant", param="tenant")
            return named.tenant
        if named.tenant not in (None, self._only):
            raise Forbidden("this vLLM reads the caches of another tenant than that of the request; see trust_tenant")
        return self._only

    def _holder(self, keys: LiveKeys, key: str | None) -> str:
        if key is None:
            raise Unauthorized(f"this vLLM needs an API key: kv_transfer_params.{FIELD}.api_key")
        if time.monotonic() > self._read_at + REREAD_S:  # a scheduler has no loop that could do it aside
            keys.reread()
            self._read_at = time.monotonic()
        caller = keys.holder(key)
        caller.require("read")
        return caller.tenant


class HiddenKeys(logging.Filter):
    """Takes API keys out of log lines: with --enable-log-requests vLLM writes all parameters of a request."""

    def filter(self, record: logging.LogRecord) -> bool:
        text = record.getMessage()
        if "kvsk_" in text:
            record.msg, record.args = _KEY.sub("kvsk_...", text), ()
        return True

    def install(self) -> None:
        """On vLLM's handlers, and on those of others that get its lines where `VLLM_CONFIGURE_LOGGING` is 0."""
        for logger in (logging.getLogger("vllm"), logging.getLogger()):
            for handler in logger.handlers:
                handler.addFilter(self)
