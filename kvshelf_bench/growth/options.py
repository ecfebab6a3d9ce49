"""The documents of `kvshelf bench growing`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer


@dataclass(frozen=True)
class Documents:
    """Documents that grow by appends, and what is asked about each."""

    tokens: Annotated[int, typer.Option(min=300, help="Tokens of each document.")] = 4096
    appends: Annotated[int, typer.Option(min=1, help="Appends, behind a beginning of one more part.")] = 8
    documents: Annotated[int, typer.Option(min=1, help="Documents.")] = 5
    questions: Annotated[int, typer.Option(min=1, max=48, help="Questions about a document.")] = 16
    seed: Annotated[int, typer.Option(min=0, help="Another set of documents.")] = 0
