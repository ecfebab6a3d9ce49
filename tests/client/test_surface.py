"""Both clients have the same calls, described by the functions that build them."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from kvshelf.client import AsyncClient, Client, _async, _sync

GROUPS = ["Caches", "Files", "Batches", "Erasures", "Requests", "Models", "Policies", "Client"]


def calls(cls: type) -> dict[str, Any]:
    """The function that builds each call of a client, by the name of its method."""
    found = {name: getattr(method, "__wrapped__", None) for name, method in vars(cls).items()}
    return {name: build for name, build in found.items() if build is not None}


@pytest.mark.parametrize("group", GROUPS)
def test_both_clients_send_the_same_calls(group: str) -> None:
    blocking, awaited = calls(getattr(_sync, group)), calls(getattr(_async, f"Async{group}"))
    assert blocking == awaited
    assert list(blocking) == list(awaited) != []


def test_a_call_shows_its_arguments_and_its_docstring() -> None:
    with Client() as client:
        assert list(inspect.signature(client.requests.retrieve).parameters) == ["id", "wait_s"]
        assert "RequestNotFound" in (client.requests.retrieve.__doc__ or "")
    assert inspect.iscoroutinefunction(AsyncClient().caches.create)
