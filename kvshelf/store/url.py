"""A store is chosen by one URL: tiers from the fastest to the home, joined by `+`.

    disk:///var/lib/kvshelf                               a folder
    redis://host:6379/0                                   a Redis server; all forms: `kvshelf.store.redis.address`
    ram:2GiB+disk:///var/lib/kvshelf                      copies in memory before a folder
    redis://host?blobs=s3://bucket/prefix                 an index in Redis, blobs in object storage; so with disk:
    ram:2GiB+disk:///scratch?max=200GiB+redis://host      copies in memory and on a local disk before Redis
    disk:///mine?under=disk:///theirs                     a folder over another's, which is only read
    disk:///mine?under=disk:///theirs&signed=/theirs/signed&trust=/etc/trust.json
                                                          as before, where a trusted key has signed the caches

The last one is the home, the source of truth. The others are tiers of copies and may vanish. `max` is a budget in
bytes: a tier drops copies to stay within it, and a home evicts caches that are not pinned (`CacheExpired`, reason
"evicted"). The parameters of a URL after `blobs=` are percent-encoded: s3://bucket/prefix%3Fregion=eu-central-1.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final
from urllib.parse import parse_qsl, unquote, urlsplit

from kvshelf.errors import InvalidRequest, nearest
from kvshelf.store.base import Store
from kvshelf.store.checks import parsed_size
from kvshelf.store.disk import DiskStore
from kvshelf.store.disk.overlay import Overlay
from kvshelf.store.index import MakeBlobs, Quota
from kvshelf.store.objects import address as objects_address
from kvshelf.store.private import without_secret
from kvshelf.store.rules import Rules
from kvshelf.store.sealing.keyring import Keyring
from kvshelf.store.shelf import Shelf
from kvshelf.store.tiers.disk import DiskTier
from kvshelf.store.tiers.ram import RamTier
from kvshelf.store.tiers.tiered import TieredStore
from kvshelf.store.tiers.tiers import Tier

if TYPE_CHECKING:
    from kvshelf.store.bundles.signed import SignedCaches

_JOIN: Final = re.compile(r"\+(?=[a-z-]+:)")
_REDIS: Final = tuple(f"redis{tls}{kind}" for tls in ("", "s") for kind in ("", "-sentinel", "-cluster"))


@dataclass(frozen=True)
class StoreConfig:
    """How to open a store: its URL, and the `Rules` that all its processes share. All values can be pickled. It holds
    the path of the key file, never a key: each process reads the file itself, at the same absolute path."""

    url: str = field(repr=False)
    default_ttl_s: float | None = None
    max_ttl_s: float | None = None
    tenant_max_caches: int | None = None
    tenant_max_bytes: int | None = None
    tenant_promised_bytes: int | None = None
    promised_bytes: int | None = None
    encryption_key_file: str | None = None

    def open(self) -> Store:
        """Raises as `open_store` does, and `InvalidRequest` for a key file that cannot be used."""
        return open_store(self.url, rules=self.rules())

    def rules(self) -> Rules:
        return Rules(
            default_ttl_s=self.default_ttl_s,
            max_ttl_s=self.max_ttl_s,
            quota=Quota(
                max_caches=self.tenant_max_caches,
                max_bytes=self.tenant_max_bytes,
                tenant_promised_bytes=self.tenant_promised_bytes,
                promised_bytes=self.promised_bytes,
            ),
            keyring=None if self.encryption_key_file is None else Keyring.read(self.encryption_key_file),
        )


def open_store(url: str, *, rules: Rules | None = None) -> Store:
    """Open the store that a URL names, and make it if it is not there. Raises `InvalidRequest` for any other text (no
    message shows a password), `StoreUnavailable` if the home does not work. If a disk tier has copies already, an
    unreachable Redis home raises nothing: it is used once it answers."""
    if not isinstance(url, str):
        raise InvalidRequest(f"a store is named by a URL, as disk:///absolute/path, not {url!r:.80}", param="store")
    *tiers, home = _JOIN.split(url)
    rules = rules or Rules()
    return _tiered(url, tiers, home, rules) if tiers else _home(home, rules)


def _tiered(url: str, tiers: Sequence[str], home_url: str, rules: Rules) -> TieredStore:
    """A home with tiers before it: memory, a folder, or both in this order."""
    kinds = [urlsplit(tier).scheme for tier in tiers]
    if kinds not in (["ram"], ["disk"], ["ram", "disk"]):
        raise _refused(url, "before the home there may be ram:SIZE, then one disk:///folder?max=SIZE, and nothing else")
    ram_bytes = _size(url, urlsplit(tiers[0]).path) if "ram" in kinds else None
    disk = _disk_tier(tiers[-1]) if "disk" in kinds else None
    with ExitStack() as opened:
        key = None if disk is None else DiskTier.known_key(disk[0])
        home = opened.enter_context(_home(home_url, rules, key))
        before: list[Tier] = [] if ram_bytes is None else [RamTier(ram_bytes, now=home.now)]
        if disk is not None:
            before.append(DiskTier.open(*disk, key=home.key, keyring=rules.keyring, now=home.now))
        opened.pop_all()
    return TieredStore(home, before)


def _disk_tier(url: str) -> tuple[Path, int]:
    rest, budget = _budget(url)
    if _parameter(url, "blobs")[1] is not None:
        raise _refused(url, "a tier of copies keeps them in its folder; blobs= belongs to the home")
    if budget is None:
        raise _refused(url, "a tier must know how much it may take; write disk:///scratch?max=200GiB")
    return _folder(rest), budget


def _home(url: str, rules: Rules, key: bytes | None = None) -> Shelf:
    rest, budget = _budget(url)
    rest, objects = _parameter(rest, "blobs")
    rest, under = _parameter(rest, "under")
    rest, signed = _parameter(rest, "signed")
    rest, trust = _parameter(rest, "trust")
    blobs: MakeBlobs | None = None
    if objects is not None:
        from kvshelf.store.objects.blobs import ObjectBlobs  # obstore, which other homes do not need

        blobs = partial(ObjectBlobs.open_at, objects_address.parse(objects), patient=key is not None)
    scheme = urlsplit(rest).scheme
    rules = replace(rules, quota=replace(rules.quota, budget_bytes=budget))
    if under is not None:
        if scheme != "disk" or urlsplit(under).scheme != "disk" or objects is not None:
            raise _refused(url, "under= names a folder that lies below another: disk:///mine?under=disk:///theirs")
        return Overlay.open_over(
            _folder(rest), _folder(under), rules=rules, key=key, signed=_signed(url, signed, trust)
        )
    if signed is not None or trust is not None:
        raise _refused(url, "signed= and trust= say what is taken of a shelf below; write under=disk:///theirs, too")
    if scheme == "disk":
        return DiskStore.open(_folder(rest), rules=rules, key=key, blobs=blobs)
    if scheme in _REDIS:
        from kvshelf.store.redis import RedisStore  # half a second of imports, which a folder does not need

        return RedisStore.open(rest, rules=rules, key=key, blobs=blobs)
    if scheme == "ram":
        raise _refused(url, "the last part is the home, and memory cannot be one: join it as in ram:2GiB+disk:///path")
    if scheme in objects_address.SCHEMES:
        raise _refused(
            url,
            "object storage keeps blobs, and their index needs a place that can change in one step: write "
            f"redis://host:6379/0?blobs={without_secret(rest)} or disk:///absolute/path?blobs={without_secret(rest)}",
        )
    parts = urlsplit(rest)
    if not scheme and not parts.netloc and parts.path.startswith(("/", ".")):  # anything else may hold a password
        raise _refused(url, f"it is a path; did you mean disk://{Path(rest).absolute()}")
    raise _refused(url, f"unknown scheme {scheme!r}{nearest(scheme, ('disk', 'ram', *_REDIS))}")


def _signed(url: str, folder: str | None, trust: str | None) -> SignedCaches | None:
    """The caches of the shelf below that are taken; None: all."""
    if folder is None and trust is None:
        return None
    paths = [Path(unquote(path or "")) for path in (folder, trust)]
    if not all(path.is_absolute() for path in paths):
        raise _refused(
            url, "signed= is the absolute path of a folder with bundles, and trust= that of the keys whose are taken"
        )
    from kvshelf.store.bundles.signed import SignedCaches  # its checks, which other stores do not need

    return SignedCaches(*paths)


def _folder(url: str) -> Path:
    parts = urlsplit(url)
    if parts.query or parts.fragment:
        extra = (parts.query or parts.fragment).split("=")[0]
        raise _refused(url, f"it has no parameter {extra!r}")
    path = unquote(parts.path)
    if parts.netloc or not path.startswith("/") or path == "/" or "\0" in path or ".." in Path(path).parts:
        raise _refused(url, "the path must be absolute, with three slashes and without '..'")
    return Path(path)


def _budget(url: str) -> tuple[str, int | None]:
    """A URL without its parameter `max`, and the bytes that `max` allows."""
    rest, size = _parameter(url, "max")
    return rest, None if size is None else _size(url, size)


def _parameter(url: str, name: str) -> tuple[str, str | None]:
    """A URL without one of its parameters, and the value of that, None if it is not given."""
    base, mark, query = url.partition("?")
    if not mark:
        return url, None
    values = [value for key, value in parse_qsl(query, keep_blank_values=True) if key == name]
    if len(values) > 1:
        raise _refused(url, f"{name} is given twice")
    others = "&".join(part for part in query.split("&") if part.split("=")[0] != name)
    return f"{base}?{others}" if others else base, values[0] if values else None


def _size(url: str, text: str) -> int:
    size = parsed_size(text)
    if size < 1:
        raise _refused(url, f"{text!r} is no size; write 2GiB, 500MB or a number of bytes")
    return size


def _refused(url: str, why: str) -> InvalidRequest:
    return InvalidRequest(
        f"cannot open the store {without_secret(url)!r}: {why}. A store is disk:///absolute/path or "
        "redis://host:6379/0, with its blobs in object storage as in redis://host?blobs=s3://bucket/prefix, and with "
        "copies before it as in ram:2GiB+disk:///scratch?max=200GiB+redis://host",
        param="store",
    )
