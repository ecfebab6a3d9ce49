"""The Python client, and the types of the HTTP API, which client and service share."""

from kvshelf.client._async import AsyncAnswerStream, AsyncClient
from kvshelf.client._config import DEFAULT_URL, Retries, Timeouts
from kvshelf.client._sync import AnswerStream, Client

__all__ = ["DEFAULT_URL", "AnswerStream", "AsyncAnswerStream", "AsyncClient", "Client", "Retries", "Timeouts"]
