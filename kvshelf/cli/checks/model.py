"""Tries a model in processes of its own: a put, a question, the same after a restart, and what it can have."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from kvshelf.errors import InvalidRequest, KvshelfError, NoWorker

if TYPE_CHECKING:
    from kvshelf.engine.engine import Engine

BUNDLED: Final = "kvshelf-tiny"
DOCUMENT_TOKENS: Final = 1024
_WARM_CHARACTERS: Final = 400
_TOOL: Final = {"type": "function", "function": {"name": "look_up", "description": "Looks up a word.", "parameters": {
    "type": "object", "properties": {"word": {"type": "string"}}, "required": ["word"]}}}  # fmt: skip


class Finding(NamedTuple):
    """What a check found. ok: False fails `kvshelf doctor`."""

    check: str
    ok: bool
    message: str


@dataclass(frozen=True)
class ModelToTry:
    """name: bundled name, folder, file or hub id. shelf: URL of a store for the trial alone."""

    name: str
    device: str
    dtype: str
    shelf: str

    def engine(self) -> Engine:
        import transformers

        from kvshelf.engine.engine import Engine

        transformers.utils.logging.disable_progress_bar()
        return Engine.load(self.name, device=self.device, dtype=self.dtype)


@dataclass(frozen=True)
class Put:
    """A document on the shelf that was asked a question."""

    cache_id: str
    question: str
    token_ids: tuple[int, ...]
    findings: tuple[Finding, ...] = field(default=())


def findings(name: str, device: str, dtype: str) -> Iterator[Finding]:
    """Raises what keeps the model from being loaded, put or asked, and `NoWorker` where a process of the trial dies."""
    spawned = multiprocessing.get_context("spawn")
    with TemporaryDirectory() as folder, ProcessPoolExecutor(1, spawned, max_tasks_per_child=1) as processes:
        trial = ModelToTry(name, device, dtype, f"disk://{folder}/shelf")
        try:
            stored = processes.submit(_put, trial).result()
            yield from stored.findings
            again, load_s = processes.submit(_asked_again, trial, stored).result()
        except BrokenProcessPool as error:
            raise NoWorker(
                f"a process with {name} was ended by the system, perhaps for its memory; `kvshelf doctor` needs as "
                "much as a replica"
            ) from error
    if again == stored.token_ids:
        yield Finding("restart", True, f"a new process read the cache in {load_s:.2f} s and gave the same answer")
    else:
        yield Finding(
            "restart", False, f"a new process read the cache and answered {again} in place of {stored.token_ids}"
        )


def _put(trial: ModelToTry) -> Put:
    """Puts a document with one fact on the shelf, and asks for that fact."""
    from kvshelf.samples.tasks import make_document
    from kvshelf.store.url import StoreConfig

    engine = trial.engine()
    form = engine.encoder.require_text("model")
    most = min(DOCUMENT_TOKENS, engine.max_tokens // 2)
    document = make_document("needle", "prose", most, 0, form.count_tokens)
    question = document.questions[0]
    engine.compress(document.text[:_WARM_CHARACTERS], policy="full")  # the first pass of a process is a slow one
    compression = engine.run(engine.prepare(document.text, policy="full"))
    with StoreConfig(trial.shelf).open() as store:
        cache_id = store.put(compression.cache).id
        cache = store.get(cache_id)
    answer = engine.answer(cache, question.text)
    text = answer.text.strip()
    if trial.name == BUNDLED and text != question.answer:
        raise NoWorker(
            f"{trial.name} answered {text!r} instead of {question.answer!r}: its weights or torch are broken"
        )
    weights = sum(weight.nbytes for weight in engine.passes.model.parameters())
    tokens_per_s = cache.num_tokens / max(compression.prefill_s, 1e-9)
    summary = (
        f"{trial.name}: {engine.max_tokens} tokens, {engine.identity.dtype} on {engine.passes.devices.inputs}, "
        f"{weights:,} bytes of weights, "
        f"{tokens_per_s:,.0f} tokens prefilled a second, {compression.cache.nbytes / cache.num_tokens:,.0f} bytes a "
        f"token; {cache.num_tokens} put, answered {text!r}"
    )
    checks = (Finding("model", True, summary), *_features(engine, document.text))
    return Put(cache_id, question.text, tuple(answer.token_ids), checks)


def _asked_again(trial: ModelToTry, stored: Put) -> tuple[tuple[int, ...], float]:
    """The answer of another process, and the seconds in which it read the cache."""
    import time

    from kvshelf.store.url import StoreConfig

    engine = trial.engine()
    with StoreConfig(trial.shelf).open() as store:
        started = time.perf_counter()
        cache = store.get(stored.cache_id)
        load_s = time.perf_counter() - started
    return tuple(engine.answer(cache, stored.question).token_ids), load_s


def _features(engine: Engine, text: str) -> Iterator[Finding]:
    """What the model can have. Nothing here fails the check: a model may do without."""
    from kvshelf.api.tools import Tool
    from kvshelf.engine.tools.tools import ToolFormat
    from kvshelf.methods import selectors
    from kvshelf.methods.policies import POLICIES, Needs, build
    from kvshelf.methods.suffixes.registry import SUFFIX_POLICIES

    form, document = engine.encoder.require_text("model"), engine.encode_document(text)
    attached = engine.attach(engine.compress(text, policy="full"))

    def prepare(name: str) -> Any:
        return engine.prepare(document, policy=name)

    gates = [name for name in POLICIES if Needs.GATES in build(name, {}).needs]
    yield Finding("template", True, form.about_template)
    yield _feature("tools", lambda: ToolFormat.of(form, [Tool.model_validate(_TOOL)]).about)
    yield Finding("thinking", True, form.about_thoughts)
    yield _available("policies", [name for name in POLICIES if name not in gates], prepare)
    yield _available("gates", gates, prepare)
    yield _feature("klt", lambda: f"transforms {engine.coders.own.transforms.digest[:12]}")
    yield _available("selectors", selectors.names(), lambda name: engine.select(attached, name, question_tokens=8))
    yield _available("suffixes", SUFFIX_POLICIES, lambda name: engine.bound(name, question_tokens=8))
    yield _feature("vllm", partial(_in_vllm, engine))


def _in_vllm(engine: Engine) -> str:
    from kvshelf.integrations.vllm.model import require_pages

    require_pages(engine.passes.layer_shapes, engine.name)
    return "the connector reads its caches into vLLM's pages"


def _feature(check: str, say: Callable[[], str]) -> Finding:
    try:
        return Finding(check, True, say())
    except KvshelfError as error:
        return Finding(check, True, f"no: {error.message}")


def _available(check: str, names: Iterable[str], attempt: Callable[[str], Any]) -> Finding:
    """Which of these the model can have, and why not the others. `InvalidRequest` says nothing against the model."""
    available, refused = list[str](), dict[str, list[str]]()
    for name in names:
        try:
            with suppress(InvalidRequest):
                attempt(name)
            available.append(name)
        except KvshelfError as error:
            refused.setdefault(error.message.replace(name, "..."), []).append(name)
    lists = [f"{len(available)}: {', '.join(available)}" if available else "none"]
    lists += [f"not {', '.join(names)}: {message}" for message, names in refused.items()]
    return Finding(check, True, "; ".join(lists))
