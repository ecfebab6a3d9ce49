"""What the command line and the benches share: how options are read, and how progress is shown."""

from __future__ import annotations

import json
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn, TimeRemainingColumn


def json_or_text(text: str) -> Any:
    """The value of `name=value`: JSON if it parses as JSON, otherwise text."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def progress_bar() -> Progress:
    return Progress(
        "{task.description}",
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
    )
