"""Commands whose options are made when they run: options that belong together are one parameter of the function.

A parameter that is a dataclass has the fields of the class as options. One with `FieldsOf` has those of a request of
the API, with their descriptions as help: a field that is added there is an option here. The models of the API are
imported by the command that is called alone, so that `kvshelf --help` starts as fast as without them.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, is_dataclass
from functools import cached_property
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import typer
from typer.core import TyperCommand

from kvshelf.cli.output import common

Form = Callable[..., Any]
"""How a field is written on the command line: a function of options that returns its value, or None."""


@dataclass(frozen=True)
class FieldsOf:
    """The fields of a request as options, for `Annotated[dict[str, Any], FieldsOf(...)]`: the value of each, None where
    it is not given.

    model: of `kvshelf.api`. only: these fields; None: all but those `without`. forms: of the fields that are not
    written as they are. help_texts: help that takes the place of a description, by field.
    """

    model: str
    forms: Mapping[str, Form]
    only: tuple[str, ...] | None = None
    without: frozenset[str] = frozenset()
    help_texts: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def by_field(self) -> dict[str, Form]:
        from kvshelf import api

        fields = getattr(api, self.model).model_fields
        names = [name for name in self.only or fields if name not in self.without]
        return {name: self.forms.get(name) or _plain(name, fields[name], self.help_texts.get(name)) for name in names}

    def parameters(self) -> Iterator[inspect.Parameter]:
        for form in self.by_field.values():
            yield from parameters(form)

    def values(self, options: Mapping[str, Any]) -> dict[str, Any]:
        return {name: called(form, options) for name, form in self.by_field.items()}


def parameters(function: Form) -> Iterator[inspect.Parameter]:
    """Those of a function as the command line has them: of groups their options."""
    for parameter in _typed_parameters(function):
        group = _group(parameter.annotation)
        if isinstance(group, FieldsOf):
            yield from group.parameters()
        elif group is not None:
            yield from parameters(group)
        else:
            yield parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)


def called(function: Form, options: Mapping[str, Any]) -> Any:
    """What a function returns for these options, by name, once those of its groups are put together."""
    arguments = {}
    for parameter in _typed_parameters(function):
        name, group = parameter.name, _group(parameter.annotation)
        if isinstance(group, FieldsOf):
            arguments[name] = group.values(options)
        else:
            arguments[name] = options[name] if group is None else called(group, options)
    return function(**arguments)


def _typed_parameters(function: Form) -> Iterator[inspect.Parameter]:
    """The parameters of a function or a dataclass, with their types."""
    if not is_dataclass(function):
        return iter(inspect.signature(function, eval_str=True).parameters.values())
    types = get_type_hints(function, include_extras=True)  # each base in its own module
    return (
        parameter.replace(annotation=types[parameter.name])
        for parameter in inspect.signature(function).parameters.values()
    )


def _group(annotation: Any) -> Any:
    if is_dataclass(annotation):
        return annotation
    return next((note for note in getattr(annotation, "__metadata__", ()) if isinstance(note, FieldsOf)), None)


def _plain(name: str, about: Any, help: str | None) -> Form:
    """The form of a field that is a number or a text, or several texts."""
    kind, several = _kind(about.annotation)
    option = name.removesuffix("s") if several else name
    text = _sentence(help or about.description or "") + (" May be repeated." if several else "")
    if help is None and "default: " not in text and type(about.default) in (int, float, str) and about.default != "":
        text += f"  [default: {about.default}]"
    metavar = "|".join(get_args(kind)) if get_origin(kind) is Literal else None
    written = typer.Option(f"--{option.replace('_', '-')}", help=text, metavar=metavar)
    typed: Any = list[kind] if several else str if metavar else kind  # type: ignore[valid-type]
    if kind is bool:
        return one(option, Annotated[bool, written], lambda flag: flag or None, default=False)
    return one(option, Annotated[typed | None, written])


def one(option: str, kind: Any, parse: Callable[[Any], Any] = lambda value: value, *, default: Any = None) -> Form:
    """The form of a field that is written as one option. kind: its annotation. parse: gives the field's value."""
    parameter = inspect.Parameter(option, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)

    def form(**options: Any) -> Any:
        return parse(options[option])

    form.__signature__ = inspect.Signature([parameter])  # type: ignore[attr-defined]
    return form


def _kind(annotation: Any) -> tuple[Any, bool]:
    """The type of a field's values, and whether there may be several."""
    if get_origin(annotation) is Annotated:
        return _kind(get_args(annotation)[0])
    if get_origin(annotation) in (Union, UnionType):
        kinds = [_kind(member) for member in get_args(annotation) if member is not type(None)]
        return next((kind for kind in kinds if kind[1]), kinds[0])
    if get_origin(annotation) is list:
        return _kind(get_args(annotation)[0])[0], True
    return annotation, False


def _sentence(description: str) -> str:
    """A description of the API as help: a sentence, with the default as typer writes it."""
    sentence, has_default, default = description.partition("default: ")
    sentence = re.sub(r"\b[a-z]+(?:_[a-z]+)+\b", lambda name: "--" + name[0].replace("_", "-"), sentence.rstrip("; "))
    if sentence:
        sentence = (sentence if re.match(r"\w+: ", sentence) else sentence[0].upper() + sentence[1:]) + "."
    return f"{sentence}  [default: {default}]" if has_default else sentence


class GroupedCommand(TyperCommand):
    """A command that `command` has registered: its options are made when it runs or shows its help."""

    @cached_property
    def _command(self) -> Any:
        function: Form = self._stub.function

        def run(**options: Any) -> Any:
            return self._run(function, options)

        run.__signature__ = inspect.Signature(list(parameters(function)))  # type: ignore[attr-defined]
        app = typer.Typer(add_completion=False, rich_markup_mode=None)
        app.command(self.name)(run)
        return typer.main.get_command(app)

    def _run(self, function: Form, options: Mapping[str, Any]) -> Any:
        return called(function, options)

    @property
    def params(self) -> Any:
        return self._command.params

    @params.setter
    def params(self, _: Any) -> None:
        """Those of the stub, which has none."""

    @property
    def callback(self) -> Any:
        return self._command.callback

    @callback.setter
    def callback(self, stub: Any) -> None:
        self._stub = stub


class Command(GroupedCommand):
    """One whose errors are said as its option --json wants them."""

    def _run(self, function: Form, options: Mapping[str, Any]) -> Any:
        with common.named_errors(as_json=options.get("as_json", False)):
            return super()._run(function, options)


def command(
    app: typer.Typer,
    function: Form,
    name: str | None = None,
    *,
    cls: type[GroupedCommand] = Command,
    **options: Any,
) -> None:
    """Register a command under its name, by default that of the function. options: of `Typer.command`."""

    def stub() -> None: ...

    stub.__name__, stub.__doc__, stub.function = function.__name__, function.__doc__, function  # type: ignore[attr-defined]
    app.command(name, cls=cls, **options)(stub)
