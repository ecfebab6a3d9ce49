"""calibrate: find out which heads of a model retrieve, once, for the policies that need to know."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

from kvshelf._extras import needs_extra
from kvshelf.cli import _common
from kvshelf.cli._common import AsJson, Device, Dtype


def calibrate(
    model: Annotated[str, typer.Option(help="A bundled name, a folder or a hub id.")],
    output: Annotated[
        Path | None, typer.Option(help="Where to write it.  [default: the user's data folder, where engines look]")
    ] = None,
    documents: Annotated[int, typer.Option(min=1, help="Documents with a sentence to find.")] = 60,
    tokens: Annotated[int, typer.Option(min=128, help="Tokens of each document.")] = 1024,
    device: Device = "auto",
    dtype: Dtype = "auto",
    as_json: AsJson = False,
) -> None:
    """Find out which query heads retrieve and which layers suffer from compression, and write it down for compresskv.

    The result is for these weights in this dtype. Engines find it in the data folder ($XDG_DATA_HOME/kvshelf/
    calibrations), or as compresskv.json in the model's own folder.
    """
    with _common.named_errors(as_json=as_json), needs_extra("serve", purpose="kvshelf calibrate"):
        from kvshelf.bench.quality.needles import needles
        from kvshelf.workers.engine import head_search
        from kvshelf.workers.engine.engine import Engine
        from kvshelf.workers.model import calibration

        engine = Engine.load(model, device=device, dtype=dtype)
        count = engine.require_text("model").count_tokens
        path = output or calibration.data_folder() / f"{engine.identity.weights}.json"
        calibration.require_writable(path)
        with Progress(
            "{task.description}", BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), console=_common.notes
        ) as progress:
            bar = progress.add_task(model, total=2 * documents)
            found = head_search.calibrate(
                engine, list(needles(documents, tokens, count)), lambda: progress.advance(bar)
            )
        calibration.save(found, path)
    if as_json:
        print(found.model_dump_json())
    else:
        _common.notes.print(f"{found.origin.answered:.0%} of the answers' tokens were in the sentence asked for")
        print(path)
