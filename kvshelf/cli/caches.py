"""put, search, ask, ls, show, update, rm: commands that talk to a running service."""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import math
import re
import shlex
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from kvshelf.cli import _forms, _options, _references
from kvshelf.cli.output import common, say, say_json
from kvshelf.cli.output.common import connected
from kvshelf.cli.output.progress import Spent, put_shown
from kvshelf.errors import CacheNotFound, InvalidRequest, QueueFull, SourceNotKept, nearest
from kvshelf.names import as_text

if TYPE_CHECKING:
    from kvshelf.api import Answered, CacheObject, CertifiedBy, JointAnswer, SearchList
    from kvshelf.api.usage.prices import Prices
    from kvshelf.client import Client

_ONE_FILE = "UTF-8 text, PDF or HTML; - reads text from standard input."
Files = Annotated[list[Path], typer.Argument(metavar="FILE...", help=_ONE_FILE)]
STDIN = Path("-")

_PAGES_BYTES = 64 << 20
"""Of the images of a document in base64: a service takes no more by default."""

_CACHE = "An id (kvs_...), the beginning of one as `kvshelf ls` shows it, or the name of a cache."
_SEVERAL = "Several, with commas between them, are asked together. Left out with --label and --all."
Cache = Annotated[str, typer.Argument(metavar="CACHE", help=_CACHE)]


Images = Annotated[
    list[Path],
    typer.Option(
        "--image",
        metavar="FILE",
        help="A PNG or JPEG behind the text, for Idefics 3 and SmolVLM. May be repeated; every FILE gets all.",
    ),
]
AsImages = Annotated[bool, typer.Option("--pages-as-images", help="Take FILE, a PDF, as images of its pages.")]
Dots = Annotated[
    int | None, typer.Option(min=20, max=600, help="With --pages-as-images: dots an inch.  [default: 150]")
]


def put(
    files: Files,
    fields: Annotated[dict[str, Any], _forms.CREATION],
    image: Images = [],  # noqa: B006 - typer's form of an option that may be given several times
    pages_as_images: AsImages = False,
    dpi: Dots = None,
    url: _options.Url = None,
    as_json: _options.AsJson = False,
) -> None:
    """Compress documents and put them on the shelf. Prints one cache id per file, or one per level, part or episode.

    A document that is already on the shelf, compressed in the same way, costs nothing. If one file fails, the others
    still run; the exit code is that of the first failure.
    """
    failures, name = common.Failures(as_json=as_json), fields["name"]
    if pages_as_images and image:
        raise InvalidRequest("--image stands behind a text, and --pages-as-images has none; give one", param="--image")
    if dpi is not None and not pages_as_images:
        raise InvalidRequest("--dpi is of --pages-as-images, which is not given", param="--dpi")
    with connected(url) as client:
        for file in files:
            with failures.reported(of=_named(file)):
                creation = fields | {"name": name or ("" if file == STDIN else as_text(file.name))}
                _put_one(
                    client,
                    file,
                    creation | (_pages(file, dpi or 150) if pages_as_images else _with_images(file, image)),
                    as_json,
                )
    raise typer.Exit(failures.exit_code)


def append(
    cache: Cache,
    file: Annotated[Path, typer.Argument(metavar="FILE", help=_ONE_FILE)],
    fields: Annotated[dict[str, Any], _forms.APPENDED],
    url: _options.Url = None,
    as_json: _options.AsJson = False,
) -> None:
    """Read a file behind the document of a cache, and put the cache of both on the shelf. Prints its id.

    The text goes on where the document ends, just as it is. Only the file goes through the model, and only what is new
    takes space; CACHE stays as it is. Policy, ratio and budget are of the file alone, by default those of CACHE; the
    new cache expires with CACHE unless --ttl says otherwise.
    """
    document = {"document": common.standard_input()} if file == STDIN else {"file": file}
    with connected(url) as client:
        appended = client.caches.append(_references.id_at(client, cache), **document, **fields)
        if as_json:
            say_json(appended)
            return
        say(appended.id)
        _tell(_named(file), appended, "already on the shelf" if appended.existing else _seconds(appended))


def _named(file: Path) -> str:
    return "standard input" if file == STDIN else as_text(file)


def _with_images(file: Path, images: Sequence[Path]) -> dict[str, Any]:
    """The fields of a document with images behind its text; none without."""
    if not images:
        return {}
    text = common.standard_input() if file == STDIN else _text_of(file)
    files = [base64.b64encode(_read(image)).decode() for image in images]
    return {"document": text, "images": [{"at": len(text), "data": data} for data in files]}


def _pages(file: Path, dots: int) -> dict[str, Any]:
    """The fields of a document that is the pages of a PDF."""
    from kvshelf.corpus.input.extract import ExtractLimits, page_images

    if file == STDIN:
        raise InvalidRequest("--pages-as-images is of a file; name it in place of -", param="file")
    limits = ExtractLimits(_PAGES_BYTES, extract_memory_bytes=1 << 30, extract_cpu_s=60.0)
    pages = asyncio.run(page_images(_read(file), limits, as_text(file), dots))
    return {"document": [{"type": "image", "data": page} for page in pages]}


def _text_of(file: Path) -> str:
    from kvshelf.client._calls import MEDIA_TYPES
    from kvshelf.corpus.input.extract import Upload, plain_text

    data = _read(file)
    if (kind := Upload(data, MEDIA_TYPES.get(file.suffix.lower(), "")).kind) != "text":
        raise InvalidRequest(
            f"{as_text(file)} is {kind.upper()}, and --image stands behind UTF-8 text; give its text, or put it alone",
            param="file",
        )
    return plain_text(data, as_text(file), "file")


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise InvalidRequest(f"cannot read {as_text(path)}: {error.strerror}", param="file") from error


def _put_one(client: Client, file: Path, fields: Mapping[str, Any], as_json: bool) -> None:
    from kvshelf.api import CreationProgress

    document: dict[str, Any] = {}
    if "document" not in fields:
        document = {"document": common.standard_input()} if file == STDIN else {"file": file}
    result: CacheObject | list[CacheObject] = []
    watched: Any = {**document, **fields}
    spent = Spent()
    with put_shown(_named(file)) as show:
        for event in client.caches.create_events(**watched):
            if isinstance(event, CreationProgress):
                show(event)
                spent.add(event)
            else:
                result = event
    caches = result if isinstance(result, list) else [result]
    for cache in caches:
        if as_json:
            say_json(cache)
        else:
            say(cache.id)
            done = "already on the shelf" if cache.existing else spent.describe(_number(cache)) or _seconds(cache)
            if len(caches) > 1 and not cache.existing and _number(cache) is None:
                done = f"all together {done}"
            _tell(f"{_named(file)}{_part(cache)}", cache, done)
    if fields["split"] and not as_json:
        label = shlex.quote(f"document={caches[0].labels['document']}")
        common.notes.print(f'ask all parts: kvshelf ask --label {label} "QUESTION"', style="dim", soft_wrap=True)
    if len(caches) > 1 and fields["episodes"] and not as_json:
        ids = ",".join(_references.shortened([cache.id for cache in caches]))
        hint = f'ask the nearest: kvshelf ask {ids} --route nearest "QUESTION"'
        common.notes.print(hint, style="dim", soft_wrap=True)


def _tell(what: str, cache: CacheObject, done: str) -> None:
    """done: what it took."""
    agreement = "" if cache.quality is None else f", agreement {cache.quality.text}"
    common.notes.print(
        f"{what}: {cache.tokens.document} tokens, {cache.tokens.kept} kept by {cache.policy}, "
        f"{common.megabytes(cache.bytes.stored)} ({cache.entries_text}, {cache.bytes.share:.1%} of the full cache in "
        f"16 bits){agreement}, {done}",
        style="dim",
        soft_wrap=True,
    )
    for warning in cache.warnings:
        common.notes.print(f"{what}: {warning}", style="yellow", soft_wrap=True)


def _part(cache: CacheObject) -> str:
    number = _number(cache)
    return "" if number is None else f" {'part' if _is_part(cache) else 'episode'} {number}"


def _number(cache: CacheObject) -> str | None:
    """Which part or episode of its document a cache is."""
    if cache.policy == "epicache" and "episode" in cache.labels:
        return cache.labels["episode"]
    return cache.labels["part"] if _is_part(cache) else None


def _is_part(cache: CacheObject) -> bool:
    """Whether a cache is one of a split document, and not one to which somebody gave a label of that name."""
    return "split" in cache.labels and re.fullmatch(r"[1-9]\d*/[1-9]\d*", cache.labels.get("part", "")) is not None


def _seconds(cache: CacheObject) -> str:
    spent = cache.timings
    quality = "" if cache.quality is None else f"quality {cache.quality.probe_s:.2f} s, "
    return f"prefill {spent.prefill_s:.2f} s, policy {spent.compress_s:.2f} s, {quality}store {spent.store_s:.2f} s"


def search(
    question: Annotated[str, typer.Argument(metavar="QUESTION")],
    label: _options.Labels = None,
    model: _options.ServiceModel = None,
    limit: Annotated[int, typer.Option(min=1, max=64, help="Most documents to name.")] = 5,
    url: _options.Url = None,
    as_json: _options.AsJson = False,
) -> None:
    """Name the documents on the shelf that hold most of a question's words, the best first; --label narrows to some.

    `kvshelf ask --all` asks them.
    """
    with connected(url) as client:
        hits = client.caches.search(question, labels=common.pairs(label, "--label"), model=model, limit=limit)
        if as_json:
            say_json(hits)
            return
        rows = [(f"{hit.score:.3f}", hit.cache_id, hit.name) for hit in hits.data]
        common.print_table(common.table(["SCORE", "ID", "NAME"], rows, numbers=[0]), cut="NAME")
        common.notes.print(_searched(hits), style="dim")


def _searched(hits: SearchList) -> str:
    left_out = ", ".join(f"{count} {why.replace('_', ' ')}" for why, count in hits.skipped if count)
    return f"{hits.searched} documents searched" + (f"; caches left out: {left_out}" if left_out else "")


@dataclass(frozen=True)
class Searched:
    """Which caches are asked, where none is named."""

    label: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=VALUE",
            help="Ask all parts of the document that `put --split` gave this label. With --all: search these caches.",
        ),
    ] = None
    search_all: Annotated[
        bool, typer.Option("--all", help="Search the shelf for each question, and ask the best documents together.")
    ] = False
    best: Annotated[int, typer.Option(min=1, max=64, help="With --all: how many documents to ask.")] = 4

    @property
    def any(self) -> bool:
        return bool(self.label or self.search_all)


def ask(
    cache: Annotated[str, typer.Argument(metavar="CACHE[,CACHE...]", help=f"{_CACHE} {_SEVERAL}")],
    questions: Annotated[list[str] | None, typer.Argument(metavar="QUESTION...")] = None,
    *,
    fields: Annotated[dict[str, Any], _forms.QUESTION],
    of_shelf: Searched,
    show_prompt: Annotated[
        bool,
        typer.Option(
            "--show-prompt", help="Answer nothing: print the prompt that each question builds, by its tokens."
        ),
    ] = False,
    url: _options.Url = None,
    as_json: _options.AsJson = False,
) -> None:
    """Ask a stored document one or several independent questions. The document is not prefilled again.

    Of several documents (CACHE,CACHE) each question sees all, or with --route one or two, and a table says what part
    each had in its answer. With --label the questions go to each part of a document in turn, and each answer names
    its part.
    With --all each question goes to the documents of the shelf that hold most of its words (see `kvshelf search`).
    """
    if fields["route"] is not None and not of_shelf.search_all and (of_shelf.any or "," not in cache):
        raise typer.BadParameter("it chooses among several caches: give CACHE,CACHE or --all", param_hint="--route")
    texts = [cache, *(questions or ())] if of_shelf.any else questions or []
    if not texts:
        raise typer.BadParameter("a question is missing", param_hint="QUESTION...")
    if show_prompt and of_shelf.any:
        raise typer.BadParameter("it shows the prompt of one cache: give CACHE", param_hint="--show-prompt")
    with connected(url) as client:
        labels = common.pairs(of_shelf.label, "--label")
        if labels and not of_shelf.search_all:
            _ask_parts(client, _parts(client, labels), texts, fields, as_json)
            return
        named = [] if of_shelf.search_all else _references.ids_at(client, cache)
        for question in texts:
            if len(texts) > 1 and not as_json:
                common.heading(question)
            if show_prompt:
                _show_prompt(client, _references.id_at(client, cache), question, as_json)
                continue
            of = _best(client, question, labels, of_shelf.best) if of_shelf.search_all else named
            _ask_together(client, of, question, fields if len(of) > 1 else {**fields, "route": None}, as_json)


Named = tuple[str, str]
"""A cache as the output names it, and its id."""


def _best(client: Client, question: str, labels: Mapping[str, str] | None, most: int) -> list[Named]:
    """The caches that a search names. Raises `CacheNotFound` if it names none."""
    hits = client.caches.search(question, labels=labels, limit=most)
    if not hits.data:
        raise CacheNotFound(f"there is no document to ask: {_searched(hits)}; `kvshelf put` puts some on the shelf")
    ids = _references.shortened([hit.cache_id for hit in hits.data])
    return [(f"{id} {hit.name}".rstrip(), hit.cache_id) for id, hit in zip(ids, hits.data, strict=True)]


def _ask_together(client: Client, named: Sequence[Named], question: str, fields: Any, as_json: bool) -> None:
    """Ask one cache, or several together, and show the answer; of several, also what part each had in it."""
    ids: Any = [id for _, id in named] if len(named) > 1 else named[0][1]
    if as_json:
        say_json(client.caches.query(ids, question, **fields))
        return
    with client.caches.stream(ids, question, **fields) as stream:
        if sys.stdout.isatty():
            for text in stream:
                say(text, end="")
            say()
        else:  # in one piece: a log may be fed by other lines meanwhile
            say("".join(stream))
    if len(named) > 1:
        common.print_table(_sources([reference for reference, _ in named], stream.answer), cut="SOURCE")
    if stream.answer.passages is not None:
        references = {id: reference for reference, id in named} if len(named) > 1 else None
        _print_passages(client, stream.answer, references)
    common.notes.print(_cost(stream.answer), style="dim", soft_wrap=True)


_SHOWN = 24
"""Tokens that are shown of the beginning and of the end of a part of a prompt; --json has all."""


def _show_prompt(client: Client, cache_id: str, question: str, as_json: bool) -> None:
    prompt = client.caches.prompt(cache_id, question)
    if as_json:
        say_json(prompt)
        return
    for part in prompt.parts:
        where = "from the shelf" if part.from_shelf else "prefilled"
        say(f"{part.part}, {part.num_tokens} tokens, {where}:")
        texts = [json.dumps(text, ensure_ascii=False) for text in part.texts]
        if len(texts) > 2 * _SHOWN:
            texts = [*texts[:_SHOWN], f"... {len(texts) - 2 * _SHOWN} more ...", *texts[-_SHOWN:]]
        say("  " + (" ".join(texts) or "(not known here: `kvshelf put --keep-source text` keeps it)"))


def _sources(references: Sequence[str], answer: JointAnswer) -> Table:
    """The shares of a joint answer, the largest first, each with the reference by which its cache was asked."""
    shares = sorted(zip(references, answer.sources, strict=True), key=lambda pair: -pair[1].share)
    rows = [(reference, f"{source.share:.1%}") for reference, source in shares]
    return common.table(["SOURCE", "SHARE"], rows, numbers=[1])


_PASSAGES = 5
"""Most read passages that are printed of an answer."""


def _print_passages(client: Client, answer: Answered, references: Mapping[str, str] | None = None) -> None:
    """Print the passages that an answer read most. references: of several documents, by cache id."""
    every = ((read.cache_id, run) for read in answer.passages or () for run in read.most_read(_PASSAGES))
    best = sorted(every, key=lambda pair: -pair[1].share)[:_PASSAGES]
    tokens = {cache_id: _tokens(client, cache_id) for cache_id in {cache_id for cache_id, _ in best}}
    columns = {
        "SOURCE": [references[cache_id] for cache_id, _ in best] if references else [],
        "TOKENS": [f"{run.first}-{run.end - 1}" for _, run in best],
        "READ": [f"{run.share:.0%}" for _, run in best],
        "TEXT": [" ".join("".join(tokens[cache_id][run.first : run.end]).split()) for cache_id, run in best],
    }
    filled = {heading: cells for heading, cells in columns.items() if any(cells)}
    if best:
        common.print_table(common.table(list(filled), zip(*filled.values(), strict=True)), cut="TEXT")


def _tokens(client: Client, cache_id: str) -> list[str]:
    """The text of each token of a document; none where its source is not kept."""
    try:
        return client.caches.kept(cache_id).tokens
    except SourceNotKept:
        return []


def _cost(answer: Answered) -> str:
    usage = answer.usage
    ran = usage.prefill_tokens + usage.completion_tokens - 1  # the last token never runs
    bounded = usage.suffix_tokens is not None and usage.suffix_tokens < ran
    text = (
        f"{usage.cache_read_tokens} tokens from the shelf (loaded in {answer.load_ms:.1f} ms), "
        f"{usage.read_tokens} entries read, {usage.prefill_tokens} prefilled, {usage.completion_tokens} generated"
    )
    text += f", {usage.suffix_tokens} entries of these kept" if bounded else ""
    if answer.finish_reason == "length":
        text = f"cut off after {usage.completion_tokens} tokens (--max-tokens allows more); {text}"
    cost, saved = usage.prefill_token_equivalents, usage.prefill_token_equivalents_saved
    if cost is None or saved is None:
        return text
    return f"{text}; as much work as {cost:,.0f} tokens of a prefill, and {cost + saved:,.0f} without the shelf"


def _ask_parts(
    client: Client, parts: Sequence[CacheObject], questions: Sequence[str], fields: Any, as_json: bool
) -> None:
    for question in questions:
        if len(questions) > 1 and not as_json:
            common.heading(question)
        for cache in parts:
            answer = client.caches.query(cache.id, question, **fields)
            if as_json:
                say_json({"part": cache.labels["part"], **answer.model_dump(mode="json")})
            else:
                say(f"part {cache.labels['part']}: {answer.text}")
                if answer.passages is not None:
                    _print_passages(client, answer)
                common.notes.print(f"{cache.id}: {_cost(answer)}", style="dim", soft_wrap=True)


def _parts(client: Client, labels: Mapping[str, str]) -> list[CacheObject]:
    """All parts of the one split document with these labels, in order.

    Raises `CacheNotFound` if there is none or a part is missing, and `InvalidRequest` for labels that others have too.
    """
    label = ", ".join(f"{key}={value}" for key, value in labels.items())
    splits: dict[str, dict[str, CacheObject]] = {}
    for cache in client.caches.list(labels=labels, limit=1000):
        if not _is_part(cache):
            raise InvalidRequest(
                f"{cache.id} has the label {label} and is no part of a split document; ask it by its id, or add "
                "--label split=... of the document that is meant",
                param="--label",
            )
        splits.setdefault(cache.labels["split"], {})[cache.labels["part"]] = cache
    if not splits:
        raise CacheNotFound(
            f"no cache has the label {label}; `kvshelf put --split FILE` labels the parts of a document"
        )
    whole = {split: _ordered(parts) for split, parts in splits.items()}
    complete = [parts for parts in whole.values() if parts is not None]
    if len(complete) > 1:
        raise InvalidRequest(
            f"{len(complete)} documents have the label {label}; add one of "
            + ", ".join(f"--label split={parts[0].labels['split']} ({_describe(parts[0])})" for parts in complete),
            param="--label",
        )
    if not complete:
        have = ", ".join(f"{', '.join(sorted(parts))} of split {split}" for split, parts in splits.items())
        raise CacheNotFound(
            f"the document with the label {label} lacks parts: there is {have}. They expired, were removed, or "
            "belong to a newer version of the document. Put it again; the parts that are there cost nothing"
        )
    return complete[0]


def _ordered(parts: Mapping[str, CacheObject]) -> list[CacheObject] | None:
    """The parts from the first to the last; None if one is missing."""
    count = next(iter(parts)).partition("/")[2]
    names = [f"{number}/{count}" for number in range(1, int(count) + 1)]
    return [parts[name] for name in names] if set(names) == set(parts) else None


def _describe(part: CacheObject) -> str:
    when = common.local_time(part.created_at, "minutes")
    return f"{part.name or 'without a name'}, {part.policy}, {part.compression_ratio:.0%} removed, made {when}"


def ls(
    filters: Annotated[dict[str, Any], _forms.LISTED],
    limit: Annotated[int, typer.Option(min=1, help="How many to list, newest first.")] = 100,
    wide: Annotated[bool, typer.Option("--wide", help="Show all columns.")] = False,
    columns: Annotated[str | None, typer.Option(help="Show these columns, such as id,age,name.")] = None,
    url: _options.Url = None,
    as_json: _options.AsJson = False,
) -> None:
    """List the caches on the shelf, with ids as short as `ask`, `show`, `rm` and `export` take them.

    With --json ids are whole. Columns: id, policy, kept, of, size, quality, interval, age, expiry, uses, codec, model,
    name; the model by default where there are several.
    """
    with connected(url) as client:
        chosen = _columns(columns, wide)
        listing = client.caches.list(**filters, limit=min(limit, 1000))
        caches = itertools.islice(listing, limit)
        if as_json:
            for cache in caches:
                say_json(cache)
        else:
            listed = list(caches)
            shown = chosen or narrow_columns(
                {*(cache.model for cache in listed), *(model.id for model in client.models.list())}
            )
            common.print_table(_table(listed, shown), cut="NAME")


_CELLS: dict[str, Callable[[CacheObject], str]] = {
    "id": lambda cache: cache.id,  # shortened where all of them are known
    "policy": lambda cache: cache.policy,
    "kept": lambda cache: str(cache.tokens.kept),
    "of": lambda cache: str(cache.tokens.document),
    "size": lambda cache: common.megabytes(cache.bytes.stored),
    "quality": lambda cache: (
        "-" if cache.quality is None or cache.quality.agreement is None else f"{cache.quality.agreement:.3f}"
    ),
    "interval": lambda cache: "-" if cache.quality is None else cache.quality.interval,
    "age": lambda cache: common.duration(time.time() - cache.created_at),
    "expiry": lambda cache: "never" if cache.expires_at is None else common.duration(cache.expires_at - time.time()),
    "uses": lambda cache: str(cache.uses),
    "codec": lambda cache: cache.codec if cache.recoded is None else f"{cache.codec} (was {cache.recoded.codec})",
    "model": lambda cache: cache.model,
    "name": lambda cache: cache.name,
}
_NARROW = ("id", "policy", "kept", "of", "size", "quality")
_NUMBERS = {"kept", "of", "size", "quality", "age", "expiry", "uses"}


def narrow_columns(models: Collection[str]) -> Sequence[str]:
    """The columns that are shown by default. models: that are served, and those of the caches."""
    return (*_NARROW, *(("model",) if len(models) > 1 else ()), "name")


def _columns(columns: str | None, wide: bool) -> Sequence[str] | None:
    if columns is None:
        return tuple(_CELLS) if wide else None
    if wide:
        raise InvalidRequest("--wide shows all columns and --columns some; give one of them", param="--columns")
    names = [name.strip().lower() for name in columns.split(",")]
    for name in names:
        if name not in _CELLS:
            raise InvalidRequest(
                f"--columns has no {name!r}{nearest(name, _CELLS)}; it takes {', '.join(_CELLS)}", param="--columns"
            )
    return names


def _table(caches: Sequence[CacheObject], columns: Sequence[str]) -> Table:
    shown = {name: [_CELLS[name](cache) for cache in caches] for name in _CELLS}
    shown["id"] = _references.shortened(shown["id"])
    numbers = [place for place, name in enumerate(columns) if name in _NUMBERS]
    rows = zip(*(shown[name] for name in columns), strict=True)
    return common.table([name.upper() for name in columns], rows, numbers=numbers)


def show(
    cache: Cache,
    output: Annotated[Path | None, typer.Option(help="Also write the blob of the cache to this file.")] = None,
    prices: _options.Prices = None,
    url: _options.Url = None,
    as_json: _options.AsJson = False,
) -> None:
    """Show one cache. With --output, also fetch it for `CompressedCache.from_bytes` in your own program.

    "pays back": after how many questions it has saved what making it took; with --prices also what keeping it costs.
    """
    from kvshelf.api.usage.prices import read_prices

    with connected(url) as client:
        money = None if prices is None else read_prices(prices)
        stored = client.caches.retrieve(_references.id_at(client, cache))
        if output is not None:
            blob = client.caches.download(stored.id)
            with common.written(output) as file:
                file.write(blob)
        if as_json:
            say_json(stored)
        else:
            common.table_console().print(_details(stored, money))


def _details(cache: CacheObject, prices: Prices | None) -> Table:
    when = partial(common.local_time, timespec="seconds")
    used = ", ".join(f"{name}={value}" for name, value in cache.policy_params.items())
    renewed = "" if cache.ttl_s is None else f", {common.duration(cache.ttl_s)} after each question"
    until = cache.guaranteed_until
    promised = "" if until is None else f", not evicted before {when(until)}"
    rows = {
        "id": cache.id,
        "document": cache.document_id,
        **({"appended to": cache.parent_id} if cache.parent_id else {}),
        "name": cache.name or "-",
        "model": f"{cache.model} ({cache.layout})",
        **({"date told": cache.date} if cache.date else {}),
        **(
            {"template told": json.dumps(variables, ensure_ascii=False)}
            if (variables := cache.chat_template_kwargs)
            else {}
        ),
        "policy": f"{cache.policy}{f' ({used})' if used else ''}, {cache.compression_ratio:.0%} removed",
        "tokens": f"{cache.tokens.document}, of which {cache.tokens.kept} kept per layer and head"
        + (f", {cache.tokens.protected} of them protected" if cache.tokens.protected else ""),
        "codec": cache.codec
        + (f", made under {cache.recoded.codec}, coded last {when(cache.recoded.at)}" if cache.recoded else ""),
        "size": f"{cache.bytes.describe(common.megabytes)}; {cache.entries_text}",
        "quality": _quality(cache),
        **({"certificate": _certificate(cache.certificate)} if cache.certificate else {}),
        **({"warning": "; ".join(cache.warnings)} if cache.warnings else {}),
        "labels": ", ".join(f"{key}={value}" for key, value in cache.labels.items()) or "-",
        "created": when(cache.created_at),
        "last used": when(cache.last_used_at),
        "expires": when(cache.expires_at) + renewed + (", never evicted: pinned" if cache.pinned else promised),
        "source": _source(cache),
        **({"pays back": _break_even(cache, prices)} if cache.timings.prefill_s else {}),
    }
    return common.details(rows)


def _certificate(by: CertifiedBy) -> str:
    return f"{by.name} (at most {by.alpha:g} of the answers lost, digest {by.digest[:16]})"


def _break_even(cache: CacheObject, prices: Prices | None) -> str:
    """After how many questions the cache has paid: in the model's seconds, or in money over the life it has."""
    from kvshelf.api.usage.prices import DAY_S, made_s, worth

    uses = f"{cache.uses} asked so far"
    if prices is None:
        least = math.ceil(made_s(cache) / cache.timings.prefill_s)
        return f"after {least} questions ({uses}), in seconds of the model"
    one = worth(cache, prices)
    days = 0.0 if cache.expires_at is None else (cache.expires_at - cache.created_at) / DAY_S
    least_paid = one.answers(days)
    if least_paid is None:
        return f"never: a question saves nothing by these prices ({uses})"
    idle = "" if math.isinf(one.most_idle_days) else f"; keep it while it is asked every {one.most_idle_days:,.1f} days"
    costs = f"made for {one.made:.2g} {prices.currency}, kept for {one.a_day:.2g} a day, saves {one.an_answer:.2g} each"
    return f"after {least_paid} questions ({uses}): {costs}{idle}"


def _source(cache: CacheObject) -> str:
    if cache.source is None:
        return "-"
    until = common.local_time(cache.source.expires_at, timespec="seconds")
    return f"{cache.source.form} kept, {common.megabytes(cache.source.bytes)}; expires: {until}"


def _quality(cache: CacheObject) -> str:
    figure = cache.quality
    if figure is None:
        return "not measured"
    chosen = f"; chosen among {len(cache.tried)}" if cache.tried else ""
    worst = figure.worst
    if worst is None:
        return f"{figure.text}{chosen}" if figure.agreement is not None else f"no figure: {figure.reason}{chosen}"
    if not figure.cues:
        return f"the full cache{chosen}"
    return (
        f"agreement {figure.text} with the full cache on {figure.cues} cues, lowest {worst['agreement']:.3f} at tokens "
        f"{worst['from']} to {worst['to']}, KL {figure.kl:.3g} nats{chosen}"
    )


def update(
    cache: Cache,
    fields: Annotated[dict[str, Any], _forms.CHANGES],
    url: _options.Url = None,
    as_json: _options.AsJson = False,
) -> None:
    """Change a cache on the shelf, or say when its next question comes. Prints its id."""
    changes: Any = {name: value for name, value in fields.items() if value is not None}
    changes |= {name: None for name, value in changes.items() if value == _forms.NEVER}
    with connected(url) as client:
        changed = client.caches.update(_references.id_at(client, cache), **changes)
        say_json(changed) if as_json else say(changed.id)


def warm(
    fields: Annotated[dict[str, Any], _forms.WARMED],
    caches: Annotated[list[str] | None, typer.Argument(metavar="CACHE...", help=_CACHE)] = None,
    url: _options.Url = None,
    as_json: _options.AsJson = False,
) -> None:
    """Have caches in the memory of every replica before their questions come, by CACHE or --label.

    Prints how many bytes each replica has of them, and how many of these it read now. What does not fit is refused
    before anything is read; what found no room beside the questions of the moment is left out, with exit code 5.
    """
    with connected(url) as client:
        ids = [_references.id_at(client, cache) for cache in caches or ()]
        warmed = client.caches.warm(ids, **{**fields, "replicas": fields["replicas"] or "all"})
    if as_json:
        for replica in warmed:
            say_json(replica)
    else:
        size = common.megabytes
        rows = [(row.replica, row.model, str(row.caches), size(row.bytes), size(row.read_bytes)) for row in warmed]
        headings = ("REPLICA", "MODEL", "CACHES", "SIZE", "READ")
        common.print_table(common.table(headings, rows, numbers=(2, 3, 4)), cut="REPLICA")
    if left_out := sorted({id for row in warmed for id in row.left_out}):
        raise QueueFull(f"without room in a replica, or not read to the end: {', '.join(left_out)}; warm them later")


def remake(
    model: Annotated[str, typer.Option("--model", help="The model to make them under, one of the service's.")],
    from_model: Annotated[
        str | None, typer.Option(help="The model's name in the caches to make again.  [default: that of --model]")
    ] = None,
    label: _options.Labels = None,
    url: _options.Url = None,
    as_json: _options.AsJson = False,
) -> None:
    """Make caches again under another generation of their model, from their kept sources, one after the other.

    Prints a line for each: the old id, a space, and the id of its successor. Old caches stay. What cannot be made again
    is reported with its reason, and the others go on. Run it again after a stop: what is there costs no prefill.
    """
    failures = common.Failures(as_json=as_json)
    counts = dict.fromkeys(("new", "there", "already of this generation", "not made"), 0)
    with connected(url) as client:
        old = client.caches.list(model=from_model or model, labels=common.pairs(label, "--label"), limit=1000)
        for cache in old:
            end = "not made"
            with failures.reported(of=cache.id):
                successor = client.caches.remake(cache.id, model=model)
                if successor.id == cache.id:
                    end = "already of this generation"
                else:
                    end = "there" if successor.existing else "new"
                    say_json(successor) if as_json else say(cache.id, successor.id)
            counts[end] += 1
    common.notes.print(", ".join(f"{count} {end}" for end, count in counts.items() if count) or "no caches")
    raise typer.Exit(failures.exit_code)


def rm(
    caches: Annotated[list[str], typer.Argument(metavar="CACHE...", help=_CACHE)],
    cascade: Annotated[
        bool, typer.Option("--cascade", help="Also delete the caches that extend it, and those that extend these.")
    ] = False,
    url: _options.Url = None,
    as_json: _options.AsJson = False,
) -> None:
    """Delete caches from the shelf. Prints each deleted id.

    Each CACHE deletes one cache or none: what may mean several is refused. If one fails, the others are still deleted.
    """
    failures = common.Failures(as_json=as_json)
    with connected(url) as client:
        ids: dict[str, None] = {}
        # Before the first deletion: it might leave one cache of two that a name means.
        for cache in caches:
            with failures.reported():
                ids[_references.id_at(client, cache)] = None
        gone: set[str] = set()
        for id in ids:
            if id in gone:
                continue
            with failures.reported():
                deleted = client.caches.delete(id, cascade=cascade)
                gone |= {*deleted.descendants}
                lines = "\n".join([*deleted.descendants, deleted.id])
                say_json(deleted) if as_json else say(lines)
    raise typer.Exit(failures.exit_code)
