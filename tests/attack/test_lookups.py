"""The time of an answer does not tell a tenant what another tenant has."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Iterator
from statistics import mean, median

import httpx
import pytest

from tests.amounts import few
from tests.attack.conftest import Attacked
from tests.attack.test_turns import begun
from tests.service.conftest import created

UNKNOWN = "e" * 40
DOCUMENT = "The pilot boat leaves at the second bell. " * 300


@pytest.fixture(scope="module")
def theirs(attacked: Attacked, soak: bool) -> Iterator[dict[str, tuple[str, str]]]:
    """What another tenant has, and what nobody has: the path of each, by what it is."""
    with attacked.client("alice") as alice:
        cache_id = created(alice, document=DOCUMENT, labels={"case": "theirs"}, keep_source=True)["id"]
        for number in range(1000 if soak else 30):
            created(alice, document=f"Boat {number} is in.", labels={"case": "theirs"})
        waiting = alice.post("/v1/caches", json={"document": DOCUMENT * 99}, headers={"prefer": "respond-async"})
        batch_id = begun(alice, [{"document": "One row."}])
        file_id = alice.get(f"/v1/batches/{batch_id}").json()["input_file_id"]
        yield {
            "cache": (f"/v1/caches/{cache_id}", f"/v1/caches/kvs_{UNKNOWN}"),
            "kept entries": (f"/v1/caches/{cache_id}/kept", f"/v1/caches/kvs_{UNKNOWN}/kept"),
            "blob": (f"/v1/caches/{cache_id}/blob", f"/v1/caches/kvs_{UNKNOWN}/blob"),
            "label": ("/v1/caches?label.case=theirs", "/v1/caches?label.case=nobodys"),
            "request": (f"/v1/requests/{waiting.json()['id']}", f"/v1/requests/req_{UNKNOWN}"),
            "batch": (f"/v1/batches/{batch_id}", f"/v1/batches/batch_{UNKNOWN}"),
            "file": (f"/v1/files/{file_id}/content", f"/v1/files/file_{UNKNOWN}/content"),
        }


def mann_whitney_p(one: list[float], other: list[float]) -> float:
    """Two-sided p of the hypothesis that two samples are of one distribution, by the normal approximation of U (Mann
    and Whitney 1947): the share of pairs in which the first is larger, against what chance makes of it."""
    ranks: dict[float, list[int]] = {}
    for rank, value in enumerate(sorted(one + other), 1):
        ranks.setdefault(value, []).append(rank)
    rank_sum = sum(mean(ranks[value]) for value in one)
    n, m = len(one), len(other)
    u = rank_sum - n * (n + 1) / 2
    ties = sum(len(equal) ** 3 - len(equal) for equal in ranks.values())
    deviation = math.sqrt(n * m / 12 * (n + m + 1 - ties / ((n + m) * (n + m - 1))))
    return math.erfc(abs(u - n * m / 2) / deviation / math.sqrt(2))


def test_the_statistic_tells_samples_apart() -> None:
    """Five against five that do not overlap: U is 0, which is 12.5 / 4.787 deviations from its mean."""
    assert mann_whitney_p([1, 2, 3, 4, 5], [6, 7, 8, 9, 10]) == pytest.approx(0.00902, abs=5e-5)
    same = [float(7919 * n % 1009) for n in range(1000)]
    assert mann_whitney_p(same, same[::-1]) > 0.9
    assert mann_whitney_p(same, [value + 100 for value in same]) < 1e-6


@pytest.mark.parametrize("what", few(4, ["cache", "kept entries", "blob", "label", "request", "batch", "file"]))
def test_what_another_tenant_has_is_answered_in_the_time_of_what_nobody_has(
    mallory: httpx.Client, theirs: dict[str, tuple[str, str]], what: str, soak: bool
) -> None:
    """A search by another tenant's label took 184 ms in place of 0.03, that of its request 97 ms in place of 13."""
    draw, seen = random.Random(18), {path: list[float]() for path in theirs[what]}
    for answer in map(mallory.get, seen):
        assert answer.status_code == 404 or answer.json()["data"] == []
    for _ in range(1000 if soak else 150):
        for path in draw.sample(list(seen), 2):
            began = time.perf_counter()
            mallory.get(path)
            seen[path].append(time.perf_counter() - began)
    found, unknown = (seen[path] for path in theirs[what])
    more_ms, middle_ms = (1e3 * value for value in (median(found) - median(unknown), median(unknown)))
    chance = mann_whitney_p(found, unknown)
    print(f"{what}: {middle_ms:.3f} ms, another tenant's {more_ms:+.3f}, by chance with probability {chance:.2f}")
    assert chance > 1e-4  # where nothing differs, one run in 10,000 fails
