"""`kvshelf bench characterize` and `heads`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvshelf._extras import needs_extra
from kvshelf_bench.options import Device, Dtype, Loading, Reporting, Threads, counted, decimals, publish, split

if TYPE_CHECKING:
    from kvshelf_bench.characterize.load import Offer


@dataclass(frozen=True)
class _Subjects:
    models: Annotated[str, typer.Option(help="Comma-separated; random:8 is a Llama of 8 layers of random weights.")] = (
        "kvshelf-tiny,random:2,random:8"
    )
    device: Device = "auto"
    dtype: Dtype = "auto"
    threads: Threads = 1


@dataclass(frozen=True)
class _Ways:
    systems: Annotated[
        str, typer.Option(help="Policies and selectors: such as lagkv:lag=64,policy:snapkv,read:infllm.")
    ] = "full,infinigen,quest,h2o,kvzip"
    shares: Annotated[str, typer.Option(help="Of the entries, to read or to keep.")] = "0.5,0.125"


@dataclass(frozen=True)
class _Questions:
    rates: Annotated[str, typer.Option(help="Questions a second.")] = "8,64"
    requests: Annotated[int, typer.Option(min=2, help="Questions at each rate.")] = 32
    documents: Annotated[int, typer.Option(min=1, help="Documents that they are about.")] = 3
    tokens: Annotated[int, typer.Option(min=512, help="Tokens of each document.")] = 2048
    answer_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each answer.")] = 32
    seed: Annotated[int, typer.Option(help="Of documents and arrivals.")] = 0

    def offer(self) -> Offer:
        from kvshelf_bench.characterize.load import Offer

        return Offer(**vars(self) | {"rates": decimals(self.rates, "--rates", 0.01, 1e4)})


def characterize(subjects: _Subjects, ways: _Ways, questions: _Questions, reporting: Reporting) -> None:
    """Full shelf, selection and eviction under load: which wins where, by request rate, model size and share.

    Questions arrive at random times (Poisson), whether those before are answered or not. full keeps and reads all,
    selectors read a share at each token of an answer, policies keep a share; all under int4. Right answers are
    counted on kvshelf-tiny.
    """
    with needs_extra("serve", "the bench"):
        import torch

        from kvshelf_bench.characterize.load import LoadCell, cells_table, characterized, require_known, winners_table
        from kvshelf_bench.engines import EngineOptions
        from kvshelf_bench.measure import load_warning, machine
        from kvshelf_bench.speed.subject import load_subject

    known = require_known(list(split(ways.systems)), decimals(ways.shares, "--shares", 0.01, 1), questions.tokens)
    offer = questions.offer()
    where, names, cells = machine(), [name.strip() for name in subjects.models.split(",")], list[LoadCell]()
    with counted("loads", len(names) * len(offer.rates) * len(known)) as step:
        for name in names:
            with load_subject(EngineOptions(name, subjects.device, subjects.dtype, subjects.threads)) as subject:
                for cell in characterized(subject, name, known, offer):
                    cells.append(cell)
                    step()
    where["threads"] = torch.get_num_threads()
    report: dict[str, Any] = {"bench": "characterize", "machine": where, "offer": offer, "cells": cells}
    publish(report, [cells_table(cells), winners_table(cells)], reporting, notes=load_warning(where))


def heads(
    *,
    loading: Loading,
    documents: Annotated[int, typer.Option(min=1, help="Documents, of prose.")] = 4,
    tokens: Annotated[int, typer.Option(min=16, help="Tokens of each document.")] = 2048,
    reporting: Reporting,
) -> None:
    """How sparse and how redundant each KV head is: what speaks for eviction, and what for merging (EMS)."""
    with needs_extra("serve", "the bench"):
        from kvshelf.samples.tasks import haystacks
        from kvshelf_bench.characterize.heads import heads as measured
        from kvshelf_bench.characterize.heads import heads_table
        from kvshelf_bench.measure import machine
        from kvshelf_bench.speed.subject import load_subject

    with load_subject(loading.engine_options()) as subject:
        where, text = machine(), subject.engine.text
        if text is None:
            ids = [subject.tokens(tokens, seed=10 + number) for number in range(documents)]
        else:
            ids = [text.encode(prose) for prose in haystacks(documents, tokens, text.count_tokens)]
        rows = measured(subject.engine, ids)
    report: dict[str, Any] = {"bench": "heads", "model": loading.model, "machine": where, "heads": rows}
    publish(report, [heads_table(rows)], reporting)
