"""LangChain over the shelf: a chat model that answers from stored documents, and a retriever that finds them.

pip install langchain-core . (in a checkout of kvshelf)
python examples/langchain_client.py         # the service at KVSHELF_URL, or http://127.0.0.1:8765
"""

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

from langchain_core.callbacks import (
    AsyncCallbackManagerForLLMRun,
    AsyncCallbackManagerForRetrieverRun,
    CallbackManagerForLLMRun,
    CallbackManagerForRetrieverRun,
)
from langchain_core.documents import Document
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage, convert_to_openai_messages
from langchain_core.messages.ai import InputTokenDetails, UsageMetadata
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult
from langchain_core.retrievers import BaseRetriever
from pydantic import Field

from kvshelf import AsyncClient, Client
from kvshelf.api import AnswerObject, JointAnswer, SearchList


class ShelfChat(BaseChatModel):
    """Answers from one stored document, or from several together. Its messages follow the documents."""

    cache_id: str | list[str]
    max_tokens: int = 256
    temperature: float = 0.0
    client: Client = Field(default_factory=Client, exclude=True)
    async_client: AsyncClient = Field(default_factory=AsyncClient, exclude=True)

    @property
    def _llm_type(self) -> str:
        return "kvshelf"

    @property
    def _identifying_params(self) -> dict[str, Any]:
        return {"cache_id": self.cache_id, "max_tokens": self.max_tokens, "temperature": self.temperature}

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        return result_of(self.client.caches.query(self.cache_id, **self._request(messages, stop, kwargs)))

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        return result_of(await self.async_client.caches.query(self.cache_id, **self._request(messages, stop, kwargs)))

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        with self.client.caches.stream(self.cache_id, **self._request(messages, stop, kwargs)) as stream:
            for text in stream:
                yield chunk_of(text)
            yield last_chunk(stream.answer)

    async def _astream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[ChatGenerationChunk]:
        async with await self.async_client.caches.stream(
            self.cache_id, **self._request(messages, stop, kwargs)
        ) as stream:
            async for text in stream:
                yield chunk_of(text)
            yield last_chunk(await stream.final())

    def _request(self, messages: list[BaseMessage], stop: list[str] | None, options: dict[str, Any]) -> dict[str, Any]:
        """options: of one call, such as `chat.bind(max_tokens=16)`."""
        limits = {"max_tokens": self.max_tokens, "temperature": self.temperature}
        turns = convert_to_openai_messages(messages, text_format="string")
        return {**limits, **options, "messages": turns, "stop": stop}


class ShelfRetriever(BaseRetriever):
    """Finds stored documents by the words of a question. What it gives has the name of a document as its content: the
    cache in `metadata["cache_id"]` stands for the text."""

    k: int = 4
    labels: dict[str, str] | None = None
    client: Client = Field(default_factory=Client, exclude=True)
    async_client: AsyncClient = Field(default_factory=AsyncClient, exclude=True)

    def _get_relevant_documents(self, query: str, *, run_manager: CallbackManagerForRetrieverRun) -> list[Document]:
        return documents_of(self.client.caches.search(query, labels=self.labels, limit=self.k))

    async def _aget_relevant_documents(
        self, query: str, *, run_manager: AsyncCallbackManagerForRetrieverRun
    ) -> list[Document]:
        return documents_of(await self.async_client.caches.search(query, labels=self.labels, limit=self.k))


def documents_of(hits: SearchList) -> list[Document]:
    return [
        Document(page_content=hit.name, metadata={"cache_id": hit.cache_id, "score": hit.score}) for hit in hits.data
    ]


def result_of(answer: AnswerObject | JointAnswer) -> ChatResult:
    message = AIMessage(answer.text, usage_metadata=usage_of(answer), response_metadata=metadata_of(answer))
    return ChatResult(generations=[ChatGeneration(message=message)])


def chunk_of(text: str) -> ChatGenerationChunk:
    return ChatGenerationChunk(message=AIMessageChunk(text))


def last_chunk(answer: AnswerObject | JointAnswer) -> ChatGenerationChunk:
    message = AIMessageChunk("", usage_metadata=usage_of(answer), response_metadata=metadata_of(answer))
    return ChatGenerationChunk(message=message)


def metadata_of(answer: AnswerObject | JointAnswer) -> dict[str, Any]:
    return {"finish_reason": answer.finish_reason}


def usage_of(answer: AnswerObject | JointAnswer) -> UsageMetadata:
    """The documents' tokens count as input that was read from a cache."""
    usage = answer.usage
    read = usage.cache_read_tokens + usage.prefill_tokens
    return UsageMetadata(
        input_tokens=read,
        output_tokens=usage.completion_tokens,
        total_tokens=read + usage.completion_tokens,
        input_token_details=InputTokenDetails(cache_read=usage.cache_read_tokens),
    )


async def streamed(chat: ShelfChat, question: str) -> str:
    return "".join([chunk.text async for chunk in chat.astream(question)])


def main() -> None:
    filler = "The harbour opens at six and boats wait at the lock. "
    facts = {
        "falcon.txt": "The access code of the amber falcon is 482913. ",
        "heron.txt": "The access code of the silver heron is 175206. ",
    }
    labels = {"example": "langchain"}
    with Client() as client:
        for name, fact in facts.items():
            document = filler * 4 + fact + filler * 4
            client.caches.create(document=document, policy="full", name=name, labels=labels)

    retriever = ShelfRetriever(k=1, labels=labels)
    for animal in ("silver heron", "amber falcon"):
        question = f"What is the access code of the {animal}?"
        (best,) = retriever.invoke(question)
        chat = ShelfChat(cache_id=best.metadata["cache_id"], max_tokens=16)
        reply = chat.invoke(question)
        print(f"{best.page_content}: {reply.text.strip()}")
        print("usage:", reply.usage_metadata)
        print("streamed:", asyncio.run(streamed(chat, question)).strip())


if __name__ == "__main__":
    main()
