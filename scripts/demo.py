"""`make demo`: one document on the shelf under three policies, the same questions to each, and what it saves.

Starts a service of its own on a free port, with its shelf in a temporary folder, and stops both at the end. The
answers are marked by comparing them with the facts that were written into the document. The time of a query that
prefills the document again is measured in the same run, with plain transformers in this process: the same model,
weights and threads, and no HTTP in between.
"""

from __future__ import annotations

import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

# Before transformers is imported: one screen, no log lines.
os.environ.update(TRANSFORMERS_VERBOSITY="error", TOKENIZERS_PARALLELISM="false")

import torch
import transformers
from rich.console import Console
from rich.status import Status
from rich.table import Table
from rich.text import Text

from kvshelf import Client, CompressedCache, Engine
from kvshelf.bench.tasks import Question, TaskDocument, make_facts, write_document
from kvshelf.client.types import CacheObject
from kvshelf.errors import ConnectionFailed, InternalError, KvshelfError

MODEL = "kvshelf-tiny"
SEED = 11
FACT_DIGITS = (6, 4, 9, 3, 6, 5)
LEAST_TOKENS = 4000
DOCUMENT_TOKENS = 4080
STARTUP_S = 120.0
SHUTDOWN_S = 30.0
WIDTH = 100

# Title -> policy and the fraction of the cache that is removed.
SHELVES: dict[str, tuple[str, float | None]] = {
    "full": ("full", None),
    "keydiff, 75 % removed": ("keydiff", 0.75),
    "lagkv, 75 % removed": ("lagkv", 0.75),
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


def main() -> int:
    out = Console(width=WIDTH, highlight=False)
    err = Console(stderr=True)
    transformers.utils.logging.disable_progress_bar()
    try:
        with tempfile.TemporaryDirectory(prefix="kvshelf-demo-") as folder, err.status("loading the model") as status:
            demo(Path(folder), out, status)
    except KvshelfError as error:
        err.print(f"the demo failed: {error}", style="red", markup=False)
        return 1
    out.print("The service is stopped and its folder removed.", style="dim")
    return 0


def demo(folder: Path, out: Console, status: Status) -> None:
    engine = Engine.load(MODEL)
    document = write(engine, folder / "report.txt")
    status.update("starting the service")
    with service(folder) as (client, started_s):
        shelves = {}
        for title, (policy, ratio) in SHELVES.items():
            status.update(f"on the shelf: {title}")
            shelves[title] = fill(client, folder / "report.txt", policy, ratio, document.questions)
        status.update("prefilling the document again for each question, for comparison")
        mine = CompressedCache.from_bytes(client.caches.download(shelves["full"].cache.id))
        again_s = [prefill_again(engine, mine, document.text, question) for question in document.questions]
        own = in_own_process(engine, mine, document.questions[0])
    status.stop()
    tokens = shelves["full"].cache.tokens.document
    out.print(f"[bold]report.txt[/]: {tokens:,} tokens of prose with {len(FACT_DIGITS)} facts spread through it.")
    out.print(
        f"The service (started in {started_s:.0f} s) put it on the shelf three times with {MODEL}, {hardware()}.\n"
    )
    out.print(sizes(shelves))
    out.print(answers(shelves, document.questions))
    out.print(times(shelves, again_s), own, sep="\n", markup=False)


def write(engine: Engine, path: Path) -> TaskDocument:
    """Write the document and check that it is as long as promised."""
    rng = random.Random(SEED)

    def count(text: str) -> int:
        return engine.prepare(text, layout="plain", policy="full").num_tokens

    document = write_document(rng, make_facts(rng, FACT_DIGITS), "prose", DOCUMENT_TOKENS, count)
    if count(document.text) < LEAST_TOKENS:
        raise InternalError(f"the document has only {count(document.text)} tokens; the demo promises {LEAST_TOKENS}")
    path.write_text(document.text, encoding="utf-8")
    return document


def hardware() -> str:
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return f"on the CPU, {torch.get_num_threads()} threads"


@contextmanager
def service(folder: Path) -> Iterator[tuple[Client, float]]:
    """A running service and the seconds it took to start; it is stopped when the block ends, however it ends."""
    port = free_port()
    command = [sys.executable, "-m", "kvshelf", "serve", "--store", f"disk://{folder}/home", "--port", str(port)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("KVSHELF_")}
    log = folder / "service.log"
    began = time.perf_counter()
    with log.open("wb") as file:
        # In a session of its own: Ctrl-C reaches this program alone, which then stops the service in order.
        process = subprocess.Popen(
            command, stdout=file, stderr=subprocess.STDOUT, env=environment, cwd=folder, start_new_session=True
        )
    try:
        with Client(f"http://127.0.0.1:{port}") as client:
            wait_until_ready(client, process, log, began + STARTUP_S)
            yield client, time.perf_counter() - began
    finally:
        stop(process)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def wait_until_ready(client: Client, process: subprocess.Popen[bytes], log: Path, deadline: float) -> None:
    while time.perf_counter() < deadline and process.poll() is None:
        try:
            if client.ready().status == "ready":
                return
        except ConnectionFailed:
            pass  # it does not listen yet
        time.sleep(0.2)
    last = "\n".join(log.read_text(errors="replace").splitlines()[-15:])
    raise ConnectionFailed(f"the service did not become ready; its last words:\n{last}")


def stop(process: subprocess.Popen[bytes]) -> None:
    """Ask the service to stop, and make sure that nothing it started is left."""
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(SHUTDOWN_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def fill(client: Client, path: Path, policy: str, ratio: float | None, questions: Sequence[Question]) -> Shelf:
    began = time.perf_counter()
    cache = client.caches.create(file=path, policy=policy, compression_ratio=ratio)
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

    Tokenizing is left out, in favour of this side of the comparison.
    """
    tokens = engine.prepare(text, policy="full").token_ids + engine.encode_query(cache, question.text)
    ids = torch.tensor([tokens], device=engine.model.device)
    began = time.perf_counter()
    with torch.no_grad():
        engine.model(input_ids=ids, use_cache=True, logits_to_keep=1).logits.argmax().item()
    return time.perf_counter() - began


def sizes(shelves: dict[str, Shelf]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for heading in ("", *shelves):
        table.add_column(heading)
    full = shelves["full"].cache.bytes.stored
    caches = [shelf.cache for shelf in shelves.values()]
    table.add_row("entries kept", *(f"{cache.tokens.kept:,}" for cache in caches))
    table.add_row(
        "size on the shelf",
        *(f"{cache.bytes.stored / 1e6:.2f} MB, {cache.bytes.stored / full:.0%} of full" for cache in caches),
    )
    table.add_row("time to put it there", *(f"{shelf.put_s:.2f} s" for shelf in shelves.values()))
    return table


def answers(shelves: dict[str, Shelf], questions: Sequence[Question]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("\nquestion", no_wrap=True, overflow="ellipsis", max_width=52)
    for title in shelves:
        table.add_column("\n" + title.partition(",")[0], no_wrap=True, overflow="ellipsis", max_width=17)
    for index, question in enumerate(questions):
        table.add_row(question.text, *(mark(shelf.asked[index].text, question) for shelf in shelves.values()))
    right = [sum(asked.text == q.answer for asked, q in zip(s.asked, questions, strict=True)) for s in shelves.values()]
    table.add_row("[bold]right answers", *(f"[bold]{count} of {len(questions)}" for count in right))
    return table


def mark(text: str, question: Question) -> Text:
    """An answer is right when it is exactly the value."""
    if text == question.answer:
        return Text(f"{text} right", style="green")
    return Text(f"{text or 'nothing'} wrong", style="red")


def times(shelves: dict[str, Shelf], again_s: Sequence[float]) -> str:
    again = statistics.median(again_s)
    lines = [
        f"\nTime to the first token, median of {len(again_s)} questions:",
        f"  {again * 1e3:7.1f} ms  prefilling the document again: plain transformers, this process, no HTTP",
    ]
    for title, shelf in shelves.items():
        first = statistics.median(asked.first_token_s for asked in shelf.asked)
        prefilled = max(asked.prefill_tokens for asked in shelf.asked)
        lines.append(
            f"  {first * 1e3:7.1f} ms  from the shelf over HTTP, {title}: "
            f"{again / first:.0f} times faster, at most {prefilled} tokens prefilled"
        )
    return "\n".join(lines)


def in_own_process(engine: Engine, cache: CompressedCache, question: Question) -> str:
    answer = engine.answer(cache, question.text, max_new_tokens=16).text.strip()
    verdict = "right" if answer == question.answer else "wrong"
    return f"The full cache, downloaded and attached in this process, answers {answer!r}: {verdict}."


if __name__ == "__main__":
    sys.exit(main())
