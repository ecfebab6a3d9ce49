"""The web page at `/` and its files. The package holds them as they are served; there is no build step."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from fastapi import APIRouter, Request, Response
from fastapi.staticfiles import StaticFiles

router = APIRouter(include_in_schema=False)

FOLDER: Final = Path(__file__).parent / "page"

_FILES: Final = StaticFiles(directory=FOLDER)


@router.api_route("/", methods=["GET", "HEAD"])
async def index(request: Request) -> Response:
    """The page's HTML. It needs no API key: if the service has keys, the page asks for one."""
    return await file("index.html", request)


@router.api_route("/page/{path:path}", methods=["GET", "HEAD"])
async def file(path: str, request: Request) -> Response:
    """A file of the page. Every answer has the content security policy that allows only these scripts."""
    response = await _FILES.get_response(path, request.scope)
    response.headers["cache-control"] = "no-cache"  # browsers revalidate each time, so an upgrade is seen at once
    return response
