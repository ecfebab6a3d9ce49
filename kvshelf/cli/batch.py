"""batch: compress a whole corpus, here or by a running service."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final
from urllib.parse import urlsplit

import typer

from kvshelf._extras import needs_extra
from kvshelf.cli import _forms, _options
from kvshelf.cli.output import common, progress, say, say_json
from kvshelf.errors import InvalidRequest, KvshelfError
from kvshelf.names import as_text

if TYPE_CHECKING:
    from kvshelf.api import CreateCache
    from kvshelf.corpus.input.files import FileCorpus
    from kvshelf.corpus.places import Place
    from kvshelf.corpus.row import Row
    from kvshelf.corpus.run.progress import Summary

_LOOK_S: Final = 2.0
"""How long a service of this machine may take to say that it is there."""

STOPPED = 6
"""Exit code of a batch that ended before its last row."""

EPILOG = """
Exit codes: 0 every document is on the shelf; 1 some or all failed, the output says why; 2 refused before any work;
6 stopped before the end, 130 with Ctrl-C: run the same command again to continue.
"""

_Input = Annotated[
    str,
    typer.Argument(metavar="INPUT", help="A JSONL or Parquet file, a folder of texts, or a pattern like 'd/*.md'."),
]
_Url = Annotated[
    str | None, typer.Option("--url", envvar="KVSHELF_URL", help="URL of a running service that runs the batch.")
]


@dataclass(frozen=True)
class Outputs:
    output: Annotated[
        str, typer.Option(metavar="FILE", help="One line per document, as .jsonl or .parquet; a path or an s3:// URL.")
    ]
    report: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Also write a report with pictures, as .html; a path or an s3:// URL."),
    ] = None

    def places(self) -> tuple[Place, Place | None]:
        """Raises `InvalidRequest` for what is no place to write to."""
        from kvshelf.corpus.places import place

        report = place(self.report, param="--report") if self.report else None
        return place(self.output, param="--output"), report


@dataclass(frozen=True)
class BatchPace:
    """When the batch works, and how often it tries."""

    window: Annotated[str | None, typer.Option(help="Work only at this time of day: 22:00-06:00.")] = None
    max_gpu_hours: Annotated[
        float | None, typer.Option(min=0, help="Stop when the replicas' GPUs have worked this long.")
    ] = None
    document_timeout: Annotated[str, typer.Option(help="Time limit of one attempt at one document: 90s, 15m, 2h.")] = (
        "1h"
    )
    max_attempts: Annotated[int, typer.Option(min=1, max=100, help="Attempts before a document is given up.")] = 3
    priority: Annotated[
        int,
        typer.Option(min=-10, max=10, help="At a service: of your batches, those of the highest priority run first."),
    ] = 0
    retry_failed: Annotated[bool, typer.Option("--retry-failed", help="Retry rows that failed in an earlier run.")] = (
        False
    )

    @property
    def options(self) -> dict[str, Any]:
        """Of `RunOptions`, the window as text."""
        return {
            "window": self.window,
            "max_gpu_hours": self.max_gpu_hours,
            "document_deadline_s": _timeout(self.document_timeout),
            "max_attempts": self.max_attempts,
            "retry_failed": self.retry_failed,
        }


def batch(
    context: typer.Context,
    input: _Input,
    written: Outputs,
    fields: Annotated[dict[str, Any], _forms.DEFAULTS],
    run: BatchPace,
    hosting: _options.Hosting,
    url: _Url = None,
    as_json: _options.AsJson = False,
) -> None:
    """Compress a corpus: many documents in, one line out for each, with its cache id or its error.

    With --url, unless --store is given, a running service runs the batch. Otherwise this command starts the model and
    writes to --store. Run the same command again after a stop, or to add new documents: documents on the shelf are not
    compressed again.
    """
    with needs_extra("serve", purpose="kvshelf batch"):
        remote = _is_remote(context)
        fields["model"] = _only(hosting.model) if remote else None
        chosen = {name: value for name, value in fields.items() if value is not None}
        job = BatchJob(input, *written.places(), chosen, run.options, as_json)
        if remote:
            assert url is not None
            raise typer.Exit(job.run_at(url, run.priority))
        if run.priority:
            raise InvalidRequest(
                "--priority is among the batches of a service, and this command runs the batch itself; leave it out",
                param="--priority",
            )
        raise typer.Exit(job.run(**hosting.settings))


@dataclass(frozen=True)
class BatchJob:
    """One call of the command. fields: of `CreateCache`, for all rows; options: of `RunOptions`, the window as text."""

    input: str
    output: Place
    report: Place | None
    fields: Mapping[str, Any]
    options: Mapping[str, Any]
    as_json: bool

    def corpus(self) -> FileCorpus:
        """The corpus. Files that the batch itself writes may lie in the same folder; they are left out."""
        from kvshelf.atomic import partial_of
        from kvshelf.corpus.input.extract import ExtractLimits
        from kvshelf.corpus.input.files import FileCorpus
        from kvshelf.corpus.input.rows import MAX_DOCUMENT_BYTES
        from kvshelf.corpus.places import beside
        from kvshelf.service.settings import load_settings

        settings = load_settings()
        limits = ExtractLimits(MAX_DOCUMENT_BYTES, settings.extract_memory_bytes, settings.extract_cpu_s)
        written = [self.output] if self.report is None else [self.output, self.report]
        unfinished = [partial_of(path) for path in written if isinstance(path, Path)]
        without = [beside(self.output, ".journal"), *written, *unfinished]
        return FileCorpus(self.input, self.fields, without=without, limits=limits)

    def run(self, **settings: Any) -> int:
        """Run the batch here; returns the exit code. Bad options are refused before anything is started."""
        from kvshelf.corpus.run.journal import journal_of
        from kvshelf.corpus.run.progress import RunOptions, RunState, WorkHours
        from kvshelf.service.process.standalone import TENANT, run_standalone
        from kvshelf.service.settings import load_settings
        from kvshelf.store.private import without_secret
        from kvshelf.workers.replica.create.spec import require_policy

        loaded = load_settings(**settings)
        require_policy(self._defaults())
        window = self.options["window"]
        options = {**self.options, "window": WorkHours.parse(window) if window else None}
        corpus = self.corpus()
        shards = corpus.shards()
        about = {**self._about(), "dtype": loaded.dtype, "weights": loaded.weights}
        # The run's id depends on the models' fingerprints, and the store holds its job table.
        models = [*loaded.models, *loaded.adapters]
        with journal_of(self.output, {**about, "models": models, "store": without_secret(loaded.store)}) as journal:
            if loaded.address is None:
                mention_service(loaded.port)
            # Ray prints events of its nodes to standard output, which is for results.
            with redirect_stdout(sys.stderr), progress.shown(quiet=self.as_json) as show:
                summary = run_standalone(
                    loaded, shards, journal, about, lambda batch_id: RunOptions(TENANT, batch_id, **options), show
                )
            completed = summary.state is RunState.COMPLETED
            rows = partial(journal.finished, of_this_run=completed)
            code = self._end(summary, about, models, rows, several=corpus.several)
            if completed:
                journal.complete()
        return code

    def run_at(self, url: str, priority: int) -> int:
        """Upload the corpus to a service, wait for the batch to end, write the output; returns the exit code.

        Ctrl-C cancels the batch and writes the finished rows. Caches on the shelf are reused by the next run.
        """
        from kvshelf.client import Client
        from kvshelf.corpus.run.journal import journal_of
        from kvshelf.corpus.run.remote import run_at
        from kvshelf.store.private import without_secret

        self._defaults()
        corpus = self.corpus()
        # A service always makes a new batch, which tries the failed rows of earlier batches again.
        options = {name: value for name, value in self.options.items() if name != "retry_failed"}
        options |= {"document_timeout_s": options.pop("document_deadline_s"), "priority": priority}
        about = {**self._about(), "service": without_secret(url)}
        with journal_of(self.output, about), Client(url) as client:
            with progress.shown(quiet=self.as_json) as show:
                summary, rows = run_at(client, corpus.shards(), {**self.fields, **options}, about["input"], show)
            models = [self.fields.get("model") or client.models.list()[0].id] if self.report else []
            return self._end(summary, about, models, lambda: rows, several=corpus.several)

    def _about(self) -> dict[str, Any]:
        """What identifies the batch wherever it runs, as plain JSON values."""
        from kvshelf.corpus.places import is_url
        from kvshelf.store.private import without_secret

        where = without_secret(self.input) if is_url(self.input) else as_text(Path(self.input).absolute())
        output = self.output if isinstance(self.output, str) else as_text(self.output.absolute())
        return {"input": where, "output": output, "fields": self.fields}

    def _defaults(self) -> CreateCache:
        """The creation fields that rows start from. Raises `InvalidRequest` for bad options and files."""
        from kvshelf.corpus.input.defaults import require_defaults
        from kvshelf.corpus.output.files import require_format
        from kvshelf.corpus.output.report import require_report

        require_format(self.output)
        if self.report is not None:
            require_report(self.report)
        return require_defaults(self.fields)

    def _end(
        self,
        summary: Summary,
        about: Mapping[str, Any],
        models: Sequence[str],
        rows: Callable[[], Iterable[Row]],
        *,
        several: bool,
    ) -> int:
        """Write the output and the report, and say how the batch ended; returns the exit code."""
        from kvshelf.corpus.output.files import write_output
        from kvshelf.corpus.output.report import BatchOptions, write_report
        from kvshelf.corpus.run.progress import INTERRUPTED

        write_output(self.output, rows(), file=several)
        if self.report is not None:
            write_report(self.report, BatchOptions(about["input"], models, self.fields), summary, rows())
        if self.as_json:
            say_json(asdict(summary) | {"output": as_text(self.output)}, default=vars)
        else:
            say(self.output)
            common.notes.print(
                describe_end(summary), soft_wrap=True, style="red" if summary.state == "failed" else None
            )
        if summary.state == "cancelled":
            return common.INTERRUPTED if summary.reason == INTERRUPTED else STOPPED
        return 1 if summary.failed or summary.state == "failed" else 0


def mention_service(port: int) -> None:
    """Say so if a service of this machine could take the batch, instead of a second model beside its own."""
    from kvshelf.client import Client, Retries, Timeouts

    url = os.environ.get("KVSHELF_URL") or f"http://127.0.0.1:{port}"
    if urlsplit(url).hostname not in ("127.0.0.1", "::1", "localhost"):
        return
    soon, once = Timeouts(connect_s=1.0, read_s=_LOOK_S), Retries(max_retries=0)
    try:
        with Client(url, timeouts=soon, retries=once) as client:
            client.ready()
    except KvshelfError:  # nobody answers, or another program
        return
    common.notes.print(
        f"A service listens at {url}. This batch starts a model of its own beside it, and both share this machine. To "
        f"let the service run the batch on its own shelf, give --url {url} instead of --store.",
        soft_wrap=True,
    )


def describe_end(summary: Summary) -> str:
    rows = f"{summary.done:,} documents on the shelf, {summary.reused:,} of them before; {summary.failed:,} failed"
    match summary.state:
        case "cancelled":
            return f"stopped ({summary.reason}): {rows}. Run the same command again to go on"
        case "failed":
            return f"failed: {summary.reason}"
    again = ". The output says why; --retry-failed tries them again" if summary.failed else ""
    return f"{rows}; {summary.bytes.describe(common.megabytes)}; {summary.gpu_hours:.2f} GPU hours{again}"


def _is_remote(context: typer.Context) -> bool:
    """Whether a service runs the batch. Raises `InvalidRequest` for options that would have no effect there."""
    sources = {name: context.get_parameter_source(name) for name in context.params}
    chosen = {name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"}
    url = context.params["url"]
    if url is None or ("store" in chosen and "url" not in chosen):
        return False
    for name in _options.Hosting.__dataclass_fields__:  # a service has its own settings, and models
        if name in chosen and name != "model":
            option = "--" + name.replace("_", "-")
            raise InvalidRequest(
                f"{option} is for a batch that this command runs itself, and the service at {url} runs this one; leave "
                f"{option} out, or --url and KVSHELF_URL",
                param=option,
            )
    return True


def _only(models: list[str] | None) -> str | None:
    if models is not None and len(models) > 1:
        raise InvalidRequest(
            f"--model is given {len(models)} times, and a service's batch has one; rows may name others",
            param="--model",
        )
    return models[0] if models else None


def _timeout(text: str) -> float:
    seconds = common.seconds(text, "--document-timeout")
    if not seconds:
        raise InvalidRequest(f"--document-timeout {text!r} leaves no time at all", param="--document-timeout")
    return seconds
