"""The one place where error envelopes and foreign exceptions become the errors of `kvshelf.errors`."""

from __future__ import annotations

import re
import time
from email.utils import parsedate_to_datetime

import httpx
from pydantic import ValidationError

from kvshelf.api import ErrorBody, ErrorEnvelope
from kvshelf.errors import ConnectionFailed, InvalidRequest, KvshelfError, Unauthorized, by_code

_START = "Start one with `kvshelf serve`, or give the address of another: --url, KVSHELF_URL, or the client's url"
_KEY = " (the commands take a key from KVSHELF_API_KEY, the clients also as api_key)"

# Most specific first: the first matching class gives the message.
_TRANSPORT: list[tuple[type[Exception], str]] = [
    (httpx.ConnectTimeout, "no service answered within the time limit (connect_s). " + _START),
    (httpx.ConnectError, "no service answers there. " + _START),
    (httpx.ReadTimeout, "no answer within the time limit (read_s); the work may still finish, so ask again later"),
    (httpx.WriteTimeout, "the request could not be sent within the time limit (write_s)"),
    (httpx.PoolTimeout, "all connections of this client were busy for longer than pool_s"),
    (httpx.ProxyError, "the proxy refused the connection"),
    (httpx.TransportError, "the connection broke before the answer was complete; repeat the call"),
]


def from_httpx(error: httpx.HTTPError | httpx.StreamError, url: httpx.URL) -> KvshelfError:
    """The error to raise for an exception of httpx in an exchange with `url`."""
    if isinstance(error, httpx.UnsupportedProtocol):
        return InvalidRequest(f"{url} is not the URL of a service: {error}", param="url")
    advice = next((text for cls, text in _TRANSPORT if isinstance(error, cls)), "this is no answer of kvshelf")
    reason = re.sub(r"^\[Errno -?\d+\] ", "", str(error)) or type(error).__name__
    return ConnectionFailed(f"{url}: {reason}: {advice}", cause=type(error).__name__)


def from_response(response: httpx.Response) -> KvshelfError:
    """The error to raise for a response (read to its end) that is not a success."""
    try:
        body = ErrorEnvelope.model_validate_json(response.content).error
    except ValidationError:
        return not_kvshelf(response)
    error = from_body(body, request_id=response.headers.get("x-request-id"))
    if (wait_s := retry_after_s(response)) is not None:
        error.details["retry_after_s"] = wait_s
    return error


def from_body(body: ErrorBody, *, request_id: str | None = None) -> KvshelfError:
    """The error to raise for the `error` object of a response or of a stream.

    A code that this version does not know, from a newer service, becomes a plain `KvshelfError`.
    """
    cls = by_code().get(body.code, KvshelfError)
    error = cls(body.message + (_KEY if cls is Unauthorized else ""), param=body.param)
    facts = {"request_id": request_id, "miss_reason": body.miss_reason}
    if error.code != body.code:
        facts["code"] = body.code
    error.details.update({key: value for key, value in facts.items() if value is not None}, **(body.details or {}))
    return error


def not_kvshelf(response: httpx.Response) -> KvshelfError:
    """The error to raise when the other side does not speak this API: a proxy, another service, another version."""
    return ConnectionFailed(
        f"{response.request.url} answered {response.status_code} with something that is not an answer of kvshelf: "
        f"{response.text[:120]!r}. Does this URL belong to a kvshelf service of this version?",
        http_status=response.status_code,
    )


def retry_after_s(response: httpx.Response) -> float | None:
    """Seconds of the Retry-After header, a number or a date (RFC 9110, section 10.2.3); None without a usable one."""
    header = response.headers.get("retry-after", "")
    try:
        return max(0.0, float(header))
    except ValueError:
        pass
    try:
        return max(0.0, parsedate_to_datetime(header).timestamp() - time.time())
    except ValueError:
        return None
