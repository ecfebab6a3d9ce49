"""demo: one document on the shelf in three ways, the same questions to each, and what it saves. sample: its document.

The demo starts a service of its own on a free port, with its shelf in a temporary folder, and removes both at the end.
Answers are marked by comparing them with the facts that were written into the document. The time of a query that
prefills the document again is measured in the same run, with plain transformers in this process: the same model,
weights and threads, and no HTTP in between.
"""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.status import Status
from rich.table import Table
from rich.text import Text

from kvshelf._extras import needs_extra
from kvshelf.bench.quality.tasks import Question
from kvshelf.bench.quality.tasks import sample as sample_document
from kvshelf.cli import _common
from kvshelf.cli.output import HarmlessConsole, say
from kvshelf.errors import ConnectionFailed, KvshelfError

if TYPE_CHECKING:
    from kvshelf.api.caches import CacheObject
    from kvshelf.client import Client
    from kvshelf.store.artifact.cache import CompressedCache
    from kvshelf.workers.engine.engine import Engine

MODEL = "kvshelf-tiny"
STARTUP_S = 120.0
SHUTDOWN_S = 30.0
WIDTH = 100

# Title -> policy, the fraction of the cache that is removed, and codec.
SHELVES: dict[str, tuple[str, float | None, str]] = {
    "full": ("full", None, "none"),
    "full, codec klt": ("full", None, "klt"),
    "keydiff, 75 % removed": ("keydiff", 0.75, "none"),
}


@dataclass(frozen=True)
class Asked:
    """One question to one cache: the answer's text and how long its first piece took, over HTTP."""

    text: str
    first_token_s: float
    prefill_tokens: int


@dataclass(frozen=True)
class Shelf:
    """One cache of the document, and what it answered."""

    cache: CacheObject
    put_s: float
    asked: list[Asked]


def sample() -> None:
    """Print a document to try kvshelf with: prose with six facts, such as the access code of the amber falcon."""
    say(sample_document().text)


def demo() -> None:
    """Put the sample document on a shelf in three ways, ask each the same questions, and show answers, sizes and times.

    Starts a service of its own, with its shelf in a temporary folder, and removes both: half a minute.
    """
    # Set before torch and transformers are imported. It keeps log lines off the screen, and makes threads sleep while
    # they wait, as the service's do: on a busy machine, spinning would slow down the side that it is compared with.
    os.environ.update(TRANSFORMERS_VERBOSITY="error", TOKENIZERS_PARALLELISM="false", OMP_WAIT_POLICY="PASSIVE")
    out = HarmlessConsole(width=WIDTH, highlight=False)
    with _common.named_errors(), needs_extra("serve", purpose="kvshelf demo"):
        import transformers

        transformers.utils.logging.disable_progress_bar()
        waiting = HarmlessConsole(stderr=True).status("loading the model")
        with tempfile.TemporaryDirectory(prefix="kvshelf-demo-") as folder, waiting as status:
            show(Path(folder), out, status)
    out.print("The service is stopped and its folder removed.", style="dim")


def show(folder: Path, out: HarmlessConsole, status: Status) -> None:
    from kvshelf.store.artifact.cache import CompressedCache
    from kvshelf.workers.engine.engine import Engine

    engine = Engine.load(MODEL)
    document = sample_document()
    path = folder / "sample.txt"
    path.write_text(document.text, encoding="utf-8")
    status.update("starting the service")
    with service(folder) as (client, started_s):
        shelves = {}
        for title, way in SHELVES.items():
            status.update(f"on the shelf: {title}")
            shelves[title] = fill(client, path, way, document.questions)
        status.update("prefilling the document again for each question, for comparison")
        mine = CompressedCache.from_bytes(client.caches.download(shelves["full"].cache.id))
        again_s = [prefill_again(engine, mine, document.text, question) for question in document.questions]
        own = in_own_process(engine, mine, document.questions[0])
    status.stop()
    tokens = shelves["full"].cache.tokens.document
    out.print(
        f"[bold]The sample[/]: {tokens:,} tokens of prose, {len(document.questions)} facts in it. "
        f"{MODEL} in {str(engine.model.dtype).removeprefix('torch.')}, {hardware()}."
    )
    out.print(f"A service was started (in {started_s:.0f} s) and put it on its shelf three times.")
    for part in (sizes(shelves), answers(shelves, document.questions), times(shelves, again_s), own):
        out.print()
        out.print(part)


def hardware() -> str:
    import torch

    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return f"CPU, {torch.get_num_threads()} threads"


@contextmanager
def service(folder: Path) -> Iterator[tuple[Client, float]]:
    """A running service and the seconds it took to start; it is stopped whenever the block ends."""
    from kvshelf.client import Client

    command = [sys.executable, "-m", "kvshelf", "serve", "--store", f"disk://{folder}/home", "--port", "0"]
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


def fill(client: Client, path: Path, way: tuple[str, float | None, str], questions: Sequence[Question]) -> Shelf:
    policy, ratio, codec = way
    began = time.perf_counter()
    cache = client.caches.create(file=path, policy=policy, compression_ratio=ratio, codec=codec)
    put_s = time.perf_counter() - began
    return Shelf(cache, put_s, [ask(client, cache, question) for question in questions])


def ask(client: Client, cache: CacheObject, question: Question) -> Asked:
    began = time.perf_counter()
    with client.caches.stream(cache.id, question.text, max_tokens=16) as stream:
        first = next(iter(stream), "")
        first_s = time.perf_counter() - began
        text = first + "".join(stream)
        return Asked(text.strip(), first_s, stream.answer.usage.prefill_tokens)


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
    made = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold", title_justify="left")
    for heading in headings:
        made.add_column(heading, no_wrap=True, overflow="ellipsis")
    return made


def sizes(shelves: dict[str, Shelf]) -> Table:
    made = table("", *shelves)
    caches = [shelf.cache for shelf in shelves.values()]
    made.add_row("entries kept", *(f"{cache.tokens.kept:,} of {cache.tokens.document:,}" for cache in caches))
    full = caches[0].bytes
    made.add_row(
        f"size (of {full.full_16bit / 1e6:.2f} MB in 16 bits)",
        *(f"{cache.bytes.stored / 1e6:.2f} MB ({cache.bytes.share:.0%})" for cache in caches),
    )
    made.add_row("time to put it there", *(f"{shelf.put_s:.2f} s" for shelf in shelves.values()))
    return made


def answers(shelves: dict[str, Shelf], questions: Sequence[Question]) -> Table:
    made = table("question", "value", *(title.partition(" removed")[0] for title in shelves))
    for index, question in enumerate(questions):
        given = [mark(shelf.asked[index].text, question) for shelf in shelves.values()]
        made.add_row(shortened(question.text, 40), question.answer, *given)
    right = [sum(asked.text == q.answer for asked, q in zip(s.asked, questions, strict=True)) for s in shelves.values()]
    made.add_row("[bold]right answers", "", *(f"[bold]{count} of {len(questions)}" for count in right))
    return made


def mark(text: str, question: Question) -> Text:
    """An answer is right when it is exactly the value."""
    if text == question.answer:
        return Text("right", style="green")
    return Text("wrong: " + shortened(text.replace("\n", " "), 8), style="red")


def shortened(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"


def times(shelves: dict[str, Shelf], again_s: Sequence[float]) -> Table:
    again = statistics.median(again_s)
    tokens = shelves["full"].cache.tokens.document + shelves["full"].asked[0].prefill_tokens
    made = table("time to the first token, median of the questions", "", "prefilled", "")
    made.add_row("document prefilled again: plain transformers, no HTTP", f"{again * 1e3:.0f} ms", f"{tokens:,}")
    for title, shelf in shelves.items():
        first = statistics.median(asked.first_token_s for asked in shelf.asked)
        prefilled = str(shelf.asked[0].prefill_tokens)
        faster = f"{again / first:.0f} times faster"
        made.add_row(f"from the shelf over HTTP: {title}", f"{first * 1e3:.0f} ms", prefilled, faster)
    return made


def in_own_process(engine: Engine, cache: CompressedCache, question: Question) -> str:
    answer = engine.answer(cache, question.text, max_new_tokens=16).text.strip()
    verdict = "right" if answer == question.answer else "wrong"
    return f"The full cache, downloaded and attached in this process, answers {answer!r}: {verdict}."
