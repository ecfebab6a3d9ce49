"""`kvshelf batch --url`: the same corpus, compressed by a running service."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from kvshelf.cli import _progress

if TYPE_CHECKING:
    from kvshelf.corpus.input.files import FileSource
    from kvshelf.corpus.run.progress import Summary


class Asked(Protocol):
    """What `kvshelf batch` was asked for. fields: of `CreateCache`, for all rows; options: of `RunOptions`."""

    @property
    def input(self) -> str: ...
    @property
    def output(self) -> Path: ...
    @property
    def report(self) -> Path | None: ...
    @property
    def fields(self) -> Mapping[str, Any]: ...
    @property
    def options(self) -> Mapping[str, Any]: ...
    @property
    def as_json(self) -> bool: ...
    def source(self) -> FileSource: ...
    def told(self, summary: Summary) -> int: ...


def run_remote(url: str, asked: Asked) -> int:
    """Upload the corpus, wait for its end, write the output; returns the exit code.

    Ctrl-C cancels the batch and writes what is done. What is on the shelf is reused when the command is run again.
    """
    from kvshelf.client import Client
    from kvshelf.corpus.input.rows import require_defaults
    from kvshelf.corpus.output.files import require_format, write_output
    from kvshelf.corpus.output.report import require_report, write_report
    from kvshelf.corpus.run.remote import run_at

    require_format(asked.output)
    if asked.report is not None:
        require_report(asked.report)
    require_defaults(asked.fields)
    source = asked.source()
    # A batch of a service is always a new one: what failed in an earlier one is tried again without asking for it.
    options = {name: value for name, value in asked.options.items() if name != "retry_failed"}
    options["document_timeout_s"] = options.pop("document_deadline_s")
    with Client(url) as client, _progress.shown(quiet=asked.as_json) as show:
        summary, results = run_at(client, source, options, asked.input, show)
    write_output(asked.output, results, file=source.several)
    if asked.report is not None:
        write_report(asked.report, summary, results)
    return asked.told(summary)
