"""Takes turns between tenants for the files that `kvshelf.corpus.input.extract` reads."""

from __future__ import annotations

import asyncio
from typing import Final, Literal

from kvshelf.corpus.input.extract import ExtractLimits, Upload, extract, missing_library
from kvshelf.errors import DeadlineExceeded, UnsupportedMediaType
from kvshelf.service.settings import Settings
from kvshelf.workers.replica.fair_queue import FairQueue

AT_ONCE: Final = 2
"""Files that are parsed at once; others wait for their tenant's turn."""


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
