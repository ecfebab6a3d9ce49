"""Reading /metrics in tests: as Prometheus does, and as differences, because the service is shared by all tests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import httpx
from prometheus_client.parser import text_string_to_metric_families

Numbers = dict[tuple[str, frozenset[tuple[str, str]]], float]


def scrape(http: httpx.Client) -> Numbers:
    """Every sample by its name and labels."""
    response = http.get("/metrics")
    assert response.status_code == 200, response.text
    return parsed(response.text)


def parsed(text: str) -> Numbers:
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    found = {(sample.name, frozenset(sample.labels.items())): sample.value for sample in samples}
    assert len(found) == len(samples), "a sample is there twice"
    return found


class Moved:
    """By how much numbers have moved. Labels that are not given are summed over."""

    def __init__(self, before: Numbers) -> None:
        self._before = before
        self._after: Numbers = {}

    def __call__(self, name: str, **labels: str) -> float:
        return _sum(self._after, name, labels) - _sum(self._before, name, labels)

    def read(self, http: httpx.Client) -> None:
        self._after = scrape(http)


def _sum(numbers: Numbers, name: str, labels: dict[str, str]) -> float:
    return sum(
        value for (found, has), value in numbers.items() if found == name and labels.items() <= dict(has).items()
    )


@contextmanager
def moving(http: httpx.Client) -> Iterator[Moved]:
    """By how much the numbers move in the block."""
    moved = Moved(scrape(http))
    yield moved
    moved.read(http)
