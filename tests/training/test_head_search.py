"""The search for retrieval heads: against the attention of a plain model, and by what the model loses without them."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache

from kvshelf.engine.attention.attached import CACHE_ARGUMENT
from kvshelf.engine.engine import Engine
from kvshelf.errors import InvalidRequest
from kvshelf.model import loading as models
from kvshelf.model.calibration import Calibration, Origin
from kvshelf.samples.tasks import needles
from kvshelf.training import head_search
from kvshelf.training.head_search import Needle, calibrate, layer_errors, retrieval_scores
from kvshelf_bench.quality.retrieval import measure_cell
from tests.amounts import few

ORIGIN = Origin(model="made up", documents=1, tokens=1, answered=1.0, compression_ratio=0.5)


def sample_of(engine, needle):
    line = head_search.answered_share(engine, needle)
    return head_search.head_sample(engine, needle, line["asked"], line["answer"])


@pytest.fixture(scope="module")
def samples(tiny):
    return [sample_of(tiny, needle) for needle in needles(3, 300, tiny.text.count_tokens)]


def plain(model, ids):
    """Weights `[layers][q_heads, T, T]` and the cache, by transformers alone."""
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        with torch.no_grad():
            cache = DynamicCache()
            out = model(torch.tensor([ids]), **{CACHE_ARGUMENT: cache}, output_attentions=True)
        return [weights[0].double() for weights in out.attentions], cache
    finally:
        model.set_attn_implementation(before)


def test_needles_are_where_they_say(tiny):
    for needle in needles(8, 300, tiny.text.count_tokens):
        sentence = needle.document[needle.start : needle.end]
        assert sentence.endswith(".")
        sample = sample_of(tiny, needle)
        read = tiny.text.decode(sample.job.document.token_ids[sample.needle])
        assert read.strip() == sentence


def test_different_data_sets_and_no_document_twice(tiny):
    all_needles = list(needles(8, 300, tiny.text.count_tokens))
    assert len({needle.dataset for needle in all_needles}) >= 2
    assert len({needle.document for needle in all_needles}) == 8
    assert all_needles == list(needles(8, 300, tiny.text.count_tokens))


def test_scores_are_the_mass_on_the_needle_where_its_tokens_are_written(tiny, samples):
    for sample in samples:
        document = list(sample.job.document.token_ids)
        attention, _ = plain(tiny.model, document + list(sample.dialogue))
        expected = torch.zeros(4, 4, dtype=torch.float64)
        needle = set(document[sample.needle])
        first = len(document) + len(sample.dialogue) - len(sample.answer)
        for i, token in enumerate(sample.answer):
            if token in needle:
                for layer, weights in enumerate(attention):
                    expected[layer] += weights[:, first + i, sample.needle].sum(dim=-1)
        assert expected.max() > 0.5, "the model answered from the needle"
        assert (retrieval_scores(tiny, sample) - expected).abs().max() < 1e-3


def test_errors_are_what_the_output_loses(tiny, samples):
    """O_c by dropping columns of a plain model's weights and dividing by what is left."""
    scores = torch.rand(4, 4, generator=torch.Generator().manual_seed(1)).tolist()
    calibration = Calibration(
        weights=tiny.identity.weights, head_scores=tuple(map(tuple, scores)), layer_errors=(0.25,) * 4, origin=ORIGIN
    )
    sample = samples[0]
    count, document = sample.job.num_tokens, list(sample.job.document.token_ids)
    attention, cache = plain(tiny.model, document + list(sample.dialogue))
    suffix = list(sample.job.document.suffix)
    ending, _ = plain(tiny.model, document + suffix)
    expected = []
    for layer, weights in enumerate(attention):
        best = max(range(4), key=lambda head: scores[layer][head])
        window = ending[layer][best, -min(8, len(suffix)) :, :]
        tail = max(0, 8 - len(suffix))
        columns = count - tail
        if tail:
            window = ending[layer][best, count - tail :]
        score = torch.nn.functional.avg_pool1d(window[None, :, :columns].sum(dim=1), 5, stride=1, padding=2)[0]
        prefix = sample.job.document.protected_prefix
        score[:prefix] = torch.inf
        keep = round(count * (1 - head_search.ERROR_RATIO)) - tail
        kept = torch.zeros(weights.shape[-1], dtype=torch.bool)
        kept[score.topk(keep).indices] = True
        kept[columns:] = True
        values = cache.layers[layer].values[0].double().repeat_interleave(2, dim=0)
        rows = weights[:, count:]
        full = rows @ values
        cut = rows * kept
        reduced = cut / cut.sum(dim=-1, keepdim=True) @ values
        expected.append(float((reduced - full).norm() / (full.norm() + 1e-5)))
    errors = layer_errors(tiny, sample, calibration).tolist()
    assert errors == pytest.approx(expected, rel=2e-2, abs=1e-5)
    assert max(expected) > 0.05


def without(heads):
    """The bundled model with the outputs of some heads, (layer, head), set to zero."""
    model, tokenizer = models.load("kvshelf-tiny", device="cpu", dtype="auto")  # not packed: its weights can be changed
    engine = Engine(model, tokenizer, name="kvshelf-tiny")
    size = model.config.head_dim
    with torch.no_grad():
        for layer, head in heads:
            model.model.layers[layer].self_attn.o_proj.weight[:, head * size : (head + 1) * size] = 0
    return engine


@pytest.mark.slow
def test_the_model_cannot_do_without_the_heads_it_finds(tiny):
    """The two best heads are of one layer; without them nothing is found, without the other two of it all is."""
    calibration = calibrate(tiny, list(needles(6, 400, tiny.text.count_tokens)))
    ranked = sorted(
        (
            (score, layer, head)
            for layer, heads in enumerate(calibration.head_scores)
            for head, score in enumerate(heads)
        ),
        reverse=True,
    )
    best = [(layer, head) for _, layer, head in ranked[:2]]
    others = [(layer, head) for _, layer, head in ranked if layer == best[0][0] and (layer, head) not in best][-2:]
    assert len(others) == 2
    ask = {"task": "needle", "haystack": "prose", "tokens": 400, "documents": 8, "compress": {"policy": "full"}}
    assert measure_cell(without(best), **ask).exact <= 2
    assert measure_cell(without(others), **ask).exact >= 6


def test_a_search_is_repeatable_and_tells_its_progress(tiny):
    calls = []
    made = [calibrate(tiny, list(needles(2, 300, tiny.text.count_tokens)), lambda: calls.append(1)) for _ in range(2)]
    assert made[0] == made[1]
    assert len(calls) == 12
    assert max(made[0].key_similarities) <= 1.001
    assert made[0].key_similarities[0] == pytest.approx(1, abs=1e-5)
    assert made[0].weights == tiny.identity.weights
    assert made[0].origin.documents == 2
    assert 0 < made[0].origin.answered <= 1


def test_a_model_that_finds_nothing_teaches_nothing(tiny_folder):
    engine = Engine.load(str(tiny_folder), device="cpu")
    text = "Nothing here can be found by a random model. " * 5
    needle = Needle("one", text, 0, 7, "What is here?")
    with pytest.raises(InvalidRequest, match="answered none of 1 questions"):
        calibrate(engine, [needle])
    with pytest.raises(InvalidRequest, match="answered none of 0 questions"):
        calibrate(engine, [])


@pytest.mark.parametrize("stopped", few(1, [1, 5, 8]))
def test_an_interrupted_search_goes_on_from_its_journal(tiny, tmp_path, monkeypatch, stopped):
    """Among the answers, among the layers' errors, and among the similarities of keys."""
    hidden, path, done = list(needles(3, 200, tiny.text.count_tokens)), tmp_path / "unfinished", []
    whole = calibrate(tiny, hidden)

    def progress():
        done.append(1)
        if len(done) == stopped:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        calibrate(tiny, hidden, progress, path)
    with path.open("a") as file:
        file.write('[0.1, "torn')
    worked = []
    for name in ("retrieval_scores", "layer_errors", "key_similarities"):
        real = getattr(head_search, name)
        monkeypatch.setattr(head_search, name, lambda *args, real=real: worked.append(1) or real(*args))
    assert calibrate(tiny, hidden, journal=path) == whole
    assert len(worked) == 3 * len(hidden) - stopped
    assert not path.exists()
