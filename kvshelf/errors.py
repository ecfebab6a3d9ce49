"""Every error that service and client raise, with its HTTP status and its code on the wire."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from functools import partial
from typing import Any, ClassVar


def nearest(name: str, names: Iterable[str]) -> str:
    """The end of a message about a wrong name: " (did you mean 'keydiff'?)" where one of `names` is near, else ""."""
    by_letters = {known.lower(): known for known in names}
    matches = get_close_matches(str(name)[:64].lower(), by_letters, n=1)  # it takes time in proportion to both lengths
    return f" (did you mean {by_letters[matches[0]]!r}?)" if matches else ""


def as_share(value: Any) -> str:
    """The end of a message about a wrong share: "; 75 % is 0.75" where a percentage may have been meant, else ""."""
    is_percentage = isinstance(value, int | float) and 1 < value <= 100
    return f"; {value:g} % is {value / 100:g}" if is_percentage else ""


class KvshelfError(Exception):
    """Base of all kvshelf errors. The message is written for the person who made the call.

    `param` names the wrong field, if there is one. `details` are facts for programs, of JSON types.
    """

    code: ClassVar[str] = "internal"
    status: ClassVar[int] = 500
    type: ClassVar[str] = "internal_error"

    def __init__(self, message: str, *, param: str | None = None, **details: Any) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.details = details

    def __reduce__(self) -> tuple[Any, ...]:
        # Errors travel between processes (from a replica to the front end). The default would call the constructor with
        # `args` alone and lose the keywords.
        return partial(type(self), self.message, param=self.param, **self.details), ()

    @property
    def is_final(self) -> bool:
        """Whether another attempt would fail the same way, as for a cache that does not fit even on an empty shelf."""
        return isinstance(self, CallerError) or self.details.get("fits") is False


class CallerError(KvshelfError):
    """The request is wrong; repeating it unchanged fails again."""

    type = "invalid_request_error"


class InvalidRequest(CallerError):
    code, status = "invalid_request", 400


class Unauthorized(CallerError):
    code, status, type = "unauthorized", 401, "authentication_error"


class Forbidden(CallerError):
    code, status, type = "forbidden", 403, "permission_error"


class NotFound(CallerError):
    code, status, type = "not_found", 404, "not_found_error"


class CacheNotFound(NotFound):
    code = "cache_not_found"


class CertificateNotFound(NotFound):
    code = "certificate_not_found"


class WorkflowNotFound(NotFound):
    code = "workflow_not_found"


class RequestNotFound(NotFound):
    code = "request_not_found"


class ResponseNotFound(NotFound):
    code = "response_not_found"


class BatchNotFound(NotFound):
    code = "batch_not_found"


class FileNotFound(NotFound):
    code = "file_not_found"


class MethodNotAllowed(CallerError):
    code, status = "method_not_allowed", 405


class RequestTimeout(CallerError):
    """The upload was too slow."""

    code, status = "request_timeout", 408


class ModelMismatch(CallerError):
    """The cache was made with a different model, dtype, tokenizer or template than the one it is attached to."""

    code, status, type = "model_mismatch", 409, "conflict_error"


class SourceNotKept(CallerError):
    code, status, type = "source_not_kept", 409, "conflict_error"


class StateConflict(CallerError):
    code, status, type = "state_conflict", 409, "conflict_error"


class CacheHasChildren(CallerError):
    """Other caches extend the one that is to be deleted, so its bytes would live on in them."""

    code, status, type = "cache_has_children", 409, "conflict_error"


class EtagMismatch(CallerError):
    code, status, type = "etag_mismatch", 412, "conflict_error"


class DocumentTooLong(CallerError):
    code, status = "document_too_long", 413


class BodyTooLarge(CallerError):
    code, status = "body_too_large", 413


class UnsupportedMediaType(CallerError):
    code, status = "unsupported_media_type", 415


class PolicyUnsupported(CallerError):
    code, status = "policy_unsupported", 422


class QualityBelowFloor(CallerError):
    code, status = "quality_below_floor", 422


class DocumentTooShort(CallerError):
    code, status = "document_too_short", 422


class CacheError(KvshelfError):
    """The stored cache cannot be used."""

    type = "cache_error"


class CacheExpired(CacheError):
    code, status = "cache_expired", 410


class CacheCorrupt(CacheError):
    """The stored bytes differ from the written ones. They never reached the model."""

    code, status = "cache_corrupt", 424


class BlobError(CacheCorrupt):
    """A blob was refused while being read. `reason` is one word from the list in docs/internals/format.md."""

    def __init__(self, message: str, *, reason: str = "malformed", param: str | None = None, **details: Any) -> None:
        super().__init__(message, param=param, reason=reason, **details)
        self.reason = reason


class CacheUnusable(CacheError):
    """The bytes are as they were written, and the model's logits after them are not numbers."""

    code, status = "cache_unusable", 424


class LoadError(KvshelfError):
    """Too much load. `details["retry_after_s"]` says when to try again and becomes the Retry-After header."""

    type = "rate_limit_error"


class RateLimited(LoadError):
    code, status = "rate_limited", 429


class QueueFull(LoadError):
    code, status = "queue_full", 429


class QuotaExceeded(LoadError):
    code, status = "quota_exceeded", 429


class ServiceBusy(LoadError):
    """The bodies of open requests fill the service's memory."""

    code, status = "service_busy", 503


class StoreError(KvshelfError):
    type = "store_error"


class StoreUnavailable(StoreError):
    code, status = "store_unavailable", 503


class StorageFull(StoreError):
    code, status = "storage_full", 507


class WorkerError(KvshelfError):
    type = "worker_error"


class NoWorker(WorkerError):
    code, status = "no_worker", 503


class WorkerCrashed(WorkerError):
    code, status = "worker_crashed", 503


class OutOfMemory(WorkerError):
    """The device had no room for one call, which ended alone. Another attempt, or another worker, may have room."""

    code, status = "out_of_memory", 507


class DeadlineExceeded(WorkerError):
    code, status = "deadline_exceeded", 504


class Cancelled(KvshelfError):
    """The caller hung up. Never on the wire."""

    code, status, type = "cancelled", 499, "cancelled"


class ConnectionFailed(KvshelfError):
    """The service could not be reached, or the connection broke. Only the client raises it."""

    code, status, type = "connection_failed", 0, "connection_error"


class MissingExtra(KvshelfError):
    """An optional part of kvshelf is needed but not installed. The message has the pip command."""

    code, status, type = "missing_extra", 0, "installation_error"


class InternalError(KvshelfError):
    """A bug in kvshelf. The message names the request id to report, never internal state."""


class InvalidTensor(InternalError):
    """An operation of `kvshelf.kernels` received tensors that it does not accept. The message has their shapes."""


def by_code() -> dict[str, type[KvshelfError]]:
    """Maps each wire code to its class, so that clients can turn an error envelope back into an exception."""
    classes: dict[str, type[KvshelfError]] = {}
    pending: list[type[KvshelfError]] = [KvshelfError]
    while pending:
        cls = pending.pop()
        pending.extend(cls.__subclasses__())
        if "code" in vars(cls):
            classes[cls.code] = cls
    classes["internal"] = InternalError
    return classes
