"""Questions a second in a batch and one by one, and what a user's question takes beside a batch:
docs/internals/scale.md has the numbers.

    python -m scripts.measure_batch_questions http://localhost:8711
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from typing import Any

from kvshelf import Client
from kvshelf.api.batches import BatchObject

COUNT = 2000
FEW = 100
URL = "/v1/chat/completions"


def body(cache_id: str, number: int) -> dict[str, Any]:
    messages = [{"role": "user", "content": f"What does page {number} of the green book say?"}]
    return {"cache_id": cache_id, "messages": messages, "max_tokens": 16}


def begun(client: Client, cache_id: str) -> BatchObject:
    lines = ({"custom_id": f"{n}", "method": "POST", "url": URL, "body": body(cache_id, n)} for n in range(COUNT))
    file = client.files.create(file=("questions.jsonl", "\n".join(map(json.dumps, lines)).encode()))
    return client.batches.create(input_file_id=file.id, endpoint=URL)


def asked_s(client: Client, cache_id: str) -> list[float]:
    """The seconds of each of some questions, one after the other."""
    seconds = []
    for number in range(FEW):
        began = time.monotonic()
        client.caches.query(cache_id, messages=body(cache_id, number)["messages"], max_tokens=16)
        seconds.append(time.monotonic() - began)
    return seconds


def main(url: str) -> None:
    with Client(url) as client:
        text = "The harbour master keeps the tide tables in a green book. " * 20
        cache_id = client.caches.create(document=text, compression_ratio=0.75).id
        asked_s(client, cache_id)
        alone = asked_s(client, cache_id)
        batch = begun(client, cache_id)
        while not batch.request_counts.completed:
            batch = client.batches.retrieve(batch.id)
        beside = asked_s(client, cache_id)
        client.batches.cancel(batch.id)
        began = time.monotonic()
        *_, batch = client.batches.events(begun(client, cache_id).id)
        batch_s = time.monotonic() - began
    print(f"one by one: {FEW / sum(alone):.0f} questions/s; {statistics.median(alone):.3f} s each")
    print(f"beside a batch: {statistics.median(beside):.3f} s each")
    print(f"a batch of {COUNT}, from its creation to its results: {COUNT / batch_s:.0f} questions/s, {batch.status}")


if __name__ == "__main__":
    main(sys.argv[1])
