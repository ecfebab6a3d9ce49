"""`kvshelf bench ...`: one command per measurement."""

from __future__ import annotations

import typer

from kvshelf_bench.batches.cli import batch
from kvshelf_bench.certify.cli import certify
from kvshelf_bench.characterize.cli import characterize, heads
from kvshelf_bench.growth.cli import append, growing, turns
from kvshelf_bench.kernels.cli import column_sums, kernels
from kvshelf_bench.models.cli import models
from kvshelf_bench.perplexity.cli import perplexity
from kvshelf_bench.quality.cli import memory, needle, quality, retrieval, search, together
from kvshelf_bench.retention.cli import retention
from kvshelf_bench.speed.cli import speed
from kvshelf_bench.stores.cli import rates, store

app = typer.Typer(help="Measure models, policies and speed on this machine.", no_args_is_help=True)


def _register() -> None:
    from kvshelf.cli._commands import GroupedCommand, command  # the package mounts `app`, which has to be there first

    functions = (quality, needle, memory, speed, column_sums, kernels, store, rates, batch, retrieval, search, together)
    for function in (*functions, append, growing, turns, models, retention, perplexity, certify, characterize, heads):
        command(app, function, cls=GroupedCommand)


_register()
