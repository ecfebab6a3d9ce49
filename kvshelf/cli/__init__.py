"""The command line. Each command imports what it needs when it runs, so that `kvshelf --help` needs no torch."""

from __future__ import annotations

import os
import sys
from importlib import import_module
from importlib.util import find_spec
from typing import Annotated

import typer

import kvshelf
from kvshelf.cli import batch, batches, caches, calibrate, demo, doctor, keys, models, output, plan, policies, serve
from kvshelf.cli._commands import command
from kvshelf.cli.checks import certify
from kvshelf.cli.output import common, say
from kvshelf.cli.removal import erase, uninstall
from kvshelf.cli.transfer import bundles, export_cache, import_cache
from kvshelf.errors import KvshelfError, StorageFull

app = typer.Typer(
    name="kvshelf",
    help="Compress a long document's KV cache once, put it on a shelf, query it a thousand times.",
    epilog=common.EXIT_CODES,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


@app.callback(invoke_without_command=True)
def root(version: Annotated[bool, typer.Option("--version", help="Show the version and stop.")] = False) -> None:
    output.prepare()
    if version:
        say(f"kvshelf {kvshelf.__version__}")
        raise typer.Exit


for run in (
    demo.demo,
    demo.sample,
    serve.serve,
    serve.mcp,
    caches.put,
    caches.append,
    caches.search,
    caches.ask,
    caches.ls,
    caches.show,
    caches.update,
    caches.warm,
    caches.remake,
    caches.rm,
    erase.erase,
    erase.verify_receipt,
    keys.usage,
    plan.estimate,
    plan.plan,
    plan.advise,
    policies.policies,
    policies.selectors,
    policies.suffixes,
    calibrate.calibrate,
    certify.certify,
    certify.certificates,
    doctor.doctor,
    uninstall.uninstall,
):
    command(app, run)
command(app, batch.batch, epilog=batch.EPILOG)
command(app, calibrate.train_gates, "train-gates")
command(app, serve.vllm_proxy, "vllm-proxy")
command(app, export_cache, "export")
command(app, import_cache, "import")
command(app, bundles.push)
command(app, bundles.pull)
command(app, bundles.trust)
app.add_typer(batches.app, name="batches")
app.add_typer(keys.app, name="keys")
app.add_typer(models.app, name="models")
if find_spec("kvshelf_bench"):  # by its name: a package beside this one, which imports it and never the other way
    app.add_typer(import_module("kvshelf_bench.cli").app, name="bench")


def main() -> None:
    """The entry point of `kvshelf`. An error that a command did not catch gets the usual message and exit code."""
    sys.stdin = sys.stdin or open(os.devnull)  # noqa: SIM115 - some starters of programs close it
    try:
        app(prog_name="kvshelf")
    except KvshelfError as error:
        sys.exit(common.report(error, as_json=False))
    except OSError as error:  # of stdout, or a file that no command looks after; a closed pipe has ended in `app`
        output.abandon()
        sys.exit(common.report(StorageFull(f"cannot write or read: {error}"), as_json=False))
