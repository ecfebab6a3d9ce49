"""The prompt that a question builds, token by token: whose text each token is, and whether it is on the shelf."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from tokenizers import Tokenizer

from kvshelf.api.inspect import BuiltPrompt, PromptPart, PromptPartName
from kvshelf.artifact.identity import Identity
from kvshelf.engine.decode.detokenizer import Detokenizer
from kvshelf.methods.policies.view import DocumentView
from kvshelf.model.text import EncodedDocument, TemplateOptions, TextFormat


def built_prompt(
    form: TextFormat,
    identity: Identity,
    document: EncodedDocument | DocumentView | None,
    behind: Sequence[int],
    messages: Sequence[str],
    *,
    read: int = 0,
    id: str | None = None,
) -> BuiltPrompt:
    """document: of the cache with this identity; None where nobody kept it: then its tokens are counted alone. behind:
    the tokens behind it, of which the first `read` are in a cache, too. messages: the texts of those among them, in
    order. id: of the cache that is asked."""
    parts = [*_document(form, identity, document), *_behind(form, behind, messages, read)]
    return BuiltPrompt(id=id, layout=identity.layout, parts=parts)


def pieces(decoder: Tokenizer, token_ids: Sequence[int]) -> list[str]:
    """The text of each token, with control tokens written out; joined, they are the document. A character that takes
    several tokens is the text of the last one; the others are empty.

    Tokens that are no text (such as half a character) show as U+FFFD, and a run of U+FFFD in the document may grow.
    """
    stream = Detokenizer(decoder, skip_special_tokens=False)
    texts = [stream.push(token) for token in token_ids]
    if texts:
        texts[-1] += stream.rest()
    return texts


def _document(
    form: TextFormat, identity: Identity, document: EncodedDocument | DocumentView | None
) -> Iterator[PromptPart]:
    if document is not None:
        ids, prefix = list(document.token_ids), document.protected_prefix
    else:
        options = TemplateOptions.behind(identity)
        ids = form.document("", "chat", options).token_ids if identity.boundary == "document" else []
        prefix = len(ids)
    if prefix:
        yield _part(form, "template", True, ids[:prefix])
    part = _part(form, "document", True, ids[prefix:])
    yield part.model_copy(update={"num_tokens": identity.num_tokens - prefix})


def _behind(form: TextFormat, ids: Sequence[int], messages: Sequence[str], read: int) -> Iterator[PromptPart]:
    texts = pieces(form.decoder(), ids)
    places = _places("".join(texts), messages)
    at, names = 0, list[PromptPartName]()
    for text in texts:  # one without a text is a part of the next one's character
        inside = any(begin < at + max(1, len(text)) and at < end for begin, end in places)
        names.append("question" if inside else "template")
        at += len(text)
    kinds = [(name, place < read) for place, name in enumerate(names)]
    for (name, from_shelf), run in groupby(range(len(kinds)), kinds.__getitem__):
        yield _part(form, name, from_shelf, [ids[place] for place in run])


def _places(text: str, messages: Sequence[str]) -> list[tuple[int, int]]:
    """Where the texts of messages stand. A template may trim them; what it changed otherwise is found nowhere."""
    places, at = list[tuple[int, int]](), 0
    for message in map(str.strip, messages):
        if message and (begin := text.find(message, at)) >= 0:
            at = begin + len(message)
            places.append((begin, at))
    return places


def _part(form: TextFormat, name: PromptPartName, from_shelf: bool, ids: Sequence[int]) -> PromptPart:
    texts = pieces(form.decoder(), ids)
    return PromptPart(part=name, from_shelf=from_shelf, num_tokens=len(ids), token_ids=list(ids), texts=texts)
