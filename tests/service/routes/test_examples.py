"""The examples are run as their reader runs them, against a service with the bundled model."""

from __future__ import annotations

import ast
import asyncio
import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvshelf import AsyncClient, Client

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"


@pytest.fixture(autouse=True)
def _still_ready() -> None:
    """In place of the shared service's check: another service is used here."""


def run(url: str, *command: str) -> str:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("KVSHELF_")}
    environment = clean | {"KVSHELF_URL": url}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


def loaded(example: str) -> Any:
    spec = importlib.util.spec_from_file_location(example, EXAMPLES / f"{example}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[example] = module  # a dataclass looks itself up there
    spec.loader.exec_module(module)
    return module


def test_all_examples_are_run_here() -> None:
    assert {path.name for path in EXAMPLES.iterdir()} >= {
        "openai_client.py",
        "anthropic_client.py",
        "langchain_client.py",
        "retriever.py",
        "curl.sh",
    }


def test_openai_client(bundled_service: str) -> None:
    said = run(bundled_service, sys.executable, str(EXAMPLES / "openai_client.py"))
    assert said.count("482913") == 2


@pytest.mark.slow
def test_anthropic_client(bundled_service: str) -> None:
    """Ten turns on a document: after the first, only the question is prefilled."""
    said = run(bundled_service, sys.executable, str(EXAMPLES / "anthropic_client.py"))
    _, *turns, streamed = said.splitlines()
    read, kept, prefilled, answers = zip(*(turn.split(" | ")[1:] for turn in turns), strict=True)
    assert answers[:5] == answers[5:] == ("482913", "514250", "545587", "576924", "608261")
    assert streamed == "streamed: 482913"
    assert max(map(int, kept[1:])) <= 20
    assert set(prefilled) == {"0"}
    assert list(map(int, read)) == sorted(map(int, read))


def test_langchain_client(bundled_service: str) -> None:
    said = run(bundled_service, sys.executable, str(EXAMPLES / "langchain_client.py")).splitlines()
    assert len(said) == 6
    for (answer, usage, streamed), name, code in zip(
        (said[:3], said[3:]), ("heron.txt", "falcon.txt"), ("175206", "482913"), strict=True
    ):
        assert answer.startswith(f"{name}: ")
        assert code in answer
        assert streamed == f"streamed: {answer.partition(': ')[2]}"
        counts = ast.literal_eval(usage.removeprefix("usage: "))
        assert counts["input_tokens"] + counts["output_tokens"] == counts["total_tokens"]
        assert 0 < counts["input_token_details"]["cache_read"] < counts["input_tokens"]


def test_langchain_has_the_same_answer_in_every_way(bundled_service: str) -> None:
    from langchain_core.messages import AIMessage, HumanMessage

    example = loaded("langchain_client")
    toad = "The access code of the plain toad is 314159. It rains."
    said = [HumanMessage("Hello."), AIMessage("Hello."), HumanMessage("What is the access code of the plain toad?")]
    with Client(bundled_service) as client:
        ids = [client.caches.create(document=document, policy="full").id for document in (toad, "It rains.")]
        chat = example.ShelfChat(cache_id=ids, max_tokens=16, client=client, async_client=AsyncClient(bundled_service))
        whole = chat.invoke(said)
        pieces = list(chat.stream(said))
        assert chat.bind(max_tokens=2).invoke(said).usage_metadata["output_tokens"] == 2
        cut = chat.bind(stop=["314"]).invoke(said)

    async def later() -> tuple[Any, list[Any]]:
        return await chat.ainvoke(said), [piece async for piece in chat.astream(said)]

    awaited, awaited_pieces = asyncio.run(later())
    assert len(pieces) > 1
    for message in (awaited, sum(pieces[1:], pieces[0]), sum(awaited_pieces[1:], awaited_pieces[0])):
        assert (message.text, message.usage_metadata) == (whole.text, whole.usage_metadata)
        assert message.response_metadata["finish_reason"] == whole.response_metadata["finish_reason"]
    assert whole.text.partition("314")[0] == cut.text != whole.text


def test_retriever(bundled_service: str) -> None:
    heron, falcon = run(bundled_service, sys.executable, str(EXAMPLES / "retriever.py")).splitlines()
    assert "175206" in heron
    assert "(from heron.txt)" in heron
    assert "482913" in falcon
    assert "(from falcon.txt)" in falcon


def test_the_retriever_takes_documents_of_others(bundled_service: str) -> None:
    """LangChain's are told by their fields, so that it need not be installed."""
    retriever = loaded("retriever")
    document = SimpleNamespace(page_content="The access code of the plain toad is 314159. It rains.", metadata={})
    with Client(bundled_service) as client:
        shelf = retriever.Shelf(client, policy="full")
        shelf.add([document])
        assert "314159" in shelf.ask("What is the access code of the plain toad?")
    assert document.metadata["cache_id"].startswith("kvs_")


def test_curl(bundled_service: str) -> None:
    said = run(bundled_service, "bash", str(EXAMPLES / "curl.sh"))
    asked = said.partition("== ask")[2].partition("== stream")[0]
    assert "482913" in asked
    assert "data: [DONE]" in said
    assert said.partition("in the background\n")[2].startswith("done")
    assert said.endswith("== delete\nTrue\n")
