"""The ledger of a Redis home: a hash for each request, changed by `ledger.lua`, which the server runs as one step."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from typing import Any, Final

from kvshelf.errors import StoreUnavailable
from kvshelf.store.index import KEEP_ENDED_S
from kvshelf.store.jobs import ledger
from kvshelf.store.jobs.ledger import Ledger, RequestRecord
from kvshelf.store.redis.link import RedisLink
from kvshelf.store.redis.script import Script

_FIELDS: Final = (
    *("id", "tenant", "state", "attempts", "attempts_before", "worker", "lease_until", "cache_ids"),
    *("error_code", "error_message", "error_param", "error_details", "created_at", "updated_at"),
)
"""What a record consists of, in the order in which `ledger.lua` shows it."""

_REPLIES: Final = {
    **dict.fromkeys(("unknown", "taken", "done"), 0),
    **dict.fromkeys(("opened", "record", "ended", "started", "ids", "records", "forgotten"), 1),
    **dict.fromkeys(("at_work", "stale"), 2),
}
"""What replies of the script begin with, and how many parts follow."""

_UNFINISHED: Final = ("queued", "running")

_BATCH: Final = 500

_ARRIVAL_MS: Final = 60_000
"""How long a body waits to be taken into its request, which is the next command."""

_PIECE: Final = 16 << 20
"""Bytes of a body in one reply: bodies may be larger than any reply is allowed to be."""


class RedisLedger(Ledger):
    """See `Ledger`. All times are the server's."""

    def __init__(self, link: RedisLink, prefix: str) -> None:
        self._link = link
        self._base = f"{{{prefix}}}:"
        self._run = Script(link, "ledger.lua", f"{self._base}requests", _REPLIES).run

    def open_request(self, request_id: str, *, tenant: str, body: bytes, again: bool = False) -> RequestRecord:
        token = secrets.token_hex(8)
        self._link.call("SET", f"{self._base}a:{token}", body, "PX", _ARRIVAL_MS)
        word, *rest = self._run("open", id=request_id, tenant=tenant, token=token, again=again)
        if word == "taken":
            raise ledger.taken(request_id)
        return _record(rest[0])

    def start_attempt(self, request_id: str, *, worker: str, lease_s: float) -> int:
        match self._run("start", id=request_id, worker=worker, lease_s=lease_s):
            case ["ended", state]:
                raise ledger.ended(request_id, state.decode())
            case ["at_work", holder, seconds]:
                raise ledger.at_work(request_id, holder.decode(), float(seconds))
            case [_, number]:
                return int(number)
        raise ledger.not_found(request_id)

    def renew(self, request_id: str, attempt: int, *, lease_s: float) -> None:
        reply = self._run("renew", id=request_id, attempt=attempt, lease_s=lease_s)
        _require_holder(reply, request_id, attempt)

    def finish(self, request_id: str, attempt: int, *, cache_ids: Sequence[str]) -> None:
        ids = json.dumps(list(cache_ids))
        reply = self._run("finish", id=request_id, attempt=attempt, cache_ids=ids, keep_ended_s=KEEP_ENDED_S)
        _require_holder(reply, request_id, attempt)

    def fail(
        self,
        request_id: str,
        attempt: int,
        *,
        code: str,
        message: str,
        param: str | None = None,
        details: Mapping[str, Any] | None = None,
        final: bool,
        counted: bool = True,
    ) -> None:
        reply = self._run(
            "fail",
            id=request_id,
            attempt=attempt,
            code=code,
            message=message,
            param=param,
            details=json.dumps(details) if details else None,
            final=final,
            counted=counted,
            keep_ended_s=KEEP_ENDED_S,
        )
        _require_holder(reply, request_id, attempt)

    def get_request(self, request_id: str, *, tenant: str) -> RequestRecord:
        fields = self._run("get", id=request_id)[1]
        if fields[0] is None or fields[1] != tenant.encode():
            raise ledger.not_found(request_id)
        return _record(fields)

    def body(self, request_id: str) -> bytes:
        body = bytearray()
        while len(piece := self._piece(request_id, len(body))) == _PIECE:
            body += piece
        body += piece
        # Asked afterwards: while the request is unfinished, none of its body is missing.
        fields = self._run("get", id=request_id)[1]
        if not _is_there(fields):
            raise ledger.not_found(request_id)
        if fields[2].decode() not in _UNFINISHED:
            raise ledger.dropped(request_id)
        return bytes(body)

    def _piece(self, request_id: str, start: int) -> bytes:
        piece = self._link.call("GETRANGE", f"{self._base}b:{request_id}", start, start + _PIECE - 1)
        if not isinstance(piece, bytes):
            raise StoreUnavailable(f"{piece!r:.80} came from Redis where a request's body was expected")
        return piece

    def unfinished(self) -> list[RequestRecord]:
        ids: list[bytes] = self._run("unfinished")[1]
        found: list[RequestRecord] = []
        for start in range(0, len(ids), _BATCH):
            records = self._run("records", ids=b"\0".join(ids[start : start + _BATCH]))[1]
            # One that ended since the ids were read has no place here any more.
            found += (record for record in map(_record, filter(_is_there, records)) if record.state in _UNFINISHED)
        return found

    def forget(self, before: float) -> int:
        count = 0
        while forgotten := int(self._run("forget", before=before, limit=_BATCH)[1]):
            count += forgotten
        return count


def _require_holder(reply: Sequence[Any], request_id: str, attempt: int) -> None:
    match reply:
        case ["unknown"]:
            raise ledger.not_found(request_id)
        case ["stale", state, attempts]:
            raise ledger.stale(request_id, attempt, state.decode(), int(attempts))


def _is_there(fields: Sequence[bytes | None]) -> bool:
    return fields[0] is not None


def _record(fields: Sequence[bytes | None]) -> RequestRecord:
    try:
        values: dict[str, Any] = {
            name: value.decode() for name, value in zip(_FIELDS, fields, strict=True) if value is not None
        }
        error = {key: values.pop(f"error_{key}", None) for key in ("code", "message", "param")}
        details = values.pop("error_details", None)
        values |= {
            "cache_ids": json.loads(values["cache_ids"]),
            "error": error | {"details": details and json.loads(details)} if error["code"] else None,
        }
        return RequestRecord.model_validate({"worker": None, "lease_until": None} | values)
    except (KeyError, ValueError) as wrong:
        raise StoreUnavailable(f"a request in Redis is not what kvshelf wrote there: {wrong!s:.200}") from wrong
