"""calibrate: measure a model once, for what needs it: retrieval heads for compresskv, layers for epicache, transforms
for codec klt, frequency chunks for selector fasa, skews for infinigen. train-gates: train the gates of a policy for it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from kvshelf._extras import needs_extra
from kvshelf.cli import _options
from kvshelf.cli.output import common, say
from kvshelf.cli.output.progress import searching
from kvshelf.errors import InvalidRequest

if TYPE_CHECKING:
    from kvshelf.engine.engine import Engine
    from kvshelf.training.gates.lessons import Lesson

_QUESTIONS = 6
TEXTS, TEXT_TOKENS = 10, 2048
"""How many texts are read, and their length."""


@dataclass(frozen=True)
class _Samples:
    documents: Annotated[int, typer.Option(min=1, help="Number of test documents, each hides one sentence.")] = 60
    # at least two blocks of kvshelf.training.key_search: in one, no key can change
    tokens: Annotated[int, typer.Option(min=260, help="Length of each test document, in tokens.")] = 1024
    text: Annotated[
        list[Path] | None,
        typer.Option(
            help="Make transforms and chunks from this text of yours, ten parts of it; repeat it.  [default: prose of "
            "the package, and for transforms Python's reference, too]"
        ),
    ] = None


def calibrate(
    model: Annotated[str, typer.Option(help="A bundled name, a folder, a GGUF file, a hub id, or a name served here.")],
    samples: _Samples,
    only: Annotated[
        Literal["heads", "transforms", "chunks", "skews"] | None,
        typer.Option(
            help="heads: for policies compresskv, headkv, duo_attention, epicache. transforms: for codec klt. chunks: "
            "for selector fasa. skews: for selector infinigen.  [default: all]"
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(help="The model's folder, for results in kvshelf/ there.  [default: your data folder]"),
    ] = None,
    device: _options.Device = "auto",
    dtype: _options.Dtype = "auto",
    weights: _options.Weights = "plain",
    as_json: _options.AsJson = False,  # noqa: ARG001 - for its errors
) -> None:
    """Make the transforms of codec klt, with the coarsest step that hardly changes predictions, and measure which query
    heads retrieve, for compresskv and other policies, which frequency chunks do, for the selector fasa, and the
    directions of queries, for the selector infinigen.

    The results hold for these weights in this dtype. Engines look for them in $XDG_DATA_HOME/kvshelf/calibrations and,
    as klt.safetensors, compresskv.json, fasa.json and infinigen.safetensors, in the folder kvshelf in the model's own.
    A command that was interrupted goes on where it was when it is given again.
    """
    with needs_extra("serve", purpose="kvshelf calibrate"):
        from kvshelf.engine.engine import Engine
        from kvshelf.model import calibration

        engine = Engine.load(served_model(model), device=device, dtype=dtype, weights=weights, shown=model)
        engine.encoder.require_text("model")
        paths = calibration.paths(engine.identity.weights, output)
        calibration.require_writable(paths.heads)
        texts = samples.text or []
        parts: dict[str, tuple[Path, Callable[[Path], None]]] = {
            "transforms": (paths.transforms, lambda path: _transforms(engine, path, texts)),
            "chunks": (paths.chunks, lambda path: _chunks(engine, path, texts)),
            "skews": (paths.skews, lambda path: _skews(engine, path, texts)),
            "heads": (paths.heads, lambda path: _heads(engine, path, samples.documents, samples.tokens)),
        }
        chosen = list(parts.values()) if only is None else [parts[only]]
        for path, measure in chosen:
            measure(path)
    for path, _ in chosen:
        say(path)


def _read(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"{path} cannot be read as UTF-8 text: {error}", param="text") from error


def _heads(engine: Engine, path: Path, documents: int, tokens: int) -> None:
    from kvshelf.model import calibration
    from kvshelf.samples.tasks import needles
    from kvshelf.training import head_search

    count = engine.encoder.require_text("model").count_tokens
    done = itertools.count(1)
    with searching(f"heads of {engine.name}") as report:
        heads = head_search.calibrate(
            engine,
            list(needles(documents, tokens, count)),
            lambda: report(next(done), 3 * documents),
            journal=_unfinished(path),
        )
    calibration.save(heads, path)
    common.notes.print(f"{heads.origin.answered:.0%} of the answer tokens came from the sentence asked for")


def _transforms(engine: Engine, path: Path, texts: list[Path]) -> None:
    from kvshelf.atomic import written
    from kvshelf.training.transform_search import find_transforms

    sources = [_read(text) for text in texts] or _reading(engine)
    documents = pieces(engine, sources)
    with searching(f"transforms of {engine.name}") as report:
        data = find_transforms(engine, documents, checkpoint=_unfinished(path), report=report)
    with written(path) as file:
        file.write(data)
    _unfinished(path).unlink(missing_ok=True)


def _chunks(engine: Engine, path: Path, texts: list[Path]) -> None:
    from kvshelf.model import calibration
    from kvshelf.training.chunk_search import find_chunks

    documents = pieces(engine, [_read(text) for text in texts] or _prose(engine, TEXTS))
    with searching(f"chunks of {engine.name}") as report:
        chunks = find_chunks(engine, documents, journal=_unfinished(path), report=report)
    calibration.save(chunks, path)


def _skews(engine: Engine, path: Path, texts: list[Path]) -> None:
    from kvshelf.model import calibration
    from kvshelf.training.skew_search import find_skews

    first, *_ = pieces(engine, [_read(text) for text in texts[:1]] or _prose(engine, 1))
    calibration.save(find_skews(engine, first), path)


def served_model(name: str) -> str:
    """The folder or file that a service of this user serves under this name, else the name itself."""
    from kvshelf.model import calibration

    source = calibration.served(name)
    if source is None:
        return name
    common.notes.print(f"{name} is served from {source}", soft_wrap=True)
    return source


def _unfinished(path: Path) -> Path:
    """Where a search keeps what it has found, until its result is saved: the same command goes on from there."""
    return path.with_name(path.name + ".unfinished")


def _reading(engine: Engine) -> list[str]:
    """What transforms are made from: in turns, chapters of Python's reference, which every Python brings as text, and
    prose of the package. On SmolLM2 and documents of other kinds, prose alone loses three times as many nats."""
    from pydoc_data.topics import topics

    chapters = sorted(topics.values(), key=len, reverse=True)
    pairs = zip(chapters, _prose(engine, TEXTS // 2), strict=False)
    return [text for pair in pairs for text in pair]


def _prose(engine: Engine, texts: int) -> list[str]:
    from kvshelf.samples.tasks import haystacks

    return list(haystacks(texts, _longest(engine), engine.encoder.require_text("model").count_tokens))


def pieces(engine: Engine, sources: Sequence[str]) -> list[list[int]]:
    """The beginning of each text, as token ids, and what follows in them, until there are `TEXTS`."""
    format_, longest = engine.encoder.require_text("model"), _longest(engine)
    ids = [format_.encode(source) for source in sources]
    more = [tokens[at : at + longest] for tokens in ids for at in range(longest, len(tokens) - longest // 2, longest)]
    return [tokens[:longest] for tokens in ids] + more[: max(0, TEXTS - len(ids))]


def _longest(engine: Engine) -> int:
    return min(TEXT_TOKENS, engine.max_tokens // 2)


@dataclass(frozen=True)
class _Lessons:
    steps: Annotated[int, typer.Option(min=1, help="Most steps, of one document each.")] = 600
    length: Annotated[int, typer.Option(min=512, help="Length of the documents, in tokens.")] = 1024
    seed: Annotated[int, typer.Option(min=0, help="Which documents, and where the gates begin.")] = 0


@dataclass(frozen=True)
class _Gates:
    """Which gates are trained, and where they are written."""

    target: Annotated[
        Literal["kvzip", "answers", "distill"] | None,
        typer.Option(help="With a family: what its gates learn to foretell.  [default: the first there is]"),
    ] = None
    width: Annotated[
        int | None,
        typer.Option(min=1, max=8192, help="Of the gates' hidden layer.  [default: a quarter of the model's]"),
    ] = None
    out: Annotated[
        Path | None,
        typer.Option(help="The gate file.  [default: in KVSHELF_GATES or your data folder, where engines look]"),
    ] = None
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the last checkpoint of the same file.")] = False


def train_gates(
    model: Annotated[str, typer.Option(help="A bundled name, a folder, a GGUF file, a hub id, or a name served here.")],
    family: Annotated[str, typer.Option(help="The policy (kvzip_gate, locret ...), or the family of its gates.")],
    gates: _Gates,
    by: _Lessons,
    device: _options.Device = "auto",
    dtype: _options.Dtype = "auto",
    as_json: _options.AsJson = False,  # noqa: ARG001 - for its errors
) -> None:
    """Train the gates of a policy for a model, whose own weights stay as they are.

    Beside the gate file lie a journal, with a line every 50 steps (step, loss, and the rank correlation on held-out
    documents of other kinds), and, until the training ends, a checkpoint. It ends early when eight lines bring nothing.
    """
    with needs_extra("serve", purpose="kvshelf train-gates"):
        from kvshelf.engine.engine import Engine
        from kvshelf.methods.policies.gate_file import gate_path
        from kvshelf.model import calibration
        from kvshelf.model import loading as models
        from kvshelf.training.gates.objectives import objective, trained_policy
        from kvshelf.training.gates.trainer import Checkpoint, Trainer, TrainingSettings

        policy = trained_policy(family, gates.target)
        loaded, tokenizer = models.load(served_model(model), device=device, dtype=dtype)
        engine = Engine(loaded, tokenizer, name=model)  # not `Engine.load`: gradients go through its plain weights
        path = gates.out or gate_path(engine.identity.weights, policy.name)
        calibration.require_writable(path)
        settings = TrainingSettings(by.steps, by.length, by.seed)
        goal, lesson = objective(policy, engine, gates.width), lessons(engine, by.length, by.seed)
        with searching(f"{policy.name} of {engine.name}") as show:

            def read(number: int) -> Lesson:
                if number >= 0:  # the others are held out
                    show(number, by.steps)
                return lesson(number)

            def report(line: Mapping[str, Any]) -> None:
                common.notes.print(
                    f"step {line['step']}: loss {line['loss']:.4g}, held out {line['held_out']:.3f}", highlight=False
                )

            Trainer(engine, goal, read, settings, Checkpoint(path), report).run(resume=gates.resume)
    say(path)


def lessons(engine: Engine, length: int, seed: int) -> Callable[[int], Lesson]:
    """Documents of at most `length` tokens with questions, by their number."""
    from kvshelf.samples.suite import lesson_case
    from kvshelf.training.gates.lessons import Lesson

    count = engine.encoder.require_text("model").count_tokens

    def lesson(number: int) -> Lesson:
        case = lesson_case(number, seed, length, count, questions=_QUESTIONS)
        return Lesson(case.text, [(ask.text, ", ".join(ask.references)) for ask in case.asks])

    return lesson
