"""The methods of one kind by name: those of kvshelf, and those of other packages, which name their classes as entry
points of the groups `kvshelf.policies`, `kvshelf.selectors` and `kvshelf.suffixes`.

Entry points are used instead of a setting or a call, because they work alike in the front end, in replicas on every
machine that has the package, and in an engine in the caller's own process.
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
from kvshelf.methods.method import Kind, Method, parameter_fields, parameter_types
from kvshelf.methods.parameters import legal_values, unknown

MethodT = TypeVar("MethodT", bound=Method)


class Registry(dict[str, type[MethodT]]):
    """Classes by name, in the order in which they are listed. Methods of a source, as `press:criticalkv`, are not
    listed here, and found under their names."""

    def __init__(self, base: type[MethodT], taken: Collection[str] = ()) -> None:
        """base: what they derive from. taken: names that no method of another package may have.

        Raises `InvalidRequest` for a class that cannot be loaded, derives from another one, is abstract, or has a name
        that is taken.
        """
        self.kind: Kind = base.kind
        own = (EntryPoint(name, value, self.kind.group) for name, value in BUNDLED[self.kind.folder].items())
        super().__init__()
        for entry in (*own, *entry_points(group=self.kind.group)):
            former = {cls.formerly for cls in self.values()}
            self[entry.name] = loaded(entry, base, {*self, *former, *taken})

    def build(self, name: str, params: Mapping[str, Any]) -> MethodT:
        """The method of that name with these parameters. Raises `InvalidRequest` on an unknown name or parameter."""
        return self.find(name).build(params, self)

    def find(self, name: str) -> type[MethodT]:
        """The method of that name, or that once had it. Raises `InvalidRequest` on an unknown one, and where its source
        cannot be loaded."""
        prefix, _, own = name.partition(":")
        if name in self.keys():
            return self[name]
        if renamed := [cls for cls in self.values() if name and name == cls.formerly]:
            return renamed[0]
        if not own or prefix not in SOURCES.get(self.kind.folder, {}):
            raise unknown(self.kind.noun, name, self, self.kind.param)
        methods = self._sourced(prefix)
        if own not in methods:
            names = [f"{prefix}:{each}" for each in methods]
            raise unknown(self.kind.noun, name, names, self.kind.param)
        return methods[own]

    def sourced(self) -> Iterator[type[MethodT]]:
        """The methods of all sources whose packages are installed and can be loaded."""
        for prefix, source in SOURCES.get(self.kind.folder, {}).items():
            if find_spec(source.package) is not None:
                with suppress(InvalidRequest):  # whoever asks for one of them hears why
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


def loaded(entry: EntryPoint, base: type[MethodT], taken: Collection[str]) -> type[MethodT]:
    """The class that an entry point names. Raises as `Registry` does."""
    try:
        cls = entry.load()
    except Exception as error:  # a stranger's module may raise anything
        raise _refused(entry, f"{type(error).__name__}: {error}", base.kind) from error
    problem = _problem(entry, cls, base)
    if not problem and cls.name in taken:
        problem = f"there is a {base.kind.noun} {cls.name!r} already"
    if problem:
        raise _refused(entry, problem, base.kind)
    found: type[MethodT] = cls
    return found


def _problem(entry: EntryPoint, cls: Any, base: type) -> str:
    """Why what an entry point names is no class of its group; "" if it is one."""
    if not (isinstance(cls, type) and issubclass(cls, base)):
        return f"it is no subclass of {base.__module__}.{base.__qualname__}"
    if lacking := sorted(getattr(cls, "__abstractmethods__", ())):
        return f"its class lacks {', '.join(lacking)}"
    name = getattr(cls, "name", None)
    return "" if name == entry.name else f"its class has the name {name!r}"


def _refused(entry: EntryPoint, problem: str, kind: Kind) -> InvalidRequest:
    package = entry.dist.name if entry.dist is not None else "an unknown package"
    return InvalidRequest(
        f"the {kind.noun} {entry.name!r} of {package} ({entry.value}) cannot be used: {problem}; mend or uninstall it",
        param=kind.param,
    )


def info_of(cls: type[Method], **of_policy: Any) -> MethodInfo:
    """A method with its parameters, ranges and source, from its class. of_policy: what `MethodInfo` has of policies
    alone."""
    summary, *details = paragraphs(cls)
    parameters = parameters_of(cls)
    measured = measured_rows(cls.kind, cls.name)
    return MethodInfo(cls.name, summary, details, cls.advice, cls.source, parameters, measured, **of_policy)


def paragraphs(cls: type) -> list[str]:
    """The paragraphs of a class's docstring, each on one line."""
    return [" ".join(part.split()) for part in inspect.cleandoc(cls.__doc__ or "").split("\n\n")]


def parameters_of(cls: type) -> dict[str, ParameterInfo]:
    """The parameters of a method."""
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
