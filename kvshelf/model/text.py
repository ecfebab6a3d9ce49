"""Text to token ids: documents and questions within the model's chat template.

Only the template makes control tokens. Text from outside stays text: `<|end|>` in a document is spelled out in ordinary
tokens and cannot end a turn. The template writes a whole conversation each time, as without a cache; its tokens show
which part of it is in the cache.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Any, Final, NamedTuple, Self, cast

from tokenizers import Tokenizer

from kvshelf.artifact.identity import Boundary, Identity, Layout, canonical_json, digest
from kvshelf.errors import InvalidRequest
from kvshelf.model.bounds import TokenBound
from kvshelf.model.images import PlacedImage
from kvshelf.model.templates.template import ANY_DATE, ChatTemplate, Message
from kvshelf.model.templates.thoughts import Thoughts
from kvshelf.model.tokens import Place, Run, Tokens, unused_characters

QUESTION_SEPARATOR = "\n\n"
"""Stands between a document and the question that follows it in the same user turn."""

SENTENCE_ENDS = tuple(".?!\n。？！")  # noqa: RUF001  the full-width ones are meant
SEGMENT_ENDS = (*SENTENCE_ENDS, *",;:，、；：")  # noqa: RUF001

ROLES = ("system", "user", "assistant")
TOOL_ROLES = (*ROLES, "tool")

_NO_CHARACTER = "\ufffd"  # what the decoder writes for bytes that are not a whole character
_SEAMS: Final = 64
_LATER: Final = "2001-02-03"
_TEXTS: Final = ("content", "reasoning_content", "tool_call_id", "name")
_FOLLOWS: Final = {"assistant": "user", "user": "assistant", "system": "user", "tool": "assistant"}
"""The role of the message that mostly follows a message of each role."""
_CALL: Final = {"type": "function", "id": "kvshelf01"}  # nine letters and digits, which some templates insist on

Broken = Callable[[Any], Any]
"""Breaks the marks in all texts of a value of JSON."""


@dataclass(frozen=True)
class TemplateOptions:
    """The inputs of a template besides messages. variables: such as `enable_thinking`. date: the day of the document,
    as YYYY-MM-DD; "" where the template writes none. cached: the variables that the document was written with."""

    variables: Mapping[str, Any] = field(default_factory=dict)
    date: str = ""
    cached: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def behind(cls, identity: Identity, variables: Mapping[str, Any] | None = None) -> Self:
        """The options for turns after a cache: those of its document, and these variables."""
        return cls({**identity.variables, **(variables or {})}, identity.date, identity.variables)

    @property
    def of_document(self) -> TemplateOptions:
        """The options of the document."""
        return TemplateOptions(self.cached, self.date, self.cached)

    @property
    def key(self) -> tuple[str, str]:
        return canonical_json(dict(self.variables)), self.date


@dataclass(frozen=True)
class Prompt:
    """Token ids that are added to a cache. ends: for each message that another follows, by its place, the number of
    tokens up to the end of its turn; empty where the template does not show it. first: the number of tokens before the
    first message's text."""

    token_ids: list[int]
    ends: Mapping[int, int]
    first: int = 0


class _Signs(NamedTuple):
    """Characters that no text of a conversation has. breaker: keeps texts from being marks. document: stands for the
    cached text. start: stands where the text of a message begins."""

    breaker: str
    document: str
    start: str


@dataclass(frozen=True)
class EncodedDocument:
    """Token ids to prefill. The first `protected_prefix` of them come from the template, not from the document. date:
    the date among them, "" if the template writes none; with a date, `named_ids` are the same ids with `ANY_DATE`, by
    which the document is known on any day. variables: of the template, those that changed its text. protect: spans of
    these tokens, as of an `Identity`. images: in order."""

    token_ids: list[int]
    protected_prefix: int
    layout: Layout
    boundary: Boundary
    date: str = ""
    named_ids: list[int] | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)
    protect: tuple[tuple[int, int], ...] = ()
    images: tuple[PlacedImage, ...] = ()

    @property
    def options(self) -> TemplateOptions:
        """The options that the template wrote the document with."""
        return TemplateOptions(self.variables, self.date, self.variables)


class TextFormat:
    """The tokenizer and chat template of one model. Thread-safe: encoding changes no state.

    `tokenizer` is a fast tokenizer of transformers; any other is refused.
    """

    def __init__(self, tokenizer: Any) -> None:
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if not isinstance(backend, Tokenizer):
            raise InvalidRequest(
                f"the tokenizer is a {type(tokenizer).__name__}, and only tokenizers with a tokenizer.json are "
                "supported; convert it, or give token ids to an Engine without a tokenizer",
                param="model",
            )
        self.chat = tokenizer
        self.template = ChatTemplate(tokenizer)
        self.tokens = Tokens(backend)
        self.longest_token = max(len(token.encode()) for token in backend.get_vocab())
        self.bound = TokenBound.of(self.tokens.control, self.encode)
        self.has_template = bool(tokenizer.chat_template)
        self.thoughts = Thoughts.of(self.template.source) if self.template.usable else None
        self._answer_decoder = self.tokens.showing(self.thoughts.texts if self.thoughts is not None else "")
        self.seam = lru_cache(_SEAMS)(self._seam)
        self._token_texts: dict[int, str] = {}  # filled by use; two threads may write the same, which does no harm

    def digests(self) -> tuple[str, str]:
        """Hex digests of the tokenizer and of the chat template ("" without one)."""
        template = digest("kvshelf.template", canonical_json(self.template.text)) if self.has_template else ""
        return digest("kvshelf.tokenizer", self.tokens.control.to_str()), template

    def decoder(self) -> Tokenizer:
        """The tokenizer that turns generated ids into text."""
        return self.tokens.control

    @property
    def end_id(self) -> int | None:
        """The token that ends a text, if the tokenizer names one."""
        return cast("int | None", self.chat.eos_token_id)

    def answer_decoder(self) -> Tokenizer:
        """As `decoder`, but it writes the marks of thoughts also where it leaves out control tokens."""
        return self._answer_decoder

    @property
    def thought_marks(self) -> tuple[str, ...]:
        """The marks at the beginning and the end of thoughts."""
        return () if self.thoughts is None else (self.thoughts.opening, self.thoughts.closing)

    def opens_thought(self, options: TemplateOptions, last_role: str = "user") -> bool:
        """Whether the prompt after a message of this role opens the answer's thoughts."""
        if self.thoughts is None:
            return False
        turns: list[Message] = [{"role": "user", "content": "?"}]
        if last_role == "tool":
            call = {**_CALL, "function": {"name": "kvshelf_name", "arguments": {}}}
            turns += [{"role": "assistant", "content": "", "tool_calls": [call]}, {"role": "tool", "content": "?"}]
        try:
            text = self._write(turns, options, opening=True)
        except InvalidRequest:
            return False
        return text.rstrip().endswith(self.thoughts.opening)

    def count_tokens(self, text: str) -> int:
        """Tokens of a text by itself, without template or BOS."""
        return len(self.encode(text))

    def token_starts(self, text: str) -> list[int]:
        """The place of the first character of each token of a text by itself, without template or BOS."""
        return [start for start, _ in self.tokens.spans(text)]

    def document(self, text: str, layout: Layout, options: TemplateOptions | None = None) -> EncodedDocument:
        """Chat: the template up to the end of the document inside an open user turn. Plain: the text, after the BOS
        token where the tokenizer adds one."""
        if layout == "plain":
            prefix = [i for i in self.chat("").input_ids if i == self.chat.bos_token_id]
            return EncodedDocument(prefix + self.tokens.encode(text, "first"), len(prefix), "plain", "text")
        options = self._reduce(options or TemplateOptions(), self._before_document)
        ids, before = self._begin(text, options)
        named = self._begin(text, replace(options, date=ANY_DATE))[0] if options.date else None
        return EncodedDocument(ids, before, "chat", "document", options.date, named, options.variables)

    def _reduce(self, options: TemplateOptions, write: Callable[[TemplateOptions], Any]) -> TemplateOptions:
        """The options without those that do not change a document. write: writes it, as text or as tokens."""
        kept = dict(options.variables)
        whole = write(TemplateOptions(kept, ANY_DATE)) if kept else None
        for name in sorted(options.variables):
            fewer = {other: value for other, value in kept.items() if other != name}
            with suppress(InvalidRequest):  # without the variable the template refuses
                if write(TemplateOptions(fewer, ANY_DATE)) == whole:
                    kept = fewer
        return TemplateOptions(kept, options.date if self._dates(kept) else "", kept)

    def _dates(self, variables: Mapping[str, Any]) -> bool:
        """Whether the template writes the date with these variables: one of them may be a date to write instead."""
        if not self.template.dated or not variables:
            return self.template.dated
        first, second = (self._write_question("?", TemplateOptions(variables, day)) for day in (ANY_DATE, _LATER))
        return first != second

    def _begin(self, text: str, options: TemplateOptions) -> tuple[list[int], int]:
        """The ids of a document after those of the template's text before it, and the number of the latter."""
        ids, last, place = self._open(options)
        if not last:
            return ids + self.tokens.encode(text, place), len(ids)
        spans = self.tokens.spans(last + text, place)
        return ids + self.tokens.encode(last + text, place), len(ids) + sum(end <= len(last) for _, end in spans)

    def spans(self, text: str, document: EncodedDocument) -> list[tuple[int, int]]:
        """The characters of a document's text in each of its tokens after the template's: the first, and the one after
        the last."""
        if document.layout == "plain":
            return self.tokens.spans(text, "first")
        _, last, place = self._open(document.options)
        return [
            (start - len(last), end - len(last))
            for start, end in self.tokens.spans(last + text, place)
            if not last or end > len(last)
        ]

    def message_spans(
        self,
        messages: Sequence[Message],
        document: EncodedDocument,
        spans: Sequence[tuple[int, int, int]],
        behind: Boundary | None = None,
    ) -> list[tuple[int, int]]:
        """The tokens that hold some characters of messages. spans: the place of a message, the first of the characters
        in its text and the one after the last. behind: the end of the cache that the messages are appended to; None:
        they begin a conversation. Raises `InvalidRequest` where the template does not show where a message is."""
        script = _Script(self, behind, check_messages(messages, TOOL_ROLES), document.options, None)
        try:
            return script.followed_by(_next(messages[-1])).spans(spans)
        except InvalidRequest:  # the template may refuse any message after the last
            return script.spans(spans)

    def _open(self, options: TemplateOptions) -> tuple[list[int], str, Place]:
        """The template's text before a document: its ids, its last text, which the document's first tokens join, and
        the place of that text."""
        texts = [value for value in options.variables.values() if isinstance(value, str)]
        breaker = unused_characters(texts, 1)[0] if any(map(self.tokens.has_marks, texts)) else ""
        before = self._before_document(options, breaker)
        runs = list(self.tokens.runs(before, breaker))
        ids = [token for run in runs for token in run.token_ids]
        last = before[runs[-1].start :] if runs else ""
        last = last.replace(breaker, "") if breaker else last
        marked = bool(runs) and runs[-1].is_mark
        if not last or marked or last.endswith("\n"):
            # A line's end stays a token of its own, and the document's ids are those of the document alone.
            return ids, "", "behind text" if last and not marked else "behind mark" if last else "first"
        return ids[: len(ids) - len(runs[-1].token_ids)], last, "first" if len(runs) == 1 else "behind mark"

    @property
    def writes_date(self) -> bool:
        """Whether the chat template writes the date."""
        return self.has_template and self.template.dated

    @property
    def about_template(self) -> str:
        """A description of the chat template, for people."""
        if not self.has_template:
            return "none: documents have the layout plain and take no messages; --chat-template gives the model one"
        if not self.template.usable:
            return f"chat templates {', '.join(sorted(self.template.text))} and none the default: take --chat-template"
        return f"of the family {self.template.family}" + (", writes the date" if self.writes_date else "")

    @property
    def about_thoughts(self) -> str:
        """Whether the model thinks, and the variables that turn it off, for people."""
        if self.thoughts is None:
            return "no"
        switch = {"enable_thinking", "thinking", "reasoning_effort"} & self.template.variables
        return f"between {self.thoughts.opening} and {self.thoughts.closing}, " + (
            f"told by {', '.join(sorted(switch))}" if switch else "always"
        )

    def dated(self, document: EncodedDocument, date: str) -> EncodedDocument:
        """A document of token ids that a cache was made of, with this date among them."""
        if document.boundary != "document":
            return replace(document, date=date, named_ids=None)
        before = self._begin("", replace(document.options, date=ANY_DATE))[0]
        return replace(document, date=date, named_ids=before + document.token_ids[document.protected_prefix :])

    def conversation(self, messages: Sequence[Message], options: TemplateOptions | None = None) -> EncodedDocument:
        """A document of whole turns; a query appends more turns."""
        turns = check_messages(messages)
        boundary = cast(Boundary, f"after_{turns[-1]['role']}")

        def write(options: TemplateOptions) -> Prompt:
            return self.prompt(None, turns, followed=True, options=options)

        options = self._reduce(options or TemplateOptions(), lambda fewer: write(fewer).token_ids)
        prompt = write(options)
        named = write(replace(options, date=ANY_DATE)).token_ids if options.date else None
        return EncodedDocument(prompt.token_ids, prompt.first, "chat", boundary, options.date, named, options.variables)

    def question(self, boundary: Boundary, prompt: str, options: TemplateOptions | None = None) -> list[int]:
        """The ids that ask `prompt`: a question in the document's own turn, or a turn of its own."""
        if boundary == "text":
            return self.encode(prompt)
        return self.turns(boundary, [{"role": "user", "content": prompt}], options=options)

    def turns(
        self,
        boundary: Boundary | None,
        messages: Sequence[Message],
        *,
        opening: bool = True,
        roles: Sequence[str] = ROLES,
        options: TemplateOptions | None = None,
    ) -> list[int]:
        """The token ids of `prompt`, of messages with these roles; without `opening`, up to the end of the last one."""
        turns = check_messages(messages, roles)
        return self.prompt(boundary, turns, opening=opening, followed=not opening, options=options).token_ids

    def prompt(
        self,
        boundary: Boundary | None,
        messages: Sequence[Message],
        *,
        opening: bool = False,
        followed: bool = False,
        options: TemplateOptions | None = None,
        intro: Callable[[Broken], str] | None = None,
    ) -> Prompt:
        """The tokens that add checked `messages` to a cache, and with `opening` open the assistant's turn. boundary:
        None for the beginning of a conversation. followed: up to the end of the last message, as the template writes it
        when another one follows. intro: gives the template's own text before them.

        After a document the first message must be the user's: it ends the turn that the document is in. A system
        message may stand before it: the document is already in the cache, so its text comes behind the document, as
        the first text of the same turn. Another system message is refused then. After a conversation the template
        decides where a system message may stand.
        """
        if boundary == "text":
            raise InvalidRequest(
                "this cache has the layout 'plain' and no turns; ask it with prompt instead of messages",
                param="messages",
            )
        script = _Script(self, boundary, list(messages), options or TemplateOptions(), intro)
        if not followed:
            return script.prompt(opening=opening)
        try:
            more = script.followed_by(_next(messages[-1])).prompt(opening=False)
        except InvalidRequest:  # the template may refuse any message after the last
            return script.prompt(opening=False)
        if (end := more.ends.get(len(messages) - 1)) is None:
            return script.prompt(opening=False)
        return Prompt(more.token_ids[:end], more.ends, more.first)

    def suffix(self, boundary: Boundary, options: TemplateOptions | None = None) -> list[int]:
        """The tokens that the template writes between the cached tokens and the model's answer; none where a question
        must come first, or without a template. options: of the document."""
        if boundary not in ("document", "after_user"):
            return []
        options, place = options or TemplateOptions(), "kvshelf_question"
        text = self._write_question(place, options).rpartition(place)[2]
        if boundary == "after_user":
            text = text.removeprefix(self.seam("user", "assistant", False, options.key)[0])
        return self.tokens.encode_marked(text, place="behind text")

    def _write(self, messages: Sequence[Message], options: TemplateOptions, *, opening: bool = False) -> str:
        return self.template.write(messages, opening=opening, options=options.variables, date=options.date)

    def _write_question(self, text: str, options: TemplateOptions) -> str:
        return self._write([{"role": "user", "content": text}], options, opening=True)

    def encode(self, text: str) -> list[int]:
        """Token ids of a text that follows another; control tokens in it are text."""
        return self.tokens.encode(text)

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of token ids, control tokens written out."""
        return self.tokens.control.decode(list(token_ids), skip_special_tokens=False)

    def segment_ends(self, token_ids: Sequence[int], endings: tuple[str, ...] = SEGMENT_ENDS) -> list[bool]:
        """Which tokens end a segment: their text ends with one of `endings`. The point in "3.14" ends none.

        Single-byte tokens split a character ("。" has three bytes); its last token then ends the segment.
        """
        texts = {i: self._token_text(i) for i in set(token_ids)}
        ends = {i: text.endswith(endings) for i, text in texts.items()}
        flags = [ends[i] for i in token_ids]
        bytes_, points = ({i for i, text in texts.items() if text.endswith(end)} for end in (_NO_CHARACTER, "."))
        for at in (at for at, i in enumerate(token_ids) if i in bytes_):
            flags[at] = self.decode(token_ids[max(0, at - 2) : at + 1]).endswith(endings)
        for at in (at for at, i in enumerate(token_ids[:-1]) if i in points and flags[at]):
            before = (texts[token_ids[at - 1]] if at else "") + texts[token_ids[at]]
            flags[at] = not (before[-2:-1].isdigit() and texts[token_ids[at + 1]][:1].isdigit())
        return flags

    def lines(self, token_ids: Sequence[int]) -> list[tuple[int, str]]:
        """The lines of these tokens: the first token of each, and its text with the line's end. A token that ends
        several lines, as after a paragraph, ends the first of them."""
        ends = {i: "\n" in self._token_text(i) for i in set(token_ids)}
        edges = [0, *(at + 1 for at, i in enumerate(token_ids[:-1]) if ends[i]), len(token_ids)]
        return [(first, self.decode(token_ids[first:end])) for first, end in pairwise(edges)]

    def number_starts(self, token_ids: Sequence[int]) -> list[bool]:
        """Which tokens have a digit and follow a token without one."""
        digits = [any(map(str.isdigit, self._token_text(i))) for i in token_ids]
        return [now and not before for before, now in zip([False, *digits], digits, strict=False)]

    def name_starts(self, token_ids: Sequence[int]) -> list[bool]:
        """Which tokens begin with a capital letter, but not after the end of a sentence, where every word does."""
        texts = [self._token_text(i) for i in token_ids]
        capital = [text.lstrip()[:1].isupper() for text in texts]
        opens = [text.rstrip(" ").endswith((*SENTENCE_ENDS, "\n")) for text in ["\n", *texts]]
        return [now and not first for now, first in zip(capital, opens, strict=False)]

    def _token_text(self, token_id: int) -> str:
        if token_id not in self._token_texts:
            self._token_texts[token_id] = self.decode([token_id])
        return self._token_texts[token_id]

    def _before_document(self, options: TemplateOptions, breaker: str = "") -> str:
        """The template's text before the text of a first message. breaker: breaks marks in the variables."""
        place = unused_characters([breaker], 1)[0]
        safe = _nested(options.variables, lambda value: self.tokens.broken(value, breaker) if breaker else value)
        text = self.template.write([{"role": "user", "content": place}], options=safe, date=options.date)
        return self._halves(text, place)[0]

    def _halves(self, text: str, place: str) -> list[str]:
        """The texts before and after a sign."""
        parts = text.split(place)
        if len(parts) != 2:
            raise InvalidRequest("the model's chat template does not write every turn once, in order", param="messages")
        return parts

    def _seam(self, last: str, following: str, calls: bool, key: tuple[str, str]) -> tuple[str, str]:
        """The template's text between the texts of two neighbouring messages: the end of the first one's turn, and the
        beginning of the second. last, following: their roles. calls: whether the first has calls of tools. key: of the
        options. Raises `InvalidRequest` where one may not follow the other."""
        text, after = "kvshelf_text", "kvshelf_after"
        question = {"role": "user", "content": "kvshelf_question"}
        call = {**_CALL, "function": {"name": "kvshelf_name", "arguments": {"kvshelf": text}}}
        calling = {"role": "assistant", "content": "", "tool_calls": [call]}
        before: dict[str, list[Message]] = {"assistant": [question], "tool": [question, calling]}
        first = calling if calls else {"role": last, "content": text}
        turns: list[Message] = [*before.get(last, []), first, {"role": following, "content": after}]
        options = TemplateOptions(json.loads(key[0]), key[1])
        alone, both = self._write(turns[:-1], options), self._write(turns, options)
        tail, rest = alone.rpartition(text)[2], both.rpartition(text)[2]
        between, mark, _ = rest.partition(after)
        if not mark:
            raise InvalidRequest("the model's chat template writes no message behind such a one", param="messages")
        same = same_beginning(tail, between)
        ends = [at for run in self.tokens.runs(between) if run.is_mark for at in (run.start, run.end)]
        end = max(at for at in (0, len(between), *ends) if at <= same)
        return between[:end], between[end:]


@dataclass(frozen=True)
class _Script:
    """Messages after a cache, which the template writes. The fields are arguments of `TextFormat.prompt`."""

    form: TextFormat
    boundary: Boundary | None
    messages: list[Message]
    options: TemplateOptions
    intro: Callable[[Broken], str] | None

    def followed_by(self, message: Message) -> _Script:
        return replace(self, messages=[*self.messages, message])

    def _write(self, *, opening: bool) -> tuple[_Signs, str, list[Run]]:
        """The template's text after the cache, with the signs in it, and its runs."""
        texts, tokens = self._texts(), self.form.tokens
        breaker, document, start = unused_characters(texts, 3)
        signs = _Signs(breaker if any(map(tokens.has_marks, texts)) else "", document, start)
        text, place = self._text(signs, opening=opening)
        return signs, text, list(tokens.runs(text, signs.breaker, place))

    def prompt(self, *, opening: bool) -> Prompt:
        signs, text, runs = self._write(opening=opening)
        ends, first = self._ends(signs, text, runs, opening=opening)
        return Prompt([token for run in runs for token in run.token_ids], ends, first)

    def spans(self, spans: Sequence[tuple[int, int, int]]) -> list[tuple[int, int]]:
        """See `TextFormat.message_spans`."""
        signs, text, runs = self._write(opening=False)
        tokens, begins = self.form.tokens, self._places(signs, text, opening=False)
        edges: list[int] = []
        for at, first, end in spans:
            if at not in begins:
                raise InvalidRequest(
                    f"the model's chat template does not tell where the text of messages[{at}] is; protect tokens",
                    param="protect",
                )
            content = self.messages[at]["content"]
            lead = len(content) - len(content.lstrip())
            broken = tokens.broken(content.lstrip(), signs.breaker) if signs.breaker else content.lstrip()
            letters = [place for place, letter in enumerate(broken) if letter != signs.breaker]
            edges += (begins[at] + letters[min(max(edge - lead, 0), len(letters) - 1)] for edge in (first, end - 1))
        # The token that holds a character is the one after those that end before it or with it.
        counts = tokens.tokens_until(text, runs, edges, signs.breaker)
        return [(first, last + 1) for first, last in zip(counts[::2], counts[1::2], strict=True)]

    def _text(self, signs: _Signs, *, opening: bool) -> tuple[str, Place]:
        """The template's text after the cache, with broken texts from outside, and its place."""
        broken = self._render(signs, opening=opening)
        if signs.breaker:
            plain = self._render(signs._replace(breaker=""), opening=opening)
            if broken[0].replace(signs.breaker, "") != plain[0]:
                # The template looks for thoughts in answers that are sent back.
                thoughts = self._render(signs, opening=opening, answers_too=False)
                if thoughts[0].replace(signs.breaker, "") == plain[0]:
                    return thoughts
        return broken

    def _render(
        self, signs: _Signs, *, opening: bool, answers_too: bool = True, started: bool = False
    ) -> tuple[str, Place]:
        """started: whether each message's text begins with its sign."""
        turns = [_changed(message, self._breaking(message, signs, answers_too)) for message in self.messages]
        if self.intro is not None:
            intro = self.intro(lambda value: _nested(value, self._breaking({}, signs, True)))
            turns[0]["content"] = QUESTION_SEPARATOR.join([intro, turns[0]["content"]])
        if self.boundary == "document":
            turns = _system_before_question(turns)
        if started:
            turns = [message | {"content": _started(message["content"], signs.start)} for message in turns]
        if self.boundary == "document":
            return self._behind_document(turns, signs, opening=opening), "behind text"
        if self.boundary is None:
            return self._template(turns, signs, opening=opening), "first"
        return self._behind_turn(turns, signs, opening=opening)

    def _behind_document(self, turns: list[dict[str, Any]], signs: _Signs, *, opening: bool) -> str:
        turns[0]["content"] = signs.document + QUESTION_SEPARATOR + turns[0]["content"]
        before, behind = self.form._halves(self._template(turns, signs, opening=opening), signs.document)
        before = before.replace(signs.breaker, "") if signs.breaker else before
        if before != self.form._before_document(self.options.of_document):
            if not self._differing:
                raise InvalidRequest(
                    "with these messages the chat template of this model writes something else before the document, "
                    "which is in the cache already; leave out what is not a plain turn",
                    param="messages",
                )
            raise self._other_variables()
        return behind

    @property
    def _differing(self) -> dict[str, Any]:
        """The variables that the document was not written with."""
        cached = self.options.cached
        return {name: value for name, value in self.options.variables.items() if (name, value) not in cached.items()}

    def _other_variables(self) -> InvalidRequest:
        differing, cached = (
            ", ".join(f"{name} {json.dumps(value, ensure_ascii=False):.80}" for name, value in variables.items())
            for variables in (self._differing, self.options.cached)
        )
        return InvalidRequest(
            f"with {differing} the chat template of this model writes something else before the document, which is in "
            f"the cache already, made with {cached or 'none of them'}; leave them out, or put the document with them",
            param="chat_template_kwargs",
        )

    def _behind_turn(self, turns: list[dict[str, Any]], signs: _Signs, *, opening: bool) -> tuple[str, Place]:
        # The cached turns are not known. A stand-in with the same last role shows what the template writes after it.
        last = str(self.boundary).removeprefix("after_")
        before: list[Message] = [{"role": "user", "content": "?"}] if last in ("assistant", "tool") else []
        stand_in = [*before, {"role": last, "content": signs.document}]
        if self._begins_otherwise(stand_in, signs.document):
            raise self._other_variables()
        behind = self.form._halves(self._template([*stand_in, *turns], signs, opening=opening), signs.document)[1]
        end = self.form.seam(last, _FOLLOWS[last], False, self.options.key)[0]
        if not behind.startswith(end):
            raise InvalidRequest(
                "the chat template of this model rewrites earlier turns when new ones follow; cache the conversation "
                "as a document instead",
                param="messages",
            )
        marked = [run.is_mark for run in self.form.tokens.runs(end)][-1:] == [True]
        return behind.removeprefix(end), "behind mark" if marked else "behind text"

    def _begins_otherwise(self, turns: Sequence[Message], place: str) -> bool:
        """Whether the cached turns would begin otherwise with the variables of this question. turns: stand for the last
        of them. With a system message and without, because nobody knows whether they have one."""
        if not self._differing:
            return False
        both = (self.options, self.options.of_document)
        for system in ([], [{"role": "system", "content": "?"}] if turns[0]["role"] != "system" else []):
            with suppress(InvalidRequest):  # the template takes no system message
                texts = (self.form._write([*system, *turns], options) for options in both)
                now, cached = (text.partition(place)[0] for text in texts)
                if now != cached:
                    return True
        return False

    def _template(self, turns: Sequence[Message], signs: _Signs, *, opening: bool) -> str:
        safe = _nested(self.options.variables, self._breaking({}, signs, True))
        return self.form.template.write(turns, opening=opening, options=safe, date=self.options.date)

    def _breaking(self, message: Message, signs: _Signs, answers_too: bool) -> Callable[[str], str]:
        if not signs.breaker:
            return lambda text: text
        kept = () if answers_too or message.get("role") != "assistant" else self.form.thought_marks
        return lambda text: self.form.tokens.broken(text, signs.breaker, kept)

    def _ends(self, signs: _Signs, text: str, runs: Sequence[Run], *, opening: bool) -> tuple[dict[int, int], int]:
        """`ends` and `first` of a `Prompt`."""
        if len(self.messages) < 2 and self.boundary is not None:
            return {}, 0
        if not (places := self._places(signs, text, opening=opening)):
            return {}, 0
        with_text = list(places)
        stops: dict[int, int] = {}
        for at in with_text[1:]:
            last, following = self.messages[at - 1], self.messages[at]
            with suppress(InvalidRequest):
                calls = bool(last.get("tool_calls"))
                _, header = self.form.seam(last["role"], following["role"], calls, self.options.key)
                stop = places[at] - len(header)
                if text.startswith(header, stop):
                    stops[at - 1] = stop
        begins = next(iter(places.values()), 0)
        first, *ends = self.form.tokens.tokens_until(text, runs, [begins, *stops.values()], signs.breaker)
        return dict(zip(stops, ends, strict=True)), first

    def _places(self, signs: _Signs, text: str, *, opening: bool) -> dict[int, int]:
        """Where the text of each message begins in the template's text; empty where that does not show it."""
        for answers_too in (True, False):
            started, _ = self._render(signs, opening=opening, answers_too=answers_too, started=True)
            if started.replace(signs.start, "") == text:
                break
        else:
            return {}
        parts = started.split(signs.start)[:-1]
        with_text = [at for at, message in enumerate(self.messages) if message["content"]]
        if not parts or len(parts) > len(with_text):  # the template's text about tools stands before an empty text
            return {}
        with_text = with_text[len(with_text) - len(parts) :]  # a system message may have become a part of the question
        return dict(zip(with_text, accumulate(map(len, parts)), strict=True))

    def _texts(self) -> list[str]:
        """All texts from outside."""
        texts: list[str] = []

        def note(text: str) -> str:
            texts.append(text)
            return text

        for message in self.messages:
            _changed(message, note)
        _nested(self.options.variables, note)
        if self.intro is not None:
            self.intro(lambda value: _nested(value, note))
        return texts


def _next(last: Message) -> Message:
    """A message that may follow one."""
    return {"role": "tool" if last.get("tool_calls") else _FOLLOWS[last["role"]], "content": "kvshelf_next"}


def _changed(message: Message, change: Callable[[str], str]) -> dict[str, Any]:
    """A message with its texts changed, and all that is in calls of tools."""
    return {
        name: change(value)
        if name in _TEXTS
        else [_call(call, change) for call in value]
        if name == "tool_calls"
        else value
        for name, value in message.items()
    }


def _call(call: Mapping[str, Any], change: Callable[[str], str]) -> dict[str, Any]:
    function = call["function"]
    arguments = _nested(function["arguments"], change)
    return {**call, "id": change(call["id"]), "function": {**function, "arguments": arguments}}


def _nested(value: Any, change: Callable[[str], str]) -> Any:
    """A value of JSON with each text in it changed, and the names of its fields."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {change(name): _nested(part, change) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_nested(part, change) for part in value]
    return value


def same_beginning(one: str, other: str) -> int:
    """How many characters two texts begin with alike."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, pair in pairs if pair[0] != pair[1]), min(len(one), len(other)))


def _started(content: str, sign: str) -> str:
    text = content.lstrip()
    return content[: len(content) - len(text)] + sign + text if content else ""  # templates treat no text as such


_MORE: Final = {"assistant": {"tool_calls", "reasoning_content"}, "tool": {"tool_call_id", "name"}}
"""Fields of a message besides its role and content."""


def check_messages(messages: Sequence[Message], roles: Sequence[str] = ROLES) -> list[Message]:
    """The messages of a conversation. Raises `InvalidRequest` naming the message that is wrong."""
    if not messages:
        raise InvalidRequest("messages is empty; give at least one message", param="messages")
    for i, message in enumerate(messages):
        known = {"role", "content"} | (
            _MORE.get(str(message.get("role")), set()) if isinstance(message, Mapping) else set()
        )
        if not isinstance(message, Mapping) or not {"role", "content"} <= set(message) <= known:
            raise InvalidRequest(f"messages[{i}] must have exactly the fields role and content", param=f"messages[{i}]")
        role, content = message["role"], message["content"]
        if role not in roles:
            raise InvalidRequest(
                f"messages[{i}].role is {role!r}; it must be one of {', '.join(roles)}", param=f"messages[{i}].role"
            )
        # A tool may return nothing, and an answer may be calls alone.
        if not isinstance(content, str) or (not content and role != "tool" and not message.get("tool_calls")):
            raise InvalidRequest(
                f"messages[{i}].content must be a text that is not empty", param=f"messages[{i}].content"
            )
    return list(messages)


def _system_before_question(turns: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Turns that begin with the user's: a system message before it becomes the first text of that turn."""
    system = [turn["content"] for turn in turns[:1] if turn["role"] == "system"]
    second = next((i for i, turn in enumerate(turns) if i and turn["role"] == "system"), None)
    if system and second is not None:
        raise InvalidRequest(
            f"messages[{second}] is a second system message; a query on a document takes one, as its first message",
            param=f"messages[{second}].role",
        )
    rest = turns[len(system) :]
    if not rest or rest[0]["role"] != "user":
        problem = f"has role {rest[0]['role']!r}" if rest else "is missing"
        raise InvalidRequest(
            "the first message of a query on a document, after a system message if there is one, must be the user's "
            f"(it ends the turn that holds the document) and {problem}",
            param=f"messages[{len(system)}].role" if rest else "messages",
        )
    return [{**rest[0], "content": QUESTION_SEPARATOR.join([*system, rest[0]["content"]])}, *rest[1:]]
