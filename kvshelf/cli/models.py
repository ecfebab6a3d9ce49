"""models: which weights may answer from the caches of other weights."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvshelf._extras import needs_extra
from kvshelf.cli import _options
from kvshelf.cli._commands import command
from kvshelf.cli.output import common, say
from kvshelf.errors import InvalidRequest, ModelMismatch

if TYPE_CHECKING:
    from rich.table import Table

    from kvshelf.engine.engine import Engine
    from kvshelf.store.base import Store
    from kvshelf.store.jobs.links import LinkedModel, ModelLink

app = typer.Typer(help="Let a quantization answer from the caches of the weights it was made of.", no_args_is_help=True)

_TRIAL = "A text."

_MADE_DOCUMENTS, _MADE_TOKENS = 3, 768

Maker = Annotated[str, typer.Argument(metavar="MADE", help="The model that makes the caches: as of `serve --model`.")]
Asker = Annotated[str, typer.Argument(metavar="ASKED", help="The GGUF file that `serve --engine llama.cpp` runs.")]


@dataclass(frozen=True, kw_only=True)
class Serving:
    dtype: _options.Dtype = "auto"
    asked_dtype: Annotated[str, typer.Option(help="As --dtype, of ASKED.")] = "auto"
    chat_template: Annotated[str | None, typer.Option(metavar="NAME|FILE", help="As of `serve`, of both models.")] = (
        None
    )


def link(
    maker: Maker,
    asker: Asker,
    serving: Serving,
    document: Annotated[
        list[Path] | None,
        typer.Option(help="A text whose cues are asked. May be repeated.  [default: some of kvshelf's own]"),
    ] = None,
    floor: Annotated[
        float, typer.Option(min=0, max=1, help="Refuse the link if the lower bound of the agreement is below this.")
    ] = 0.9,
    store: _options.Store = None,
    encryption_key_file: _options.KeyFile = None,
    as_json: _options.AsJson = False,
) -> None:
    """Measure whether ASKED answers from the caches of MADE as MADE does, and keep the result in the store.

    A service with --engine llama.cpp on ASKED answers from caches of MADE after its next start. Give --dtype (of MADE),
    --asked-dtype and --chat-template as both are served: a link holds for these alone.
    """
    with needs_extra("serve", purpose="kvshelf models link"):
        from kvshelf.engine.engine import Engine
        from kvshelf.engine.files.llamacpp import NAME, PERMUTED
        from kvshelf.engine.files.prefix import prefix_of
        from kvshelf.engine.llama.agreement import CueAsker
        from kvshelf.engine.llama.engine import LlamaEngine, gguf_of
        from kvshelf.integrations.engine_weights import require_weights
        from kvshelf.workers.cluster.served import served_name

        template: dict[str, Any] = {"chat_template": serving.chat_template}
        file, texts = gguf_of(asker), [_text(path) for path in document or ()]
        with _opened(store, encryption_key_file) as shelf:
            making = Engine.load(maker, dtype=serving.dtype, shown=served_name(maker), **template)
            making.encoder.require_text("MADE")
            texts = texts or _own_texts(making)
            trial = making.compress(_TRIAL, policy="full")
            require_weights(prefix_of(making, trial, of=NAME, types=PERMUTED, dtype=None, document=()).about, file)
            asking = LlamaEngine.load(asker, dtype=serving.asked_dtype, shown=served_name(asker), **template)
            _require_rope(making, asking)
            agreement = CueAsker(making, asking).agreement(texts)
            if agreement.low < floor:
                raise ModelMismatch(
                    f"{asking.name!r} agrees with {making.name!r} on {agreement.share:.1%} of {agreement.cues} cues, "
                    f"which shows {agreement.low:.1%}, and the floor is {floor:.0%}; take a finer quantization, more "
                    "documents, or --floor",
                    agreement=round(agreement.share, 4),
                )
            measured = _measured(making, asking, *agreement)
            shelf.links.keep(measured)
    common.print_objects([measured], lambda: _table([measured]), as_json=as_json)


def _require_rope(making: Engine, asking: Engine) -> None:
    """Keys of one rotation mean nothing under another."""
    ropes = [json.loads(engine.identity.rope)["parameters"] for engine in (making, asking)]
    if ropes[0] != ropes[1]:
        raise ModelMismatch(
            f"{asking.name!r} rotates keys otherwise than {making.name!r}: {ropes[1]} against {ropes[0]}; take a "
            "conversion of these weights",
            field="rope",
        )


def links(
    store: _options.Store = None,
    encryption_key_file: _options.KeyFile = None,
    remove: Annotated[
        str | None,
        typer.Option(metavar="FINGERPRINT", help="Remove links whose MADE has a fingerprint that begins so."),
    ] = None,
    as_json: _options.AsJson = False,
) -> None:
    """List the links of a store, newest first, or remove some."""
    with _opened(store, encryption_key_file) as shelf:
        links = shelf.links.list()
        if remove is not None:
            links = [one for one in links if one.maker.fingerprint.startswith(remove)]
            if len(remove) < 4 or not links:
                raise InvalidRequest(f"no link has a maker whose fingerprint begins {remove!r:.60}", param="--remove")
            for one in links:
                shelf.links.remove(one)
                say(f"{one.maker.name} {one.asker.name}")
            return
    common.print_objects(links, lambda: _table(links), as_json=as_json)


@contextmanager
def _opened(url: str | None, key_file: Path | None) -> Iterator[Store]:
    with needs_extra("serve", purpose="kvshelf models"):
        from kvshelf.service.settings import load_settings
        from kvshelf.service.storage import store_config

    settings = load_settings(store=url, encryption_key_file=None if key_file is None else str(key_file))
    with store_config(settings).open() as store:
        yield store


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"{path} cannot be read: {error}", param="--document") from error


def _own_texts(maker: Engine) -> list[str]:
    """A handbook, and documents with facts: as many tokens as the model takes with room for cues."""
    from kvshelf.cli.demo import handbook
    from kvshelf.samples.tasks import make_document

    form = maker.encoder.require_text("MADE")
    tokens = min(_MADE_TOKENS, maker.max_tokens // 2)
    texts = [
        make_document("multikey", "prose", tokens, seed, form.count_tokens).text for seed in range(_MADE_DOCUMENTS)
    ]
    return [handbook().document, *texts] if maker.max_tokens > 4 * _MADE_TOKENS else texts


def _measured(maker: Engine, asker: Engine, share: float, low: float, cues: int, documents: int) -> ModelLink:
    import kvshelf
    from kvshelf.engine.files.llamacpp import NAME
    from kvshelf.engine.llama.sequences import package_version
    from kvshelf.engine.quality import VERSION
    from kvshelf.store.jobs.links import ModelLink

    return ModelLink(
        maker=_side(maker),
        asker=_side(asker),
        engine=NAME,
        engine_version=package_version(),
        agreement=share,
        low=low,
        cues=cues,
        documents=documents,
        quality_version=VERSION,
        kvshelf=kvshelf.__version__,
        date=time.strftime("%Y-%m-%d", time.gmtime()),
    )


def _side(engine: Engine) -> LinkedModel:
    from kvshelf.store.jobs.links import LinkedModel

    identity = engine.identity
    return LinkedModel(
        name=identity.name,
        fingerprint=identity.fingerprint(),
        weights=identity.weights,
        dtype=identity.dtype,
        tokenizer=identity.tokenizer,
        template=identity.template,
    )


def _table(links: list[ModelLink]) -> Table:
    headings = ("MADE", "ASKED", "ENGINE", "AGREEMENT", "LOW", "CUES", "DATE", "FINGERPRINT")
    rows = (
        (
            *(one.maker.name, one.asker.name, f"{one.engine} {one.engine_version}", f"{one.agreement:.1%}"),
            *(f"{one.low:.1%}", str(one.cues), one.date, one.maker.fingerprint[:16]),
        )
        for one in links
    )
    return common.table(headings, rows, numbers=(3, 4, 5))


command(app, link)
command(app, links, "list")
