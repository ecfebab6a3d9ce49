"""erase and verify-receipt: everything of a subject goes, and a receipt says so."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvshelf._extras import needs_extra
from kvshelf.cli import _forms, _options
from kvshelf.cli.checks import stores
from kvshelf.cli.output import common, say, say_json
from kvshelf.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvshelf.api.caches import Erasure

_TENANT = "default"

SigningKey = Annotated[
    Path | None,
    typer.Option(
        "--erasure-key-file",
        envvar="KVSHELF_ERASURE_KEY_FILE",
        help="With --store: private key of Ed25519 in PEM that signs the receipt. A service signs with its own.",
    ),
]


def erase(
    fields: Annotated[dict[str, Any], _forms.ERASED],
    output: Annotated[Path | None, typer.Option(help="Write the receipt to this file, and not to stdout.")] = None,
    store: _options.Store = None,
    encryption_key_file: _options.KeyFile = None,
    erasure_key_file: SigningKey = None,
    url: _options.Url = None,
    as_json: _options.AsJson = False,  # noqa: ARG001 - for its errors
) -> None:
    """Erase everything of a subject, and print the receipt as JSON.

    That is: the caches with these labels and this name, and those that extend them; their sources and responses;
    waiting requests and batches that ask for them; lines of files and journals that name them. Through a running
    service, or with --store directly in a store, with the copies of its tiers on this machine. After a stop, the same
    command goes on.
    """
    if not any(fields[name] for name in ("labels", "name")) and fields["tenant"] is None:
        raise InvalidRequest(
            "say what is to be erased: --label subject=X, --name NAME, or --tenant NAME for everything of it",
            param="--label",
        )
    with ExitStack() as stack:
        # Before anything goes: a receipt that cannot be written is refused, and not lost.
        file = None if output is None else stack.enter_context(common.written(output))
        if store is None:
            receipt = _by_service(url, fields)
        else:
            receipt = _in_store(store, encryption_key_file, erasure_key_file, fields)
        if file is not None:
            file.write(receipt.model_dump_json().encode())
    if output is None:
        say_json(receipt)
    else:
        say(output)
    common.notes.print(_describe(receipt), soft_wrap=True)


def _in_store(
    store: str, encryption_key_file: Path | None, erasure_key_file: Path | None, fields: Mapping[str, Any]
) -> Erasure:
    with stores.opened(store, encryption_key_file) as shelf:
        from kvshelf.store.erasure.eraser import Subject
        from kvshelf.store.erasure.signing import Signer, sealed

        signer = None if erasure_key_file is None else Signer.read(erasure_key_file)
        tenant, labels = fields["tenant"] or _TENANT, fields["labels"] or {}
        subject = Subject(tenant=tenant, labels=labels, name=fields["name"])
        return sealed(shelf.erase(subject, dry_run=bool(fields["dry_run"])), signer)


def _by_service(url: str | None, fields: Mapping[str, Any]) -> Erasure:
    from kvshelf.client import Client

    with Client(url) as client:
        while True:
            receipt = client.erasures.create(**fields)
            if receipt.status != "in_progress":
                return receipt
            common.notes.print(_describe(receipt))


def _describe(receipt: Erasure) -> str:
    counts = ", ".join(f"{count} of {kind}" for kind, count in sorted(receipt.counts.items())) or "nothing"
    what = {"dry_run": "would go", "in_progress": "found, and not all is gone yet", "completed": "gone"}
    again = "".join(
        f"; {stay.kind} {stay.id}: {stay.why}" for stay in receipt.stays if stay.kind in ("request", "batch")
    )
    return f"{what[receipt.status]}: {counts}, {common.megabytes(receipt.bytes)}{again}"


def verify_receipt(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A receipt of `kvshelf erase`.")],
    public_key: Annotated[
        Path | None, typer.Option(help="PEM of the public key that it must be signed with (openssl pkey -pubout).")
    ] = None,
) -> None:
    """Check the digest and the signature of a receipt."""
    with needs_extra("serve", purpose="the digest of a receipt"):
        from kvshelf.api.caches import Erasure
        from kvshelf.store.erasure.signing import verify

        try:
            receipt = Erasure.model_validate_json(file.read_bytes())
        except OSError as error:
            raise InvalidRequest(f"cannot read {file}: {error.strerror}", param="FILE") from error
        except ValueError as error:
            raise InvalidRequest(f"{file} is no receipt of an erasure", param="FILE") from error
        say(verify(receipt, public_key))
