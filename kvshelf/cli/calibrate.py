"""calibrate: find the retrieval heads of a model, once, for the policies that need them."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from kvshelf._extras import needs_extra
from kvshelf.bench.options import progress_bar
from kvshelf.cli import _common, _options


def calibrate(
    model: Annotated[str, typer.Option(help="A bundled name, a folder or a hub id.")],
    output: Annotated[
        Path | None, typer.Option(help="File for the result.  [default: in your data folder, where engines look]")
    ] = None,
    documents: Annotated[int, typer.Option(min=1, help="Number of test documents, each hides one sentence.")] = 60,
    tokens: Annotated[int, typer.Option(min=128, help="Length of each test document, in tokens.")] = 1024,
    device: _options.Device = "auto",
    dtype: _options.Dtype = "auto",
    as_json: _options.AsJson = False,
) -> None:
    """Measure which query heads retrieve and which layers suffer from compression, for the policy compresskv.

    The result holds for these weights in this dtype. Engines look for it in $XDG_DATA_HOME/kvshelf/calibrations and as
    compresskv.json in the model's folder.
    """
    with _common.named_errors(as_json=as_json), needs_extra("serve", purpose="kvshelf calibrate"):
        from kvshelf.bench.quality.tasks import needles
        from kvshelf.workers.engine import head_search
        from kvshelf.workers.engine.engine import Engine
        from kvshelf.workers.model import calibration

        engine = Engine.load(model, device=device, dtype=dtype)
        count = engine.require_text("model").count_tokens
        path = output or calibration.data_folder() / f"{engine.identity.weights}.json"
        calibration.require_writable(path)
        with progress_bar() as progress:
            step = partial(progress.advance, progress.add_task(model, total=2 * documents))
            found = head_search.calibrate(engine, list(needles(documents, tokens, count)), step)
        calibration.save(found, path)
    if as_json:
        print(found.model_dump_json())
    else:
        _common.notes.print(f"{found.origin.answered:.0%} of the answer tokens came from the sentence asked for")
        print(path)
