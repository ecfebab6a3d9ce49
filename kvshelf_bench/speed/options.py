"""The options of `kvshelf bench speed`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer

from kvshelf.errors import InvalidRequest
from kvshelf_bench.options import numbers

# All but long documents and answers, vLLM, which few have installed, and several processes.
_PARTS = "compression,codecs,first-token,decode"


@dataclass(frozen=True)
class SpeedOptions:
    """What is measured, with what. parts: of `kvshelf_bench.speed.parts.PARTS`. Methods raise `typer.BadParameter` and
    `InvalidRequest`."""

    parts: Annotated[str, typer.Option(help="Comma-separated.")] = _PARTS
    lengths: Annotated[
        str,
        typer.Option(
            help="Tokens per document.  [default: 2k to 8k, codecs 8k, from the shelf to 16k, serving 2,048 and 8,000, "
            "others 32k, as far as the model takes them]",
        ),
    ] = ""
    policies: Annotated[str, typer.Option(help="To compress with.  [default: all of one pass]")] = ""
    removed: Annotated[float, typer.Option(help="Fraction that those remove.")] = 0.75
    questions: Annotated[str, typer.Option(help="Asked at once, comma-separated.")] = "1,8,32,128"
    ways: Annotated[
        str, typer.Option(help="Of the documents of the part decode: such as keydiff,snapkv@1024.  [default: full]")
    ] = ""
    answer_tokens: Annotated[str, typer.Option(help="Of each answer in the part decode, comma-separated, from 2.")] = (
        "64"
    )
    rounds: Annotated[int, typer.Option(min=1, help="Interleaved rounds; medians are printed.")] = 5
    kvpress_python: Annotated[
        str | None,
        typer.Option(help="Interpreter with kvpress.  [default: this one, if it has it]"),
    ] = None
    vllm_python: Annotated[
        str | None, typer.Option(help="Interpreter with vLLM, for the part serving.  [default: this one, if it has it]")
    ] = None
    llama_python: Annotated[
        str | None,
        typer.Option(
            help="Interpreter with llama-cpp-python, for the part serving.  [default: this one, if it has it]"
        ),
    ] = None
    budget: Annotated[float, typer.Option(min=1, help="Seconds that the part serving may take.")] = 270.0
    ranks: Annotated[int, typer.Option(min=2, help="Processes that share the model, for the part ranks.")] = 2
    stores: Annotated[
        list[str] | None, typer.Option("--store", help="URL of one more store to answer from; may be repeated.")
    ] = None

    def document_tokens(self) -> list[int] | None:
        """None: the lengths of each part."""
        return numbers(self.lengths) if self.lengths else None

    def question_counts(self) -> list[int]:
        return numbers(self.questions, "--questions")

    def new_tokens(self) -> list[int]:
        lengths = numbers(self.answer_tokens, "--answer-tokens")
        if min(lengths) < 2:
            raise InvalidRequest(
                f"--answer-tokens {self.answer_tokens}: steps are measured from the second token on; give 2 or more",
                param="answer_tokens",
            )
        return lengths
