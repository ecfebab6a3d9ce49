"""estimate, plan, advise: what a put, a corpus or a scenario would take. Nothing is compressed or stored."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from kvshelf._extras import needs_extra
from kvshelf.cli import _forms, _options
from kvshelf.cli.checks.certify import read_certificate
from kvshelf.cli.output import common, say_json
from kvshelf.cli.output.common import connected
from kvshelf.errors import InvalidRequest

if TYPE_CHECKING:
    from kvshelf.api import Certificate, EstimateObject, PolicyEstimate
    from kvshelf.api.usage.prices import Prices
    from kvshelf.corpus.advice import Advice, AdviceLine, Option
    from kvshelf.corpus.keeping import Demand, KeepingAdvice
    from kvshelf.corpus.plan import Fleet, Outcome, Plan, SharedResource


def estimate(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A UTF-8 text file; - reads standard input.")],
    fields: Annotated[dict[str, Any], _forms.COST],
    url: _options.Url = None,
    as_json: _options.AsJson = False,
) -> None:
    """Estimate the tokens, bytes and seconds of a `put`, by policy and codec. Nothing is compressed or stored."""
    with connected(url) as client:
        document = {"document": common.standard_input()} if file == Path("-") else {"file": file}
        costs = client.estimate(**document, **fields)
        if as_json:
            say_json(costs)
        else:
            common.print_table(_costs_table(costs))
            common.notes.print(_about_costs(costs), style="dim", soft_wrap=True)


def _costs_table(costs: EstimateObject) -> Table:
    codecs = list(dict.fromkeys(codec for row in costs.policies for codec in row.bytes_stored or ()))
    headings = ("POLICY", "KEPT", "ADDED", "SECONDS", *codecs)
    rows = ((row.policy, *_cost_cells(row, codecs, costs.bytes_full_16bit)) for row in costs.policies)
    return common.table(headings, rows, numbers=range(1, len(headings)))


def _cost_cells(row: PolicyEstimate, codecs: list[str], full_16bit: int) -> list[str]:
    if row.bytes_stored is None:
        return ["refused"]
    added = "unknown" if row.compress_share is None else f"{row.compress_share:.0%}"
    mark = {None: "", "measured": "", "other_policies": "~", "assumed": "?"}[row.basis]
    seconds = "unknown" if row.seconds is None else f"{mark}{row.seconds:.3g}"
    stored = [row.bytes_stored.get(codec) for codec in codecs]
    sizes = ["" if size is None else f"{common.megabytes(size)} ({size / full_16bit:.1%})" for size in stored]
    return [str(row.kept), added, seconds, *sizes]


def _about_costs(costs: EstimateObject) -> str:
    return (
        f"{costs.tokens} tokens. Shares are of {common.megabytes(costs.bytes_full_16bit)}, the uncompressed cache in "
        "16 bits. ADDED is what the policy adds to the time of a prefill, measured on kvshelf-tiny. Seconds are scaled "
        f"from {costs.measured_tokens} measured tokens; ~ measured on other policies, ? assumed from the size of the "
        "model; both then with what the policy adds."
    )


_MODELS = "llama-3.1-8b, mistral-7b, qwen2.5-7b, qwen3-8b, kvshelf-tiny, a folder or a hub id."
_SPEED = "Output of `kvshelf bench speed --parts compression --output FILE`; replaces --tokens-per-s."
_NAMES = "one-long, unmodified, throughput, edge, multi-turn, prefill or accuracy."
_QUALITY = "Least share of the full cache's exact answers that is good enough."


@dataclass(frozen=True)
class _Corpus:
    documents: Annotated[int | None, typer.Option(min=1, help="How many.  [default: 1000000, or by --lengths]")] = None
    tokens: Annotated[int, typer.Option(min=1, help="Length of each document.")] = 4096
    lengths: Annotated[Path | None, typer.Option(help="A file: a length, or a length and a count, per line.")] = None

    def read(self) -> Any:
        from kvshelf.corpus.plan import read_lengths

        if self.lengths:
            return read_lengths(self.lengths, self.documents)
        return ((self.tokens, self.documents or 1_000_000),)


@dataclass(frozen=True)
class _Work:
    size: Annotated[dict[str, Any], _forms.SIZE]
    policy: Annotated[str | None, typer.Option(help="As in `kvshelf put`.")] = None
    codec: Annotated[str | None, typer.Option(help="As in `kvshelf put`: none, int8, int4, int2 ...")] = None
    home: Annotated[str, typer.Option(help="redis, disk, or objects: an index in Redis, blobs in S3.")] = "redis"

    def settled(self) -> Any:
        """With the policy and the codec that a creation would have."""
        from kvshelf.api.creation import default_codec, default_policy
        from kvshelf.corpus.plan import PlannedWork

        choice = {"policy": self.policy, **self.size}
        codec = self.codec or default_codec(choice)
        return PlannedWork(self.policy or default_policy(choice), **self.size, codec=codec, home=self.home)


@dataclass(frozen=True)
class _Pace:
    """What it may take, and how fast a GPU is."""

    gpus: Annotated[int | None, typer.Option(min=1, help="Number of GPUs; or give --hours.")] = None
    hours: Annotated[float | None, typer.Option(min=0.01, help="Hours available; the plan says how many GPUs.")] = None
    tokens_per_s: Annotated[float | None, typer.Option(min=0.001, help="Of one GPU, compression included.")] = None
    rates: Annotated[Path | None, typer.Option(help=_SPEED)] = None
    shared_rates: Annotated[Path | None, typer.Option(help="From `kvshelf bench rates`.  [default: built in]")] = None
    gb_month_price: Annotated[float | None, typer.Option(min=0, help="Of 10^9 stored bytes, in any currency.")] = None


@dataclass(frozen=True)
class _Demand:
    """How often the documents are asked, to say which are worth keeping."""

    questions: Annotated[
        int | None,
        typer.Option(min=0, max=10**12, help="Of each document: say if keeping it costs less than searching it."),
    ] = None
    days: Annotated[
        float | None, typer.Option(min=0, max=36_525, help="Questions: how long a document is kept.  [default: 30]")
    ] = None
    passages: Annotated[
        int | None,
        typer.Option(min=1, max=10**9, help="Questions: tokens that each prefills of a search.  [default: 2048]"),
    ] = None
    prices: _options.Prices = None

    def read(self) -> tuple[Demand, Prices] | None:
        """None: nobody asks. Raises `InvalidRequest` for what only questions need."""
        from kvshelf.api.usage.prices import read_prices
        from kvshelf.corpus.keeping import Demand

        rest = {"--days": self.days, "--passages": self.passages, "--prices": self.prices}
        if self.questions is None:
            for option in (option for option, value in rest.items() if value is not None):
                raise InvalidRequest(f"{option} says nothing without --questions; give both", param=option)
            return None
        if self.prices is None:
            raise InvalidRequest(
                "what keeping a document is worth needs --prices; `kvshelf usage` reads them, too", param="--prices"
            )
        days, passages = 30.0 if self.days is None else self.days, self.passages or 2048
        return Demand(self.questions, days, passages), read_prices(self.prices)


@dataclass(frozen=True)
class _Machines:
    servers: Annotated[int, typer.Option(min=1, help="Redis servers.")] = 1
    server_memory_gb: Annotated[float, typer.Option(min=0.1, help="Memory for caches of one Redis server.")] = 512.0
    server_gbit: Annotated[float, typer.Option(min=0.1, help="Network of one Redis server.")] = 25.0
    shelves: Annotated[int, typer.Option(min=1, help="Redis prefixes that share the corpus.")] = 1
    services: Annotated[int, typer.Option(min=1, help="Ray clusters that share the corpus.")] = 1
    node_gpus: Annotated[int, typer.Option(min=1, help="GPUs in a node.")] = 8
    node_gbit: Annotated[float, typer.Option(min=0.1, help="Network of a node.")] = 100.0
    node_mtbf_h: Annotated[float, typer.Option(min=0.1, help="Hours between two failures of a node.")] = 6300.0
    poison: Annotated[float, typer.Option(min=0, max=0.1, help="Share of documents that kill their worker.")] = 1e-5
    seed: Annotated[int, typer.Option(help="Seed of the simulation.")] = 0

    def fleet(self, gpus: int) -> Fleet:
        from kvshelf.corpus.plan import Fleet

        return Fleet(
            gpus, self.node_gpus, self.node_gbit, self.servers, self.server_gbit, self.server_memory_gb * 1e9,
            self.shelves, self.services, self.node_mtbf_h, poison=self.poison,
        )  # fmt: skip


def plan(
    corpus: _Corpus,
    work: _Work,
    pace: _Pace,
    demand: _Demand,
    machines: _Machines,
    model: Annotated[str, typer.Option(help=_MODELS)] = "llama-3.1-8b",
    simulate: Annotated[bool, typer.Option("--simulate", help="Simulate a run with failures.")] = False,
    as_json: _options.AsJson = False,
) -> None:
    """Say what a corpus takes: documents an hour, GPUs, bytes, memory, network, requests. Nothing is run.

    --simulate adds the resources that all GPUs share, the fullest first, and a run with failures. --questions with
    --prices adds which documents are worth keeping, and which a search for passages at each question serves for less.
    """
    with needs_extra("serve", purpose=f"kvshelf plan --model {model}"):
        from kvshelf.corpus import keeping
        from kvshelf.corpus import plan as paper

        numbers = {"--tokens-per-s": pace.tokens_per_s, "--hours": pace.hours, "--days": demand.days}
        numbers |= {"--server-memory-gb": machines.server_memory_gb, "--gb-month-price": pace.gb_month_price}
        for option, number in numbers.items():
            if number is not None and not math.isfinite(number):
                raise InvalidRequest(f"{option} is {number}, which is no number to plan with", param=option)
        if simulate and work.home == "disk":
            raise InvalidRequest(
                "a shelf in a folder is one machine's; --simulate is of redis or objects", param="--home"
            )
        priced = demand.read()
        shape = paper.shape_of(model)
        shared = paper.MEASURED if pace.shared_rates is None else paper.SharedRates.read(pace.shared_rates)
        lengths, done = corpus.read(), work.settled()
        speed = paper.Speed.of(shape, done.policy, pace.tokens_per_s, pace.rates)
        planned = paper.make_plan(lengths, shape, done, speed, shared, pace.gpus, pace.hours, pace.gb_month_price)
        report: dict[str, Any] = {"plan": asdict(planned)}
        tables, notes = [_plan_table(planned)], list(planned.assumptions)
        if priced is not None:
            advised = keeping.advise_keeping(lengths, shape, done, speed, *priced, model)
            report |= {"keeping": asdict(advised)}
            tables, notes = [*tables, _keeping_table(advised)], [*notes, *keeping.ASSUMPTIONS]
        if simulate:
            fleet = machines.fleet(planned.gpus)
            resources = {part: part.full_at(planned.gpus) for part in paper.shared_resources(planned, fleet, shared)}
            outcome = paper.simulate(planned, fleet, shared, seed=machines.seed)
            parts = [asdict(part) | {"breaks_at_gpus": at} for part, at in resources.items()]
            report |= {"fleet": asdict(fleet), "parts": parts, "outcome": asdict(outcome)}
            tables += [_resources_table(resources), _outcome_table(outcome, fleet)]
    if as_json:
        say_json(report)
        return
    for table in tables:
        common.print_table(table)
    for sentence in notes:
        common.notes.print(f"- {sentence}", style="dim", soft_wrap=True)


def _plan_table(plan: Plan) -> Table:
    stored = f"{_size(plan.bytes_stored)}, {plan.bytes_stored / plan.bytes_full_16bit:.1%}"
    rows = [
        ("documents", f"{plan.documents:,}"),
        ("tokens", f"{plan.tokens:,}"),
        ("tokens a second, each GPU", f"{plan.tokens_per_s:,.0f}"),
        ("GPUs", f"{plan.gpus:,}"),
        ("hours", f"{plan.hours:,.2f}"),
        ("GPU hours", f"{plan.gpu_hours:,.1f}"),
        ("documents an hour", f"{plan.documents_per_hour:,.0f}"),
        ("full KV in 16 bits", _size(plan.bytes_full_16bit)),
        ("stored", f"{stored} of that, {_size(plan.bytes_stored / plan.documents)} a document"),
        ("manifests, index, job table", _size(plan.home_bytes)),
        ("memory of Redis", "none" if plan.redis_memory_bytes is None else _size(plan.redis_memory_bytes)),
        ("network to the home", f"{_size(plan.network_bytes_per_s)} a second"),
    ]
    if plan.puts:
        puts, gets = (f"{count / plan.documents:,.3g}" for count in (plan.puts, plan.gets))
        rows.append(("requests to object storage", f"{puts} PUT and {gets} GET a document"))
    if plan.month_price is not None:
        rows.append(("price of the storage", f"{plan.month_price:,.0f} a month"))
    return common.table(("", ""), rows, numbers=[1])


def _keeping_table(advice: KeepingAdvice) -> Table:
    shortest, longest = advice.lengths[0], advice.lengths[-1]
    documents = sum(cost.documents for cost in advice.lengths)
    rows = [
        (f"all kept for {advice.demand.days:g} days", f"{advice.all_kept:,.2f} {advice.currency}"),
        (
            f"all searched, {advice.demand.passages:,} tokens a question",
            f"{advice.all_retrieved:,.2f} {advice.currency}",
        ),
        (f"kept {advice.kept:,} of {documents:,}, others searched", f"{advice.cheaper:,.2f} {advice.currency}"),
        *(
            (f"{cost.tokens:,} tokens are worth keeping from", _questions(cost.pays_from))
            for cost in dict.fromkeys((shortest, longest))
        ),
    ]
    return common.table((f"{advice.demand.questions:,} QUESTIONS A DOCUMENT", ""), rows, numbers=[1])


def _questions(count: int | None) -> str:
    return "no number of questions" if count is None else f"{count:,} questions"


def _resources_table(resources: dict[SharedResource, int | None]) -> Table:
    rows = []
    for resource, at in resources.items():
        used = f"{100 * resource.used:,.3g} %" if resource.used < 10 else f"{resource.used:,.0f} times"
        rows.append((resource.name, used, "-" if at is None else f"{at:,}", resource.move))
    return common.table(("WHAT ALL SHARE", "USED", "FULL AT GPUS", "WHAT MOVES IT"), rows, numbers=[1, 2])


def _outcome_table(outcome: Outcome, fleet: Fleet) -> Table:
    slowed = ", ".join(f"{name}: {hours:,.1f} hours" for name, hours in outcome.slowed_h.items())
    rows = [
        ("hours, with failures", f"{outcome.hours:,.2f}"),
        ("documents done", f"{outcome.documents:,}"),
        ("stopped by", outcome.stopped_by or "nothing"),
        ("the pace was set by", slowed or "the GPUs"),
        ("nodes that failed", f"{outcome.node_failures:,} of {-(-fleet.gpus // fleet.gpus_per_node):,}"),
        ("documents that killed their worker", f"{outcome.error_rows:,}, {outcome.worker_deaths:,} times"),
        ("GPU hours lost", f"{outcome.lost_gpu_hours:,.1f}"),
        ("innocent documents given up, expected", f"{outcome.innocent:.1e}"),
    ]
    return common.table(("A RUN ON PAPER", ""), rows, numbers=[1])


def _size(count: float) -> str:
    if count >= 1e12:
        return f"{count / 1e12:,.1f} TB"
    return f"{count / 1e9:,.1f} GB" if count >= 1e9 else common.megabytes(int(count))


def advise(
    scenario: Annotated[str, typer.Option(help=_NAMES)],
    tokens: Annotated[int, typer.Option(min=64, help="Length of a document.")],
    memory: Annotated[float, typer.Option(min=1, help="Bytes for keys and values, beside the model's weights.")],
    model: Annotated[str, typer.Option(help=_MODELS)] = "llama-3.1-8b",
    quality: Annotated[float, typer.Option(min=0, max=1, help=_QUALITY)] = 0.9,
    top: Annotated[int, typer.Option(min=1, help="Lines to show.")] = 5,
    certificate: Annotated[
        Path | None, typer.Option(metavar="FILE", help="By the questions of a certificate: of `certify --output`.")
    ] = None,
    as_json: _options.AsJson = False,
) -> None:
    """Say which policy, codec, selector, suffix policy and tier serve a scenario. Nothing is run.

    Exact answers were measured on kvshelf-tiny, whatever the model: give yours as --certificate. Bytes are those of
    the model.
    """
    with needs_extra("serve", purpose=f"kvshelf advise --model {model}"):
        from kvshelf.corpus import advice
        from kvshelf.corpus.plan import shape_of

        memory_bytes = int(memory)
        questions = None if certificate is None else read_certificate(certificate)
        advised = advice.advise(scenario, shape_of(model), tokens, memory_bytes, quality, questions)
    advised = replace(advised, lines=advised.lines[:top])
    if as_json:
        about = {"scenario": scenario, "model": model, "tokens": tokens, "memory_bytes": memory_bytes}
        measured_on = "kvshelf-tiny" if questions is None else questions.model
        say_json(about | {"measured_on": measured_on} | asdict(advised))
        return
    common.print_table(common.table(_HEADINGS, map(_cells, advised.lines), numbers=(5, 6, 7)))
    for sentence in _notes(advice.SCENARIOS[scenario].about, advised, questions):
        common.notes.print(f"- {sentence}", style="dim", soft_wrap=True)


_HEADINGS = ("POLICY", "CODEC", "SELECTOR", "SUFFIX", "TIER", "EXACT", "STORED", "MEMORY", "WHY")


def _cells(line: AdviceLine) -> tuple[str, ...]:
    option = line.option
    policy = f"{option.policy}, {option.removed:.4g} removed" if option.removed else option.policy
    stored, needed = (common.megabytes(count) for count in (option.stored_bytes, line.needed_bytes))
    exact = f"{option.exact:.1%}"
    return policy, option.codec, _selector(option), line.suffix or "-", line.tier, exact, stored, needed, line.reason


def _selector(option: Option) -> str:
    if option.selector is None or option.share is None:
        return "-"
    params = "".join(f", {name}={value}" for name, value in option.params.items())
    return f"{option.selector} of {option.share:.4g}{params}"


def _notes(about: str, advised: Advice, certificate: Certificate | None) -> Iterator[str]:
    measured = "on kvshelf-tiny, documents of 2,048 tokens"
    if certificate is not None:
        measured = f"by the certificate {certificate.name!r}, on {certificate.model}"
    yield f"{about}. Exact answers were measured {measured}; bytes are the model's."
    if any(line.option.codec == "klt" or line.option.selector == "fasa" for line in advised.lines):
        yield "Codec klt and selector fasa need what `kvshelf calibrate` makes for a model."
    names = defaultdict(list)
    for name, reason in advised.refused.items():
        names[reason].append(name)
    for reason, those in names.items():
        yield f"refused: {', '.join(those)}: {reason}"
