"""Rows from JSON: each is one document to compress, checked before any work."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from hashlib import blake2b
from typing import Any, BinaryIO, Final

from kvshelf.api import CreateCache
from kvshelf.api.batches import Endpoint
from kvshelf.api.openai import ChatCompletionRequest
from kvshelf.api.strict import parse_json, parse_request
from kvshelf.corpus.input.defaults import with_defaults
from kvshelf.corpus.row import Row
from kvshelf.errors import BodyTooLarge, InvalidRequest, KvshelfError

MAX_DOCUMENT_BYTES: Final = 64 << 20
"""Limit of a line, a text file, or a document of a Parquet file: far above what any model reads."""

MAX_CUSTOM_ID: Final = 512
"""Characters."""

MAX_NAME: Final = 256
"""Characters of a cache's name."""

_OPENAI_FIELDS: Final = {"custom_id", "method", "url", "body"}


def read_row(
    values: Any, defaults: Mapping[str, Any], *, source: str, line: int, nbytes: int, endpoint: Endpoint = "/v1/caches"
) -> Row:
    """A row from JSON values: the fields of a creation and `custom_id`, or a line of OpenAI's batches. A question is
    always such a line. A cache without a name of its own is named by the custom id."""
    row = Row(source, line, nbytes=nbytes)
    try:
        if not isinstance(values, Mapping):
            raise InvalidRequest(f"a row is a JSON object, and this is {type(values).__name__}")
        fields = dict(values)
        row = replace(row, custom_id=_custom_id(fields.pop("custom_id", None)))
        if endpoint != "/v1/caches":
            return replace(row, question=_question(_openai_body(fields, endpoint), row.custom_id))
        if fields.keys() & (_OPENAI_FIELDS - {"custom_id"}):
            fields = _openai_body(fields, endpoint)
        if row.custom_id is not None:  # so that it is shown wherever the cache is
            fields.setdefault("name", row.custom_id[:MAX_NAME])
        spec = parse_request(CreateCache, with_defaults(fields, defaults))
        if spec.split_options is not None:
            raise InvalidRequest("split: a row of a batch is one document; split it before", param="split")
        if spec.episodes is not None:
            raise InvalidRequest(
                "episodes: a row of a batch is one cache; create these by POST /v1/caches", param="episodes"
            )
        return replace(row, spec=spec)
    except KvshelfError as error:
        return row.failed(error)


def parse_jsonl(
    stream: BinaryIO,
    source: str,
    defaults: Mapping[str, Any],
    *,
    max_line_bytes: int = MAX_DOCUMENT_BYTES,
    endpoint: Endpoint = "/v1/caches",
) -> Iterator[Row]:
    """The rows of a JSONL stream, one per line. A line over the limit is skipped without being held in memory. It
    becomes an error row, as does a line that is empty, not UTF-8, not JSON, or repeats a custom id of this stream."""
    return without_duplicates(
        _parse_line(text, nbytes, source, number, defaults, max_line_bytes, endpoint)
        for number, (text, nbytes) in enumerate(_lines(stream, max_line_bytes), 1)
    )


def without_duplicates(rows: Iterable[Row]) -> Iterator[Row]:
    """The rows of one input in order; a row that repeats a custom id becomes an error row."""
    digests: set[bytes] = set()  # a custom id may be long, and an input may have millions of them
    for row in rows:
        if row.custom_id is None or row.error is not None:
            yield row
            continue
        digest = blake2b(row.custom_id.encode(), digest_size=16).digest()
        if digest in digests:
            repeated = InvalidRequest(f"custom_id: {row.custom_id!r:.80} stands in an earlier row of this input, too")
            row = row.failed(repeated)
        digests.add(digest)
        yield row


def _lines(stream: BinaryIO, limit: int) -> Iterator[tuple[bytes | None, int]]:
    """Lines without their line ends, and the bytes each had; None for a line over the limit."""
    while piece := stream.readline(limit + 1):
        if piece.endswith(b"\n") or len(piece) <= limit:
            yield piece.rstrip(b"\r\n"), len(piece)
            continue
        nbytes = len(piece)
        while piece and not piece.endswith(b"\n"):
            piece = stream.readline(limit + 1)
            nbytes += len(piece)
        yield None, nbytes


def _parse_line(
    text: bytes | None, nbytes: int, source: str, line: int, defaults: Mapping[str, Any], limit: int, endpoint: Endpoint
) -> Row:
    try:
        if text is None:
            raise BodyTooLarge(f"this line has {nbytes} bytes, and a line may have {limit}")
        if line == 1:
            text = text.removeprefix(b"\xef\xbb\xbf")  # the byte order mark
        if not text.strip():
            raise InvalidRequest("this line is empty")
        values = _json(text)
    except KvshelfError as error:
        return Row(source, line, nbytes=nbytes).failed(error)
    return read_row(values, defaults, source=source, line=line, nbytes=nbytes, endpoint=endpoint)


def _json(text: bytes) -> Any:
    try:
        text.decode()
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"byte {error.start} of this line is not valid UTF-8") from error
    try:
        return parse_json(text)
    except ValueError as error:
        raise InvalidRequest(f"this line is not JSON: {error}") from error


def _custom_id(value: Any) -> str | None:
    if value is None:
        return None
    if not isinstance(value, str) or not 0 < len(value) <= MAX_CUSTOM_ID:
        raise InvalidRequest(f"custom_id: text of 1 to {MAX_CUSTOM_ID} characters is needed; found {value!r:.80}")
    return value


def _openai_body(fields: Mapping[str, Any], endpoint: Endpoint) -> dict[str, Any]:
    """The body of the request in a line of OpenAI's batches."""
    unknown = sorted(fields.keys() - _OPENAI_FIELDS)
    if unknown:
        raise InvalidRequest(f"{unknown[0]}: unknown beside method, url and body; it may belong into body")
    if (fields.get("method"), fields.get("url")) != ("POST", endpoint):
        raise InvalidRequest(
            f"method and url: only POST {endpoint} can be done in a batch with this endpoint; found "
            f"{json.dumps(fields.get('method')):.20} {json.dumps(fields.get('url')):.80}"
        )
    body = fields.get("body")
    if not isinstance(body, Mapping):
        raise InvalidRequest("body: the fields of the request as a JSON object are needed")
    return dict(body)


def _question(body: dict[str, Any], custom_id: str | None) -> ChatCompletionRequest:
    if custom_id is None:
        raise InvalidRequest("custom_id: a question needs one; answers come in another order", param="custom_id")
    question = parse_request(ChatCompletionRequest, body)
    if question.stream:
        raise InvalidRequest("stream: an answer of a batch comes as a whole; leave stream out", param="stream")
    if question.workflow is not None:
        raise InvalidRequest("workflow: rows of a batch run in no order of steps; leave it out", param="workflow")
    if question.program is not None:
        raise InvalidRequest("program: rows of a batch go behind all questions; leave it out", param="program")
    if question.on_miss != "error":
        raise InvalidRequest(
            "on_miss: a question of a batch makes no cache again; make it by POST /v1/caches before", param="on_miss"
        )
    return question
