"""Checks the documents, questions and layouts of callers and turns them into token ids."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Integral
from typing import Any, Self, TypedDict, TypeGuard, cast

import numpy as np
from torch import Tensor

from kvshelf.api.options import MAX_IMAGES, ImagePart, Rules, unmarked, without_images, written_rule
from kvshelf.artifact.identity import Boundary, Identity, Layout
from kvshelf.engine.facts import ModelFacts
from kvshelf.engine.inputs.images import require_encoder, with_images
from kvshelf.engine.inputs.protect import DocumentRules, joined_spans
from kvshelf.errors import DocumentTooLong, DocumentTooShort, InvalidRequest
from kvshelf.methods.policies.view import DocumentView
from kvshelf.model import split
from kvshelf.model.bounds import nbytes_of
from kvshelf.model.images import ImageEncoder
from kvshelf.model.templates.template import Message
from kvshelf.model.text import (
    QUESTION_SEPARATOR,
    TOOL_ROLES,
    EncodedDocument,
    TemplateOptions,
    TextFormat,
    check_messages,
)

Document = str | Sequence[int] | Sequence[Message] | Tensor
"""A text, token ids (a list or a 1-D integer tensor), or the messages of a conversation."""


class EncodingFields(TypedDict, total=False):
    """How a document becomes tokens, see `Engine.encode_document`."""

    layout: Layout | None
    chat_template_kwargs: Mapping[str, Any] | None
    protect: Rules


Prompt = Document
"""A question: a text, messages, or token ids that are appended as they are."""

MAX_QUESTION_BYTES = 64 * 1024
"""Most UTF-8 bytes of a document's expected questions together. Limited, because its blob contains them."""

OVERLAP = 128
"""Tokens of a part that begin the next one, too, by default."""

REFERENCE_TOKENS = 64
"""Tokens, spread over the vocabulary, before a question that searches (see `summary.KeyCoder`)."""

SPLIT_IT = "split it (`kvshelf put --split`, or split=true in a request), or send less"
"""What to do about a document that is too long."""


@dataclass(frozen=True, eq=False)
class Encoder:
    """Encodes documents and questions for one model. Thread-safe, because it is immutable.

    name: the model's, for error messages. text: None for an engine without tokenizer. max_tokens: the longest sequence
    of the model. vocab_size: the number of token ids. longest: most tokens of a sequence that begins with a document of
    so many. images: reads those of documents; None for a model without.
    """

    name: str
    text: TextFormat | None
    max_tokens: int
    vocab_size: int
    longest: Callable[[int], int]
    images: ImageEncoder | None = None

    @classmethod
    def of(cls, facts: ModelFacts) -> Self:
        vocabulary = facts.model.config.vocab_size
        return cls(facts.name, facts.text, facts.max_tokens, vocabulary, facts.longest, facts.images)

    @property
    def part_tokens(self) -> int:
        """Tokens of a part by default: an eighth of what the model takes is left for questions, answers and probes."""
        return self.max_tokens - self.max_tokens // 8

    @property
    def default_layout(self) -> Layout:
        """ "chat" where the tokenizer has a chat template, else "plain"."""
        return "chat" if self.text is not None and self.text.has_template else "plain"

    def require_text(self, param: str) -> TextFormat:
        """The tokenizer and template; raises `InvalidRequest` about `param` where the engine has none."""
        if self.text is None:
            raise InvalidRequest("this engine has no tokenizer; give token ids", param=param)
        return self.text

    def document(
        self,
        document: Document | EncodedDocument,
        layout: Layout | None,
        date: str = "",
        variables: Mapping[str, Any] | None = None,
        protect: Rules = (),
    ) -> EncodedDocument:
        """The token ids of a document; those of an encoded one are checked, and its layout is not read. date: for a
        template that writes it; "": today. variables: of the template. protect: see `DocumentRules`. Raises
        `InvalidRequest`, `DocumentTooLong` or `DocumentTooShort`."""
        options, rules = self.options(layout, date, variables), _written_rules(protect)
        texts, turns = list[str](), None
        images, chars = list[ImagePart](), None
        if _are_messages(document):
            document, images = _without_images(document)
            document, rules = _without_marks(document, rules)
        if isinstance(document, EncodedDocument):
            encoded = replace(document, token_ids=self._checked_ids(document.token_ids, "token_ids"))
            if encoded.images:
                require_encoder(self.images, self.name)
        elif isinstance(document, str):
            self._require_fits([document], "document")
            texts, form, layout = [document], self.require_text("document"), self._checked_layout(layout)
            if images:
                reader = require_encoder(self.images, self.name)
                encoded, chars = with_images(form, reader, document, images, layout, options, self._require_length)
            else:
                encoded = form.document(document, layout, options)
        elif _are_messages(document):
            if layout == "plain":
                raise InvalidRequest("messages need the layout 'chat'", param="layout")
            form, turns = self.require_text("messages"), check_messages(document)
            texts = [turn["content"] for turn in turns]
            self._require_fits(texts, "document")
            encoded = form.conversation(document, options)
        else:
            if layout == "chat":
                raise InvalidRequest("token_ids are taken as they are, in the layout 'plain'", param="layout")
            if variables:
                raise InvalidRequest(
                    "token_ids are taken as they are, without a chat template; leave chat_template_kwargs out",
                    param="chat_template_kwargs",
                )
            encoded = EncodedDocument(self._checked_ids(document, "token_ids"), 0, "plain", "text")
        if len(encoded.token_ids) == encoded.protected_prefix:
            raise DocumentTooShort("the document is empty; send at least one token of text", param="document")
        self._require_length(len(encoded.token_ids))
        self.require_question(len(encoded.token_ids), encoded.boundary, encoded.options)
        if not rules:
            return encoded
        return replace(encoded, protect=DocumentRules(rules, encoded, self.text, texts, turns, chars=chars).spans())

    def options(
        self, layout: Layout | None, date: str = "", variables: Mapping[str, Any] | None = None
    ) -> TemplateOptions:
        """The options of the template for a document. Raises `InvalidRequest` for variables that it does not read, or
        that no caller sets."""
        date = date or datetime.datetime.now().date().isoformat()  # as transformers, local time
        if not variables:
            return TemplateOptions(date=date)
        if not isinstance(variables, Mapping) or not all(isinstance(name, str) for name in variables):
            raise InvalidRequest(
                f"chat_template_kwargs is {variables!r:.80}; it maps names to values", param="chat_template_kwargs"
            )
        if self._checked_layout(layout) == "plain":
            raise InvalidRequest(
                "the layout 'plain' has no chat template to be told anything; leave chat_template_kwargs out",
                param="chat_template_kwargs",
            )
        return TemplateOptions(
            self.require_text("chat_template_kwargs").template.choose_variables(variables, None), date
        )

    def require_question(
        self, num_tokens: int, boundary: Boundary, options: TemplateOptions | None = None, appended: int = 0
    ) -> None:
        """Raises `DocumentTooLong` where no question has room behind a document of `num_tokens` and `appended` more,
        which end at `boundary`. options: those of its template."""
        longest, question = self.longest(num_tokens), self.least_question(boundary, options)
        if num_tokens + appended + question > longest:
            behind, advice = (f" and {appended} appended", "append less") if appended else ("", SPLIT_IT)
            raise DocumentTooLong(
                f"the document has {num_tokens} tokens{behind}, and the shortest question with an answer takes "
                f"{question} more: together more than the {longest} that {self.name!r} takes; {advice}",
                param="document",
            )

    def least_question(self, boundary: Boundary, options: TemplateOptions | None = None) -> int:
        """Tokens of the shortest question behind a document that ends at `boundary`, and one of its answer."""
        if self.text is None or boundary == "text":
            return 2
        try:
            return len(self.text.question(boundary, "?", options)) + 1
        except InvalidRequest:  # the template lets no question of a user follow
            return 2

    def split(
        self,
        text: str,
        layout: Layout | None = None,
        *,
        size: int | None = None,
        overlap: int | None = None,
        checkpoint: Callable[[], None] = lambda: None,
        variables: Mapping[str, Any] | None = None,
    ) -> split.TextParts:
        """The parts of a text that is longer than this model takes, in order, each cut when it is read. A text that
        fits is one part.

        A part has at most `size` tokens (default: `part_tokens`), with those of the chat template, and ends with a
        paragraph where one ends in its second half, otherwise with a line, a sentence or a word. The next part begins
        at least `overlap` tokens earlier (default: 128, or a quarter of a smaller part), so that a fact of that length
        is whole in one part. checkpoint: called before each part; may raise to end the work.

        Raises `InvalidRequest` about `split` where a part has no room beside the template, or leaves none for a
        question, where a quarter of a part is less than the overlap, and as `split.spans`.
        """
        form, size = self.require_text("document"), self.part_tokens if size is None else size
        empty = form.document("", self._checked_layout(layout), self.options(layout, variables=variables))
        prefix, question = empty.protected_prefix, self.least_question(empty.boundary, empty.options)
        if size + question > self.max_tokens:
            raise InvalidRequest(
                f"split: max_tokens is {size}, and {self.name!r} takes {self.max_tokens}, {question} of them for the "
                "shortest question with an answer; give less",
                param="split",
            )
        room = size - prefix
        if room < 1:
            raise InvalidRequest(
                f"split: max_tokens is {size}, and the chat template of {self.name!r} takes {prefix} of them in each "
                "part; give more",
                param="split",
            )
        if form.bound.least_by_bytes([text]) > room * split.MOST_PARTS:
            raise split.too_many_parts(room)
        overlap = min(OVERLAP, room // 4) if overlap is None else overlap
        if overlap > room // 4:
            raise InvalidRequest(
                f"split: overlap_tokens is {overlap}, and a part has {room} tokens of the document; take at most a "
                "quarter of them, so that parts go forward",
                param="split",
            )
        spans = split.spans(text, form.token_starts, size=room, overlap=overlap, checkpoint=checkpoint)
        return split.TextParts(text, spans)

    def query(self, boundary: Boundary, prompt: Prompt, options: TemplateOptions | None = None) -> list[int]:
        """The token ids that ask `prompt` of a cache that ends at `boundary`. options: those of the cache's document,
        where its template writes a date."""
        if isinstance(prompt, str):
            if not prompt:
                raise InvalidRequest("the prompt is empty; ask something", param="prompt")
            self.require_askable([prompt], "prompt")
            return self.require_text("prompt").question(boundary, prompt, options)
        if _are_messages(prompt):
            form = self.require_text("messages")
            self.require_askable([turn["content"] for turn in check_messages(prompt)], "messages")
            return form.turns(boundary, prompt, options=options)
        return self._checked_ids(prompt, "prompt")

    def behind(self, identity: Identity, prompt: Prompt) -> list[int]:
        """As `query`, of the cache with this identity."""
        return self.query(identity.boundary, prompt, TemplateOptions.behind(identity))

    def words(self, prompt: Prompt) -> list[int]:
        """The token ids of a question's words, without the template: of a text, of the contents of messages, or token
        ids as they are."""
        if isinstance(prompt, str):
            self.require_askable([prompt], "prompt")
            return self.require_text("prompt").encode(prompt)
        if _are_messages(prompt):
            text = "\n\n".join(turn["content"] for turn in check_messages(prompt))
            self.require_askable([text], "messages")
            return self.require_text("messages").encode(text)
        return self._checked_ids(prompt, "prompt")

    def appended(self, identity: Identity, more: Document | EncodedDocument, protect: Rules = ()) -> EncodedDocument:
        """The token ids that `more` appends to the cache with this identity, and the boundary at which they end.

        A text continues where the document ends, as it is; messages are whole turns behind it. protect: as of
        `document`, of the appended tokens alone. Raises `InvalidRequest`.
        """
        boundary, rules, texts, turns = identity.boundary, _written_rules(protect), list[str](), None
        spans: tuple[tuple[int, int], ...] = ()
        if _are_messages(more):
            more, rules = _without_marks(more, rules)
        if isinstance(more, EncodedDocument):
            ids, boundary, spans = more.token_ids, more.boundary, more.protect
        elif isinstance(more, str):
            if boundary not in ("text", "document"):
                raise InvalidRequest(
                    "this cache ends with a whole turn, to which no text can be appended; append messages",
                    param="document",
                )
            self._require_fits([more], "document")
            texts = [more]
            ids = self.require_text("document").encode(more)
        elif _are_messages(more):
            if identity.layout == "plain":
                raise InvalidRequest(
                    "this cache has the layout 'plain' and no turns; append a text to it", param="messages"
                )
            turns = check_messages(more, TOOL_ROLES)
            texts = [turn["content"] for turn in turns]
            self._require_fits(texts, "messages")
            options = TemplateOptions.behind(identity)
            ids = self.require_text("messages").turns(boundary, more, opening=False, roles=TOOL_ROLES, options=options)
            boundary = cast(Boundary, f"after_{turns[-1]['role']}")
        else:
            ids = self._checked_ids(more, "token_ids")
        if not ids:
            raise DocumentTooShort("what is to be appended is empty; send at least one token", param="document")
        encoded = EncodedDocument(ids, 0, identity.layout, boundary, identity.date, variables=identity.variables)
        if rules:
            selected = DocumentRules(rules, encoded, self.text, texts, turns, behind=identity.boundary).spans()
            spans = joined_spans([*spans, *selected])
        return replace(encoded, protect=spans)

    def search(self, query: str) -> list[int]:
        """The token ids of a question that a search reads behind the coder's reference tokens.

        The separator stands before it because the first tokens of a text have other keys than the same words inside
        one: without it, the right document of 200 is the first for 7 % fewer questions.
        """
        if not query.strip():
            raise InvalidRequest("query is empty; say what the documents are to be searched for", param="query")
        self.require_askable([query], "query", room := self.max_tokens - REFERENCE_TOKENS)
        token_ids = self.require_text("query").encode(QUESTION_SEPARATOR + query)
        if len(token_ids) > room:
            raise self._too_long_a_question(f"{len(token_ids)} tokens", "query", room)
        return token_ids

    def view(self, encoded: EncodedDocument, expected_questions: Sequence[str]) -> DocumentView:
        """The document as policies see it, with the expected questions. Raises `InvalidRequest`."""
        require_list(expected_questions, "expected_questions", "texts")
        size = sum(nbytes_of(question) for question in expected_questions if isinstance(question, str))
        if size > MAX_QUESTION_BYTES:
            raise InvalidRequest(
                f"expected_questions have {size} bytes together, and {MAX_QUESTION_BYTES} are taken; give fewer",
                param="expected_questions",
            )
        for i, question in enumerate(expected_questions):
            if not isinstance(question, str) or not question:
                raise InvalidRequest(
                    f"expected_questions[{i}] is {question!r}; it must be a text that is not empty",
                    param=f"expected_questions[{i}]",
                )
        # Their bytes are bounded above, and where they are too long with the document, that is said of the document.
        ask = self.require_text("expected_questions").question if expected_questions else None
        return DocumentView(
            token_ids=encoded.token_ids,
            protected_prefix=encoded.protected_prefix,
            suffix=tuple(self.text.suffix(encoded.boundary, encoded.options)) if self.text is not None else (),
            questions=tuple(tuple(ask(encoded.boundary, text, encoded.options)) for text in expected_questions)
            if ask
            else (),
            text=self.text,
            max_tokens=self.max_tokens,
            protect=encoded.protect,
            images=tuple((image.first, image.end) for image in encoded.images),
        )

    def stored_view(self, identity: Identity, entries: int) -> DocumentView:
        """The entries of a KV head of a stored cache as policies see them: as many tokens of an unknown text, behind
        those of the chat template."""
        prefix = self.stored_prefix(identity) if identity.layout == "chat" else 0
        return DocumentView(token_ids=range(entries), protected_prefix=prefix, max_tokens=self.max_tokens)

    def stored_prefix(self, identity: Identity) -> int:
        """First tokens of a stored cache that the chat template wrote, or the BOS token of a plain text."""
        if self.text is None:
            return 0
        return self.text.document("", identity.layout, TemplateOptions.behind(identity)).protected_prefix

    def require_askable(self, texts: Sequence[str], param: str, room: int | None = None) -> None:
        """Raises `InvalidRequest` about `param` for texts of a question that have more than `room` tokens (default: as
        many as the model takes), before they are encoded."""
        room = self.max_tokens if room is None else room
        least = self.text.bound.least(texts, room) if self.text is not None else 0
        if least > room:
            raise self._too_long_a_question(f"at least {least} tokens", param, room)

    def _too_long_a_question(self, length: str, param: str, room: int) -> InvalidRequest:
        return InvalidRequest(
            f"{param} has {length}, and {self.name!r} takes {room} here; ask a shorter question", param=param
        )

    def _require_fits(self, texts: Sequence[str], param: str) -> None:
        """Raises `DocumentTooLong` for texts with too many bytes, before they are encoded."""
        self._require_length(self.require_text(param).bound.least(texts, self.max_tokens), "at least ")

    def _require_length(self, num_tokens: int, bound: str = "") -> None:
        if num_tokens > self.max_tokens:
            raise DocumentTooLong(
                f"the document has {bound}{num_tokens} tokens, and {self.name!r} takes {self.max_tokens}; {SPLIT_IT}",
                param="document",
            )

    def _checked_layout(self, layout: Layout | None) -> Layout:
        if layout not in (None, "chat", "plain"):
            raise InvalidRequest(f"unknown layout {layout!r}; one of chat, plain", param="layout")
        return layout or self.default_layout

    def _checked_ids(self, ids: Any, param: str) -> list[int]:
        vocabulary = self.vocab_size
        if isinstance(ids, Tensor | np.ndarray):
            if ids.ndim != 1 or "int" not in str(ids.dtype):
                raise InvalidRequest(
                    f"{param} is a tensor of shape {tuple(ids.shape)} and {ids.dtype}; give a 1-D tensor of integers",
                    param=param,
                )
            ids = ids.tolist()
        if not isinstance(ids, Sequence) or isinstance(ids, str | bytes | bytearray | memoryview):
            raise InvalidRequest(
                f"{type(ids).__name__} is no text, no messages and no token ids (a list, or a 1-D tensor of integers); "
                "bytes of a text must be decoded",
                param=param,
            )
        for i, token in enumerate(ids):
            # Asked of the type first: `Integral` takes five times as long, and a document has 100,000 tokens.
            whole = type(token) is int or (isinstance(token, Integral) and not isinstance(token, bool))
            if not whole or not 0 <= token < vocabulary:
                raise InvalidRequest(
                    f"{param}[{i}] is {token!r}; a token id is an integer from 0 to {vocabulary - 1}", param=param
                )
        return list(map(int, ids))


def require_list(values: object, param: str, what: str) -> None:
    """Raises `InvalidRequest` for what is no list. A text is none: it would be taken for a list of its characters."""
    if not isinstance(values, Collection) or isinstance(values, str | bytes | Mapping):
        raise InvalidRequest(f"{param} is {values!r:.80}; it must be a list of {what}", param=param)


def _written_rules(protect: Rules) -> list[str]:
    require_list(protect, "protect", "rules")
    return list(map(written_rule, protect))


def _are_messages(document: Document | EncodedDocument) -> TypeGuard[Sequence[Message]]:
    """Whether a document is messages, or blocks of text and images."""
    return isinstance(document, Sequence) and len(document) > 0 and isinstance(document[0], Mapping)


def _without_images(document: Any) -> tuple[Any, list[ImagePart]]:
    """Blocks without their images, and these; messages as they are."""
    try:
        rest, images = without_images(document)
    except ValueError as error:
        raise InvalidRequest(str(error), param="document") from error
    if len(images) > MAX_IMAGES:
        raise InvalidRequest(f"the document has {len(images)} images, and {MAX_IMAGES} are taken", param="images")
    return rest, [ImagePart.model_construct(**image) for image in images]


def _without_marks(document: Any, rules: Sequence[str]) -> tuple[Any, list[str]]:
    """Blocks of text, or messages with some, as plain text, and the rules with those of the marked blocks."""
    if document == "":  # of images alone
        return document, list(rules)
    try:
        if "role" in document[0]:
            _, plain, marked = unmarked(None, document)
        else:
            plain, _, marked = unmarked(document, None)
    except ValueError as error:
        raise InvalidRequest(str(error), param="document") from error
    return plain, [*rules, *marked]
