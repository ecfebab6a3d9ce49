"""The methods of one kind by name: kvshelf's own, and those of other packages' entry points (`kvshelf.policies`, ...).

Entry points work alike in the front end, in replicas on every machine that has the package, and in an engine in the
caller's own process; a setting or a call would not.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from typing import Any, TypeVar

from kvshelf.errors import InvalidRequest
from kvshelf.methods.bundled import BUNDLED, SOURCES
from kvshelf.methods.info import MethodInfo, ParameterInfo, measured_rows
from kvshelf.methods.method import Kind, Method, legal_values, parameter_fields, parameter_types, unknown

MethodT = TypeVar("MethodT", bound=Method)


class Registry(dict[str, type[MethodT]]):
    """Classes by name, in the order of listings, without methods of `SOURCES` (`press:criticalkv`): see `find`."""

    def __init__(self, base: type[MethodT], reserved: Collection[str] = ()) -> None:
        """base: the class of all methods of the kind. reserved: names that no method may have.

        Raises `InvalidRequest` for a class that cannot be loaded, is no subclass, is abstract, or has a taken name.
        """
        self.kind: Kind = base.kind
        bundled = (EntryPoint(name, value, self.kind.group) for name, value in BUNDLED[self.kind.folder].items())
        super().__init__()
        for entry in (*bundled, *entry_points(group=self.kind.group)):
            former = {cls.formerly for cls in self.values()}
            self[entry.name] = loaded(entry, base, {*self, *former, *reserved})

    def build(self, name: str, params: Mapping[str, Any]) -> MethodT:
        """The method of that name with these parameters. Raises `InvalidRequest` on an unknown name or parameter."""
        return self.find(name).build(params, self)

    def find(self, name: str) -> type[MethodT]:
        """The method of that name, or of that second name. Raises `InvalidRequest` on an unknown one, or if its source
        cannot be loaded."""
        if not isinstance(name, str):
            raise unknown(self.kind, name, self)
        if name in self:
            return self[name]
        if renamed := [cls for cls in self.values() if name and name == cls.formerly]:
            return renamed[0]
        prefix, _, method = name.partition(":")
        if not method or prefix not in SOURCES.get(self.kind.folder, {}):
            raise unknown(self.kind, name, self)
        methods = self._sourced(prefix)
        if method not in methods:
            raise unknown(self.kind, name, (f"{prefix}:{known}" for known in methods))
        return methods[method]

    def sourced(self) -> Iterator[type[MethodT]]:
        """The methods of all `SOURCES` whose packages are installed and can be loaded."""
        for prefix, source in SOURCES.get(self.kind.folder, {}).items():
            if find_spec(source.package) is not None:
                with suppress(InvalidRequest):  # `find` of one of them says why
                    yield from self._sourced(prefix).values()

    def _sourced(self, prefix: str) -> Mapping[str, type[MethodT]]:
        source = SOURCES[self.kind.folder][prefix]
        if find_spec(source.package) is None:
            raise InvalidRequest(
                f"{self.kind.noun} names with {prefix!r} are those of the package {source.package}, which is not "
                f"installed; install it with: pip install {source.package}",
                param=self.kind.param,
            )
        methods: Mapping[str, type[MethodT]] = EntryPoint(prefix, source.value, self.kind.group).load()()
        return methods


def loaded(entry: EntryPoint, base: type[MethodT], reserved: Collection[str]) -> type[MethodT]:
    """The class that an entry point names. Raises as `Registry` does."""
    try:
        cls: type[MethodT] = entry.load()
    except Exception as error:  # a stranger's module may raise anything
        raise _refused(entry, f"{type(error).__name__}: {error}", base.kind) from error
    if problem := _problem(entry, cls, base, reserved):
        raise _refused(entry, problem, base.kind)
    return cls


def _problem(entry: EntryPoint, cls: Any, base: type[Method], reserved: Collection[str]) -> str:
    """Why an entry point's object cannot be a method of that name; "" if it can."""
    if not (isinstance(cls, type) and issubclass(cls, base)):
        return f"it is no subclass of {base.__module__}.{base.__qualname__}"
    if lacking := sorted(getattr(cls, "__abstractmethods__", ())):
        return f"its class lacks {', '.join(lacking)}"
    if (name := getattr(cls, "name", None)) != entry.name:
        return f"its class has the name {name!r}"
    return f"there is a {base.kind.noun} {name!r} already" if name in reserved else ""


def _refused(entry: EntryPoint, problem: str, kind: Kind) -> InvalidRequest:
    package = entry.dist.name if entry.dist is not None else "an unknown package"
    return InvalidRequest(
        f"the {kind.noun} {entry.name!r} of {package} ({entry.value}) cannot be used: {problem}; mend or uninstall it",
        param=kind.param,
    )


def info_of(cls: type[Method], **of_policy: Any) -> MethodInfo:
    """The `MethodInfo` of a class. of_policy: its fields that are of policies alone."""
    summary, *details = paragraphs(cls)
    parameters = parameters_of(cls)
    measured = measured_rows(cls.kind, cls.name)
    return MethodInfo(cls.name, summary, details, cls.advice, cls.source, parameters, measured, **of_policy)


def paragraphs(cls: type) -> list[str]:
    """The paragraphs of a class's docstring, each on one line."""
    return [" ".join(part.split()) for part in inspect.cleandoc(cls.__doc__ or "").split("\n\n")]


def parameters_of(cls: type) -> dict[str, ParameterInfo]:
    types = parameter_types(cls)
    return {
        f.name: ParameterInfo(
            type=" or ".join("null" if kind is type(None) else kind.__name__ for kind in types[f.name]),
            default=f.default,
            legal=legal_values(types[f.name], f.metadata),
            **{name: rule for name, rule in f.metadata.items() if name != "added"},
        )
        for f in parameter_fields(cls)
    }
