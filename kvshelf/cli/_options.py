"""Options with one meaning in every command."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

Url = Annotated[
    str | None,
    typer.Option("--url", envvar="KVSHELF_URL", help="Address of the service.  [default: http://127.0.0.1:8765]"),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print API objects and errors as JSON, one per line.")]


def _warned(store: str | None) -> str | None:
    from kvshelf.store.private import without_secret

    if store is not None and without_secret(store) != store:
        typer.echo(
            "kvshelf: the password in --store shows in the process list; use KVSHELF_STORE, or ?password_file=/path",
            err=True,
        )
    return store


Prices = Annotated[
    Path | None,
    typer.Option(
        envvar="KVSHELF_PRICES_FILE",
        metavar="FILE",
        help='Prices as JSON: {"currency": "EUR", "worker_hour": 2.1, "gb_month": 0.03}.',
    ),
]

Store = Annotated[
    str | None,
    typer.Option(
        "--store",
        callback=_warned,
        help="URL of the store, such as disk:///var/lib/kvshelf or redis://host?blobs=s3://bucket/prefix.",
    ),
]
KeyFile = Annotated[
    Path | None,
    typer.Option(
        "--encryption-key-file",
        envvar="KVSHELF_ENCRYPTION_KEY_FILE",
        help="File with the store's encryption keys, one per line. The first key seals new caches.",
    ),
]
Device = Annotated[str, typer.Option("--device", help="auto, cpu, cuda or spread.")]
Dtype = Annotated[str, typer.Option("--dtype", help="auto, float32, bfloat16 or float16.")]
Weights = Annotated[str, typer.Option("--weights", help="plain or int8: rounded to a byte each, on a CPU.")]
Labels = Annotated[list[str] | None, typer.Option("--label", metavar="KEY=VALUE", help="A label. May be repeated.")]

Parameters = Annotated[
    list[str] | None, typer.Option("--param", metavar="NAME=VALUE", help="A parameter of the policy. May be repeated.")
]

ServiceModel = Annotated[str | None, typer.Option("--model", help="One of the service's models.  [default: its first]")]

Models = Annotated[
    list[str] | None,
    typer.Option("--model", help="A bundled name, a folder or a hub id. May be repeated; the first is the default."),
]
Adapters = Annotated[
    list[str] | None,
    typer.Option(
        "--adapter",
        metavar="NAME=FOLDER",
        help="A LoRA adapter of the first model, as peft saved it: one more model, with weights of its own. May be "
        "repeated.",
    ),
]
ServiceDevice = Annotated[str | None, typer.Option("--device", help="auto, cpu, cuda or spread.")]
ServiceDtype = Annotated[str | None, typer.Option("--dtype", help="auto, float32, bfloat16 or float16.")]
ServiceWeights = Annotated[
    str | None,
    typer.Option(
        "--weights", help="plain or int8: rounded to a byte each, on a CPU; another model than the plain one."
    ),
]
Replicas = Annotated[int | None, typer.Option(help="Replicas of each model.")]
GpusPerReplica = Annotated[
    int | None,
    typer.Option(
        help="GPUs that share one model, each with some heads; with --device spread, some layers.  [default: 1]"
    ),
]
Address = Annotated[
    str | None, typer.Option(help="Address of a running Ray cluster; auto finds it.  [default: a local one]")
]


@dataclass(frozen=True, kw_only=True)
class Hosting:
    """Where models run that this command starts itself, and which store they have."""

    store: Store = None
    encryption_key_file: KeyFile = None
    model: Models = None
    adapter: Adapters = None
    device: ServiceDevice = None
    dtype: ServiceDtype = None
    weights: ServiceWeights = None
    replicas: Replicas = None
    gpus_per_replica: GpusPerReplica = None
    address: Address = None

    @property
    def settings(self) -> dict[str, Any]:
        """Of `load_settings`; None where an option is not given."""
        values = {name: str(value) if isinstance(value, Path) else value for name, value in vars(self).items()}
        lists = {f"{name}s": values.pop(name) for name in ("model", "adapter")}
        return values | {name: tuple(texts) if texts else None for name, texts in lists.items()}
