"""Options with one meaning in every command."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

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

Policy = Annotated[
    str | None,
    typer.Option(
        help="A policy of `kvshelf policies`, or auto: it chooses policy, ratio and codec.  [default: full under codec "
        "int8; keydiff with a ratio, a budget, levels or parameters]"
    ),
]
AppendedPolicy = Annotated[str | None, typer.Option(help="A policy of `kvshelf policies`.  [default: that of CACHE]")]
CompressionRatio = Annotated[float | None, typer.Option(help="Fraction of the entries to REMOVE, such as 0.75.")]
BudgetTokens = Annotated[int | None, typer.Option(help="Entries to keep per layer and head, instead of a ratio.")]
Levels = Annotated[
    list[str] | None,
    typer.Option(
        "--level",
        metavar="RATIO[:CODEC]",
        help="A compression ratio, or 0.5:int4. Repeat it to make several caches from one prefill.",
    ),
]
MaxBytes = Annotated[
    int | None, typer.Option(help="Most bytes of the cache. Keeps the level of the best quality that fits, or none.")
]
BytesPerToken = Annotated[float | None, typer.Option(help="The same, as bytes for each token of the document.")]
Quality = Annotated[
    Literal["full", "fast"] | None,
    typer.Option(
        help="How to measure the quality: by 150 cues, or by as many as take half the prefill's time at most."
    ),
]
NoQuality = Annotated[
    bool,
    typer.Option("--no-quality", help="Do not measure the quality of the cache."),
]
MinQuality = Annotated[
    float | None,
    typer.Option(
        help="Lowest bound of the agreement with the full cache, such as 0.95. Keeps the smallest level that "
        "reaches it, or none."
    ),
]
Split = Annotated[
    bool, typer.Option("--split", help="Make one cache for each part of a document that is too long for the model.")
]
PartTokens = Annotated[
    int | None, typer.Option(help="With --split: most tokens of a part.  [default: 7/8 of what the model takes]")
]
OverlapTokens = Annotated[
    int | None,
    typer.Option(help="With --split: tokens that a part shares with the next.  [default: 128]"),
]
Episodes = Annotated[
    int | None,
    typer.Option(min=1, help="Take the document for a conversation, and make a cache for each of so many episodes."),
]
Layout = Annotated[str | None, typer.Option(help="chat or plain.")]
Codec = Annotated[
    str | None,
    typer.Option(help="none, int8, int4, int2, mixed or klt, and parameters: int4:group=64, klt:step=2,steps=kl."),
]
Ttl = Annotated[str | None, typer.Option(help="Lifetime of the cache: 90s, 15m, 2h, 7d.")]
TtlRenew = Annotated[
    bool, typer.Option("--ttl-renew", help="With --ttl: each question prolongs the lifetime to --ttl from then.")
]
Name = Annotated[str | None, typer.Option(help="Display name.  [default: the file's name]")]
KeepSource = Annotated[
    Literal["text", "tokens"] | None,
    typer.Option("--keep-source", help="Keep the document's text, or its token ids alone, to make a lost cache again."),
]
SourceTtl = Annotated[
    str | None,
    typer.Option(help="With --keep-source: lifetime of the source.  [default: until the cache is deleted]"),
]
ExpectedQuestions = Annotated[
    list[str] | None, typer.Option("--expected-question", help="For policies that use questions. May be repeated.")
]
TemplateVariables = Annotated[
    list[str] | None,
    typer.Option(
        "--chat-template-kwarg",
        metavar="NAME=VALUE",
        help="A variable of the model's chat template, such as reasoning_effort=low. May be repeated.",
    ),
]
Date = Annotated[str | None, typer.Option(help="The day that the chat template is told: YYYY-MM-DD.  [default: today]")]
ServiceModel = Annotated[str | None, typer.Option("--model", help="One of the service's models.  [default: its first]")]

Models = Annotated[
    list[str] | None,
    typer.Option("--model", help="A bundled name, a folder or a hub id. May be repeated; the first is the default."),
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
