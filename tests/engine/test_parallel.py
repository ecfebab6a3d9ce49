"""Two processes that share a model's heads are one engine: the same caches, answers, figures and errors as one
process, and an error by name where one of them ends."""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from kvshelf.engine.decode.generation import Sampling
from kvshelf.engine.engine import Engine
from kvshelf.engine.parallel.engine import ParallelEngine
from kvshelf.errors import Cancelled, InvalidRequest, PolicyUnsupported, WorkerCrashed
from kvshelf.methods.policies import POLICIES
from kvshelf.model.loading import shares_models
from kvshelf.model.prepacking import prepack
from kvshelf.samples.tasks import make_document
from kvshelf.store.url import open_store
from tests.amounts import SOAK
from tests.conftest import copy_tokenizer

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not shares_models(), reason="sharing a model among processes needs a newer transformers"),
]

_SHARED: list[ParallelEngine] = []
"""The engine of `two`, once it is there."""

CODECS = ("none", "lossless", "int8", "int4", "mixed", "klt")


@pytest.fixture(scope="module")
def one():
    return packed(Engine.load("kvshelf-tiny"))


def packed(engine):
    """The engine with its products in the order of those of several processes, as in replicas: of two tokens that are
    equally good but for last bits, each order of sums may keep another."""
    prepack(engine.model)
    return engine


@pytest.fixture(scope="module")
def two():
    engine = ParallelEngine.load("kvshelf-tiny", ranks=2)
    _SHARED[:] = [engine]
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def document(one):
    return make_document("multikey", "prose", 700, 20_261_126, one.text.count_tokens)


@pytest.fixture(scope="module")
def both(one, two, document):
    """A document's cache under a policy, of one process and of two."""

    @functools.cache
    def of(policy, ratio=0.5):
        options = {"compression_ratio": ratio} if POLICIES[policy].takes_budget else {}
        return tuple(each.compress(document.text, policy=policy, **options) for each in (one, two))

    return of


def require_equal(ours, theirs, most=1):
    """The same positions in each head, but for `most` tokens in the whole cache, whose scores may be those of others up
    to rounding; keys and values but for rounding."""
    assert theirs.identity == ours.identity
    assert (theirs.num_tokens, theirs.next_position, theirs.codec) == (ours.num_tokens, ours.next_position, ours.codec)
    others = 0
    for record, other in zip(ours.layers, theirs.layers, strict=True):
        kept, kept_there = ([set(head.tolist()) for head in each.positions] for each in (record, other))
        swapped = sum(len(one - two) for one, two in zip(kept, kept_there, strict=True))
        others += swapped
        if not swapped:
            for states, found in zip(record.dense(), other.dense(), strict=True):
                torch.testing.assert_close(found, states, rtol=1e-4, atol=1e-4)
    assert others <= most


def test_the_identity_is_that_of_one_process(one, two):
    assert two.identity == one.identity
    assert two.passes.layer_shapes == one.passes.layer_shapes


@pytest.mark.parametrize("policy", [name for name in POLICIES if name not in ("kvdirect", "lookaheadkv")])  # refused
def test_every_policy_keeps_what_it_keeps_in_one_process(one, two, document, both, policy):
    ours, theirs = both(policy)
    require_equal(ours, theirs, most=4 if policy == "kvmerger" else 1)  # which pairs merge, and where a run stands
    for question in document.questions[:2]:
        assert two.answer(theirs, question.text).token_ids == one.answer(ours, question.text).token_ids


@pytest.mark.parametrize(
    ("policy", "params"),
    [
        ("ada", {"across": "cache"}),
        ("kvzip", {"across": "layer"}),
        ("lagkv", {"prefill": "chunked"}),
        ("snapkv", {"expected_questions": ["Where is it?", "What is the code?"]}),
    ],
)
def test_what_heads_share_is_shared_by_processes(one, two, document, policy, params):
    require_equal(
        *(each.compress(document.text, policy=policy, compression_ratio=0.6, **params) for each in (one, two))
    )


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("policy", ["full", "ada", "ems"])
def test_every_codec(one, two, document, both, policy, codec):
    ours, theirs = both(policy)
    mine, other = one.encoded(ours, codec), two.encoded(theirs, codec)
    assert other.codec == mine.codec
    question = document.questions[0].text
    for cache in (mine, other):  # a cache of one process is answered from by two, and the other way round
        answers = [each.answer(cache, question, max_new_tokens=6).token_ids for each in (one, two)]
        assert answers[0] == answers[1]


def test_a_batch_of_mixed_rows_with_samples(one, two, document, both):
    asked = [
        (both(policy)[0], question.text)
        for policy in ("full", "keydiff", "ems", "ada")
        for question in document.questions[:2]
    ]
    for options in ({}, {"temperature": 0.8, "top_p": 0.9, "seed": 7}):
        ours, theirs = (each.answer_all(asked, max_new_tokens=12, **options) for each in (one, two))
        assert [answer.token_ids for answer in theirs] == [answer.token_ids for answer in ours]


def test_a_long_question_takes_several_steps(one, two, document, both):
    long = document.text[:3000] + "\n" + document.questions[0].text
    cache, _ = both("full")
    asked = [(cache, long), (cache, document.questions[0].text)]
    ours, theirs = (each.answer_all(asked) for each in (one, two))
    assert [answer.token_ids for answer in theirs] == [answer.token_ids for answer in ours]
    assert ours[0].usage.prefill_tokens > 512


def test_an_arriving_cache(one, two, document, both, tmp_path):
    cache, _ = both("keydiff")
    store = open_store(f"disk://{tmp_path}")
    cache_id = store.put(cache).id
    with store.open_cache(cache_id) as arriving:
        reading = threading.Thread(target=arriving.read)
        reading.start()
        generation = two.start(arriving, two.encode_query(two.attach(arriving), document.questions[0].text))
        batch = two.batch()
        while not generation.finished:
            batch.step([generation])
        reading.join()
    assert generation.answer().token_ids == one.answer(cache, document.questions[0].text).token_ids


def test_the_quality_figure_is_that_of_one_process(one, two, document):
    figures = []
    for engine in (one, two):
        levels = [
            engine.compressor.level(engine.prepare(document.text, policy=policy, compression_ratio=ratio), codec)
            for policy, ratio, codec in (("keydiff", 0.7, "none"), ("snapkv", 0.7, "int4"), ("full", None, "klt"))
        ]
        figures.append([made.quality for made in engine.run_levels(levels, cues=40)])
    for ours, theirs in zip(*figures, strict=True):
        assert (theirs.agreement, theirs.low, theirs.cues) == (ours.agreement, ours.low, ours.cues)
        assert theirs.kl == pytest.approx(ours.kl, rel=1e-3, abs=1e-6)


def test_scores_are_those_of_all_heads(one, two, document):
    jobs = [each.prepare(document.text, policy="snapkv", compression_ratio=0.5) for each in (one, two)]
    for ours, theirs in zip(one.compressor.scores(jobs[0]), two.compressor.scores(jobs[1]), strict=True):
        torch.testing.assert_close(theirs, ours)
    with pytest.raises(InvalidRequest, match="no scores"):
        two.compressor.scores(two.prepare(document.text, policy="full"))


def test_answers_go_on_while_a_document_is_prefilled(one, two, document, both):
    cache, _ = both("keydiff")
    query = two.encode_query(cache, document.questions[0].text)
    generation, batch = two.start(cache, query, Sampling(max_tokens=8)), two.batch()

    def step():
        if not generation.finished:
            batch.step([generation])

    made = two.run(two.prepare(document.text, policy="snapkv", compression_ratio=0.5), checkpoint=step)
    steps = len(generation.token_ids)
    assert steps > 1
    while not generation.finished:
        step()
    require_equal(both("snapkv")[0], made.cache)
    assert generation.answer().token_ids == one.answer(cache, document.questions[0].text, max_new_tokens=8).token_ids


def test_a_document_that_is_given_up_leaves_the_engine_as_it_was(two, document, both):
    layers = iter(range(2))

    def give_up():
        if next(layers, None) is None:
            raise Cancelled("the caller has left")

    with pytest.raises(Cancelled, match="the caller has left"):
        two.run(two.prepare(document.text, policy="full"), checkpoint=give_up)
    require_equal(both("keydiff")[0], two.compress(document.text, policy="keydiff", compression_ratio=0.5))


def test_an_error_of_rank_0_alone_leaves_the_engine_as_it_was(two, document, both, monkeypatch):
    fail = PolicyUnsupported("no numbers")

    def joined(*_):
        raise fail

    with monkeypatch.context() as patch:
        patch.setattr(two.lead, "joined", joined)
        with pytest.raises(PolicyUnsupported, match="no numbers"):
            two.compress(document.text, policy="keydiff", compression_ratio=0.5)
    require_equal(both("keydiff")[0], two.compress(document.text, policy="keydiff", compression_ratio=0.5))


def test_the_model_alone_is_refused_by_name(two, both):
    with (
        pytest.raises(PolicyUnsupported, match="runs in 2 processes"),
        two.attached(both("full")[0]),
    ):
        pass


def test_what_is_left_is_forgotten_by_all(two, document, both):
    """The other rank holds no answer and no document that rank 0 has let go of."""
    cache = two.compress(document.text, policy="knorm", compression_ratio=0.5)
    number = two.attach(cache).number
    two.answer(cache, document.questions[0].text, max_new_tokens=2)
    assert number in two.lead._shared
    del cache
    assert number not in two.lead._shared
    assert number in two.lead._dropped
    two.answer(both("full")[0], document.questions[0].text, max_new_tokens=2)
    assert not two.lead._dropped


def test_several_documents_are_asked_of_one_process(two):
    caches = [two.compress(f"The code of door {n} is {n}{n}{n}.", policy="full") for n in (4, 7)]
    assert two.answer(caches[:1], "Which code?") == two.answer(caches[0], "Which code?")
    with pytest.raises(PolicyUnsupported, match="several processes"):
        two.answer(caches, "Which code?")


def test_a_process_has_one_such_engine_at_a_time(two):
    assert two.lead.size == 2
    with pytest.raises(InvalidRequest, match=r"in a group of torch\.distributed already"):
        ParallelEngine.load("kvshelf-tiny", ranks=2)


def test_a_rank_that_is_killed_is_named(two, document):
    """The last test of this engine: starting another rank takes seconds."""
    require_named(two, document, in_prefill=False)


def require_named(engine, document, *, in_prefill):
    """Rank 1 is killed between two calls or in the middle of one, and the error says so, also to who only waits."""
    lost: list[WorkerCrashed] = []
    engine.lead.on_lost = lost.append
    (rank,) = engine.lead._ranks
    kill = functools.partial(os.kill, rank.process.pid, signal.SIGKILL)
    if not in_prefill:
        kill()
        rank.process.wait()
    with pytest.raises(
        WorkerCrashed, match=rf"rank 1 \(process {rank.process.pid}\) ended by signal 9; 'kvshelf-tiny'"
    ):
        engine.run(engine.prepare(document.text, policy="keydiff"), checkpoint=kill if in_prefill else None)
    deadline = time.monotonic() + 10
    while not lost and time.monotonic() < deadline:
        time.sleep(0.05)
    assert [error.message for error in lost if "ended by signal 9" in error.message]
    engine.close()


# Models


@pytest.fixture
def ungrouped():
    """A process is in one group at a time: the engine of the tests above has ended, whatever tests run."""
    if torch.distributed.is_initialized():
        _SHARED[0].close()


MODELS = {
    "llama": {"num_key_value_heads": 4},
    "qwen3_moe": {  # experts, as llama4 has; in a soak
        "num_key_value_heads": 4,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
    },
    "gemma2": {"num_key_value_heads": 2, "sliding_window": 24},  # soft caps, windows
    "gemma3_text": {  # as gemma2, in a soak
        "num_key_value_heads": 2,
        "sliding_window": 24,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "llama4_text": {
        "num_key_value_heads": 2,
        "attention_chunk_size": 32,
        "num_local_experts": 2,
        "intermediate_size_mlp": 128,
    },
}


def save_small(folder, kind, **more):
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        kind, vocab_size=3409, hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4,
        head_dim=16, max_position_embeddings=2048, initializer_range=0.2, eos_token_id=None, bos_token_id=None, **more,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    copy_tokenizer(folder)
    return str(folder)


@pytest.mark.parametrize(
    ("kind", "ranks"),
    [("llama", 4), ("gemma2", 2), ("llama4_text", 2), *([("qwen3_moe", 2), ("gemma3_text", 2)] if SOAK else [])],
)
@pytest.mark.usefixtures("ungrouped")
def test_small_models(kind, ranks, tmp_path):
    folder = save_small(tmp_path, kind, **MODELS[kind])
    one, many = packed(Engine.load(folder)), ParallelEngine.load(folder, ranks=ranks)
    try:
        assert many.identity == one.identity
        text = make_document("multikey", "prose", 250, 3, one.text.count_tokens).text
        for policy in ("full", "keydiff", "ada", "tova"):
            options = {} if policy == "full" else {"compression_ratio": 0.5}
            ours, theirs = (each.compress(text, policy=policy, **options) for each in (one, many))
            require_equal(ours, theirs)
            asked = [(ours, "who has the key?"), (theirs, "when is it closed?")]
            answers = [[a.token_ids for a in each.answer_all(asked, max_new_tokens=6)] for each in (one, many)]
            assert answers[0] == answers[1]
    finally:
        many.close()


@pytest.mark.usefixtures("ungrouped")
def test_an_error_of_another_rank_is_raised_and_leaves_the_engine_as_it_was(tmp_path):
    """The keys of the last KV head of the last layer are no numbers, which rank 1 alone finds."""
    folder = save_small(tmp_path, "llama", num_key_value_heads=2)
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.model.layers[-1].self_attn.k_proj.weight.data[-16:] = float("nan")
    model.save_pretrained(folder)
    engine = ParallelEngine.load(folder, ranks=2)
    try:
        for _ in range(2):
            with pytest.raises(PolicyUnsupported, match="came out as NaN or infinity"):
                engine.compress(list(range(100)), policy="keydiff", compression_ratio=0.5)
            cache = engine.compress(list(range(100)), policy="streaming_llm", compression_ratio=0.5)
            assert cache.kept_tokens == 50
    finally:
        engine.close()


@pytest.mark.parametrize(
    ("kind", "more", "ranks", "told"),
    [
        ("llama", {"num_key_value_heads": 2}, 3, "the 2 KV heads of .* cannot be shared evenly by 3 processes"),
        ("qwen3_next", {"num_key_value_heads": 2}, 2, "recurrent states"),
        ("gpt2", {}, 2, "no plan for sharing"),
        ("gpt_oss", {"num_key_value_heads": 2}, 2, "no plan for sharing the attention"),
        ("phi3", {"num_key_value_heads": 2}, 2, "no plan for sharing the attention"),
    ],
)
def test_what_cannot_be_shared_is_refused_before_any_process_starts(kind, more, ranks, told, tmp_path):
    with_heads = {"n_embd": 64, "n_head": 4, "n_layer": 2} if kind == "gpt2" else more
    AutoConfig.for_model(kind, **with_heads).save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").touch()
    began = time.monotonic()
    with pytest.raises(PolicyUnsupported, match=told):
        ParallelEngine.load(str(tmp_path), ranks=ranks)
    assert time.monotonic() - began < 30


def test_a_device_of_its_own_is_refused():
    with pytest.raises(InvalidRequest, match="device is 'cuda:1'"):
        ParallelEngine.load("kvshelf-tiny", ranks=2, device="cuda:1")
    if not torch.cuda.is_available():
        with pytest.raises(InvalidRequest, match="of which there are none"):
            ParallelEngine.load("kvshelf-tiny", ranks=2, device="cuda")


# Ends


@pytest.mark.usefixtures("ungrouped")
def test_a_rank_that_is_killed_in_a_prefill_is_named(document):
    require_named(ParallelEngine.load("kvshelf-tiny", ranks=2), document, in_prefill=True)


@pytest.mark.usefixtures("ungrouped")
def test_a_rank_that_fails_alone_ends_and_is_named(document):
    """Rank 1 has forgotten the document of a step: it fails, and rank 0 does not wait for it for ever."""
    engine = ParallelEngine.load("kvshelf-tiny", ranks=2)
    cache = engine.compress(document.text[:2000], policy="full")
    attached = engine.attach(cache)
    engine.lead.share(attached, engine.facts.kv_heads)
    engine.lead.drop(attached.number)  # rank 1 forgets it, and rank 0 does not know
    began = time.monotonic()
    with pytest.raises(WorkerCrashed, match=r"rank 1 .* ended with code 1"):
        engine.answer(cache, "what?")
    assert time.monotonic() - began < 60
    engine.close()


def test_ranks_end_with_their_process(tmp_path):
    script = tmp_path / "lead.py"
    script.write_text(
        "import time\n"
        "from kvshelf import ParallelEngine\n"
        "engine = ParallelEngine.load('kvshelf-tiny', ranks=2)\n"
        "print(engine.lead._ranks[0].process.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    with subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True) as lead:
        assert lead.stdout is not None
        pid = int(lead.stdout.readline())
        lead.kill()
    deadline = time.monotonic() + 10
    while os.path.exists(f"/proc/{pid}") and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not os.path.exists(f"/proc/{pid}")
