"""Groups of options of the commands here that others take as one value."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer


@dataclass(frozen=True)
class DatasetOptions:
    """What `kvshelf bench quality` measures in place of made documents."""

    dataset: Annotated[
        str, typer.Option(help="Instead of made cells: a file, a folder, a dataset of the hub, or abilities.")
    ] = ""
    ways: Annotated[
        str, typer.Option(help="With --dataset, instead of --policies: such as full/int4,keydiff@0.75,snapkv@128.")
    ] = ""
    fraction: Annotated[
        float, typer.Option(min=0, max=1, help="With --dataset: the share of its documents, drawn by --seed.")
    ] = 1.0
    limit: Annotated[int | None, typer.Option(min=1, help="With --dataset: at most so many documents.")] = None
    max_new_tokens: Annotated[
        int,
        typer.Option(min=0, help="With --dataset: tokens of an answer; 0: as its rows or their benchmark say, or 48."),
    ] = 0
    cues: Annotated[
        int | None, typer.Option(min=0, help="With --dataset: cues of each cache's figure; 0 measures none.")
    ] = None
    questions: Annotated[
        str, typer.Option(help="With --dataset: unknown at compression, or known: one compression for each.")
    ] = "unknown"
    turns: Annotated[
        bool, typer.Option("--turns", help="With --dataset: each question behind the earlier ones and their answers.")
    ] = False
    scorer: Annotated[str, typer.Option(help="With --dataset: in place of those of its tasks.")] = ""
    prompts: Annotated[
        Path | None, typer.Option(help="With --dataset: prompts of its tasks, as LongBench's dataset2prompt.json.")
    ] = None
    truncate: Annotated[
        str, typer.Option(help="With --dataset: middle cuts contexts that are too long; middle:3500 sets the tokens.")
    ] = ""
    results: Annotated[
        Path | None, typer.Option(help="With --dataset: a new folder of predictions, metrics and configurations.")
    ] = None
    compare: Annotated[
        Path | None, typer.Option(help="With --dataset: an earlier --results folder, set beside this run.")
    ] = None
    baseline: Annotated[str, typer.Option(help="With --dataset: kvpress runs the ways that it has, too.")] = ""
    kvpress_python: Annotated[
        Path | None, typer.Option(help="With --baseline kvpress: a Python that has kvpress installed.")
    ] = None


@dataclass(frozen=True)
class Sets:
    """Sets of documents that are asked together, how they are kept, and what reads a part of them."""

    tokens: Annotated[int, typer.Option(min=300, help="Tokens of each document that is made here.")] = 512
    dataset: Annotated[
        Path | None, typer.Option(help="In place of documents that are made here: a file or folder of `bench quality`.")
    ] = None
    sets: Annotated[int, typer.Option(min=1, help="Sets of documents for each number.")] = 5
    questions: Annotated[int, typer.Option(min=1, max=48, help="Questions about a set.")] = 16
    policy: Annotated[str, typer.Option(help="Of every cache.")] = "full"
    codec: Annotated[str, typer.Option(help="Of every cache.")] = "int4"
    select: Annotated[
        str, typer.Option(help="Also measured: a selector that reads as much as a quarter of one document.")
    ] = ""
    seed: Annotated[int, typer.Option(min=0, help="Another set of documents.")] = 0
