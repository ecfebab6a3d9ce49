"""URLs of places in object storage: `s3://bucket/prefix`, with `?endpoint=...&region=...&timeout_s=...`.

Credentials come from the environment alone: AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, a role of the machine or of
the pod, and the other variables that obstore reads. obstore opens gs:// and az:// as well; kvshelf is not tested there.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Final
from urllib.parse import parse_qsl, urlsplit

from kvshelf.errors import InvalidRequest, nearest
from kvshelf.store.private import without_secret

SCHEMES: Final = ("s3", "gs", "az")
_BUCKET: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,62}")
_PREFIX: Final = re.compile(r"[A-Za-z0-9!_.'()*-]+(?:/[A-Za-z0-9!_.'()*-]+)*")
_ENDPOINT: Final = re.compile(r"https?://[A-Za-z0-9._\[\]:-]+/?")
_REGION: Final = re.compile(r"[a-z0-9-]{1,64}")
_PARAMETERS: Final = ("endpoint", "region", "timeout_s")


@dataclass(frozen=True)
class ObjectPlace:
    """Where the bytes of a shelf lie. Made by `parse`; its text is the URL without parameters. timeout_s: seconds after
    which a request that failed again and again counts as failed."""

    scheme: str
    bucket: str
    prefix: str = ""
    endpoint: str | None = None
    region: str | None = None
    timeout_s: float = 30.0

    def __str__(self) -> str:
        return f"{self.scheme}://{self.bucket}" + (f"/{self.prefix}" if self.prefix else "")


def parse(url: str) -> ObjectPlace:
    """Parse a URL of this form. Raises `InvalidRequest` for any other text; no message shows a credential."""
    try:
        parts = urlsplit(url)
        query = parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query))
    except ValueError:
        raise _refused(url, "it is no URL") from None
    if parts.scheme not in SCHEMES:
        raise _refused(url, f"unknown scheme {parts.scheme!r:.40}")
    if "@" in url:
        raise _refused(
            url,
            "leave the credentials out; they come from the environment (AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY), or "
            "from the role of the machine",
        )
    if not _BUCKET.fullmatch(parts.netloc):
        raise _refused(url, f"{parts.netloc!r:.80} is not the name of a bucket")
    prefix = parts.path.strip("/")
    if prefix and (not _PREFIX.fullmatch(prefix) or {".", ".."} & set(prefix.split("/"))):
        raise _refused(url, "the prefix may have letters, digits and !_.'()*- between single slashes")
    parameters = dict(query)
    for name in parameters:
        if name not in _PARAMETERS:
            raise _refused(url, f"there is no parameter {name!r:.40}{nearest(name, _PARAMETERS)}")
    if len(parameters) < len(query) or parts.fragment:
        raise _refused(url, "each parameter may be given once, and nothing follows them")
    if "endpoint" in parameters and not _ENDPOINT.fullmatch(parameters["endpoint"]):
        raise _refused(url, "the endpoint is the address of a server, such as https://minio.internal:9000")
    if "region" in parameters and not _REGION.fullmatch(parameters["region"]):
        raise _refused(url, "the region is a name such as eu-central-1")
    timeout_s = _seconds(url, parameters.get("timeout_s", "30"))
    return ObjectPlace(
        parts.scheme, parts.netloc, prefix, parameters.get("endpoint"), parameters.get("region"), timeout_s
    )


def _seconds(url: str, text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds <= 3600:
        raise _refused(url, f"timeout_s is a number of seconds above 0 and up to 3,600, not {text!r:.40}")
    return seconds


def _refused(url: str, why: str) -> InvalidRequest:
    return InvalidRequest(
        f"cannot keep blobs at {without_secret(url)!r:.200}: {why}. Object storage is named as s3://bucket/prefix, "
        "with ?endpoint=...&region=...&timeout_s=...",
        param="store",
    )
