"""Retrieval over whole documents: each is compressed once; a question goes to the cache of the best match.

It works with LangChain's documents, or anything that has a `page_content`, and without LangChain. In a chain:

    from langchain_core.runnables import RunnableLambda
    chain = RunnableLambda(shelf.ask)                     # question -> answer
    retriever = RunnableLambda(shelf.retrieve)            # question -> documents, the best first

    python examples/retriever.py                          # the service at KVSHELF_URL, or http://127.0.0.1:8765
"""

import math
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from kvshelf import Client


@dataclass
class Document:
    """Has the fields of LangChain's `Document`, for use without LangChain."""

    page_content: str
    metadata: dict[str, Any] = field(default_factory=dict)


class Shelf:
    """Documents that can be asked. They are not cut into passages: each answer uses one whole document."""

    def __init__(self, client: Client, **compression: Any) -> None:
        """compression: what `client.caches.create` takes, such as `policy` and `compression_ratio`."""
        self._client = client
        self._compression = compression
        self._documents: list[Any] = []
        self._words: list[Counter[str]] = []

    def add(self, documents: Iterable[Any]) -> None:
        """Put documents on the shelf; one that is there already costs nothing. Their metadata gets a `cache_id`."""
        for document in documents:
            cache = self._client.caches.create(document=document.page_content, **self._compression)
            document.metadata["cache_id"] = cache.id
            self._documents.append(document)
            self._words.append(Counter(words_of(document.page_content)))

    def retrieve(self, question: str, k: int = 3) -> list[Any]:
        """The documents that share the rarest words with the question, the best first."""
        order = sorted(range(len(self._documents)), key=lambda n: -self._score(question, n))
        return [self._documents[n] for n in order[:k]]

    def ask(self, question: str, max_tokens: int = 16) -> str:
        """The answer from the document that matches the question best."""
        (best,) = self.retrieve(question, k=1)
        return self._client.caches.query(best.metadata["cache_id"], question, max_tokens=max_tokens).text

    def _score(self, question: str, n: int) -> float:
        return sum(self._rarity(word) for word in set(words_of(question)) if word in self._words[n])

    def _rarity(self, word: str) -> float:
        return math.log(1 + len(self._words) / (1 + sum(word in words for words in self._words)))


def words_of(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


def main() -> None:
    facts = {
        "falcon.txt": "The access code of the amber falcon is 482913.",
        "heron.txt": "The access code of the silver heron is 175206.",
        "otter.txt": "The access code of the quiet otter is 930448.",
    }
    filler = "The harbour opens at six and boats wait at the lock. "
    with Client() as client:
        shelf = Shelf(client, policy="keydiff", compression_ratio=0.25)
        shelf.add(Document(filler * 4 + fact + " " + filler * 4, {"file": name}) for name, fact in facts.items())
        for animal in ("silver heron", "amber falcon"):
            question = f"What is the access code of the {animal}?"
            best = shelf.retrieve(question)[0]
            print(f"{question} {shelf.ask(question).strip()}   (from {best.metadata['file']})")


if __name__ == "__main__":
    main()
