"""Engines: what they load, what they refuse before any work, and what identifies their caches."""

from __future__ import annotations

import copy
import json
import threading
import time
from dataclasses import replace

import numpy as np
import pytest
import torch
import transformers
from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars
from packaging.version import Version
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from kvshelf.artifact.cache import CompressedCache
from kvshelf.engine.attention.attached import CACHE_ARGUMENT
from kvshelf.engine.engine import Engine
from kvshelf.errors import Cancelled, DocumentTooLong, DocumentTooShort, InvalidRequest, PolicyUnsupported
from kvshelf.model.source import bundled_folder

TEXT = "The report was read twice. The gate code is 482913. Nobody spoke. " * 20


@pytest.fixture(autouse=True)
def no_forward(request, monkeypatch):
    """Tests of refusals fail if the model runs: bad input is refused before any work."""
    if "tiny" not in request.fixturenames or "refused" not in request.node.name:
        return
    tiny = request.getfixturevalue("tiny")
    for module in (tiny.model, tiny.model.base_model):
        monkeypatch.setattr(module, "forward", lambda *_, **__: pytest.fail("the model ran"))


def test_a_bundled_model_loads_by_name_and_answers(tiny):
    cache = tiny.compress(TEXT, policy="keydiff", compression_ratio=0.5)
    assert cache.num_tokens == len(tiny.text.document(TEXT, "chat").token_ids)
    assert all(len(head) == cache.num_tokens // 2 for record in cache.layers for head in record.positions)
    assert tiny.answer(cache, "What is the gate code?").text.strip()


def test_several_answers_take_the_options_of_one(tiny):
    cache = tiny.compress(TEXT, policy="full")
    asked = [(cache, "What is the gate code?"), (cache, "Who spoke?")]
    for options in ({"max_new_tokens": 3}, {"temperature": 3.0, "top_p": 0.99, "seed": 5}, {"stop": ["2"]}, {}):
        together = [answer.token_ids for answer in tiny.answer_all(asked, **options)]
        assert together == [tiny.answer(*each, **options).token_ids for each in asked]
    assert [len(answer.token_ids) for answer in tiny.answer_all(asked, max_new_tokens=3)] == [3, 3]


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"max_new_tokens": 1.5}, "max_tokens"),
        ({"max_new_tokens": True}, "max_tokens"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": "all"}, "top_p"),
        ({"temperature": 1.0, "seed": 2**64}, "seed"),
        ({"temperature": 1.0, "seed": 1.5}, "seed"),
        ({"stop": 5}, "stop"),
        ({"stop": ["a", 5]}, "stop"),
        ({"logprobs": 1.5}, "logprobs"),
        ({"select": 5}, "select.method"),
        ({"select": ["quest"]}, "select.method"),
        ({"select": "quest", "select_tokens": 99.5}, "select.tokens"),
        ({"select": "quest", "select_params": {5: 1}}, "select.params.5"),
        ({"select": "quest", "select_params": "page"}, "select_params"),
        ({"select_tokens": 64}, "select_tokens"),
        ({"select_params": {"page": 8}}, "select_params"),
        ({"suffix": "window"}, "suffix"),
        ({"shape": "json"}, "shape"),
        ({"shape": {"choices": [5]}}, "choices"),
        ({"shape": {"choices": ["\ud800"]}}, None),
    ],
)
def test_no_answer_takes_a_bad_option(tiny, options, param):
    cache = tiny.compress("Nobody spoke.", policy="full")
    with pytest.raises(InvalidRequest) as refused:
        tiny.answer(cache, "Who spoke?", **options)
    assert refused.value.param == param


def test_numbers_of_numpy_and_collections_of_any_type_are_options(tiny):
    cache = tiny.compress(TEXT, protect={"first:3"})
    plain = {"temperature": 0.5, "top_p": 0.5, "seed": 7, "stop": ["zz"], "select": "quest", "select_tokens": 64}
    of_numpy = {"temperature": np.float32(0.5), "top_p": np.float32(0.5), "seed": np.int64(7), "stop": {"zz"}}
    of_numpy |= {"select": "quest", "select_tokens": np.int64(64), "max_new_tokens": np.int64(32)}
    expected = tiny.answer(cache, "Who spoke?", **plain).token_ids
    assert tiny.answer((one for one in [cache]), "Who spoke?", **of_numpy).token_ids == expected
    assert tiny.answer({"a": cache}.values(), "Who spoke?", temperature=1, seed=7, select_params={}).text
    assert tiny.answer(cache, "Who spoke?", shape={"choices": {"Ann", "Bo"}}).text in ("Ann", "Bo")


def test_what_is_no_cache_is_not_asked(tiny):
    blob = tiny.compress("Nobody spoke.", policy="full").to_bytes()
    for call in (tiny.attach, tiny.export, lambda it: tiny.answer(it, "?"), lambda it: tiny.extend(it, "More.")):
        for wrong in (blob, "kvs_1", None):
            with pytest.raises(InvalidRequest, match="is no cache"):
                call(wrong)
    for load in (Engine, Engine.load):
        with pytest.raises(InvalidRequest):
            load(None)


def test_more_logprobs_than_tokens_are_those_of_all_tokens(tiny):
    cache = tiny.compress(TEXT, policy="full")
    (told,) = tiny.answer(cache, "What is the gate code?", max_new_tokens=1, logprobs=10**9).logprobs
    assert len(told.top_logprobs) == tiny.model.config.vocab_size


def test_threads_take_turns(tiny):
    """Two threads in one model corrupt its memory: answers were wrong, or the process died."""
    cache, order = tiny.compress(TEXT), []
    asking = threading.Thread(target=lambda: order.append(tiny.answer(cache, "Who spoke?", max_new_tokens=1)))

    def checkpoint():
        if asking.ident is None:
            asking.start()
            asking.join(0.5)
            order.append("checkpoint")

    tiny.run(tiny.prepare(TEXT), checkpoint=checkpoint)
    asking.join()
    assert order[0] == "checkpoint"
    assert len(order) == 2


def test_a_local_folder_is_the_same_model(tiny):
    other = Engine.load(bundled_folder("kvshelf-tiny"), device="cpu", dtype="float32")
    assert other.identity == tiny.identity
    assert other.identity.fingerprint() == tiny.identity.fingerprint()


@pytest.mark.parametrize("bars", [True, False])
@pytest.mark.parametrize("downloads", [True, False])
def test_loading_shows_progress_bars_only_if_asked(capfd, bars, downloads):
    """And leaves the switches of transformers and of the hub as they were."""
    was = logging.is_progress_bar_enabled(), are_progress_bars_disabled()
    try:
        (logging.enable_progress_bar if bars else logging.disable_progress_bar)()
        (enable_progress_bars if downloads else disable_progress_bars)()
        Engine.load("kvshelf-tiny", device="cpu")
        assert "Loading weights" not in capfd.readouterr().err
        assert (logging.is_progress_bar_enabled(), are_progress_bars_disabled()) == (bars, not downloads)
        Engine.load("kvshelf-tiny", device="cpu", progress=True)
        assert ("Loading weights" in capfd.readouterr().err) == bars
    finally:
        (logging.enable_progress_bar if was[0] else logging.disable_progress_bar)()
        (disable_progress_bars if was[1] else enable_progress_bars)()


def test_dtype_is_chosen_and_part_of_the_identity(tiny):
    other = Engine.load("kvshelf-tiny", device="cpu", dtype="bfloat16")
    cache = other.compress(TEXT)
    assert cache.layers[0].keys.dtype == torch.bfloat16
    assert other.identity.fingerprint() != tiny.identity.fingerprint()
    again = CompressedCache.from_bytes(cache.to_bytes())
    question = "What is the gate code?"
    assert other.answer(again, question).token_ids == other.answer(cache, question).token_ids


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("./no-such-folder", {}),
        ("/", {}),
        ("kvshelf-tiny", {"dtype": "int3"}),
        ("kvshelf-tiny", {"device": "abacus"}),
    ],
)
def test_a_model_that_cannot_be_loaded_is_named(name, options):
    with pytest.raises(InvalidRequest) as failed:
        Engine.load(name, **options)
    assert failed.value.param == next(iter(options), "model")


def test_weights_that_are_not_safetensors_are_not_loaded(tmp_path, tiny):
    """A pickled checkpoint can run code when it is read."""
    tiny.model.config.save_pretrained(tmp_path)
    torch.save(tiny.model.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(InvalidRequest, match="cannot be loaded"):
        Engine.load(str(tmp_path))


def test_remote_code_is_not_run(tmp_path, tiny):
    ran = tmp_path / "ran"
    config = tiny.model.config.to_dict() | {
        "model_type": "kvshelf_unknown",
        "auto_map": {"AutoConfig": "code.C", "AutoModelForCausalLM": "code.M"},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "code.py").write_text(f"open({str(ran)!r}, 'w')\nclass C: ...\nclass M: ...\n")
    with pytest.raises(InvalidRequest):
        Engine.load(str(tmp_path))
    assert not ran.exists()


@pytest.mark.parametrize(
    ("document", "options", "error", "param"),
    [
        ("", {}, DocumentTooShort, "document"),
        ([], {}, DocumentTooShort, "document"),
        ("word " * 20_000, {}, DocumentTooLong, "document"),
        ([5] * 16_385, {}, DocumentTooLong, "document"),
        ([5, -1], {}, InvalidRequest, "token_ids"),
        ([5, 10**6], {}, InvalidRequest, "token_ids"),
        ([5, True], {}, InvalidRequest, "token_ids"),
        ([5, "6"], {}, InvalidRequest, "token_ids"),
        (torch.tensor([[5, 6]]), {}, InvalidRequest, "token_ids"),
        (torch.tensor([5.0, 6.0]), {}, InvalidRequest, "token_ids"),
        (np.array([[5, 6]]), {}, InvalidRequest, "token_ids"),
        (np.array(5), {}, InvalidRequest, "token_ids"),
        (TEXT.encode(), {}, InvalidRequest, "token_ids"),
        (None, {}, InvalidRequest, "token_ids"),
        ({5, 6}, {}, InvalidRequest, "token_ids"),
        (iter([5, 6]), {}, InvalidRequest, "token_ids"),
        ("half a pair: \ud800", {}, InvalidRequest, None),
        (TEXT, {"policy": "snapkv", "expected_questions": ["\ud800"]}, InvalidRequest, None),
        (TEXT, {"policy": "snapkv", "expected_questions": "Who spoke?"}, InvalidRequest, "expected_questions"),
        (TEXT, {"protect": "first:3"}, InvalidRequest, "protect"),
        (TEXT, {"chat_template_kwargs": "thinking"}, InvalidRequest, "chat_template_kwargs"),
        (TEXT, {"policy": ""}, InvalidRequest, "policy"),
        (TEXT, {"policy": ["keydiff"]}, InvalidRequest, "policy"),
        ([5, 6], {"layout": "chat"}, InvalidRequest, "layout"),
        ([{"role": "user", "content": "x"}], {"layout": "plain"}, InvalidRequest, "layout"),
        (TEXT, {"layout": "diagonal"}, InvalidRequest, "layout"),
        (TEXT, {"policy": "best"}, InvalidRequest, "policy"),
        (TEXT, {"policy_params": {"sinks": 4}}, InvalidRequest, "policy_params.sinks"),
        (TEXT, {"compression_ratio": 1.0}, InvalidRequest, "compression_ratio"),
        (TEXT, {"compression_ratio": 0.996}, PolicyUnsupported, "compression_ratio"),
    ],
)
def test_bad_documents_are_refused(tiny, document, options, error, param):
    with pytest.raises(error) as refused:
        tiny.prepare(document, **options)
    assert refused.value.param == param


def test_text_without_a_tokenizer_is_refused(llama):
    with pytest.raises(InvalidRequest, match="no tokenizer"):
        llama.engine.prepare("some text")


def test_a_document_far_too_long_is_refused_without_tokenizing_it(tiny):
    """Tokenizing 40 MB takes a minute."""
    started = time.process_time()
    with pytest.raises(DocumentTooLong, match="at least"):
        tiny.prepare("word and " * 4_500_000)
    with pytest.raises(DocumentTooLong, match="at least"):
        tiny.prepare([{"role": "user", "content": "word and " * 4_500_000}])
    assert time.process_time() - started < 2


def test_ids_may_be_a_tensor(tiny):
    ids = tiny.text.document(TEXT, "plain").token_ids
    cache = tiny.compress(torch.tensor(ids))
    assert cache.identity == tiny.compress(ids).identity == tiny.prepare(np.array(ids)).identity
    assert tiny.answer(cache, torch.tensor(ids[:9])).token_ids == tiny.answer(cache, ids[:9]).token_ids


@pytest.mark.parametrize("layout", ["plain", "chat"])
def test_the_longest_document_is_one_that_can_be_asked(tiny, layout):
    """One token more is refused before its prefill: no question would have room behind it."""
    document = tiny.encode_document(TEXT, layout=layout)
    asked = len(document.token_ids) + len(tiny.text.question(document.boundary, "?"))

    def of(longest):
        return replace(tiny.encoder, max_tokens=longest, longest=lambda _: longest)

    assert of(asked + 1).document(TEXT, layout) == document
    with pytest.raises(DocumentTooLong, match="the shortest question with an answer takes"):
        of(asked).document(TEXT, layout)
    assert tiny.prepare([5] * 16_382).num_tokens == 16_382
    with pytest.raises(DocumentTooLong, match="shortest question"):
        tiny.prepare([5] * 16_383)


def test_a_part_that_fills_the_model_is_refused_before_any_is_made(tiny):
    with pytest.raises(InvalidRequest, match="of them for the shortest question") as refused:
        tiny.encoder.split(TEXT, size=tiny.max_tokens)
    assert refused.value.param == "split"


@pytest.mark.parametrize("size", [1, 2, 3])
def test_parts_without_room_beside_the_template_are_refused(tiny, size):
    prefix = tiny.text.document("", "chat").protected_prefix
    with pytest.raises(InvalidRequest, match="the chat template of 'kvshelf-tiny' takes"):
        tiny.encoder.split(TEXT, size=min(size, prefix))


def test_identity_is_known_before_the_work_and_is_that_of_the_cache(tiny):
    job = tiny.prepare(TEXT, policy="lagkv", compression_ratio=0.75)
    cache = tiny.run(job).cache
    assert cache.identity == job.identity
    assert job.identity.policy_params.items() >= {"sink": 4, "lag": 32, "prefill": "whole"}.items()
    assert job.identity.compression_ratio == 0.75
    assert cache.layers[0].entries == 2 * job.identity.budget_tokens


def test_equal_work_gives_equal_bytes(tiny):
    first, second = (tiny.compress(TEXT, policy="snapkv", compression_ratio=0.6).to_bytes() for _ in range(2))
    assert first == second


DIFFERENT = {
    "text": {"document": TEXT + "x"},
    "layout": {"layout": "plain"},
    "policy": {"policy": "snapkv"},
    "parameter": {"policy": "snapkv", "policy_params": {"kernel": 7}},
    "ratio": {"compression_ratio": 0.25},
    "budget": {"budget_tokens": 100},
}


def test_whatever_differs_gives_another_cache_id(tiny):
    key = bytes(32)
    ids = {}
    for name, change in {"same": {}, **DIFFERENT}.items():
        identity = tiny.prepare(**({"document": TEXT} | change)).identity
        ids[name] = identity.cache_id(key=key, tenant="default", codec="none", format_major=1)
    same = tiny.prepare(TEXT).identity
    ids["tenant"] = same.cache_id(key=key, tenant="other", codec="none", format_major=1)
    ids["codec"] = same.cache_id(key=key, tenant="default", codec="int8", format_major=1)
    ids["format"] = same.cache_id(key=key, tenant="default", codec="none", format_major=2)
    ids["key"] = same.cache_id(key=bytes(31) + b"\1", tenant="default", codec="none", format_major=1)
    assert len(set(ids.values())) == len(ids)
    assert same.cache_id(key=key, tenant="default", codec="none", format_major=1) == ids["same"]


def test_one_document_has_one_document_id(tiny):
    key = bytes(32)
    ids = {tiny.prepare(TEXT, policy=p).identity.document_id(key=key, tenant="t") for p in ("full", "keydiff", "lagkv")}
    assert len(ids) == 1
    assert tiny.prepare(TEXT + "x").identity.document_id(key=key, tenant="t") not in ids
    assert tiny.prepare(TEXT).identity.document_id(key=key, tenant="u") not in ids


def test_the_template_is_never_evicted(tiny):
    for policy in ("keydiff", "snapkv", "lagkv", "streaming_llm"):
        cache = tiny.compress(TEXT, policy=policy, compression_ratio=0.9)
        prefix = tiny.text.document(TEXT, "chat").protected_prefix
        assert prefix >= 1
        for record in cache.layers:
            assert all(head[:prefix].tolist() == list(range(prefix)) for head in record.positions)


def test_a_compression_can_be_abandoned_between_layers(tiny):
    seen = []

    def gone():
        seen.append(1)
        raise Cancelled("no longer wanted")

    with pytest.raises(Cancelled):
        tiny.run(tiny.prepare(TEXT), checkpoint=gone)
    assert seen == [1]


def test_a_question_is_answered_inside_a_compression(tiny):
    """The scheduler runs decode steps between the layers of a long prefill; neither changes the other."""
    cache = tiny.compress(TEXT)
    question = tiny.encode_query(cache, "What is the gate code?")
    alone = tiny.answer(cache, question, max_new_tokens=3).token_ids
    undisturbed = tiny.compress(TEXT * 2, policy="snapkv").to_bytes()
    batch, generation = tiny.batch(), tiny.start(cache, question)

    def step():
        if len(generation.token_ids) < len(alone) and not generation.finished:
            batch.step([generation])

    compression = tiny.run(tiny.prepare(TEXT * 2, policy="snapkv"), checkpoint=step)
    assert generation.token_ids == alone[: len(generation.token_ids)]
    assert len(generation.token_ids) >= 2
    assert compression.cache.to_bytes() == undisturbed


CACHES_EXPANDED = pytest.mark.skipif(
    Version(transformers.__version__) >= Version("5.24"), reason="newer versions of transformers cache latents"
)


def tiny_config(**changes):
    base = {
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 64,
    }
    return base | {"num_key_value_heads": 2, "max_position_embeddings": 256, "eos_token_id": None} | changes


@pytest.mark.parametrize(
    ("model_type", "changes", "named"),
    [
        pytest.param("deepseek_v3", {"first_k_dense_replace": 2}, "MLA.* expanded", marks=CACHES_EXPANDED),
        ("t5", {"d_model": 32, "num_layers": 1, "num_heads": 2, "d_kv": 8}, "encoder-decoder"),
        ("bloom", {}, "does not use transformers' attention interface"),
    ],
)  # fmt: skip
def test_models_that_cannot_be_attached_to_are_refused(model_type, changes, named):
    from transformers import AutoModelForSeq2SeqLM

    config = AutoConfig.for_model(model_type, **tiny_config(**changes))
    loader = AutoModelForSeq2SeqLM if model_type == "t5" else AutoModelForCausalLM
    with pytest.raises(PolicyUnsupported, match=named):
        Engine(loader.from_config(config))


def test_a_mixture_of_experts_works_like_any_other():
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "qwen3_moe", **tiny_config(head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)
    )
    model = AutoModelForCausalLM.from_config(config).eval()
    engine = Engine(model)
    ids = list(range(60))
    cache = engine.compress(ids[:50], policy="full")
    with engine.attached(cache) as past, torch.no_grad():
        ours = model(torch.tensor([ids[50:]]), **{CACHE_ARGUMENT: past}).logits
    with torch.no_grad():
        expected = model(torch.tensor([ids])).logits[:, 50:]
    assert float((ours - expected).abs().max() / expected.abs().max()) < 1e-5


def test_the_tokenizer_is_left_as_it_was(tiny):
    tokenizer = AutoTokenizer.from_pretrained(bundled_folder("kvshelf-tiny"))
    before = tokenizer.backend_tokenizer.to_str(), tokenizer("<|end|> x").input_ids
    engine = Engine(copy.deepcopy(tiny.model), tokenizer)
    engine.answer(engine.compress("<|end|> some text <|end|>" * 9), "<|end|>?", max_new_tokens=2)
    assert (tokenizer.backend_tokenizer.to_str(), tokenizer("<|end|> x").input_ids) == before
