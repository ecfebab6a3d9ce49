"""Write docs/api.md from the OpenAPI document of the service: `python scripts/publish_api.py`. A test compares them."""

from __future__ import annotations

from pathlib import Path

from opentelemetry.trace import NoOpTracer

from kvshelf.service.app import create_app
from kvshelf.service.http.reference import markdown
from kvshelf.service.settings import Settings

PAGE = Path(__file__).resolve().parent.parent / "docs" / "api.md"


def text() -> str:
    """The reference. No route is called, so neither a store nor workers are needed."""
    return markdown(create_app(Settings(), {}, None, NoOpTracer(), None).openapi())  # type: ignore[arg-type]


if __name__ == "__main__":
    PAGE.write_text(text())
