"""URLs of shelves in Redis.

    redis://[user:password@]host[:6379][/db]
    redis-sentinel://[user:password@]host1[:26379],host2[:26379]/service[/db]
    redis-cluster://[user:password@]host1[:6379],host2[:6379]

`rediss://`, `rediss-sentinel://` and `rediss-cluster://` are the same over TLS; certificates and host names are always
checked. Parameters: `prefix`, `timeout_s`, `password_file`, and with TLS `ca`. A password on a command line shows in
the process list; the file does not.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal
from urllib.parse import parse_qsl, quote, unquote, urlsplit

from kvshelf.errors import InvalidRequest
from kvshelf.store.private import read_private

Kind = Literal["single", "sentinel", "cluster"]

_SUPPORTED: Final = (
    "supported are redis://[user:password@]host[:6379][/db], redis-sentinel://host1:26379,host2:26379/service[/db] and "
    "redis-cluster://host1:6379,host2:6379, each as rediss for TLS, with ?prefix=...&timeout_s=...&"
    "password_file=...&ca=..."
)
_SCHEME = re.compile(r"(rediss?)(?:-(sentinel|cluster))?")
_HOST = re.compile(r"(?P<host>[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.%a-z]+\])(?::(?P<port>[0-9]{1,5}))?")
_PREFIX = re.compile(r"[A-Za-z0-9_-]{1,64}")
_DATABASE = re.compile(r"[0-9]{1,5}")
_SECONDS = re.compile(r"[0-9]{1,3}(\.[0-9]{1,6})?")
_SERVICE = re.compile(r"[A-Za-z0-9._-]{1,128}")
_PORTS: Final[dict[Kind, int]] = {"single": 6379, "sentinel": 26379, "cluster": 6379}


@dataclass(frozen=True)
class RedisAddress:
    """Where a shelf in Redis is. Made by `parse`; its text is the URL without user and password. hosts: host and port
    of the server, the Sentinels, or some nodes of the cluster. service: the Sentinels' name for the server. timeout_s:
    seconds without progress on a socket after which the server counts as unreachable. prefix: of all keys, so that
    several shelves can share one Redis. ca: a file of certificates to trust instead of the system's."""

    kind: Kind
    hosts: tuple[tuple[str, int], ...]
    service: str = ""
    db: int = 0
    user: str | None = None
    password: str | None = field(default=None, repr=False)
    tls: bool = False
    ca: str | None = None
    prefix: str = "kvshelf"
    timeout_s: float = 0.5

    def __str__(self) -> str:
        scheme = ("rediss" if self.tls else "redis") + ("" if self.kind == "single" else f"-{self.kind}")
        hosts = ",".join(location(host, port) for host, port in self.hosts)
        path = "".join(f"/{part}" for part in (self.service, self.db) if part)
        return f"{scheme}://{hosts}{path}"


def location(host: str, port: int) -> str:
    """`host:port`, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def parse(url: str) -> RedisAddress:
    """Parse a URL of one of these forms. Raises `InvalidRequest` for any other text, never with the password in it."""
    try:
        parts = urlsplit(url)
        scheme = _SCHEME.fullmatch(parts.scheme)
        query = parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query))
    except ValueError:
        raise _refused("it is no URL") from None
    if scheme is None:
        raise _refused(f"unknown scheme {parts.scheme!r:.40}")
    if parts.fragment:
        raise _refused("it has a fragment after '#'; write '#' in a password as %23")
    kind: Kind = scheme[2] or "single"  # type: ignore[assignment]
    tls = scheme[1] == "rediss"
    credentials, _, places = parts.netloc.rpartition("@")
    hosts = _hosts(kind, places)  # first, because it refuses a password with an unescaped '?' or '/'
    service, db = _path(kind, parts.path)
    ca, prefix, timeout_s, password_file = _parameters(query, tls)
    user, password = _credentials(credentials, password_file)
    return RedisAddress(kind, hosts, service, db, user, password, tls, ca, prefix, timeout_s)


def _credentials(text: str, password_file: str | None) -> tuple[str | None, str | None]:
    user, _, password = text.partition(":")
    if password_file is not None:
        if password:
            raise _refused("it has a password and a password_file")
        password = quote(read_private(Path(password_file), param="store").decode().strip())
    if (text or password_file) and not password:
        raise _refused("a user needs a password, as in user:password@host, or a password_file with one line")
    return unquote(user) or None, unquote(password) or None


def _hosts(kind: Kind, text: str) -> tuple[tuple[str, int], ...]:
    hosts: list[tuple[str, int]] = []
    for item in text.split(","):
        match = _HOST.fullmatch(item)
        if match is None or not 1 <= (port := int(match["port"] or _PORTS[kind])) <= 65535:
            raise _refused("every host must be a name or an address, with a port from 1 to 65535 if one is given")
        hosts.append((match["host"].strip("[]"), port))
    if kind == "single" and len(hosts) > 1:
        raise _refused("several hosts are a cluster or Sentinels; say which with redis-cluster:// or redis-sentinel://")
    return tuple(hosts)


def _path(kind: Kind, path: str) -> tuple[str, int]:
    """The service and the database that a path names."""
    parts = unquote(path).strip("/").split("/") if path.strip("/") else []
    service = parts.pop(0) if kind == "sentinel" and parts else ""
    if kind == "sentinel" and not _SERVICE.fullmatch(service):
        raise _refused("after the Sentinels comes the name of the service they watch, as in /mymaster")
    if kind == "cluster" and parts:
        raise _refused("a cluster has no databases; leave the path out")
    if len(parts) > 1 or not all(_DATABASE.fullmatch(part) for part in parts):
        raise _refused("the database must be one number")
    return service, int(parts[0]) if parts else 0


def _parameters(query: list[tuple[str, str]], tls: bool) -> tuple[str | None, str, float, str | None]:
    parameters = dict(query)
    if len(parameters) < len(query):
        raise _refused("a parameter is given twice")
    names = ("ca", "prefix", "timeout_s", "password_file")
    ca, prefix, timeout, password_file = (parameters.pop(name, None) for name in names)
    if parameters:
        raise _refused(f"it has no parameter {min(parameters)!r:.40}")
    if ca is not None and not (tls and ca.startswith("/")):
        raise _refused("ca is the absolute path of a file and needs TLS, as in rediss://...?ca=/etc/ssl/redis.pem")
    if prefix is not None and not _PREFIX.fullmatch(prefix):
        raise _refused("prefix must be 1 to 64 letters, digits, '-' and '_'")
    if password_file is not None and not password_file.startswith("/"):
        raise _refused("password_file is the absolute path of a file, because replicas run in other folders")
    timeout = "0.5" if timeout is None else timeout
    if not _SECONDS.fullmatch(timeout) or not 0.05 <= float(timeout) <= 60:
        raise _refused("timeout_s must be a number of seconds from 0.05 to 60")
    return ca, prefix or "kvshelf", float(timeout), password_file


def _refused(why: str) -> InvalidRequest:
    # The message does not repeat the URL, because a wrong URL may still contain a password.
    return InvalidRequest(f"the URL of the Redis store is not usable: {why}; {_SUPPORTED}", param="store")
