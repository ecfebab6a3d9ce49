"""Reads JSON bodies and uploaded files beside the event loop, large bodies and all files in processes of their own, so
that the front end stays responsive."""

from __future__ import annotations

import asyncio
import sys
from typing import Final, Literal

import msgpack

from kvshelf.api.strict import CHECKED, RequestT, parse_request
from kvshelf.corpus.input.expendable import run
from kvshelf.corpus.input.extract import ExtractLimits, Upload, extract, missing_library
from kvshelf.errors import DeadlineExceeded, InternalError, InvalidRequest, NoWorker, UnsupportedMediaType
from kvshelf.service.settings import Settings
from kvshelf.workers.replica.calls import Computing
from kvshelf.workers.replica.fair_queue import FairQueue

SMALL_BYTES: Final = 4 << 10
"""Up to so many are parsed at once, in 0.2 ms at most."""

LARGE_BYTES: Final = 256 << 10
"""Longer bodies are parsed in their own process, which takes 0.2 s to start. The worst of this length takes 0.04 s."""

AT_ONCE: Final = 2
"""Processes at once for bodies, and as many for files; others wait for their tenant's turn."""

_MEMORY_BYTES: Final = 1 << 30
_CPU_S: Final = 60
_CHILD: Final = "kvshelf.service.http.parse_child"


class Parser:
    """Parses request bodies. One per service, used on its event loop."""

    def __init__(self, settings: Settings, computing: Computing) -> None:
        self._computing = computing
        self._deadline_s = settings.request_deadline_s
        self._most = 2 * settings.max_body_bytes  # msgpack's integers may be longer than JSON's: 5 bytes for "65536,"
        self._turns = FairQueue("parsing of large bodies", AT_ONCE, settings.max_queued_requests)

    async def parsed(self, model: type[RequestT], body: bytes | bytearray, tenant: str) -> RequestT:
        """The validated body. Raises `InvalidRequest`, and for a large body also `QueueFull` and `DeadlineExceeded`."""
        if len(body) <= SMALL_BYTES:
            return parse_request(model, body)
        if len(body) <= LARGE_BYTES:
            return await self._computing.run(parse_request, model, body)
        child = [sys.executable, "-PB", "-m", _CHILD]
        command = [*child, model.__module__, model.__name__, f"{_MEMORY_BYTES}", f"{_CPU_S}"]
        try:
            async with self._turns.turn(tenant, self._deadline_s) as left_s, asyncio.timeout(left_s):
                code, output = await run(command, body, self._most)
        except TimeoutError as exc:
            raise DeadlineExceeded(f"the body was not parsed in {self._deadline_s:g} s; try again later") from exc
        except OSError as exc:
            raise NoWorker(f"no process could be started to parse the body: {exc.strerror}; try again later") from exc
        if code > 0:
            raise InternalError(f"the process that parses large bodies ended with {code}")
        if code < 0:  # by a signal: a library ran out of memory, or its time is over
            raise InvalidRequest(
                f"to parse the body takes more than {_MEMORY_BYTES >> 30} GiB or {_CPU_S} s; send a smaller one"
            )
        reply = await self._computing.run(msgpack.unpackb, output)
        if "refused" in reply:
            message, param = reply["refused"]
            raise InvalidRequest(message, param=param)
        return await self._computing.run(model.model_validate, reply["fields"], context=CHECKED)


class Extractor:
    """Extracts the text of uploaded files. One per service, used on its event loop."""

    def __init__(self, settings: Settings) -> None:
        self._limits = ExtractLimits(settings.max_body_bytes, settings.extract_memory_bytes, settings.extract_cpu_s)
        self._deadline_s = settings.request_deadline_s
        self._turns = FairQueue("reading PDF and HTML", AT_ONCE, settings.max_queued_requests)

    async def text(self, upload: Upload, kind: Literal["pdf", "html"], tenant: str) -> str:
        """The text of a file. Raises as `extract` does, and `UnsupportedMediaType` without the extra, `QueueFull`,
        `DeadlineExceeded`."""
        if library := missing_library(kind):
            raise UnsupportedMediaType(
                f"to take {kind.upper()}, the service needs {library}, which is not installed there. Install the extra "
                "documents of kvshelf there, or send the text of the document",
                param="file",
            )
        try:
            async with self._turns.turn(tenant, self._deadline_s) as left_s, asyncio.timeout(left_s):
                return await extract(upload, kind, self._limits, f"file: this {kind.upper()}")
        except TimeoutError as exc:
            raise DeadlineExceeded(f"the {kind.upper()} was not read in {self._deadline_s:g} s") from exc
