"""Text to token ids: documents and questions within the model's chat template.

Only the template makes control tokens. Text from outside stays text: `<|end|>` in a document is spelled out in ordinary
tokens and cannot end a turn.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from jinja2 import TemplateError
from tokenizers import Encoding, Tokenizer

from kvshelf.errors import InvalidRequest
from kvshelf.store.artifact.identity import Boundary, Layout, canonical_json, digest
from kvshelf.workers.model.bounds import TokenBound

QUESTION_SEPARATOR = "\n\n"
"""Stands between a document and the question that follows it in the same user turn."""

SENTENCE_ENDS = tuple(".?!\n。？！")  # noqa: RUF001  the full-width ones are meant
SEGMENT_ENDS = (*SENTENCE_ENDS, *",;:，、；：")  # noqa: RUF001

ROLES = ("system", "user", "assistant")
TOOL_ROLES = (*ROLES, "tool")

_NO_CHARACTER = "\ufffd"  # what the decoder writes for bytes that are not a whole character
_MARK = "\ue000{}\ue001"  # private-use characters: no template contains them, and content is never rendered through one
_MARKS = re.compile("\ue000(\\d+)\ue001")

Message = Mapping[str, str]


@dataclass(frozen=True)
class EncodedDocument:
    """Token ids to prefill. The first `protected_prefix` of them come from the template, not from the document."""

    token_ids: list[int]
    protected_prefix: int
    layout: Layout
    boundary: Boundary


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
        self._chat = tokenizer
        # Two private copies. Switching one shared tokenizer between "control tokens are text" and "are tokens" would
        # race with other threads that are encoding.
        self._control = _plain_copy(backend)
        self._text = _plain_copy(backend)
        self._text.encode_special_tokens = True
        self.longest_token = max(len(token.encode()) for token in backend.get_vocab())
        self.bound = TokenBound.of(self._text, self.encode)
        self.has_template = bool(tokenizer.chat_template)
        self._token_texts: dict[int, str] = {}  # filled by use; two threads may write the same, which does no harm

    def digests(self) -> tuple[str, str]:
        """Hex digests of the tokenizer and of the chat template ("" without one)."""
        template = digest("kvshelf.template", canonical_json(self._chat.chat_template)) if self.has_template else ""
        return digest("kvshelf.tokenizer", self._control.to_str()), template

    def decoder(self) -> Tokenizer:
        """The tokenizer that turns generated ids into text."""
        return self._control

    def count_tokens(self, text: str) -> int:
        """Tokens of a text by itself, without template or BOS."""
        return len(self.encode(text))

    def token_starts(self, text: str) -> list[int]:
        """The place of the first character of each token of a text by itself, without template or BOS."""
        return [start for start, _ in _encoding(self._text, text).offsets]

    def document(self, text: str, layout: Layout) -> EncodedDocument:
        """Chat: the template up to the end of the document inside an open user turn. Plain: the text, after the BOS
        token where the tokenizer adds one."""
        if layout == "plain":
            prefix = self._bos()
            return EncodedDocument(prefix + self.encode(text), len(prefix), "plain", "text")
        before, *_ = self._template_pieces([("user", text)], opening=False)
        prefix = self._encode_control(before)
        return EncodedDocument(prefix + self.encode(text), len(prefix), "chat", "document")

    def conversation(self, messages: Sequence[Message]) -> EncodedDocument:
        """A document of whole turns; a query appends more turns."""
        turns = check_messages(messages)
        before, *_ = pieces = self._template_pieces(turns, opening=False)
        boundary = cast(Boundary, f"after_{turns[-1][0]}")
        return EncodedDocument(self._encode_pieces(pieces, turns), len(self._encode_control(before)), "chat", boundary)

    def question(self, boundary: Boundary, prompt: str) -> list[int]:
        """The ids that ask `prompt`: a question in the document's own turn, or a turn of its own."""
        if boundary == "text":
            return self.encode(prompt)
        return self.turns(boundary, [{"role": "user", "content": prompt}])

    def turns(
        self,
        boundary: Boundary | None,
        messages: Sequence[Message],
        *,
        opening: bool = True,
        roles: Sequence[str] = ROLES,
    ) -> list[int]:
        """The ids that add `messages`, of these `roles`, and, for a question, open the assistant's turn. boundary: None
        for the beginning of a conversation.

        After a document the first message must be the user's: it ends the turn that the document is in. A system
        message may stand before it: the document is already in the cache, so its text comes behind the document, as
        the first text of the same turn. Another system message is refused then. After a conversation the template
        decides where a system message may stand.
        """
        added = check_messages(messages, roles)
        if boundary is None:
            return self._encode_pieces(self._template_pieces(added, opening=opening), added)
        if boundary == "text":
            raise InvalidRequest(
                "this cache has the layout 'plain' and no turns; ask it with prompt instead of messages",
                param="messages",
            )
        if boundary == "document":
            added = _system_before_question(added)
            # The document stands in the first message's place; the pieces after it are what the question adds.
            pieces = self._template_pieces(added, opening=opening)[1:]
            return self.encode(QUESTION_SEPARATOR + added[0][1]) + self._encode_pieces(pieces, added[1:])
        return self._appended(boundary.removeprefix("after_"), added, opening=opening)

    def suffix(self, boundary: Boundary) -> list[int]:
        """The tokens that the template writes between the cached tokens and the model's answer; none where a question
        must come first, or without a template."""
        match boundary:
            case "document":
                return self._encode_control(self._template_pieces([("user", "")], opening=True)[-1])
            case "after_user":
                before = self._template_pieces([("user", "")], opening=False)[-1]
                after = self._template_pieces([("user", "")], opening=True)[-1]
                return self._encode_control(after.removeprefix(before))
            case _:
                return []

    def encode(self, text: str) -> list[int]:
        """Token ids of a text by itself; special tokens in it are text."""
        return _encoding(self._text, text).ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of token ids, control tokens written out."""
        return self._control.decode(list(token_ids), skip_special_tokens=False)

    def segment_ends(self, token_ids: Sequence[int], endings: tuple[str, ...] = SEGMENT_ENDS) -> list[bool]:
        """Which tokens are the last of a segment: their text ends with one of `endings`. The point in "3.14" ends none.

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

    def number_starts(self, token_ids: Sequence[int]) -> list[bool]:
        """Which tokens have a digit behind a token without one."""
        digits = [any(map(str.isdigit, self._token_text(i))) for i in token_ids]
        return [now and not before for before, now in zip([False, *digits], digits, strict=False)]

    def name_starts(self, token_ids: Sequence[int]) -> list[bool]:
        """Which tokens begin with a capital letter, and not behind the end of a sentence, where every word does."""
        texts = [self._token_text(i) for i in token_ids]
        capital = [text.lstrip()[:1].isupper() for text in texts]
        opens = [text.rstrip(" ").endswith((*SENTENCE_ENDS, "\n")) for text in ["\n", *texts]]
        return [now and not first for now, first in zip(capital, opens, strict=False)]

    def _token_text(self, token_id: int) -> str:
        if token_id not in self._token_texts:
            self._token_texts[token_id] = self.decode([token_id])
        return self._token_texts[token_id]

    def _appended(self, last_role: str, added: list[tuple[str, str]], *, opening: bool) -> list[int]:
        # The cached turns are not kept. A stand-in with the same last role shows what the template writes after it.
        stand_in = [("user", "")] if last_role == "assistant" else []
        stand_in.append((last_role, ""))
        before = self._template_pieces(stand_in, opening=False)
        after = self._template_pieces(stand_in + added, opening=opening)
        shared = len(before) - 1
        if after[:shared] != before[:shared] or not after[shared].startswith(before[shared]):
            raise InvalidRequest(
                "the chat template of this model rewrites earlier turns when new ones follow; cache the conversation "
                "as a document instead",
                param="messages",
            )
        first = after[shared].removeprefix(before[shared])
        return self._encode_pieces([first, *after[shared + 1 :]], added)

    def rendered(
        self, messages: Sequence[Mapping[str, Any]], *, tools: Sequence[Any] | None = None, opening: bool = False
    ) -> str:
        """What the template writes for these messages, with these tools in its system text, if it has room for some."""
        if not self.has_template:
            raise InvalidRequest("the tokenizer has no chat template; use layout 'plain'", param="layout")
        options: dict[str, Any] = {"add_generation_prompt": opening, "tools_in_user_message": False}
        try:
            return cast(str, self._chat.apply_chat_template(messages, tools=tools, tokenize=False, **options))
        except TemplateError as error:
            raise InvalidRequest(f"the model's chat template refuses these turns: {error}", param="messages") from error

    def special_tokens(self) -> dict[str, int]:
        """The control tokens, which an answer's text lacks, and their ids."""
        added = self._control.get_added_tokens_decoder()
        return {token.content: number for number, token in added.items() if token.special}

    def _template_pieces(self, turns: Sequence[tuple[str, str]], *, opening: bool) -> list[str]:
        """The template's texts around the contents of the turns: before, between and after them."""
        messages = [{"role": role, "content": _MARK.format(i)} for i, (role, _) in enumerate(turns)]
        parts = _MARKS.split(self.rendered(messages, opening=opening))
        if [int(n) for n in parts[1::2]] != list(range(len(turns))):
            raise InvalidRequest("the model's chat template does not write every turn once, in order", param="messages")
        return cast(list[str], parts[0::2])

    def _encode_pieces(self, pieces: Sequence[str], turns: Sequence[tuple[str, str]]) -> list[int]:
        ids = self._encode_control(pieces[0])
        for (_, content), piece in zip(turns, pieces[1:], strict=True):
            ids += self.encode(content) + self._encode_control(piece)
        return ids

    def _encode_control(self, text: str) -> list[int]:
        return _encoding(self._control, text).ids

    def _bos(self) -> list[int]:
        added = self._chat("").input_ids
        return [i for i in added if i == self._chat.bos_token_id]


def check_messages(messages: Sequence[Message], roles: Sequence[str] = ROLES) -> list[tuple[str, str]]:
    """Roles and contents of a conversation. Raises `InvalidRequest` naming the message that is wrong."""
    if not messages:
        raise InvalidRequest("messages is empty; give at least one message", param="messages")
    turns = []
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping) or set(message) != {"role", "content"}:
            raise InvalidRequest(f"messages[{i}] must have exactly the fields role and content", param=f"messages[{i}]")
        role, content = message["role"], message["content"]
        if role not in roles:
            raise InvalidRequest(
                f"messages[{i}].role is {role!r}; it must be one of {', '.join(roles)}", param=f"messages[{i}].role"
            )
        if not isinstance(content, str) or (not content and role != "tool"):  # a tool may return nothing
            raise InvalidRequest(
                f"messages[{i}].content must be a text that is not empty", param=f"messages[{i}].content"
            )
        turns.append((role, content))
    return turns


def _system_before_question(turns: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """Turns that begin with the user's: a system message before it becomes the first text of that turn."""
    system = [content for role, content in turns[:1] if role == "system"]
    second = next((i for i, (role, _) in enumerate(turns) if i and role == "system"), None)
    if system and second is not None:
        raise InvalidRequest(
            f"messages[{second}] is a second system message; a query on a document takes one, as its first message",
            param=f"messages[{second}].role",
        )
    asked = turns[len(system) :]
    if not asked or asked[0][0] != "user":
        found = f"has role {asked[0][0]!r}" if asked else "is missing"
        raise InvalidRequest(
            "the first message of a query on a document, after a system message if there is one, must be the user's "
            f"(it ends the turn that holds the document) and {found}",
            param=f"messages[{len(system)}].role" if asked else "messages",
        )
    return [("user", QUESTION_SEPARATOR.join([*system, asked[0][1]])), *asked[1:]]


def _encoding(tokenizer: Tokenizer, text: str) -> Encoding:
    # As a batch of one: `Tokenizer.encode` holds the interpreter's lock, and all other threads wait for the text.
    return tokenizer.encode_batch([text], add_special_tokens=False)[0]


def _plain_copy(backend: Tokenizer) -> Tokenizer:
    copy = Tokenizer.from_str(backend.to_str())
    copy.no_padding()
    copy.no_truncation()
    return copy
