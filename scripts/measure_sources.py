"""What a kept source takes on the shelf, and what making a cache again from it costs beside a hit
(docs/internals/creation.md).

Asks a running service that keeps its shelf in a folder of this machine: `kvshelf serve --store disk:///tmp/shelf`, then
`python scripts/measure_sources.py http://127.0.0.1:8765 /tmp/shelf`.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from statistics import median

from kvshelf import Client
from kvshelf.engine.engine import Engine
from kvshelf.samples.tasks import make_document
from kvshelf.store import housekeeping
from kvshelf.store.disk import DiskStore

REPEATS = 7
ASKED = "What is the access code of the amber falcon?"


def evict(home: Path, cache_id: str) -> None:
    with DiskStore.open(home) as store:
        entry = store._index.find(cache_id, "default")
        assert entry is not None
        housekeeping.bury(store._index, store._blobs, entry, "evicted", time.time())


def asked_ms(client: Client, cache_id: str) -> tuple[float, str | None]:
    began = time.perf_counter()
    answer = client.caches.query(cache_id, ASKED, max_tokens=1, on_miss="recompute")
    return 1e3 * (time.perf_counter() - began), answer.recomputed


def main(url: str, home: Path) -> None:
    text = Engine.load("kvshelf-tiny", device="cpu").require_text("document")
    with Client(url) as client:
        for tokens in (512, 1024, 1900):
            document = make_document("multikey", "prose", tokens, 1, text.count_tokens).text
            for form in (True, "tokens"):
                cache = client.caches.create(document=document, policy="kvzip", codec="int4", keep_source=form)  # type: ignore[arg-type]
                assert cache.source is not None
                hits, remade = [], []
                for _ in range(REPEATS):
                    evict(home, cache.id)
                    took, why = asked_ms(client, cache.id)
                    assert why == "evicted"
                    remade.append(took)
                    took, why = asked_ms(client, cache.id)
                    assert why is None
                    hits.append(took)
                read = cache.tokens.document
                print(
                    f"{read} tokens, {cache.source.form}: {cache.source.bytes / read:.2f} bytes per token, cache "
                    f"{cache.bytes.stored / read:.0f}; hit {median(hits):.1f} ms, made again {median(remade):.0f} ms"
                )
                client.caches.delete(cache.id)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
