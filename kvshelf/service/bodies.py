"""The body of a request, read and parsed for the tenant who sent it."""

from __future__ import annotations

from typing import TypeVar

from starlette.requests import Request

from kvshelf.api import AppendCache, CreateCache
from kvshelf.api.strict import RequestT, parse_request
from kvshelf.corpus.input.extract import plain_text
from kvshelf.service.access.keys import KeyCaller
from kvshelf.service.http.body import FORM, form_values, read_form, read_upload
from kvshelf.service.http.receiving import JSON_TYPE, read_body, require_type
from kvshelf.service.http.waiting import until_hangup
from kvshelf.service.service import Service

DocumentT = TypeVar("DocumentT", CreateCache, AppendCache)


async def read_json(request: Request, model: type[RequestT], service: Service) -> RequestT:
    """The validated JSON body of a request."""
    require_type(request, JSON_TYPE)
    body = await read_body(request, service.settings)
    return await service.parser.parsed(model, body, request.state.caller.tenant)


async def read_document(request: Request, service: Service, caller: KeyCaller, model: type[DocumentT]) -> DocumentT:
    """The validated body of a request with a document: JSON, or a form with the document as `file` (text, PDF or
    HTML)."""
    is_form = require_type(request, JSON_TYPE, FORM) == FORM
    body = await read_body(request, service.settings)
    if not is_form:
        return await service.parser.parsed(model, body, caller.tenant)
    form = await read_form(request, body)
    values, part = await service.computing.run(form_values, form, model.model_json_schema())
    # Validate the other fields before extracting text from the file, which is expensive.
    checked: DocumentT = await service.computing.run(parse_request, model, values | {"document": ""})
    file = await read_upload(part)
    kind = file.kind
    if kind == "text":
        text = plain_text(file.data, "the file", "file")
    else:
        text = await until_hangup(request, service.extractor.text(file, kind, caller.tenant))
    return checked.model_copy(update={"document": text})
