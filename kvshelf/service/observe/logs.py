"""Logs: one line for each request and event, with the request's id. Never a document, a prompt or an answer."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import structlog

_FACTS: ContextVar[dict[str, Any]] = ContextVar("kvshelf_facts")


def configure(level: str) -> None:
    """Set up structlog and the standard library's logging: to standard error, as JSON unless a person is watching.

    Each process does it for itself, the front end and every replica. Other libraries speak from warnings upwards only.
    """
    number = logging.getLevelNamesMapping()[level.upper()]
    watched = sys.stderr.isatty()
    renderer = structlog.dev.ConsoleRenderer() if watched else structlog.processors.JSONRenderer()
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    structlog.configure(
        processors=[*shared, structlog.processors.format_exc_info, renderer],
        wrapper_class=structlog.make_filtering_bound_logger(number),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(structlog.stdlib.ProcessorFormatter(foreign_pre_chain=shared, processor=renderer))
    logging.basicConfig(level=max(number, logging.WARNING), handlers=[handler], force=True)
    logging.getLogger("kvshelf").setLevel(number)


@contextmanager
def collecting() -> Iterator[dict[str, Any]]:
    """What `note` is told inside the block, by this task and those that it starts."""
    facts: dict[str, Any] = {}
    token = _FACTS.set(facts)
    try:
        yield facts
    finally:
        _FACTS.reset(token)


def note(**facts: Any) -> None:
    """Add facts to the one line of the request at hand; a creation in the background has none.

    Bound context variables would not do: what a route's own task binds, the line's task never sees.
    """
    _FACTS.get({}).update(facts)
