"""calibrate: measure a model once, for what needs it: retrieval heads for compresskv, transforms for codec klt,
frequency chunks for selector fasa. train-gates: train the gates of a policy for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from kvshelf._extras import needs_extra
from kvshelf.bench.options import counted, progress_bar
from kvshelf.cli import _common, _options
from kvshelf.cli.output import say
from kvshelf.errors import InvalidRequest

if TYPE_CHECKING:
    from kvshelf.workers.engine.engine import Engine
    from kvshelf.workers.engine.gates.lessons import Lesson

_QUESTIONS = 6
_TEXTS, _TEXT_TOKENS = 10, 2048
"""How many texts of the package's own prose are read, and their length."""


def calibrate(
    model: Annotated[str, typer.Option(help="A bundled name, a folder or a hub id.")],
    only: Annotated[
        Literal["heads", "transforms", "chunks"] | None,
        typer.Option(
            help="heads: for policy compresskv. transforms: for codec klt. chunks: for selector fasa.  [default: all]"
        ),
    ] = None,
    output: Annotated[
        Path | None, typer.Option(help="Folder for the results.  [default: your data folder, where engines look]")
    ] = None,
    documents: Annotated[int, typer.Option(min=1, help="Number of test documents, each hides one sentence.")] = 60,
    tokens: Annotated[int, typer.Option(min=128, help="Length of each test document, in tokens.")] = 1024,
    text: Annotated[
        list[Path] | None,
        typer.Option(
            help="Make transforms and chunks from this text of yours; repeat it.  [default: prose of the package]"
        ),
    ] = None,
    device: _options.Device = "auto",
    dtype: _options.Dtype = "auto",
    weights: _options.Weights = "plain",
    as_json: _options.AsJson = False,
) -> None:
    """Make the transforms of codec klt, with its steps=kl, and measure which query heads retrieve, for the policy
    compresskv, and which frequency chunks do, for the selector fasa.

    The results hold for these weights in this dtype. Engines look for them in $XDG_DATA_HOME/kvshelf/calibrations and,
    as klt.safetensors, compresskv.json and fasa.json, in the model's folder.
    """
    with _common.named_errors(as_json=as_json), needs_extra("serve", purpose="kvshelf calibrate"):
        from kvshelf.workers.engine.engine import Engine
        from kvshelf.workers.model import calibration

        engine = Engine.load(model, device=device, dtype=dtype, weights=weights)
        engine.require_text("model")
        paths = calibration.paths(engine.identity.weights, output)
        calibration.require_writable(paths.heads)
        made = []
        if only in (None, "transforms"):
            _transforms(engine, paths.transforms, text or [])
            made.append(paths.transforms)
        if only in (None, "chunks"):
            _chunks(engine, paths.chunks, text or [])
            made.append(paths.chunks)
        if only in (None, "heads"):
            _heads(engine, paths.heads, documents, tokens)
            made.append(paths.heads)
    for path in made:
        say(path)


def _read(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"{path} cannot be read as UTF-8 text: {error}", param="text") from error


def _heads(engine: Engine, path: Path, documents: int, tokens: int) -> None:
    from kvshelf.bench.quality.tasks import needles
    from kvshelf.workers.engine import head_search
    from kvshelf.workers.model import calibration

    count = engine.require_text("model").count_tokens
    with counted(f"heads of {engine.name}", 2 * documents) as step:
        found = head_search.calibrate(engine, list(needles(documents, tokens, count)), step)
    calibration.save(found, path)
    _common.notes.print(f"{found.origin.answered:.0%} of the answer tokens came from the sentence asked for")


def _transforms(engine: Engine, path: Path, texts: list[Path]) -> None:
    from kvshelf.atomic import written
    from kvshelf.workers.engine.transform_search import find_transforms

    with _reporting(f"transforms of {engine.name}") as report:
        data = find_transforms(engine, _documents(engine, texts), report=report)
    with written(path) as file:
        file.write(data)


def _chunks(engine: Engine, path: Path, texts: list[Path]) -> None:
    from kvshelf.workers.engine.chunk_search import find_chunks
    from kvshelf.workers.model import calibration

    with _reporting(f"chunks of {engine.name}") as report:
        found = find_chunks(engine, _documents(engine, texts), report=report)
    calibration.save(found, path)


@contextmanager
def _reporting(title: str) -> Iterator[Callable[[int, int], None]]:
    """A progress bar, as what is called with how much is done, and of how much."""
    with progress_bar() as progress:
        task = progress.add_task(title, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


def _documents(engine: Engine, texts: list[Path]) -> list[list[int]]:
    """The token ids of the user's texts, or of the package's prose."""
    from kvshelf.bench.quality.tasks import haystacks

    format_ = engine.require_text("model")
    longest = min(_TEXT_TOKENS, engine.max_tokens)
    sources = [_read(path) for path in texts] or list(haystacks(_TEXTS, longest, format_.count_tokens))
    return [format_.encode(source)[:longest] for source in sources]


def train_gates(
    model: Annotated[str, typer.Option(help="A bundled name, a folder or a hub id.")],
    family: Annotated[str, typer.Option(help="The policy (kvzip_gate, locret ...), or the family of its gates.")],
    target: Annotated[
        Literal["kvzip", "answers", "distill"] | None,
        typer.Option(help="With a family: what its gates learn to foretell.  [default: the first there is]"),
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Most steps, of one document each.")] = 600,
    length: Annotated[int, typer.Option(min=512, help="Length of the documents, in tokens.")] = 1024,
    width: Annotated[
        int | None,
        typer.Option(min=1, max=8192, help="Of the gates' hidden layer.  [default: a quarter of the model's]"),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Which documents, and where the gates begin.")] = 0,
    out: Annotated[
        Path | None,
        typer.Option(help="The gate file.  [default: in KVSHELF_GATES or your data folder, where engines look]"),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the last checkpoint of the same file.")] = False,
    device: _options.Device = "auto",
    dtype: _options.Dtype = "auto",
    as_json: _options.AsJson = False,
) -> None:
    """Train the gates of a policy for a model, whose own weights stay as they are.

    Beside the gate file lie a journal, with a line every 50 steps (step, loss, and the rank correlation on held-out
    documents of other kinds), and, until the training ends, a checkpoint. It ends early when eight lines bring nothing.
    """
    with _common.named_errors(as_json=as_json), needs_extra("serve", purpose="kvshelf train-gates"):
        from kvshelf.workers.engine.engine import Engine
        from kvshelf.workers.engine.gates.objectives import objective, trained_policy
        from kvshelf.workers.engine.gates.trainer import Checkpoint, Settings, Trainer
        from kvshelf.workers.model import calibration
        from kvshelf.workers.model import loading as models
        from kvshelf.workers.policies.gates.file import gate_path

        policy = trained_policy(family, target)
        loaded, tokenizer = models.load(model, device=device, dtype=dtype)
        engine = Engine(loaded, tokenizer, name=model)  # not `Engine.load`: gradients go through its plain weights
        path = out or gate_path(engine.identity.weights, policy.name)
        calibration.require_writable(path)
        settings = Settings(steps, length, seed)
        with progress_bar() as progress:
            task = progress.add_task(f"{policy.name} of {engine.name}", total=steps)

            def report(line: Mapping[str, Any]) -> None:
                progress.update(task, completed=line["step"])
                _common.notes.print(
                    f"step {line['step']}: loss {line['loss']:.4g}, held out {line['held_out']:.3f}", highlight=False
                )

            made = objective(policy, engine, width), lessons(engine, length, seed)
            Trainer(engine, *made, settings, Checkpoint(path), report).run(resume=resume)
    say(path)


def lessons(engine: Engine, length: int, seed: int) -> Callable[[int], Lesson]:
    """Documents of at most `length` tokens with questions, by their number."""
    from kvshelf.bench.quality.suite import lesson_case
    from kvshelf.workers.engine.gates.lessons import Lesson

    count = engine.require_text("model").count_tokens

    def lesson(number: int) -> Lesson:
        case = lesson_case(number, seed, length, count, questions=_QUESTIONS)
        return Lesson(case.text, [(ask.text, ", ".join(ask.references)) for ask in case.asks])

    return lesson
