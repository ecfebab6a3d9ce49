"""The types of errors on the wire."""

from __future__ import annotations

from typing import Any

from kvshelf.api.strict import MissReason, ResponseBody


class ErrorBody(ResponseBody):
    """`code` is for programs, `type` groups codes, `param` names the wrong field, `message` is for people.

    `miss_reason` says why a stored cache could not be used. `details` holds machine-readable facts, such as both
    fingerprints of a model_mismatch. Both are present only if they apply.
    """

    message: str
    type: str
    param: str | None = None
    code: str
    miss_reason: MissReason | None = None
    details: dict[str, Any] | None = None


class ErrorEnvelope(ResponseBody):
    error: ErrorBody
