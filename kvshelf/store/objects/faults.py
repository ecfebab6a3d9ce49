"""Errors of obstore, translated into ours. The only place that does so."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from obstore.exceptions import AlreadyExistsError, BaseError, PermissionDeniedError, UnauthenticatedError

from kvshelf.errors import StorageFull, StoreUnavailable
from kvshelf.store.objects.address import ObjectPlace

_CODE: Final = re.compile(r"<Code>([A-Za-z]+)</Code>")
_STATUS: Final = re.compile(r"\b([45][0-9]{2} [A-Z][A-Za-z ]+)")
_EMPTY: Final = re.compile(r"InvalidRange|\b416 ")
_CAUSE: Final = re.compile(r"(Connection refused|TimedOut|timed out|dns error|invalid peer certificate)")
_FULL: Final = re.compile(r"StorageFull|QuotaExceeded|InsufficientStorage|\b507 ")
_NO_BUCKET: Final = re.compile(r"NoSuchBucket|InvalidBucketName")
_ROLE: Final = re.compile(r"/latest/(?:api|meta-data)/|AssumeRoleWithWebIdentity|/v2/credentials/")
_CREDENTIALS: Final = (
    "check the rights of the credentials in the environment (AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, or the role of "
    "the machine): kvshelf gets, puts, lists and deletes objects below the prefix"
)


class EmptyObject(Exception):
    """A range of an object was asked for, but the object has no byte there."""


@contextmanager
def translated(place: ObjectPlace) -> Iterator[None]:
    """Inside the block, errors of obstore become `StoreUnavailable` or `StorageFull`. `AlreadyExistsError` passes, and
    `FileNotFoundError` if an object is missing; a missing bucket becomes `StoreUnavailable` where the server tells the
    two apart."""
    try:
        yield
    except FileNotFoundError as error:
        if _NO_BUCKET.search(str(error)):
            raise StoreUnavailable(f"there is no bucket {place.bucket!r} for {place}; create it first") from error
        raise
    except AlreadyExistsError:
        raise
    except (PermissionDeniedError, UnauthenticatedError) as error:
        why = f" ({match[1]})" if (match := _CODE.search(str(error))) else ""
        raise StoreUnavailable(f"{place} refuses access{why}; {_CREDENTIALS}") from error
    except BaseError as error:
        text = str(error)
        if _EMPTY.search(text):
            raise EmptyObject from error
        if _ROLE.search(text):
            raise StoreUnavailable(
                f"there are no credentials for {place}: AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY are not in the "
                f"environment of this process, and this machine has no role ({_short(text)})"
            ) from error
        if _FULL.search(text):
            raise StorageFull(f"cannot write to {place}: its space or quota is used up. Delete caches.") from error
        if _NO_BUCKET.search(text):
            raise StoreUnavailable(f"there is no bucket {place.bucket!r} for {place}; create it first") from error
        raise StoreUnavailable(f"{place} does not work: {_short(text)}") from error


def _short(text: str) -> str:
    """The message of a server or a connection, without the library's nested descriptions."""
    if match := _CODE.search(text) or _STATUS.search(text):
        return match[1]
    message = text.partition("\n\nDebug source")[0].strip().rpartition(" - ")[2][:200]
    cause = _CAUSE.search(text)
    return f"{message} ({cause[1]})" if cause else message
