"""Logs: one line for each request and event, with the request's id. Never a document, a prompt or an answer."""

from __future__ import annotations

import logging
import sys

import structlog


def configure(level: str) -> None:
    """Set up structlog and the standard library's logging: to standard error, as JSON unless a person is watching."""
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
