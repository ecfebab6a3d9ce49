"""`kvshelf bench speed`: its parts on the bundled model, and the worker that runs kvpress."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from contextlib import ExitStack, closing, contextmanager
from itertools import product
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from kvshelf.engine.attention.attached import CACHE_ARGUMENT
from kvshelf.engine.engine import Engine
from kvshelf.errors import InvalidRequest, StoreUnavailable, WorkerCrashed
from kvshelf.kernels.quantize.rows import plain
from kvshelf.kernels.rates import Cost
from kvshelf.model.loading import shares_models
from kvshelf.model.source import bundled_folder
from kvshelf.store.url import open_store
from kvshelf_bench.cli import app
from kvshelf_bench.engines import EngineOptions, endless_answers
from kvshelf_bench.peers import kvpress_worker
from kvshelf_bench.peers.peer import Peer
from kvshelf_bench.quality.grid import Row
from kvshelf_bench.speed import compression, decode, serving
from kvshelf_bench.speed.codecs import codec_costs, codec_ways
from kvshelf_bench.speed.compression import Hooked, compress, compression_costs, plain_prefill
from kvshelf_bench.speed.first_token import first_tokens, ways_to_ask
from kvshelf_bench.speed.parts import codecs_table, decode_table, serving_table, suffix_table
from kvshelf_bench.speed.subject import (
    QUESTION_TOKENS,
    Subject,
    fitting,
    load_random_model,
    load_subject,
    random_layers,
    save_random_model,
)
from kvshelf_bench.speed.suffixes import bounded_answers
from kvshelf_bench.speed.ways import OfPeer, open_kvpress, open_vllm, own_ways
from tests.store.redis.servers import PATIENT, ValkeyServer


@pytest.fixture(autouse=True)
def one_thread():
    """Threads that wait for each other on a busy machine use processor time, which is what is measured."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def subject(tiny):
    return Subject(tiny, bundled_folder("kvshelf-tiny"))


def test_the_hook_is_the_policys_part_of_the_run(subject):
    """h2o multiplies all queries with all keys once more, streaming_llm looks at nothing."""
    ids = subject.tokens(1024, seed=0)
    compress(subject, ids, "h2o", 0.75)
    costly, cheap = (
        min(compress(subject, ids, name, 0.75).hook_s for _ in range(3)) for name in ("h2o", "streaming_llm")
    )
    run = compress(subject, ids, "h2o", 0.75)
    assert 0 < cheap < costly < run.total.wall_s
    assert run.prefill_s == pytest.approx(run.total.wall_s - run.hook_s)
    assert not subject.engine.model.base_model._forward_pre_hooks


def test_the_plain_prefill_runs_the_models_own_attention(subject):
    calls = []
    layer = subject.engine.model.base_model.layers[0].self_attn
    handle = layer.register_forward_hook(lambda *_: calls.append(layer.config._attn_implementation))
    plain_prefill(subject, subject.tokens(64, seed=0))
    handle.remove()
    assert calls == ["sdpa"]


def test_compression_has_a_row_per_policy_and_no_peer_where_there_is_none(subject):
    found = compression_costs(subject, None, 300, 2, ["lagkv", "ems"], 0.5)
    assert [(row.policy, row.tokens, row.beside_peer) for row in found.rows] == [
        ("lagkv", 300, None),
        ("ems", 300, None),
    ]
    assert all(0 < row.hook_s.low <= row.hook_s.high and row.share.low > 0 for row in found.rows)
    for policy in ("lagkv", "ems"):
        run = compress(subject, subject.tokens(300, seed=1), policy, 0.5)
        assert 0 < run.hook_s < run.total.wall_s, "a part of its own run"
    assert found.same.low <= found.same.median <= found.same.high


def test_each_share_is_of_the_prefill_of_its_own_round(subject, monkeypatch):
    """The plain model's, of the whole; its own run's, of the policy's part."""
    plain, again, ours = (
        [Hooked(Cost(seconds, wall_s), hook_s) for seconds, wall_s, hook_s in rounds]
        for rounds in ([(1, 10, 0), (2, 20, 0)], [(1.5, 1, 0), (2, 1, 0)], [(3, 11, 1), (4, 40, 1)])
    )
    measured = {("plain", "first"): plain, ("plain", "second"): again, ("ours", "lagkv"): ours}
    monkeypatch.setattr(compression, "interleaved", lambda *_: measured)
    found = compression_costs(subject, None, 64, 2, ["lagkv"], 0.5)
    (row,) = found.rows
    assert (row.whole.low, row.whole.median, row.whole.high) == (2, 2.5, 3)
    assert (row.whole_wall.low, row.whole_wall.high) == pytest.approx((1.1, 2))
    assert (row.share.low, row.share.high) == pytest.approx((1 / 39, 1 / 10))
    assert (row.plain_s.median, row.hook_s.median, found.same.high) == (1.5, 1, 1.5)


ANSWERING = """
import json, sys
print(json.dumps({"timed": ["lagkv"], "versions": {"kvpress": "1"}}), flush=True)
for line in sys.stdin:
    asked = json.loads(line)
    hook = 0.25 * len(asked["token_ids"])
    print(json.dumps({"total_s": 1.0, "hook_s": hook, "wall_s": 4 * hook, "kept": 1}), flush=True)
"""


@contextmanager
def speaking(program, name="kvpress"):
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with process:
        yield Peer(process, name)


def test_a_peer_is_asked_only_for_what_it_knows(subject):
    with speaking(ANSWERING) as peer:
        lagkv, ems = compression_costs(subject, peer, 64, 1, ["lagkv", "ems"], 0.5).rows
    assert lagkv.peer_s.median == 16.0
    assert lagkv.peer_share.median == pytest.approx(1 / 3)
    assert lagkv.beside_peer.median == pytest.approx(lagkv.hook_s.median / 16.0)
    assert ems.peer_s is None


def test_a_peer_that_dies_is_an_error_and_not_a_wait():
    with (
        speaking(ANSWERING.replace("hook =", "sys.exit(3) #")) as peer,
        pytest.raises(WorkerCrashed, match="exit code 3"),
    ):
        peer.ask(method="lagkv", removed=0.5, token_ids=[1])


def test_a_peer_that_is_not_ready_in_time_is_left_out_and_ended(subject, tmp_path):
    slow, number = tmp_path / "python", tmp_path / "number"
    slow.write_text(f"#!/bin/sh\necho $$ > {number}\nexec sleep 600\n")
    slow.chmod(0o700)
    with open_vllm(str(slow), subject, 1, 100, time.monotonic() + 2) as peer:
        assert peer is None
    assert not Path(f"/proc/{int(number.read_text())}").exists()


SERVING = """
import json, sys
print(json.dumps({"versions": {"vllm": "1"}}), flush=True)
for line in sys.stdin:
    asked = json.loads(line)
    count, longest = len(asked["prompts"]), max(map(len, asked["prompts"]))
    seconds = 2.0 if longest < 150 else 1000.0
    print(json.dumps({"wall_s": seconds, "seconds": 4.0, "tokens": count * asked["new_tokens"]}), flush=True)
"""


@contextmanager
def measuring(subject, lengths, budget_s):
    """The run of a serving part beside a peer that says it takes 2 s, and 1,000 for what is longer than 150 tokens."""
    with speaking(SERVING, "vLLM") as peer, own_ways(subject) as ways:
        ends = time.monotonic() + budget_s
        run = serving.ServingRun(
            subject, ways | {"vLLM": OfPeer(peer)}, serving.works(lengths), ends, lambda _: None, 0.0
        )
        run.warm()
        yield run


@pytest.mark.slow
def test_serving_has_a_row_for_each_work_and_tells_it_when_it_is_measured(subject):
    told = []
    interpreters = {"vLLM": None, "llama.cpp": None}
    pace = serving.ServingPace(2, 60.0, rest_s=0.0)
    found = serving.serving(subject, [96, 160], pace, interpreters, 1, tell=lambda row: told.append(row.work))
    assert told == [row.work for row in found.rows] == [work.name for work in serving.works([96, 160])]
    assert [row.rounds for row in found.rows] == [2] * 5
    for row in found.rows:
        assert set(row.seconds) == set(row.processor_s) == {"transformers", "Engine.load", "replica"}
        assert set(row.beside) == {"transformers", "Engine.load"}
        assert all(each.low > 0 for each in row.seconds.values())
    assert [line.split(":")[0] for line in found.missing] == ["vLLM", "llama.cpp"]
    assert serving_table(found).row_count == 5


def test_serving_measures_a_random_model_without_a_tokenizer():
    with load_subject(EngineOptions("random:1", "cpu", "float32", 1, "int8")) as subject:
        found = serving.serving(subject, [96], serving.ServingPace(1, 60.0, 0.0), {"vLLM": None, "llama.cpp": None}, 1)
    assert [row.rounds for row in found.rows] == [1] * 4


def test_serving_stands_beside_a_peer(subject):
    with measuring(subject, [96], 60.0) as run:
        assert all(run.measure_first(work) for work in run.works)
        row = run.row(run.works[0])
    assert row.seconds["vLLM"].median == 2.0
    assert row.processor_s["vLLM"].median == 4.0
    assert row.beside["vLLM"].median == pytest.approx(2.0 / row.seconds["replica"].median)


@pytest.mark.slow
def test_what_would_go_beyond_the_budget_is_left_out_by_name(subject):
    """A peer for which 100 tokens take 2 s cannot prefill 3,000 in a minute. Later rounds are left out as a whole."""
    with measuring(subject, [96, 3000], 60.0) as run:
        for work in run.works:
            run.measure_first(work)
        assert "vLLM" not in run.costs["3,000 tokens prefilled"]
        assert "3,000 tokens prefilled by vLLM (about 493 s)" in run.missing(1)
        run.ends = time.monotonic() + 1.0
        assert not run.measure_again(run.works[0], 1)
        assert "96 tokens prefilled: 1 of 2 rounds" in run.missing(2)


def test_no_question_is_asked_of_a_document_that_was_not_prefilled(subject):
    with measuring(subject, [100], 3.0) as run:
        run.ends = time.monotonic() + 1.5
        for work in run.works:
            run.measure_first(work)
    assert all("vLLM" not in costs for costs in run.costs.values())
    assert len([line for line in run.missing(1) if "by vLLM" in line]) == 4


def test_lengths_fit_the_model(subject):
    left_out = []
    most = subject.engine.max_tokens - 96
    assert fitting(subject, None, [2048, 32768], "cold", left_out) == [2048]
    assert left_out == [f"cold of 32,768 tokens: 'kvshelf-tiny' takes {subject.engine.max_tokens:,}"]
    assert fitting(subject, None, [32768], "cold", []) == [most]
    assert fitting(subject, [64, most], [2048], "cold", []) == [64, most]
    with pytest.raises(InvalidRequest, match=f"give {most} at most"):
        fitting(subject, [most + 1], [2048], "cold", [])


def test_an_answer_that_is_too_short_is_no_measurement():
    with (
        speaking(SERVING.replace('asked["new_tokens"]', "0"), "vLLM") as peer,
        pytest.raises(AssertionError, match="no token ends"),
    ):
        OfPeer(peer).prefilled([1])


def test_an_interpreter_without_kvpress_is_named(subject, tmp_path):
    missing = str(tmp_path / "python")
    with pytest.raises(InvalidRequest, match=missing), open_kvpress(missing, subject, 1):
        pass
    program = tmp_path / "broken"
    program.write_text(f"#!{sys.executable}\nraise SystemExit(7)\n")
    program.chmod(0o755)
    with pytest.raises(WorkerCrashed, match="exit code 7"), open_kvpress(str(program), subject, 1):
        pass


class HalvingPress:
    """What the worker needs of a press of kvpress: a hook, and a context that registers it on every layer."""

    def forward_hook(self, module, _, kwargs, output):
        layer = kwargs[CACHE_ARGUMENT].layers[module.layer_idx]
        layer.keys, layer.values = layer.keys[:, :, ::2], layer.values[:, :, ::2]
        return output

    @contextmanager
    def __call__(self, model):
        handles = [
            layer.self_attn.register_forward_hook(self.forward_hook, with_kwargs=True)
            for layer in model.base_model.layers
        ]
        yield
        for handle in handles:
            handle.remove()


def test_the_worker_times_the_hook_of_a_press_within_a_whole_prefill():
    model = AutoModelForCausalLM.from_pretrained(bundled_folder("kvshelf-tiny")).eval()
    answer = kvpress_worker.measure(model, HalvingPress(), list(range(100)))
    assert answer["kept"] == 50
    assert 0 < answer["hook_s"] < answer["wall_s"]


def test_first_tokens_come_from_memory_and_from_every_store(subject, tmp_path):
    home = open_store(f"disk://{tmp_path}/home")
    found = first_tokens(subject, {"disk": home}, 400, 1, [("full", 0.0), ("keydiff", 0.75)])
    home.close()
    full, quarter = found.rows
    assert list(full.tiers) == ["memory", "disk", "safetensors"]
    assert full.prefill_tokens == QUESTION_TOKENS
    assert quarter.entry_bytes < 0.3 * full.entry_bytes
    disk = full.tiers["disk"]
    assert disk.speedup.median == pytest.approx(found.again_s.median / disk.first_s.median)
    assert found.alone.first_s.median < found.again_s.median


def test_a_store_keeps_what_was_there_before_the_first_tokens_and_nothing_else(subject, tmp_path):
    with closing(open_store(f"disk://{tmp_path}/home")) as home:
        document = subject.tokens(400, seed=2)
        before = home.put(subject.engine.compress(document, policy="keydiff", compression_ratio=0.75), name="mine")
        first_tokens(subject, {"disk": home, "again": home}, 400, 1, [("full", 0.0), ("keydiff", 0.75)])
        assert list(home.manifests()) == [before]


def test_nothing_stays_in_a_store_when_the_next_one_fails(subject, tmp_path):
    with closing(open_store(f"disk://{tmp_path}/home")) as home, closing(open_store(f"disk://{tmp_path}/gone")) as gone:
        shutil.rmtree(tmp_path / "gone")
        with pytest.raises(StoreUnavailable, match="gone"):
            first_tokens(subject, {"disk": home, "gone": gone}, 400, 1, [("full", 0.0)])
        assert home.usage().caches == 0


def test_the_plain_file_answers_as_the_shelf_does(subject, tmp_path, monkeypatch):
    """The plain file holds the same entries: the model's own attention chooses the same first token."""
    monkeypatch.setitem(subject.engine.passes.__dict__, "program", None)  # its modules run, whose hooks are called
    cache = subject.engine.compress(subject.tokens(300, seed=0), policy="keydiff", compression_ratio=0.5)
    question = subject.tokens(QUESTION_TOKENS, seed=1)
    ways = dict(ways_to_ask(subject, cache, {}, tmp_path / "cache.safetensors", question, ExitStack()))
    chosen = []
    handle = subject.engine.model.register_forward_hook(lambda *call: chosen.append(call[2].logits[0, -1].argmax()))
    for ask in ways.values():
        ask()
    handle.remove()
    assert list(ways) == ["memory", "safetensors"]
    assert chosen[0] == chosen[1]


def test_every_answer_has_as_many_tokens_as_it_is_asked_for(subject, monkeypatch):
    """The tokens of an answer become end tokens, and still every answer has its full length."""
    cache = subject.engine.compress(subject.tokens(200, seed=0))
    model = subject.engine.model
    said = subject.engine.answer(cache, decode.question(subject, 0), max_new_tokens=4).token_ids
    for config in (model.generation_config, model.config):
        monkeypatch.setattr(config, "eos_token_id", said)
    with endless_answers(subject.engine):
        assert decode.one_at_a_time(subject, [cache, cache], 16).tokens == 32
    assert model.generation_config.eos_token_id == said
    assert decode.one_at_a_time(subject, [cache], 16).tokens == 1


def test_a_step_reads_weights_once_each_document_once_and_every_suffix(subject):
    cache = subject.engine.compress(subject.tokens(200, seed=0))
    weights = sum(p.nbytes for p in subject.engine.model.parameters())  # the embedding is the head: read in full
    per_token = 4 * 2 * 2 * 64 * 4  # layers, keys and values, KV heads, channels, bytes
    mean_suffix = QUESTION_TOKENS + decode.NEW_TOKENS // 2
    assert decode.step_bytes(subject, [cache], 3) == weights + cache.nbytes + 3 * mean_suffix * per_token
    assert decode.step_bytes(subject, [cache] * 3, 3) == weights + 3 * cache.nbytes + 3 * mean_suffix * per_token


@pytest.mark.slow
def test_decoding_is_measured_on_different_documents_and_on_one(subject):
    found = decode.decodings(subject, [1, 3], rounds=1, lengths=[128], answers=[8])
    assert [(row.questions, row.documents) for row in found.rows] == [(1, 1), (3, 3), (3, 1)]
    assert all(row.together.median > 0 and row.gain.median > 0 for row in found.rows)
    assert found.rows[1].step_bytes > found.rows[2].step_bytes
    assert found.read_bandwidth > 1e8
    rows = [Row.parse("full"), Row.parse("streaming_llm@32")]
    found = decode.decodings(subject, [2], rounds=1, rows=rows, lengths=[128, 256], answers=[2, 4])
    told = [(row.document_tokens, row.way, row.new_tokens, row.documents) for row in found.rows]
    assert told == list(product((128, 256), (row.label for row in rows), (2, 4), (2, 1)))
    assert len(decode_table(found).rows) == 16
    assert found.rows[4].held_bytes == found.rows[0].held_bytes / 4
    with pytest.raises(InvalidRequest, match="an answer of 20000"):
        decode.decodings(subject, [1], rounds=1, answers=[8, 20_000])


def test_a_random_model_is_the_same_every_time(tmp_path):
    for name in ("first", "second"):
        torch.rand(1)  # whatever was drawn before
        save_random_model(tmp_path / name, 2)
    first, second = (load_random_model(tmp_path / name, torch.device("cpu"), "auto") for name in ("first", "second"))
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    assert len(first.base_model.layers) == 2
    with load_subject(EngineOptions("random:2", "cpu", "bfloat16", 0)) as loaded:
        assert loaded.dtype == "bfloat16"
        assert torch.equal(loaded.engine.model.state_dict()["lm_head.weight"], first.lm_head.weight.bfloat16())
        assert compress(loaded, loaded.tokens(64, seed=0), "knorm", 0.5).hook_s > 0


@pytest.fixture(scope="module")
def random_subject():
    with load_subject(EngineOptions("random:2", "cpu", "float32", 0)) as loaded:
        yield loaded


def codec_rows(costs):
    return {(row.codec, row.threads): row for row in costs.rows}


@pytest.mark.slow
def test_a_random_model_has_a_row_for_each_codec_and_number_of_threads(random_subject, tmp_path):
    threads = torch.get_num_threads()
    with closing(open_store(f"disk://{tmp_path}/home")) as home:
        costs = codec_costs(random_subject, home, 400, 1)
        assert sorted(manifest.codec for manifest in home.manifests()) == ["int4", "klt", "none"]
    assert torch.get_num_threads() == threads
    assert (costs.document, costs.tokens, costs.symbols_per_token) == ("random token ids", 400, 2 * 2 * 2 * 64)
    rows = codec_rows(costs)
    assert list(rows) == [(codec, n) for codec in ("none", "int8", "int4", "lossless", "klt", "zstd") for n in (1, 2)]
    sizes = [rows[codec, 1].bytes_per_token for codec in ("none", "int8", "int4", "klt")]
    assert sizes == sorted(sizes, reverse=True)
    for row in costs.rows:
        assert row.smaller == pytest.approx(2 * costs.symbols_per_token / row.bytes_per_token)
        assert (row.encode_mb_s is None) == (row.decode_mb_s is None) == (row.codec == "none")
        assert (row.of_prefill is None) == (row.codec == "none" or row.threads == 2)
        assert (row.first_s is None) == (row.over_int4 is None) == (row.codec in ("int8", "lossless", "zstd"))
        assert (row.symbols_s is None) == (row.decoding is None) == (row.codec != "klt")
    assert 0.5 < rows["none", 1].smaller + rows["none", 2].smaller < 1.0  # fp32, and a header


@pytest.mark.slow
def test_the_figures_of_a_codec_fit_together(random_subject, tmp_path):
    with closing(open_store(f"disk://{tmp_path}/home")) as home:
        costs = codec_costs(random_subject, home, 400, 1)
    for threads in (1, 2):
        klt, int4 = (codec_rows(costs)[codec, threads] for codec in ("klt", "int4"))
        decode_s = costs.symbols_per_token * costs.tokens / klt.symbols_s.median
        assert klt.decode_mb_s.median * 1e6 * decode_s == pytest.approx(2 * costs.symbols_per_token * costs.tokens)
        assert klt.over_int4.median == pytest.approx(klt.first_s.median / int4.first_s.median)
        assert klt.decoding.median == pytest.approx(decode_s / klt.first_s.median)
        assert klt.decoding.median > 0


@pytest.mark.parametrize("threads", [1, 2])
def test_what_is_decoded_is_what_the_engine_decodes(subject, threads):
    engine = subject.engine
    cache = engine.compress(subject.tokens(300, seed=0), policy="full")
    ways = codec_ways(engine, cache)
    torch.set_num_threads(threads)
    for codec in ("int8", "int4", "klt"):
        assert ways[codec].nbytes == len(engine.encoded(cache, codec).to_bytes())
        layers = engine.coders.decoded(ways[codec].encode()).layers
        parts = [part for layer in layers for part in getattr(layer, "parts", (layer,))]
        whole = [plain(rows) for part in parts for rows in part.rows]
        assert all(torch.equal(*pair) for pair in zip(ways[codec].decode(), whole, strict=True))
    frames, numbers = ways["zstd"].encode(), ways["zstd"].decode()
    assert ways["zstd"].nbytes == sum(map(len, frames)) < sum(map(len, numbers))
    rows = [rows for layer in cache.layers for rows in layer.rows]
    assert numbers == [each.bfloat16().view(torch.uint8).numpy().tobytes() for each in rows]


def test_a_model_without_transforms_is_measured_without_klt(tmp_path):
    save_random_model(tmp_path / "model", 1)
    engine = Engine(load_random_model(tmp_path / "model", torch.device("cpu"), "bfloat16"), name="mine")
    with closing(open_store(f"disk://{tmp_path}/home")) as home:
        costs = codec_costs(Subject(engine, str(tmp_path / "model")), home, 300, 1)
    assert {row.codec for row in costs.rows} == {"none", "int8", "int4", "lossless", "zstd"}
    assert 0.9 < codec_rows(costs)["none", 1].smaller < 1  # bf16, and a header
    assert "klt: not measured" in codecs_table(costs).caption


@pytest.mark.parametrize(
    ("name", "layers"), [("random:8", 8), ("kvshelf-tiny", None), ("random", None), ("random:", None)]
)
def test_the_name_of_a_random_model_says_its_layers(name, layers):
    assert random_layers(name) == layers


@pytest.mark.parametrize("name", ["random:0", "random:1000"])
def test_a_random_model_of_an_odd_size_is_refused(name):
    with pytest.raises(InvalidRequest, match="1 to 64"):
        random_layers(name)


@pytest.mark.slow
def test_speed_command(tmp_path):
    report = tmp_path / "speed.json"
    arguments = ["speed", "--parts", "compression,first-token", "--lengths", "256,384", "--policies", "snapkv,lagkv"]
    result = CliRunner().invoke(app, [*arguments, "--rounds", "1", "--output", str(report)])
    assert result.exit_code == 0, result.output
    assert "redis: not measured" in result.output
    found = json.loads(report.read_text())
    assert [[row["policy"] for row in length["rows"]] for length in found["compression"]] == [["snapkv", "lagkv"]] * 2
    assert [length["tokens"] for length in found["first_token"]] == [256, 384]
    assert "decode" not in found


@pytest.mark.slow
def test_serving_command(tmp_path):
    report = tmp_path / "speed.json"
    arguments = ["speed", "--parts", "serving", "--lengths", "256", "--rounds", "1", "--budget", "60"]
    result = CliRunner().invoke(app, [*arguments, "--weights", "int8", "--output", str(report)])
    assert result.exit_code == 0, result.output
    assert "256 tokens prefilled: transformers" in result.stderr  # told before the table
    assert "not measured: vLLM" in result.output
    found = json.loads(report.read_text())
    assert found["weights"] == "int8"
    assert len(found["serving"]["rows"]) == 4


@pytest.mark.slow
def test_codecs_command(tmp_path):
    """kvshelf-tiny brings its transforms, and its document is text: smaller than random ids under klt."""
    report = tmp_path / "speed.json"
    arguments = ["speed", "--parts", "codecs", "--lengths", "1024", "--rounds", "1", "--output", str(report)]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    (costs,) = json.loads(report.read_text())["codecs"]
    assert costs["document"] == "prose with 16 facts"
    assert 900 < costs["tokens"] <= 1024
    klt = next(row for row in costs["rows"] if row["codec"] == "klt")
    assert klt["smaller"] > 14
    assert klt["symbols_s"]["median"] > 0


@pytest.mark.slow
def test_stores_of_one_scheme_are_told_apart_without_their_urls(tmp_path):
    with ValkeyServer(tmp_path, requirepass="secret") as server:
        stores = ["--store", server.url + PATIENT, "--store", f"{server.url}{PATIENT}&prefix=b"]
        arguments = ["speed", "--parts", "first-token", "--lengths", "256", "--rounds", "1", *stores]
        table = CliRunner().invoke(app, [*arguments, "--output", str(tmp_path / "speed.json")])
        assert table.exit_code == 0, table.output
        report = (tmp_path / "speed.json").read_text()
        for prefix in ("kvshelf", "b"):
            with closing(open_store(f"{server.url}{PATIENT}&prefix={prefix}")) as store:
                assert store.usage().caches == 0
    assert "secret" not in report + table.output
    ((row, *_),) = (found["rows"] for found in json.loads(report)["first_token"])
    assert list(row["tiers"]) == ["memory", "disk", "redis", "redis-2", "safetensors"]


@pytest.mark.slow
@pytest.mark.skipif(not shares_models(), reason="sharing a model among processes needs a newer transformers")
def test_ranks_take_turns_with_one_process(tmp_path):
    report = tmp_path / "speed.json"
    arguments = ["speed", "--parts", "ranks", "--model", "random:1", "--threads", "2", "--lengths", "128"]
    result = CliRunner().invoke(app, [*arguments, "--rounds", "1", "--output", str(report)])
    assert result.exit_code == 0, result.output
    (row,) = json.loads(report.read_text())["ranks"]
    assert (row["tokens"], row["ranks"]) == (128, 2)
    assert [len(row["held_bytes"][way]) for way in ("one", "shared")] == [1, 2]
    assert row["prefill"]["low"] <= row["prefill"]["median"] <= row["prefill"]["high"]
    assert min(row["answers_s"]["shared"].values()) > 0


def test_bounded_answers_stand_beside_the_whole_one(subject):
    whole, window, h2o = bounded_answers(subject, tokens=80, budget=48, policies=("window", "h2o"))
    assert (whole.policy, whole.stored, whole.behind, whole.equal) == (None, QUESTION_TOKENS + 79, 1.0, 1.0)
    assert whole.bytes == 128 * subject.engine.kv_bytes_per_token
    for row in (window, h2o):
        assert 48 <= row.stored <= 80
        assert row.bytes == 128 * subject.engine.kv_bytes_per_token  # 64 and then 80, in steps of 64
        assert 0 < row.equal <= 1
        assert 0 < row.behind <= 1
        assert row.token_s > 0
    assert "window" in [*suffix_table([whole, window]).columns[0].cells]


@pytest.mark.parametrize("arguments", [["--parts", "cooking"], ["--questions", "many"], ["--lengths", "long"]])
def test_bad_choices_are_refused(arguments):
    assert CliRunner().invoke(app, ["speed", *arguments]).exit_code == 2


@pytest.mark.parametrize(("option", "text"), [("--questions", "0"), ("--lengths", "0,512"), ("--answer-tokens", "1,8")])
def test_a_bench_of_nothing_is_refused(option, text):
    result = CliRunner().invoke(app, ["speed", option, text])
    assert isinstance(result.exception, InvalidRequest), result.output
    assert f"{option} {text}" in str(result.exception)
