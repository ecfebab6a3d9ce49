"""Logs: one line per request and event, with the request id. Never a document, a prompt or an answer."""

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
    """Sets up structlog and the standard library's logging: to standard error, as JSON unless that is a terminal.

    Each process calls it: the front end and every replica. Other libraries log only warnings and above.
    """
    number = logging.getLevelNamesMapping()[level.upper()]
    in_terminal = sys.stderr.isatty()
    renderer = structlog.dev.ConsoleRenderer() if in_terminal else structlog.processors.JSONRenderer()
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    structlog.configure(
        processors=[*shared, structlog.processors.format_exc_info, renderer],
        wrapper_class=structlog.make_filtering_bound_logger(number),
        logger_factory=structlog.WriteLoggerFactory(sys.stderr),  # print would write each line in two steps
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(structlog.stdlib.ProcessorFormatter(foreign_pre_chain=shared, processor=renderer))
    logging.basicConfig(level=max(number, logging.WARNING), handlers=[handler], force=True)
    logging.getLogger("kvshelf").setLevel(number)


def request_id() -> str:
    """The id of the current request."""
    return str(structlog.contextvars.get_contextvars().get("request_id", "unknown"))


@contextmanager
def collecting() -> Iterator[dict[str, Any]]:
    """Collects the facts passed to `note` inside the block, by this task and the tasks it starts."""
    facts: dict[str, Any] = {}
    token = _FACTS.set(facts)
    try:
        yield facts
    finally:
        _FACTS.reset(token)


def note(**facts: Any) -> None:
    """Adds facts to the log line of the current request; background creations have no such line.

    Bound context variables do not work here: the task that logs the line does not see what a route's task binds.
    """
    _FACTS.get({}).update(facts)
