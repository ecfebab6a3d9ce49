"""serve, vllm-proxy, mcp: run the service, a proxy before vLLM servers, or a server of MCP, in the foreground."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from kvshelf._extras import needs_extra
from kvshelf.cli import _options
from kvshelf.cli.output import say_json


@dataclass(frozen=True, kw_only=True)
class _Serving(_options.Hosting):
    encryption_key_file: Annotated[
        Path | None, typer.Option(help="Encrypt stored caches with the first key of this file, one key per line.")
    ] = None
    api_key_file: Annotated[
        Path | None,
        typer.Option(help="API keys of those who may use the service; see `kvshelf keys`.  [default: everybody]"),
    ] = None
    chat_template: Annotated[
        str | None,
        typer.Option(metavar="NAME|FILE", help="Another chat template: of the model, by its name, or in a file."),
    ] = None
    engine: Annotated[
        str | None, typer.Option(help="What answers questions: kvshelf, or llama.cpp, which runs GGUF files.")
    ] = None
    threads: Annotated[int | None, typer.Option(help="CPU threads per replica.")] = None
    host: Annotated[str | None, typer.Option(help="Address to listen on.")] = None
    port: Annotated[int | None, typer.Option(help="Port to listen on; 0 takes a free one.")] = None
    ladder: Annotated[
        str | None,
        typer.Option(
            metavar="RULE", help="Code caches smaller that nobody asks: none:1d,int8:7d,klt.  [default: never]"
        ),
    ] = None
    log_level: Annotated[str | None, typer.Option(help="debug, info, warning or error.")] = None


def serve(
    options: _Serving,
    env_file: Annotated[
        Path | None,
        typer.Option(envvar="KVSHELF_ENV_FILE", help="File with lines NAME=value; environment variables win over it."),
    ] = None,
    print_config: Annotated[bool, typer.Option("--print-config", help="Print the settings and exit.")] = False,
    place: Annotated[str | None, typer.Option(hidden=True)] = None,  # for the process that the supervisor starts
) -> None:
    """Run the service until it is stopped. SIGHUP restarts it without a pause.

    Every option is also an environment variable: --store is KVSHELF_STORE, --model KVSHELF_MODELS, and so on. An option
    wins over its variable.
    """
    with needs_extra("serve", purpose="kvshelf serve"):
        from kvshelf.service.settings import load_settings

        settings = load_settings(env_file, **options.settings)
        if print_config:
            say_json(settings.redacted(), indent=2)
            return
        if place is None:
            from kvshelf.service.process.supervisor import supervise

            # Start the child as this process was started: same interpreter, script or module.
            sys.exit(supervise(settings, [sys.executable, *sys.orig_argv[1:]]))
        from kvshelf.service.http.place import ServerPlace
        from kvshelf.service.process.server import serve as run

        with ServerPlace.inherited(place) as inherited:
            run(settings, inherited)


def vllm_proxy(
    upstream: Annotated[
        list[str], typer.Option(metavar="URL", help="A vLLM server with kvshelf's connector. May be repeated.")
    ],
    model: Annotated[str, typer.Option(help="Bundled name, folder or hub id of the model that they serve.")],
    block_size: Annotated[int, typer.Option(min=1, help="Their --block-size; vLLM's own on a CPU is 128.")] = 128,
    store: _options.Store = None,
    encryption_key_file: _options.KeyFile = None,
    api_key_file: Annotated[
        Path | None, typer.Option(help="API keys of those who may use the proxy; see `kvshelf keys`.")
    ] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on; without API keys only loopback.")] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on; 0 takes a free one.")] = None,
) -> None:
    """Answer OpenAI's requests from vLLM servers; those with a cache_id from a cache of the store.

    Options are also environment variables, as for `kvshelf serve`. Only the model's tokenizer is loaded.
    """
    with needs_extra("serve", purpose="kvshelf vllm-proxy"):
        from kvshelf.integrations.vllm.proxy import serve as run
        from kvshelf.service.settings import load_settings

        settings = load_settings(
            store=store,
            encryption_key_file=None if encryption_key_file is None else str(encryption_key_file),
            api_key_file=None if api_key_file is None else str(api_key_file),
            host=host,
            port=port,
        )
        run(settings, upstream, model, block_size)


def mcp(
    http: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            help="Listen there, at the path /mcp, instead of on stdin; each caller sends its API key.",
        ),
    ] = None,
    files: Annotated[
        Path | None, typer.Option(help="Let the assistant put files of this folder on the shelf. Only without --http.")
    ] = None,
    url: _options.Url = None,
) -> None:
    """Give assistants the shelf of a running service, by the Model Context Protocol.

    An assistant can put documents on the shelf, ask, search, list and delete them. It starts this command itself and
    talks to it on stdin and stdout, with the key in KVSHELF_API_KEY; or it connects to --http.
    """
    with needs_extra("mcp", purpose="kvshelf mcp"):
        from kvshelf.integrations.mcp import serve as run

        run(url, http, files)
