"""append: more of a document, behind its cache."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvshelf.cli import _common, _options, _references
from kvshelf.cli.caches import STDIN, Cache, summary

File = Annotated[
    Path, typer.Argument(metavar="FILE", help="UTF-8 text, PDF or HTML; - reads text from standard input.")
]


def append(
    cache: Cache,
    file: File,
    policy: _options.Policy = None,
    compression_ratio: _options.CompressionRatio = None,
    budget_tokens: _options.BudgetTokens = None,
    param: _options.Parameters = None,
    ttl: _options.Ttl = None,
    name: _options.Name = None,
    label: _options.Labels = None,
    expected_question: _options.ExpectedQuestions = None,
    url: _options.Url = None,
    as_json: _options.AsJson = False,
) -> None:
    """Read a file behind the document of a cache, and put the cache of both on the shelf. Prints its id.

    The text goes on where the document ends, just as it is. Only the file goes through the model, and only what is new
    takes space; CACHE stays as it is. Policy, ratio and budget are of the file alone, by default those of CACHE; the
    new cache expires with CACHE unless --ttl says otherwise.
    """
    document = {"document": _common.standard_input()} if file == STDIN else {"file": file}
    with _common.connected(url, as_json=as_json) as client:
        made = client.caches.append(
            _references.id_at(client, cache),
            **document,
            policy=policy,
            policy_params=_common.parameters(param),
            compression_ratio=compression_ratio,
            budget_tokens=budget_tokens,
            expected_questions=expected_question,
            ttl_s=_common.seconds(ttl),
            name=name,
            labels=_common.pairs(label, "--label"),
        )
        if as_json:
            _common.print_object(made)
            return
        print(made.id, flush=True)
        shown = "standard input" if file == STDIN else str(file)
        _common.notes.print(f"{shown}: {summary(made)}", style="dim", soft_wrap=True)
