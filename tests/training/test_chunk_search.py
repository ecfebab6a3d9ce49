"""Frequency chunks: how well each finds a head's best keys, and selector fasa, which reads the tokens they name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from kvshelf.engine.engine import Engine
from kvshelf.errors import InvalidRequest, PolicyUnsupported
from kvshelf.kernels.choose import Choice, Chosen, choose
from kvshelf.kernels.prefix_attention import PackedPrefix
from kvshelf.methods.selectors.base import StoredLayer
from kvshelf.methods.selectors.fasa import Fasa
from kvshelf.model import calibration
from kvshelf.training.chunk_search import agreement, find_chunks
from tests.engine.asking import ids


@pytest.fixture
def engine(llama, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Engine:
    """The model with chunks in a data folder of its own."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    chunks = find_chunks(llama.engine, [llama.ids[:300], llama.ids[300:500]])
    path = calibration.paths(llama.engine.identity.weights).chunks
    path.parent.mkdir(parents=True)
    calibration.save(chunks, path)
    assert calibration.Chunks.from_file(path) == chunks
    return llama.engine


def naive(queries, keys):
    """By Python's sets: for each head the share of the best keys that a chunk finds, over query heads and rows."""
    heads, group, tokens, dim = queries.shape
    before, half = tokens // 2, dim // 2
    top = min(256, before // 4)
    rows = torch.linspace(before, tokens - 1, min(32, tokens - before)).long()
    means = torch.zeros(heads, half)
    for h in range(heads):
        for f in range(half):
            shares = []
            for g in range(group):
                for row in rows:
                    query = queries[h, g, row]
                    best = set((keys[h, :before] @ query).topk(top).indices.tolist())
                    one = keys[h, :before, f] * query[f] + keys[h, :before, f + half] * query[f + half]
                    shares.append(len(best & set(one.topk(top).indices.tolist())) / top)
            means[h, f] = sum(shares) / len(shares)
    return means


def test_agreement_is_the_share_of_best_keys():
    generator = torch.Generator().manual_seed(2)
    queries, keys = torch.randn(2, 3, 80, 8, generator=generator), torch.randn(2, 80, 8, generator=generator)
    assert torch.allclose(agreement(queries, keys), naive(queries, keys), atol=1e-6)
    only = queries.clone()
    only[..., [0, 2, 3, 4, 6, 7]] = 0  # one chunk has all there is
    by_chunk = agreement(only, keys)
    assert (by_chunk[:, 1] == 1).all()
    assert (by_chunk[:, [0, 2, 3]] < 1).all()


def found_chunks(engine: Engine) -> calibration.Chunks:
    heads = engine.facts.kv_heads, engine.preparer.geometry.head
    return calibration.find(engine.identity, "", calibration.Chunks, heads, "selector fasa")


def test_chunks_are_those_of_the_model(engine: Engine):
    chunks = found_chunks(engine)
    shape = json.loads(engine.identity.attention)
    assert len(chunks.agreement) == shape["num_hidden_layers"]
    assert {len(layer) for layer in chunks.agreement} == {engine.facts.kv_heads}
    assert all(0 <= share <= 1 for layer in chunks.agreement for head in layer for share in head)
    best = chunks.best(0, 3)
    assert all(sorted(set(head)) == head for head in best)
    assert min(chunks.agreement[0][0][f] for f in best[0]) >= max(
        share for f, share in enumerate(chunks.agreement[0][0]) if f not in best[0]
    )


def test_all_chunks_choose_the_tokens_of_greatest_product(engine: Engine):
    """In bf16, as the proxies are held: keys that bf16 can tell apart."""
    chunks = found_chunks(engine)
    dim = 2 * len(chunks.agreement[0][0])
    generator = torch.Generator().manual_seed(1)
    keys = torch.randn(2 * 200, dim, generator=generator).bfloat16().float()
    selector = Fasa(chunks=dim, always=0).calibrated(chunks)  # more than there are: all
    (units,) = selector.units(StoredLayer(0, (PackedPrefix(keys, keys, (200, 200)),), (), 200, ()))
    choice = Choice((units,), (Chosen.room((200, 200), 30, keys.device),), 30, columns=selector.columns(0))
    queries = torch.randn(4, dim, generator=generator)
    choose(queries, choice)
    for head in range(2):
        logits = (keys[200 * head : 200 * head + 200] @ queries[2 * head : 2 * head + 2].T).amax(1)
        assert choice.chosen[0].rows[head].tolist() == logits.topk(30).indices.sort().values.tolist()


def test_an_answer_reads_what_it_says(engine: Engine, llama):
    cache = engine.compress(llama.ids[:230], policy="full").encoded("int4:group=16,residual=16")
    document, question = engine.attach(cache), ids(9)
    before = document.nbytes
    answer = engine.answer(cache, question, max_new_tokens=8, select="fasa", select_tokens=60)
    assert answer.usage.read_tokens == 60
    assert answer == engine.answer(cache, question, max_new_tokens=8, select="fasa", select_tokens=60)
    rows = 230 * engine.facts.kv_heads * len(engine.passes.layer_shapes)
    assert document.nbytes - before == rows * (4 * (16 // 2 // 4) + 5)  # two bytes a channel, an end and a mark
    dense = engine.answer(cache, question, max_new_tokens=8)
    assert engine.answer(cache, question, max_new_tokens=8, select="fasa", select_tokens=230) == dense


def test_chunks_that_are_not_this_model_s_are_refused(engine: Engine, llama):
    path = calibration.paths(engine.identity.weights).chunks
    said = json.loads(path.read_text())
    for change, words in (
        ({"weights": "f" * 40}, "other weights"),
        (
            {"agreement": said["agreement"][:-1]},
            f"{path.name} has 2 layers of 2 KV heads of 16 channels, .* has 3 layers",
        ),
        ({"agreement": [layer[:1] for layer in said["agreement"]]}, "3 layers of 1 KV heads"),
        (
            {"agreement": [[head[:-1] for head in layer] for layer in said["agreement"]]},
            "14 channels, .* of 16 channels",
        ),
        (
            {"agreement": [[head + head for head in layer] for layer in said["agreement"]]},
            "32 channels, .* of 16 channels",
        ),
        ({"agreement": [[[2.0]]]}, "broken at agreement"),
        ({"format": "kvshelf.chunks/2"}, "broken at format"),
    ):
        path.write_text(json.dumps(said | change))
        cache = engine.compress(llama.ids[:200], policy="full")
        with pytest.raises(PolicyUnsupported, match=words) as refused:
            engine.answer(cache, ids(5), select="fasa", select_tokens=50)
        assert refused.value.param == "select.method"


def test_short_texts_are_refused(llama):
    with pytest.raises(InvalidRequest, match="64 tokens or more"):
        find_chunks(llama.engine, [llama.ids[:63]])


def test_an_interrupted_search_goes_on_behind_the_last_document(llama, tmp_path: Path) -> None:
    documents, path, reports = [llama.ids[at : at + 100] for at in (0, 100, 200)], tmp_path / "unfinished", []
    whole = find_chunks(llama.engine, documents)

    def report(done: int, _: int) -> None:
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        find_chunks(llama.engine, documents, journal=path, report=report)
    assert len(path.read_text().splitlines()) == 3
    other = [*documents[:2], llama.ids[50:150]]  # another search does not take it
    assert find_chunks(llama.engine, other) == find_chunks(llama.engine, other, journal=tmp_path / "another")
    assert (
        find_chunks(llama.engine, documents, journal=path, report=lambda *progress: reports.append(progress)) == whole
    )
    assert not path.exists()
