"""Policies and selectors of other packages: classes that they name under the entry point groups `kvshelf.policies` and
`kvshelf.selectors`.

Entry points are used instead of a setting or a call, because they work alike in the front end, in replicas on every
machine that has the package, and in an engine in the caller's own process.
"""

from __future__ import annotations

from collections.abc import Collection
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from kvshelf.errors import InvalidRequest


def installed(group: str, base: type, taken: Collection[str], *, kind: str, param: str) -> dict[str, Any]:
    """The installed classes of a group, by name. base: what they derive from. taken: the names of ours. kind: what an
    error calls them.

    Raises `InvalidRequest` with this param for a class that cannot be loaded, derives from another one, is abstract, or
    has a name that is taken.
    """
    found: dict[str, Any] = {}
    for entry in entry_points(group=group):
        try:
            cls = entry.load()
        except Exception as error:  # a stranger's module may raise anything
            raise _refused(entry, f"{type(error).__name__}: {error}", kind, param) from error
        problem = _problem(entry, cls, base)
        if not problem and (cls.name in taken or cls.name in found):
            problem = f"there is a {kind} {cls.name!r} already"
        if problem:
            raise _refused(entry, problem, kind, param)
        found[cls.name] = cls
    return found


def _problem(entry: EntryPoint, cls: Any, base: type) -> str:
    """Why what an entry point names is no class of its group; "" if it is one."""
    if not (isinstance(cls, type) and issubclass(cls, base)):
        return f"it is no subclass of {base.__module__}.{base.__qualname__}"
    if lacking := sorted(getattr(cls, "__abstractmethods__", ())):
        return f"its class lacks {', '.join(lacking)}"
    name = getattr(cls, "name", None)
    return "" if name == entry.name else f"its class has the name {name!r}"


def _refused(entry: EntryPoint, problem: str, kind: str, param: str) -> InvalidRequest:
    package = entry.dist.name if entry.dist is not None else "an unknown package"
    return InvalidRequest(
        f"the {kind} {entry.name!r} of {package} ({entry.value}) cannot be used: {problem}; mend or uninstall it",
        param=param,
    )
