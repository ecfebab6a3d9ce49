"""Which fields of a request each command takes, and how people write those that are no number and no text: as a
duration, pairs, a file or several options."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import typer

from kvshelf.cli import _options
from kvshelf.cli._commands import FieldsOf, Form, one
from kvshelf.cli.output import common
from kvshelf.errors import InvalidRequest

Text = str | None
Texts = list[str] | None
_BY_THE_QUALITY = "How to measure the quality: by 150 cues, or by as many as take half the prefill's time at most."


def _levels(texts: Texts) -> list[float | dict[str, Any]] | None:
    """`0.5` as a compression ratio, and `0.5:int4` as a ratio and a codec."""
    sizes: list[float | dict[str, Any]] = []
    for text in texts or ():
        ratio, _, codec = text.partition(":")
        try:
            number = float(ratio)
        except ValueError:
            raise InvalidRequest(
                f"--level {text!r} is no compression ratio; write 0.5, or 0.5:int4 with a codec", param="--level"
            ) from None
        sizes.append({"compression_ratio": number, "codec": codec} if codec else number)
    return sizes or None


def _quality(
    quality: Annotated[Literal["full", "fast"] | None, typer.Option(help=_BY_THE_QUALITY)] = None,
    no_quality: Annotated[bool, typer.Option("--no-quality", help="Do not measure the quality of the cache.")] = False,
) -> Any:
    if quality is not None and no_quality:
        raise InvalidRequest("--quality says how to measure, and --no-quality not to; give one", param="--quality")
    return False if no_quality else quality


def _split(
    split: Annotated[
        bool,
        typer.Option("--split", help="Make one cache for each part of a document that is too long for the model."),
    ] = False,
    part_tokens: Annotated[
        int | None, typer.Option(help="With --split: most tokens of a part.  [default: 7/8 of what the model takes]")
    ] = None,
    overlap_tokens: Annotated[
        int | None, typer.Option(help="With --split: tokens that a part shares with the next.  [default: 128]")
    ] = None,
) -> Any:
    sizes = {"max_tokens": part_tokens, "overlap_tokens": overlap_tokens}
    options = {name: tokens for name, tokens in sizes.items() if tokens is not None}
    if options and not split:
        raise InvalidRequest("--part-tokens and --overlap-tokens say how to --split; add it", param="--split")
    return options or split


def _schema(
    schema: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The answer is JSON that fits the JSON schema in this file.")
    ] = None,
) -> Any:
    if schema is None:
        return None
    wrapped = {"name": "answer", "schema": _read(schema, json.loads, "--schema")}
    return {"type": "json_schema", "json_schema": wrapped}


def _read(file: Path, parse: Callable[[str], Any], option: str) -> Any:
    try:
        return parse(file.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise typer.BadParameter(f"cannot be read: {error}", param_hint=option) from error


def _select(
    select: Annotated[
        str | None, typer.Option(help="Read only what this selector chooses for the question; see `kvshelf selectors`.")
    ] = None,
    select_tokens: Annotated[int | None, typer.Option(min=1, help="Entries of a KV head to read at most.")] = None,
    select_param: Annotated[
        Texts, typer.Option(metavar="NAME=VALUE", help="A parameter of the selector. May be repeated.")
    ] = None,
    passages: Annotated[
        bool, typer.Option("--passages", help="With --select: print the passages that the answer read most.")
    ] = False,
) -> Any:
    if select is None and (select_tokens is not None or select_param or passages):
        raise typer.BadParameter(
            "--select-tokens, --select-param and --passages need a selector", param_hint="--select"
        )
    if select is None:
        return None
    params = common.parameters(select_param)
    return {"method": select, "tokens": select_tokens, "params": params, "passages": passages}


def _suffix(
    suffix: Annotated[
        str | None,
        typer.Option(help="Keep of question and answer what this suffix policy keeps; see `kvshelf suffixes`."),
    ] = None,
    suffix_scope: Annotated[
        Literal["suffix", "cache"] | None,
        typer.Option(help="cache: the document's entries may leave, too, for this answer."),
    ] = None,
    suffix_budget: Annotated[int | None, typer.Option(min=1, help="Entries of a KV head to keep of them.")] = None,
    suffix_param: Annotated[
        Texts, typer.Option(metavar="NAME=VALUE", help="A parameter of the suffix policy. May be repeated.")
    ] = None,
) -> Any:
    if suffix is None and (suffix_scope or suffix_budget is not None or suffix_param):
        raise typer.BadParameter(
            "--suffix-scope, --suffix-budget and --suffix-param need a suffix policy", param_hint="--suffix"
        )
    if suffix is None:
        return None
    params = common.parameters(suffix_param)
    scope = {"scope": suffix_scope} if suffix_scope else {}  # older services do not know it
    return {"policy": suffix, **scope, "budget": suffix_budget, "params": params}


def _at_step(text: str | None) -> Any:
    if text is None:
        return None
    id, colon, step = text.partition(":")
    if not (id and colon and step):
        raise typer.BadParameter(f"{text!r} names no step; write ID:STEP", param_hint="--workflow")
    return {"id": id, "step": step}


NEVER: Final = "never"
"""What an update is told for a time that there is not to be any more."""


def _or_never(text: str | None, option: str = "--ttl") -> Any:
    return text if text == NEVER else common.seconds(text, option)


def _option(
    name: str, kind: Any, help: str, parse: Callable[[Any], Any] = lambda value: value, *flags: str, **written: Any
) -> Form:
    """The form of a field that is written as one option of this type. flags: what a bool is written as."""
    default = False if kind is bool else None
    return one(name, Annotated[kind, typer.Option(*flags, help=help, **written)], parse, default=default)


_TEMPLATE: Final = _option(
    "chat_template_kwarg",
    Texts,
    "A variable of the model's chat template, such as reasoning_effort=low. May be repeated.",
    lambda texts: common.parameters(texts, "--chat-template-kwarg") or None,
    metavar="NAME=VALUE",
)


def _guarantee(read: Callable[[str | None, str], Any], help: str = "") -> Form:
    """From a time from now on."""
    about = f"Never evict it for so long, within the budget of promises: 15m, 2h, 7d.{help}"

    def until(text: str | None) -> Any:
        lasts_s = read(text, "--guarantee")
        return time.time() + lasts_s if isinstance(lasts_s, float) else lasts_s

    return _option("guarantee", Text, about, until)


_KEPT: Final[dict[str, Form]] = {
    "ttl_s": _option("ttl", Text, "Lifetime of the cache: 90s, 15m, 2h, 7d.", common.seconds),
    "ttl_renew": _option(
        "ttl_renew",
        bool,
        "With --ttl: each question prolongs the lifetime to --ttl from then.",
        lambda flag: flag or None,
        "--ttl-renew",
    ),
    "labels": one("label", _options.Labels, lambda texts: common.pairs(texts, "--label") or None),
}
_CREATION: Final[dict[str, Form]] = {
    **_KEPT,
    "levels": _option(
        "level",
        Texts,
        "A compression ratio, or 0.5:int4. Repeat it to make several caches from one prefill.",
        _levels,
        metavar="RATIO[:CODEC]",
    ),
    "quality": _quality,
    "policy_params": one("param", _options.Parameters, lambda texts: common.parameters(texts) or None),
    "chat_template_kwargs": _TEMPLATE,
    "keep_source": _option(
        "keep_source",
        Literal["text", "tokens"] | None,
        "Keep the document's text, or its token ids alone, to make a lost cache again.",
        {None: None, "text": True, "tokens": "tokens"}.__getitem__,
    ),
    "source_ttl_s": _option(
        "source_ttl",
        Text,
        "With --keep-source: lifetime of the source.  [default: until the cache is deleted]",
        lambda text: common.seconds(text, "--source-ttl"),
    ),
    "guaranteed_until": _guarantee(common.seconds),
    "split": _split,
    "episodes": _option(
        "episodes",
        int | None,
        "Take the document for a conversation, and make a cache for each of so many episodes.",
        lambda count: None if count is None else {"count": count},
        min=1,
    ),
}
_HELP_TEXTS: Final = {
    "policy": "a policy of `kvshelf policies`, or auto: it chooses policy, ratio and codec; default: full under codec "
    "int8; keydiff with a ratio, a budget, levels or parameters",
    "model": "one of the service's models; default: its first",
    "name": "display name; default: the file's name",
}
_DOCUMENT: Final = frozenset({"document", "images", "messages", "token_ids", "tokenizer", "expires_at"})

CREATION: Final = FieldsOf("CreateCache", _CREATION, without=_DOCUMENT, help_texts=_HELP_TEXTS)
"""How one document is compressed and kept."""

DEFAULTS: Final = FieldsOf("CacheOptions", _CREATION, without=_DOCUMENT | {"model", "adapter"}, help_texts=_HELP_TEXTS)
"""How all documents of a corpus are."""

COST: Final = FieldsOf(
    "Estimate",
    _CREATION,
    ("policy", "compression_ratio", "budget_tokens", "levels", "policy_params", "model", "adapter", "layout", "codec"),
    help_texts=_HELP_TEXTS
    | {
        "policy": "estimate only this policy; auto: the ones it would try; default: all",
        "codec": "estimate only this codec; default: all, without parameters",
    },
)
SIZE: Final = FieldsOf("CreateCache", {}, ("compression_ratio", "budget_tokens"))
APPENDED: Final = FieldsOf(
    "AppendCache",
    _CREATION,
    without=_DOCUMENT,
    help_texts={"policy": "a policy of `kvshelf policies`; default: that of CACHE", "name": _HELP_TEXTS["name"]},
)
IMPORTED: Final = FieldsOf(
    "ImportCache",
    _KEPT,
    without=_DOCUMENT,
    help_texts={"name": "display name; default: the exported one; for a blob alone, the file's"},
)
CHANGES: Final = FieldsOf(
    "UpdateCache",
    {
        **_KEPT,
        "ttl_s": _option("ttl", Text, "Lifetime from now on: 90s, 15m, 2h, 7d, or never.", _or_never),
        "labels": _option(
            "label",
            Texts,
            "Replaces all labels. May be repeated.",
            lambda texts: common.pairs(texts, "--label") if texts else None,
            metavar="KEY=VALUE",
        ),
        "pinned": one(
            "pin",
            Annotated[bool | None, typer.Option("--pin/--no-pin", help="Never evict it to make room on the shelf.")],
        ),
        "guaranteed_until": _guarantee(_or_never, " never takes it back."),
        "next_use_s": _option(
            "next_use",
            Text,
            "Time until its next question: 20s, 5m; the service has it in memory by then. never takes it back.",
            lambda text: _or_never(text, "--next-use"),
        ),
    },
    without=_DOCUMENT,
    help_texts={"name": "display name"},
)
WARMED: Final = FieldsOf("WarmCaches", _KEPT, without=frozenset({"cache_ids"}))
ERASED: Final = FieldsOf("CreateErasure", _KEPT)
LISTED: Final = FieldsOf("ListCaches", _KEPT, ("policy", "model", "document_id", "labels", "ended"))

QUESTION: Final = FieldsOf(
    "JointQuery",
    {
        "chat_template_kwargs": _TEMPLATE,
        "response_format": _schema,
        "grammar": _option(
            "grammar",
            Path | None,
            "The answer fits the grammar in this file, in Lark.",
            lambda file: None if file is None else _read(file, str, "--grammar"),
            metavar="FILE",
        ),
        "select": _select,
        "suffix": _suffix,
        "workflow": _option(
            "workflow",
            Text,
            "The step of a workflow (client.workflows keeps one) that this is: the service readies the next. Runs at "
            "the same time need a --program each.",
            _at_step,
            metavar="ID:STEP",
        ),
    },
    # `ask` gives the first three itself, and prints one text that nobody keeps
    without=frozenset({"prompt", "messages", "cache_ids", "stream", "n", "logprobs", "top_logprobs"})
    | {"store", "ttl_s", "ttl_renew"},
    help_texts={"route": "of several caches ask only the one or two that the question is about"},
)
"""How a question is answered."""
