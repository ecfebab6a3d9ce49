"""Which chat templates work: the matrix of docs/internals/model-types.md, made with kvshelf-tiny's weights and each
template's tokens.

    pip install --no-deps trl            # its chat templates are data; the package is not imported
    python scripts/measure_templates.py                       # every template, as a Markdown table: some two minutes
    python scripts/measure_templates.py --only qwen3,phi3     # some
    python scripts/measure_templates.py --tokens              # also what was expected and what ran where they differ

What is expected does not come from kvshelf: it is `apply_chat_template` of the whole conversation, document included,
through the plain tokenizer. A cell says "yes", what went wrong, or with which words the request was refused.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import json
import logging
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final
from unittest import mock

import structlog
import torch
from tokenizers import AddedToken
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from transformers.utils import logging as transformers_logging

from kvshelf.api import CreateCache
from kvshelf.api.openai import ChatCompletionRequest
from kvshelf.artifact.identity import digest
from kvshelf.engine.decode.grammar import Grammar
from kvshelf.engine.engine import Engine
from kvshelf.engine.inputs.prepare import as_bytes
from kvshelf.errors import KvshelfError
from kvshelf.model.source import bundled_folder
from kvshelf.store.disk import DiskStore
from kvshelf.workers.replica.calls import Caller
from kvshelf.workers.replica.replica import Replica
from kvshelf.workers.replica.scheduler import Scheduler

DOCUMENT: Final = "The harbour master keeps the tide tables in a green book. " * 8 + "It lies on the desk"
TURNS: Final = 6
THOUGHT: Final = "The book is on the desk"
TOOLS: Final[list[dict[str, Any]]] = [
    {"type": "function", "function": {
        "name": "weather", "description": "The weather of a town",
        "parameters": {"type": "object", "properties": {"town": {"type": "string", "enum": ["Bergen", "Kiel"]}},
                       "required": ["town"], "additionalProperties": False}}},
]  # fmt: skip
VARIABLES: Final[Sequence[tuple[str, Any]]] = (
    ("enable_thinking", False), ("enable_thinking", True), ("preserve_thinking", True), ("thinking", False),
    ("reasoning_effort", "low"), ("reasoning_effort", "medium"), ("reasoning_strength", "low"), ("low_effort", True),
    ("medium_effort", True), ("date_string", "07 Mar 2031"), ("knowledge_cutoff", "2030-01"),
    ("model_identity", "You are a parrot"),
)  # fmt: skip
"""What documents are put with, where the template reads it."""
_MARKS: Final = re.compile(
    r"<\|[^|<>\s'\"{}]+\|>|<\uff5c[^\uff5c]+\uff5c>|<\|/?[a-z_]+>|</?[a-z_]+\|>|</?(?:think|tool_call|tool_response|bos|eos"
    r"|start_of_turn|end_of_turn|end_of_utterance|start_of_image|image|s|sop)>|\[/?[A-Z_]+\]|\[gMASK\]"
)  # fmt: skip
_PLAIN: Final = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<\uff5c")
"""Tokens of these beginnings are not flagged special, as in the tokenizers of Qwen 3 and DeepSeek."""


def templates() -> dict[str, str]:
    """The chat templates that trl ships, without its variants for training, by name."""
    spec = find_spec("trl")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("the templates are those of trl; run: pip install --no-deps 'trl>=1.16,<2'")
    folder = Path(spec.submodule_search_locations[0]) / "chat_templates"
    texts = {path.stem: path.read_text() for path in sorted(folder.glob("*.jinja"))}
    return {name: text for name, text in texts.items() if not name.endswith("_training")}


def tokenizer_for(template: str) -> PreTrainedTokenizerFast:
    """The bundled tokenizer with the tokens that a template writes."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(bundled_folder("kvshelf-tiny"))
    marks = sorted({*_MARKS.findall(template), "<|bos|>", "<|eos|>"})
    flagged = [AddedToken(mark, special=not mark.startswith(_PLAIN), normalized=False) for mark in marks]
    tokenizer.add_tokens(flagged)
    tokenizer.bos_token, tokenizer.eos_token = "<|bos|>", "<|eos|>"
    tokenizer.chat_template = template
    return tokenizer


_TURN_ENDS: Final = (
    "<|im_end|>", "<|eot_id|>", "<|end|>", "<|eom_id|>", "<|eos|>", "<\uff5cend▁of▁sentence\uff5c>", "<|call|>",
    "<|user|>",
    "<|observation|>", "<turn|", "<|END_OF_TURN_TOKEN|>", "<|tool_response>", "<|e_turn|>",
)  # fmt: skip


class Recording(Engine):
    """An engine that notes which tokens are read: those of documents by their digest, and those of each question."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.documents: dict[str, list[int]] = {}
        self.asked: list[tuple[Any, list[int]]] = []

    def prepare(self, *args: Any, **options: Any) -> Any:
        job = super().prepare(*args, **options)
        self.documents[job.identity.document] = list(job.document.token_ids)
        return job

    def start(self, cache: Any, query: Sequence[int], *args: Any, **options: Any) -> Any:
        self.asked.append((cache.identity, list(query)))
        return super().start(cache, query, *args, **options)


class Wrong(Exception):
    """Something else came than was expected."""


class Subject:
    """One template on the bundled weights, in a replica with a shelf of its own."""

    def __init__(self, template: str, folder: Path, *, tokens: bool = False) -> None:
        self.template, self.tokens = template, tokens
        self.tokenizer = tokenizer_for(template)
        model = AutoModelForCausalLM.from_pretrained(bundled_folder("kvshelf-tiny"))
        model.resize_token_embeddings(len(self.tokenizer), mean_resizing=False)
        model.generation_config.eos_token_id = model.config.eos_token_id = self.tokenizer.eos_token_id
        self.engine = Recording(model.eval(), self.tokenizer, name="tiny")
        self.store = DiskStore.open(folder)
        self.replica = Replica(self.engine, self.store, Scheduler(self.engine), quality=False)
        self.parts = not self._takes_texts()

    def _takes_texts(self) -> bool:
        try:
            return "KVMARK" in self.plain([{"role": "user", "content": "KVMARK"}])
        except Exception:
            return False

    # What is expected

    def plain(self, messages: Sequence[Mapping[str, Any]], *, opening: bool = True, **options: Any) -> str:
        """What transformers makes of a whole conversation."""
        if getattr(self, "parts", False):
            messages = [
                dict(message, content=[{"type": "text", "text": message["content"]}])
                if "content" in message
                else message
                for message in messages
            ]
        prompt = self.tokenizer.apply_chat_template(
            list(messages), tokenize=False, add_generation_prompt=opening, **options
        )
        assert isinstance(prompt, str)
        return prompt

    def ids(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False).input_ids)

    def whole(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> list[int]:
        """The tokens of a conversation about the document."""
        first = dict(messages[0], content=f"{DOCUMENT}\n\n{messages[0]['content']}")
        return self.ids(self.plain([first, *messages[1:]], **options))

    # What ran

    def require_ran(self, cache_id: str, expected: Sequence[int], what: str) -> None:
        """The last question read exactly these tokens behind the cache that answered it."""
        _, query = self.engine.asked[-1]
        manifest = self.store.stat(cache_id)
        ran = [*self._stored(manifest), *query]
        if ran != list(expected):
            same = next((at for at, pair in enumerate(zip(ran, expected, strict=False)) if pair[0] != pair[1]), None)
            at = min(len(ran), len(expected)) if same is None else same
            place = "" if not self.tokens else (
                f" (expected {self.tokenizer.decode(expected[at : at + 30])!r}, "
                f"ran {self.tokenizer.decode(ran[at : at + 30])!r})"
            )  # fmt: skip
            raise Wrong(f"{what}: other tokens{place}")

    def _stored(self, manifest: Any) -> list[int]:
        return self.turn_tokens[manifest.id] if manifest.parent_id else self.engine.documents[
            manifest.identity["document"]
        ]  # fmt: skip

    turn_tokens: dict[str, list[int]]

    def keep_tokens(self, cache_id: str, expected: Sequence[int]) -> None:
        """Note the tokens of a kept turn: a beginning of what is expected of the next question, by its digests."""
        manifest = self.store.stat(cache_id)
        parent = self.store.stat(str(manifest.parent_id))
        added = list(expected[parent.num_tokens : manifest.num_tokens])
        made = digest("kvshelf.appended", parent.identity["document"], as_bytes(added))
        if made != manifest.identity["document"] or self._stored(parent) != list(expected[: parent.num_tokens]):
            raise Wrong("a kept turn has other tokens than the next question needs")
        self.turn_tokens[cache_id] = list(expected[: manifest.num_tokens])

    # Asking

    async def put(self) -> Any:
        self.turn_tokens = {}
        return (
            await self.replica.create(CreateCache(document=DOCUMENT, policy="full"), caller=Caller("default"))
        ).manifest

    async def ask(self, cache_id: str, messages: Sequence[Mapping[str, Any]], **fields: Any) -> Any:
        body = {"cache_id": cache_id, "messages": list(messages), "max_tokens": 200} | fields
        asking = ChatCompletionRequest.model_validate(body).asking
        return await self.replica.query(cache_id, asking, caller=Caller("default"))

    async def stream(self, cache_id: str, messages: Sequence[Mapping[str, Any]], **fields: Any) -> tuple[str, Any]:
        body = {"cache_id": cache_id, "messages": list(messages), "max_tokens": 60} | fields
        asking = ChatCompletionRequest.model_validate(body).asking
        pieces = [piece async for piece in self.replica.stream(cache_id, asking, caller=Caller("default"))]
        return "".join(str(piece) for piece in pieces[:-1] if isinstance(piece, str)), pieces[-1]

    def exactly(self, text: str) -> str:
        """A grammar of exactly the tokens of a text."""
        return "start: " + " ".join(f"<[{token}]>" for token in self.ids(text))

    # Cells

    @property
    def quiet(self) -> dict[str, Any]:
        """What turns thinking off where the template can."""
        known = "chat_template_kwargs" in ChatCompletionRequest.model_fields
        off = {"chat_template_kwargs": {"enable_thinking": False}}
        return off if known and "enable_thinking" in self.template and self._switches_behind else {}

    @property
    def _switches_behind(self) -> bool:
        """Whether the template says behind the document alone that thinking is off."""
        question = [{"role": "user", "content": "KVMARK"}]
        on, off = (
            self.plain(question, **variables).partition("KVMARK")[0] for variables in ({}, {"enable_thinking": False})
        )
        return on == off

    def answer(self, number: int) -> dict[str, Any]:
        """The fields that force an answer: behind thoughts where the template opens some."""
        return {"grammar": self.exactly(f"{self.thought_end}It is number {number}")} | self.quiet

    @property
    def thought_end(self) -> str:
        """What ends the thoughts that the template opens, where nothing turns them off."""
        opened = self.plain([{"role": "user", "content": "?"}], **self.quiet.get("chat_template_kwargs", {}))
        return "\n</think>\n\n" if opened.rstrip().endswith("<think>") else ""

    async def conversation(self) -> str:
        return await self._turns(store=False)

    async def keep(self) -> str:
        return await self._turns(store=True)

    async def _turns(self, *, store: bool) -> str:
        cache, messages, read = await self.put(), [], []
        kwargs = self.quiet.get("chat_template_kwargs", {})
        for number in range(TURNS):
            messages.append({"role": "user", "content": f"Question {number}?"})
            expected = self.whole(messages, **kwargs)
            for cache_id in [cache.id] if store else []:
                self._note_turns(cache_id, expected)
            reply = await self.ask(cache.id, messages, store=store, **self.answer(number))
            self.require_ran(reply.served.cache_id, expected, f"turn {number + 1}")
            read.append(reply.usage.cache_read_tokens > cache.num_tokens)
            messages.append({"role": "assistant", "content": reply.text})
            if store and reply.served.stored_cache_id is None:
                raise Wrong(f"turn {number + 1} was not kept: {reply.served.not_stored}")
        if store and sum(read) < TURNS - 1:
            return f"yes, {sum(read)} of {TURNS - 1} kept turns read"
        return "yes"

    def _note_turns(self, cache_id: str, expected: Sequence[int]) -> None:
        for child in self.store.list(parent_id=cache_id, limit=100).data:
            if child.id not in self.turn_tokens:
                try:
                    self.keep_tokens(child.id, expected)
                except Wrong:
                    continue
            self._note_turns(child.id, expected)

    async def responses(self) -> str:
        cache, messages, read = await self.put(), [], []
        at = cache.id
        kwargs = self.quiet.get("chat_template_kwargs", {})
        for number in range(TURNS):
            question = {"role": "user", "content": f"Question {number}?"}
            messages.append(question)
            expected = self.whole(messages, **kwargs)
            self._note_turns(cache.id, expected)
            reply = await self.ask(at, [question], store=True, **self.answer(number))
            self.require_ran(reply.served.cache_id, expected, f"turn {number + 1}")
            read.append(reply.usage.cache_read_tokens > cache.num_tokens)
            messages.append({"role": "assistant", "content": reply.text})
            if reply.served.stored_cache_id is None:
                raise Wrong(f"turn {number + 1} was not kept: {reply.served.not_stored}")
            at = reply.served.stored_cache_id
        return "yes" if sum(read) == TURNS - 1 else f"yes, {sum(read)} of {TURNS - 1} kept turns read"

    async def tools(self) -> str:
        cache = await self.put()
        question = {"role": "user", "content": "Is it dry in Kiel?"}
        offered = {"tools": TOOLS} | self.quiet
        kwargs = self.quiet.get("chat_template_kwargs", {})
        forced: Sequence[Any] = ("required", {"type": "function", "function": {"name": "weather"}})
        if self.thought_end:  # a random model never ends its thoughts, behind which a forced call stands
            forced = ()
            await self.ask(cache.id, [question], tool_choice="auto", max_tokens=1, **offered)
        for choice in forced:
            reply = await self.ask(cache.id, [question], tool_choice=choice, parallel_tool_calls=False, **offered)
            if [call.function.name for call in reply.tool_calls] != ["weather"]:
                raise Wrong(f"{choice if choice == 'required' else 'named'}: no call in {reply.text[:60]!r}")
        call = {"id": "kvshelf01", "type": "function"}
        arguments = {"town": "Kiel"}
        called = {"role": "assistant", "content": "", "tool_calls": [
            dict(call, function={"name": "weather", "arguments": arguments})
        ]}  # fmt: skip
        written = self._call_text(question, called, kwargs)
        many = {"grammar": self.exactly(written)}
        reply = await self.ask(cache.id, [question], **offered, **many)
        self._require_calls("auto", reply, [arguments])
        text, reply = await self.stream(cache.id, [question], stream=True, **offered, **many)
        self._require_calls("streamed", reply, [arguments])
        if text.strip():
            raise Wrong(f"streamed: the call is told as text {text[:40]!r}")
        reply = await self.ask(cache.id, [question], tool_choice="none", **offered)
        if reply.tool_calls:
            raise Wrong("none: there are calls")
        sent = dict(called, tool_calls=[dict(call, function={"name": "weather", "arguments": json.dumps(arguments)})])
        result = {"role": "tool", "content": "It rains", "tool_call_id": call["id"]}
        reply = await self.ask(cache.id, [question, sent, result], **offered | self.answer(1))
        self._require_tail("results", [question, called, result], kwargs)
        both = dict(called, tool_calls=called["tool_calls"] * 2)
        try:
            written = self._call_text(question, both, kwargs)
        except Exception as error:
            return f"yes, one call at a time ({str(error).splitlines()[0][:60]})"
        reply = await self.ask(cache.id, [question], **offered, grammar=self.exactly(written))
        if len(reply.tool_calls) < 2:
            return "yes, one call at a time"
        return "yes"

    def _call_text(self, question: Mapping[str, Any], called: Mapping[str, Any], kwargs: Mapping[str, Any]) -> str:
        """What the model writes to call a tool: what follows the opening in the template's own rendering."""
        before = self.plain([question], tools=TOOLS, **kwargs)
        after = self.plain([question, called], tools=TOOLS, opening=False, **kwargs)
        result = {"role": "tool", "content": "KVRESULT", "tool_call_id": called["tool_calls"][0]["id"]}
        later = self.plain([question, called, result], tools=TOOLS, opening=False, **kwargs)
        for text in (after, later):
            if text.startswith(before):
                end = max(text.rfind(str(part)) for part in ("Kiel",)) + len("Kiel")
                return text[len(before) : end] + self._until_end(text[end:])
        return after[after.rfind("?") + 1 :]

    @staticmethod
    def _until_end(text: str) -> str:
        """What closes a call, without what closes the turn."""
        end = re.search("|".join(map(re.escape, _TURN_ENDS)), text)
        return text if end is None else text[: end.start()]

    def _require_calls(self, what: str, reply: Any, calls: Sequence[Mapping[str, Any]]) -> None:
        arguments = [json.loads(call.function.arguments) for call in reply.tool_calls]
        if arguments != list(calls):
            raise Wrong(f"{what}: calls {arguments} in {reply.text[:60]!r}")

    def _require_tail(self, what: str, messages: Sequence[Mapping[str, Any]], kwargs: Mapping[str, Any]) -> None:
        """What ran behind the question is what the template writes there."""
        whole = self.plain(messages, tools=TOOLS, **kwargs)
        tail = self.ids(whole[whole.rfind("Is it dry in Kiel?") + len("Is it dry in Kiel?") :])
        _, query = self.engine.asked[-1]
        if query[-len(tail) :] != tail:
            note = f" (expected {self.tokenizer.decode(tail)!r}, ran {self.tokenizer.decode(query[-len(tail) :])!r})"
            raise Wrong(f"{what}: other tokens{note if self.tokens else ''}")

    async def thinking(self) -> str:
        question = {"role": "user", "content": "Where is the book?"}
        close = self._thought_end(question)
        if close is None:
            return "none"
        cache, (before, between) = await self.put(), close
        reply = await self.ask(cache.id, [question], grammar=self.exactly(f"{before}{THOUGHT}{between}There"))
        thought = reply.thought
        if (reply.text, thought) != ("There", THOUGHT):
            raise Wrong(f"on: content is {reply.text[:40]!r}, thoughts are {thought!r}")
        if not self.quiet:
            return "yes, always on"
        reply = await self.ask(cache.id, [question], **self.quiet, grammar=self.exactly("There"))
        self.require_ran(reply.served.cache_id, self.whole([question], enable_thinking=False), "off")
        if (reply.text, reply.thought) != ("There", None):
            raise Wrong(f"off: content is {reply.text[:40]!r}")
        return "yes"

    def _thought_end(self, question: Mapping[str, Any]) -> tuple[str, str] | None:
        """What stands before a thought, behind the opening, and between it and the answer; None without thoughts."""
        if "<|channel|>analysis" in self.template:
            return "<|channel|>analysis<|message|>", "<|end|><|start|>assistant<|channel|>final<|message|>"
        if "<|channel>thought" in self.template:
            return "<|channel>thought\n", "\n<channel|>"
        if "</think>" not in self.template or "<think>" not in self.template:
            return None
        opened = self.plain([question])
        return "" if opened.rstrip().endswith("<think>") else "<think>\n", "\n</think>\n\n"

    async def variables(self) -> str:
        """Documents that are put with each variable alone: what runs is the whole conversation with it."""
        question, count = [{"role": "user", "content": "Where?"}], 0
        usual = (await self.put()).id
        for name, value in VARIABLES:
            if name not in self.engine.encoder.require_text("messages").template.variables:
                continue
            variables = {name: value}
            expected = self.whole(question, **variables)
            manifest = (await self.replica.create(
                CreateCache(document=DOCUMENT, policy="full", chat_template_kwargs=variables), caller=Caller("default")
            )).manifest  # fmt: skip
            mark = [{"role": "user", "content": "KVMARK"}]
            before, behind = (self.plain(mark, **extra).partition("KVMARK")[::2] for extra in ({}, variables))
            if (manifest.id == usual) != (before[0] == behind[0]):
                raise Wrong(f"{name}: the id does not follow what is before the document")
            if manifest.identity.get("variables", {}) != ({} if manifest.id == usual else variables):
                raise Wrong(f"{name}: the cache keeps {manifest.identity.get('variables')}")
            again = {} if manifest.id != usual else {"chat_template_kwargs": variables}
            reply = await self.ask(manifest.id, question, max_tokens=2, **again)
            self.require_ran(reply.served.cache_id, expected, f"{name} {value}")
            if manifest.id != usual:
                self._require_refused(await self._tried(usual, question, variables), name)
            count += 1
        return "yes" if count else "none"

    async def _tried(self, cache_id: str, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]) -> str:
        try:
            await self.ask(cache_id, messages, max_tokens=2, chat_template_kwargs=variables)
        except KvshelfError as error:
            return error.message
        return ""

    @staticmethod
    def _require_refused(message: str, name: str) -> None:
        if name not in message or "before the document" not in message:
            raise Wrong(f"{name}: asked of a cache without it: {message or 'answered'}")

    async def date(self) -> str:
        if "strftime_now" not in self.template:
            return "none"
        manifests = []
        for day in (datetime.date(2031, 3, 7), datetime.date(2031, 3, 8)):
            with on_day(day):
                created = await self.replica.create(CreateCache(document=DOCUMENT), caller=Caller("default"))
                manifests.append(created.manifest.id)
                reply = await self.ask(manifests[0], [{"role": "user", "content": "Where?"}], max_tokens=2)
                assert reply.text is not None
        if manifests[0] != manifests[1]:
            raise Wrong("the id changes with the day")
        return "yes"


@contextmanager
def on_day(day: datetime.date) -> Iterator[None]:
    """Inside the block every clock shows noon of this day."""

    class Clock(datetime.datetime):
        @classmethod
        def now(cls, tz: datetime.tzinfo | None = None) -> Clock:
            return cls(day.year, day.month, day.day, 12, tzinfo=tz)

    from transformers.utils import chat_template_utils

    with mock.patch.object(chat_template_utils, "datetime", Clock), mock.patch.object(datetime, "datetime", Clock):
        yield


CELLS: Final[dict[str, Callable[[Subject], Any]]] = {
    "conversation": Subject.conversation,
    "keep, resend": Subject.keep,
    "responses": Subject.responses,
    "tools": Subject.tools,
    "thinking": Subject.thinking,
    "variables": Subject.variables,
    "date": Subject.date,
}


def row(template: str, *, tokens: bool = False, cells: Sequence[str] = tuple(CELLS)) -> dict[str, str]:
    """What each cell says of a template."""
    results = {}
    with tempfile.TemporaryDirectory() as folder:

        async def measured() -> None:
            # Otherwise a grammar begins behind thoughts, and nobody could say here what the model is to think.
            with mock.patch.object(Grammar, "behind", lambda grammar, *_: grammar, create=True):
                await measured_rows()

        async def measured_rows() -> None:
            subject = Subject(template, Path(folder), tokens=tokens)
            subject.replica.start()
            try:
                for name in cells:
                    try:
                        results[name] = await CELLS[name](subject)
                    except KvshelfError as error:
                        results[name] = f"refused: {error.message}"
                    except Wrong as wrong:
                        results[name] = f"**no**, {wrong}"
                    except Exception as error:  # of transformers: the plain conversation is refused, too
                        results[name] = f"refused by transformers: {type(error).__name__} {error}"
            finally:
                subject.replica.stop()

        try:
            asyncio.run(measured())
        except KvshelfError as error:
            results = dict.fromkeys(cells, f"refused: {error.message}")
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="names of templates, with commas")
    parser.add_argument("--cells", default=",".join(CELLS), help="columns, with commas")
    parser.add_argument("--tokens", action="store_true", help="show what was expected where other tokens ran")
    parser.add_argument(
        "--short", action="store_true", help="each cell's verdict alone, as in docs/internals/model-types.md"
    )
    parser.add_argument("--width", type=int, default=90, help="characters of a cell")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    transformers_logging.disable_progress_bar()
    cells = [cell for cell in CELLS if cell in chosen.cells]
    only = {name for name in chosen.only.split(",") if name}
    print("| template | " + " | ".join(cells) + " |\n|---|" + "---|" * len(cells), flush=True)
    for name, template in templates().items():
        if not only or name in only:
            cells_of_row = row(template, tokens=chosen.tokens, cells=cells)
            if chosen.short:
                cells_of_row = {
                    cell: re.split(r"[:,(]| by ", text)[0].strip() for cell, text in cells_of_row.items()
                } | {cell: "always on" for cell, text in cells_of_row.items() if text == "yes, always on"}
            shown = [" ".join(cells_of_row.get(cell, "").split())[: chosen.width].replace("|", "\\|") for cell in cells]
            print(f"| {name} | " + " | ".join(shown) + " |", flush=True)


if __name__ == "__main__":
    main()
