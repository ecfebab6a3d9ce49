"""calibrate: measure a model once, for what needs it: retrieval heads for compresskv, transforms for codec klt."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from kvshelf._extras import needs_extra
from kvshelf.bench.options import progress_bar
from kvshelf.cli import _common, _options
from kvshelf.errors import InvalidRequest

if TYPE_CHECKING:
    from kvshelf.workers.engine.engine import Engine

_TEXTS, _TEXT_TOKENS = 10, 2048
"""How many texts of the package's own prose make transforms, and their length."""


def calibrate(
    model: Annotated[str, typer.Option(help="A bundled name, a folder or a hub id.")],
    only: Annotated[
        Literal["heads", "transforms"] | None,
        typer.Option(help="heads: for policy compresskv. transforms: for codec klt.  [default: both]"),
    ] = None,
    output: Annotated[
        Path | None, typer.Option(help="Folder for the results.  [default: your data folder, where engines look]")
    ] = None,
    documents: Annotated[int, typer.Option(min=1, help="Number of test documents, each hides one sentence.")] = 60,
    tokens: Annotated[int, typer.Option(min=128, help="Length of each test document, in tokens.")] = 1024,
    text: Annotated[
        list[Path] | None,
        typer.Option(help="Make the transforms from this text of yours; repeat it.  [default: prose of the package]"),
    ] = None,
    device: _options.Device = "auto",
    dtype: _options.Dtype = "auto",
    as_json: _options.AsJson = False,
) -> None:
    """Make the transforms of codec klt, with its steps=kl, and measure which query heads retrieve, for the policy
    compresskv.

    The results hold for these weights in this dtype. Engines look for them in $XDG_DATA_HOME/kvshelf/calibrations and,
    as klt.safetensors and compresskv.json, in the model's folder.
    """
    with _common.named_errors(as_json=as_json), needs_extra("serve", purpose="kvshelf calibrate"):
        from kvshelf.workers.engine.engine import Engine
        from kvshelf.workers.model import calibration

        engine = Engine.load(model, device=device, dtype=dtype)
        engine.require_text("model")
        heads_path, transforms_path = calibration.paths(engine.identity.weights, output)
        calibration.require_writable(heads_path)
        made = []
        if only != "heads":
            _transforms(engine, transforms_path, text or [])
            made.append(transforms_path)
        if only != "transforms":
            _heads(engine, heads_path, documents, tokens)
            made.append(heads_path)
    for path in made:
        print(path)


def _read(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"{path} cannot be read as UTF-8 text: {error}", param="text") from error


def _heads(engine: Engine, path: Path, documents: int, tokens: int) -> None:
    from kvshelf.bench.quality.tasks import needles
    from kvshelf.workers.engine import head_search
    from kvshelf.workers.model import calibration

    count = engine.require_text("model").count_tokens
    with progress_bar() as progress:
        step = partial(progress.advance, progress.add_task(f"heads of {engine.name}", total=2 * documents))
        found = head_search.calibrate(engine, list(needles(documents, tokens, count)), step)
    calibration.save(found, path)
    _common.notes.print(f"{found.origin.answered:.0%} of the answer tokens came from the sentence asked for")


def _transforms(engine: Engine, path: Path, texts: list[Path]) -> None:
    from kvshelf.atomic import written
    from kvshelf.bench.quality.tasks import haystacks
    from kvshelf.workers.engine.transform_search import find_transforms

    format_ = engine.require_text("model")
    longest = min(_TEXT_TOKENS, engine.max_tokens)
    sources = [_read(path) for path in texts] or list(haystacks(_TEXTS, longest, format_.count_tokens))
    ids = [format_.encode(source)[:longest] for source in sources]
    with progress_bar() as progress:
        task = progress.add_task(f"transforms of {engine.name}", total=None)
        data = find_transforms(
            engine, ids, report=lambda done, total: progress.update(task, completed=done, total=total)
        )
    with written(path) as file:
        file.write(data)
