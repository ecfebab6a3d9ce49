"""The page for people at `/`, and its files. They are in the package as they are served: there is no build step."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from fastapi import APIRouter, Request, Response
from fastapi.staticfiles import StaticFiles

router = APIRouter(include_in_schema=False)

FOLDER: Final = Path(__file__).parent.parent / "page"

_FILES: Final = StaticFiles(directory=FOLDER)


@router.api_route("/", methods=["GET", "HEAD"])
async def index(request: Request) -> Response:
    """The one document of the page. It needs no key: it asks for one where the service has keys."""
    return await _file("index.html", request)


@router.api_route("/page/{path:path}", methods=["GET", "HEAD"])
async def file(path: str, request: Request) -> Response:
    """A file of the page. Its policy, which forbids all scripts but these, is on every answer of the service."""
    return await _file(path, request)


async def _file(path: str, request: Request) -> Response:
    response = await _FILES.get_response(path, request.scope)
    response.headers["cache-control"] = "no-cache"  # asked for again each time: an upgrade is seen at once
    return response
