"""Policies of other packages: classes that they name under the entry point group `kvshelf.policies`.

Entry points are used instead of a setting or a call, because they work alike in the front end, in replicas on every
machine that has the package, and in an engine in the caller's own process.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import EntryPoint, entry_points

from kvshelf.errors import InvalidRequest
from kvshelf.workers.policies.base import Policy
from kvshelf.workers.policies.info import GROUP


def installed(ours: Mapping[str, type[Policy]]) -> dict[str, type[Policy]]:
    """Installed policies by name. Raises `InvalidRequest` for one that cannot be loaded, is no policy, or has a name
    that is taken."""
    found: dict[str, type[Policy]] = {}
    for entry in entry_points(group=GROUP):
        cls = _loaded(entry)
        if cls.name in ours or cls.name in found:
            raise _refused(entry, f"there is a policy {cls.name!r} already")
        found[cls.name] = cls
    return found


def _loaded(entry: EntryPoint) -> type[Policy]:
    try:
        cls = entry.load()
    except Exception as error:  # a stranger's module may raise anything
        raise _refused(entry, f"{type(error).__name__}: {error}") from error
    if not (isinstance(cls, type) and issubclass(cls, Policy)):
        raise _refused(entry, "it is no subclass of kvshelf.workers.policies.Policy")
    if getattr(cls, "name", None) != entry.name:
        raise _refused(entry, f"its class has the name {getattr(cls, 'name', None)!r}")
    return cls


def _refused(entry: EntryPoint, problem: str) -> InvalidRequest:
    package = entry.dist.name if entry.dist is not None else "an unknown package"
    return InvalidRequest(
        f"the policy {entry.name!r} of {package} ({entry.value}) cannot be used: {problem}; mend or uninstall it",
        param="policy",
    )
