"""What a replica plans to hold, beside what it holds; and what becomes of work that finds no memory."""

from __future__ import annotations

import re
import subprocess
import sys
import weakref
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs
from transformers import LlamaConfig, LlamaForCausalLM, Phi3Config, Phi3ForCausalLM, Qwen2Config, Qwen2ForCausalLM

from kvshelf.api import AppendCache, CreateCache
from kvshelf.engine.decode.generation import Sampling
from kvshelf.engine.engine import Engine
from kvshelf.engine.inputs.job import Job
from kvshelf.engine.progress import Checkpoint
from kvshelf.errors import DocumentTooLong, InternalError, OutOfMemory
from kvshelf.kernels.rowwise import available
from kvshelf.kernels.staging import BUFFER_BYTES
from kvshelf.methods.policies import POLICIES
from kvshelf.methods.policies.gate_file import gate_path
from kvshelf.methods.policies.partitions import PartitionPolicy
from kvshelf.model.prepacking import prepack
from kvshelf.samples.tasks import make_document
from kvshelf.store.disk import DiskStore
from kvshelf.workers.replica.api import Created
from kvshelf.workers.replica.calls import Caller, named_errors
from kvshelf.workers.replica.create.auto import auto
from kvshelf.workers.replica.create.plan import LEAST_TOKENS, MemoryPlan, machine_bytes, token_bytes
from kvshelf.workers.replica.create.spec import Levels
from kvshelf.workers.replica.replica import Replica
from kvshelf.workers.replica.scheduler import Scheduler
from kvshelf.workers.replica.ticket import out_of_memory
from kvshelf_bench.measure import allocated_peak
from tests.amounts import few, in_turn
from tests.engine.inputs.test_protect import CHUNKED
from tests.images import OLDER, save_image_model
from tests.methods.policies.gates import GATED, random_gates

ROOT = Path(__file__).resolve().parents[4]
CPU = torch.device("cpu")
DEFAULT = Caller("default")
WAIT_S = 60.0
FAMILIES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "llama": (LlamaConfig, LlamaForCausalLM, {}),
    "wide": (LlamaConfig, LlamaForCausalLM, {"intermediate_size": 192}),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {"num_key_value_heads": 2}),
    "phi3": (Phi3Config, Phi3ForCausalLM, {"pad_token_id": None}),
}


def engine_of(family: str, *, recorded: bool) -> Engine:
    """A small random model, by its own modules as on a card, or by its program."""
    config, kind, more = FAMILIES[family]
    sizes = {
        "vocab_size": 500, "hidden_size": 192, "intermediate_size": 576, "num_hidden_layers": 3,
        "num_attention_heads": 6, "num_key_value_heads": 3, "max_position_embeddings": 16384,
        "eos_token_id": None, "bos_token_id": None,
    }  # fmt: skip
    torch.manual_seed(0)
    model = kind(config(**{**sizes, **more})).eval().requires_grad_(False)
    if recorded:
        prepack(model)
    return Engine(model, name=family)


def plan_of(engine: Engine, **limits: Any) -> MemoryPlan:
    return MemoryPlan.of(engine.model, engine.name, CPU, **limits).loaded(engine)


@in_turn({"family": FAMILIES, "recorded": [False, True]})
def test_what_a_prefill_is_planned_to_hold_is_what_it_holds(family: str, recorded: bool) -> None:
    engine = engine_of(family, recorded=recorded)
    if recorded and engine.passes.program is None:
        pytest.skip("no program without compiled kernels")
    plan = plan_of(engine)
    engine.compress(list(range(2, 300)), policy="full")  # the first pass of a process makes what stays
    for tokens in (2048, 6144):
        job = engine.prepare([number % 500 for number in range(tokens)], policy="full")
        _, most = allocated_peak(CPU, lambda job=job: engine.run(job))  # type: ignore[misc]
        assert plan.prefill_bytes(tokens) == pytest.approx(most, rel=0.15)


@pytest.mark.parametrize("name", few(1, CHUNKED))
def test_what_a_prefill_in_chunks_is_planned_to_hold_is_what_it_holds(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Small chunks behind much that stays, too: `attention_gate` and shared budgets are counted for more."""
    monkeypatch.setenv("KVSHELF_GATES", str(tmp_path))
    engine = engine_of("llama", recorded=False)
    if name in GATED:
        gates = random_gates(name, engine.preparer.geometry, weights=engine.identity.weights)
        gate_path(engine.identity.weights, name).write_bytes(gates.to_bytes())
    plan = plan_of(engine)
    engine.compress(list(range(2, 300)), policy="full")
    for budget, chunk in ((400, 256), (1500, 128)):
        blocks = {"lag": chunk // 2} if issubclass(POLICIES[name], PartitionPolicy) else {"chunk": chunk}
        options: dict[str, Any] = {"policy_params": {"prefill": "chunked", **blocks}, "budget_tokens": budget}
        job = engine.prepare([number % 500 for number in range(3000)], policy=name, **options)
        _, most = allocated_peak(CPU, lambda job=job: engine.run(job))  # type: ignore[misc]
        work = Levels((engine.compressor.level(job),), False)
        exact = replace(plan, there=plan.beside + plan.weights + int(0.85 * most))
        with pytest.raises(DocumentTooLong):
            exact.require_room(engine, work)
        replace(exact, there=plan.beside + plan.weights + int(1.3 * most)).require_room(engine, work)


READ_ON = {"policy": "make_each_token_count", "budget_tokens": 1500}
"""A policy that goes on reading in chunks behind its own caches."""


def in_chunks(chunk: int) -> dict[str, Any]:
    return {"policy_params": {"prefill": "chunked", "chunk": chunk, "keep_scores": True}}


@pytest.mark.slow
@in_turn({"codec": ["none", "int8", "klt"], "chunk": [128, 1024]})
def test_what_is_appended_in_chunks_is_planned_to_hold_what_it_holds(codec: str, chunk: int, tiny: Engine) -> None:
    """With the cache before it, which was read for it, but not with that and what follows joined."""
    plan = plan_of(tiny)
    parent = tiny.encoded(tiny.run(tiny.prepare(ids(3000), **READ_ON, **in_chunks(chunk))).cache, codec)
    job = tiny.prepare_append(parent, ids(2000), **READ_ON, **in_chunks(chunk))
    assert job.absorber is not None
    _, most = allocated_peak(CPU, lambda: tiny.run(job))
    most, work = most + parent.nbytes, Levels((tiny.compressor.level(job),), False)
    with pytest.raises(DocumentTooLong):
        replace(plan, there=plan.beside + plan.weights + int(0.85 * most)).require_room(tiny, work)
    replace(plan, there=plan.beside + plan.weights + int(1.15 * most)).require_room(tiny, work)


def limited(engine: Engine, tokens: int) -> MemoryPlan:
    """A plan with room for one document of so many tokens, and no more."""
    plan = plan_of(engine, attached=1 << 20, suffixes=1 << 20)
    return replace(plan, there=plan.beside + plan.weights + (2 << 20) + plan.prefill_bytes(tokens))


def test_the_plan_of_a_card_says_what_stays_pinned_of_the_host(tiny: Engine) -> None:
    plan = plan_of(tiny)
    assert (plan.pinned, "pinned" in str(plan)) == (0, False)
    on_a_card = replace(plan, shape=replace(plan.shape, device="cuda"))
    assert f"of the host {4 * BUFFER_BYTES:,} pinned for copies" in str(on_a_card)


def test_what_decodes_klt_on_a_card_has_its_part(tiny: Engine) -> None:
    """The transforms of four layers' keys and values of 2 heads of 32 channels, and codes in fp32 of 1,024 tokens."""
    plan = limited(tiny, 2000)
    shape = plan.shape
    assert plan.decoding == 0
    on_a_card = replace(plan, shape=replace(shape, device="cuda"))
    codes = plan.wanted * shape.layers * shape.kv_heads * sum(shape.dims) * 4
    assert codes * 1.5 < on_a_card.decoding < codes * 2.5 + (4 << 20)
    assert on_a_card.parts["decoding klt"] == on_a_card.decoding
    assert on_a_card.longest < plan.longest
    large = replace(shape, layers=32, kv_heads=32, head_dim=128, value_dim=128, device="cuda")
    assert replace(plan, shape=large, wanted=65536).decoding == (1 << 31) * 7 // 2


@pytest.mark.skipif(OLDER, reason="it needs torchvision")
def test_the_vision_tower_of_a_model_is_among_its_weights(tmp_path: Path) -> None:
    save_image_model(tmp_path)
    engine = Engine.load(str(tmp_path), device="cpu", dtype="float32")
    images = engine.facts.images
    assert images is not None
    assert images.nbytes > 0
    alone = sum(tensor.nbytes for tensor in (*engine.model.parameters(), *engine.model.buffers()))
    assert plan_of(engine).weights == alone + images.nbytes


def test_recorded_decode_steps_have_their_part(tiny: Engine) -> None:
    limited(tiny, LEAST_TOKENS).require()
    with pytest.raises(OutOfMemory, match="recorded decode steps 1,000,"):
        replace(limited(tiny, LEAST_TOKENS), recorded=1000).require()
    assert replace(limited(tiny, 2000), recorded=1000).longest < 2000
    assert plan_of(tiny, answers=64).recorded == 0  # a CPU records none


def test_a_plan_names_what_does_not_fit(tiny: Engine) -> None:
    plan = limited(tiny, LEAST_TOKENS - 1)
    with pytest.raises(OutOfMemory, match=r"'kvshelf-tiny' does not fit on cpu: it needs .*weights.*KVSHELF_GPU") as no:
        plan.require()
    assert no.value.is_final
    assert no.value.details == {"fits": False, "needed_bytes": sum(plan.parts.values()), "there_bytes": plan.there}
    assert plan.longest == LEAST_TOKENS - 1
    unlimited = plan_of(tiny, attached=1 << 50)
    unlimited.require()
    assert (unlimited.room, unlimited.longest) == (None, tiny.max_tokens)


def test_the_longest_document_is_the_last_that_fits(tiny: Engine) -> None:
    short = plan_of(tiny, longest=300)
    assert (short.wanted, short.max_tokens) == (300, 300)
    plan = limited(tiny, 3000)
    plan.require()
    assert plan.longest == 3000
    assert plan.prefill_bytes(3000) <= (plan.room or 0) < plan.prefill_bytes(3001)
    assert "the longest document that fits in one pass has 3,000 tokens" in str(plan)


def test_numbers_for_answers_count(tiny: Engine) -> None:
    """4 bytes each: `ems` has two of each entry."""
    plan, needed = limited(tiny, LEAST_TOKENS), []
    for more in ({}, {"keep_scores": True}):
        job = tiny.prepare(ids(16_000), policy="ems", budget_tokens=500, policy_params={"merge": False, **more})
        with pytest.raises(DocumentTooLong) as refused:
            plan.require_room(tiny, Levels((tiny.compressor.level(job),), False))
        needed.append(refused.value.details["needed_bytes"])
    assert needed[1] - needed[0] == 2 * 4 * 500 * plan.shape.layers * plan.shape.kv_heads


def test_a_plan_needs_no_weights(tiny: Engine) -> None:
    """Before they are read it counts more for a pass: that may turn out to run by a program."""
    limits = {"attached": 1 << 20, "suffixes": 1 << 20}
    before = MemoryPlan.of_name("kvshelf-tiny", "t", device="cpu", dtype="float32", memory=0.5, **limits)  # type: ignore[arg-type]
    after = before.loaded(tiny)
    assert before.there == machine_bytes() // 2
    assert before.shape == after.shape
    assert before.token_bytes >= after.token_bytes


@pytest.mark.skipif(not available(), reason="int8 is multiplied by compiled kernels")
def test_weights_in_int8_are_planned_as_they_are_held() -> None:
    before = MemoryPlan.of_name("kvshelf-tiny", "t", device="cpu", dtype="auto", rounded=True)
    assert before.weights == before.loaded(Engine.load("kvshelf-tiny", device="cpu", weights="int8")).weights


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_layers_are_planned_as_plain_ones(family: str) -> None:
    """Their passes by modules, as where no program fits, hold the same."""
    plain, packed = engine_of(family, recorded=False), engine_of(family, recorded=True)
    assert token_bytes(packed.model) == token_bytes(plain.model)
    assert token_bytes(packed.model, recorded=True) == token_bytes(plain.model, recorded=True)


def ids(tokens: int) -> list[int]:
    return [7 + number % 90 for number in range(tokens)]


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
async def replica(tiny: Engine, tmp_path: Path) -> AsyncIterator[Replica]:
    shelf = DiskStore.open(tmp_path / "home")
    replica = Replica(tiny, shelf, Scheduler(tiny), quality=False)
    replica.creations.plan = limited(tiny, 3000)
    replica.start()
    yield replica
    replica.stop()


async def create(replica: Replica, tokens: int, **fields: Any) -> Created:
    return await replica.create(CreateCache(token_ids=ids(tokens), **fields), caller=DEFAULT)


@pytest.mark.anyio
async def test_a_document_that_has_no_room_is_refused_before_any_work(replica: Replica) -> None:
    with pytest.raises(
        DocumentTooLong, match=r"3,200 tokens needs .*3,000 tokens under policy full.*prefill=chunked"
    ) as refused:
        await create(replica, 3200, policy="full")
    assert refused.value.is_final
    assert refused.value.details["needed_bytes"] > refused.value.details["there_bytes"]
    assert replica.store.list().data == ()
    assert replica.scheduler.idle
    kept = await create(replica, 3000, policy="full")
    assert kept.manifest.num_tokens == 3000


@pytest.mark.anyio
async def test_what_needs_less_room_is_taken(replica: Replica) -> None:
    """Chunk by chunk, and with most of each layer removed; two levels and the cues of quality need more."""
    chunked = {"policy": "lagkv", "policy_params": {"prefill": "chunked"}, "compression_ratio": 0.75}
    assert (await create(replica, 6000, **chunked)).manifest.num_tokens == 6000
    assert (await create(replica, 3200, policy="streaming_llm", compression_ratio=0.9)).manifest.num_tokens == 3200
    with pytest.raises(DocumentTooLong):
        await create(replica, 2900, policy="knorm", compression_ratio=0.01, quality="full")
    with pytest.raises(DocumentTooLong):
        await create(replica, 2900, policy="knorm", levels=[0.01, 0.05])


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("policy", "params", "advice"),
    [
        ("d2o", {"prefill": "chunked", "chunk": 5000}, "lower chunk or what stays"),
        ("lagkv", {"prefill": "chunked", "lag": 2500}, "lower lag or what stays"),
        ("keydiff", {}, "read it in chunks (prefill=chunked)"),
        ("knorm", {}, "read it in chunks (policy lagkv with prefill=chunked)"),
    ],
)
async def test_a_refusal_advises_what_the_policy_can_do(
    policy: str, params: dict[str, Any], advice: str, replica: Replica
) -> None:
    with pytest.raises(DocumentTooLong, match=re.escape(f"remove more of it, {advice}, or give")):
        await create(replica, 8000, policy=policy, policy_params=params, compression_ratio=0.05)


@pytest.mark.anyio
async def test_a_coded_cache_that_is_appended_to_counts_as_attention_reads_it(replica: Replica) -> None:
    parent = await create(replica, 3000, policy="full", codec="klt")
    plan = replica.creations.plan
    assert plan is not None
    plain = plan.shape.held_bytes(3000, 3000)
    assert parent.manifest.bytes_stored < plain / 10
    tokens = next(n for n in range(3000) if plan.prefill_bytes(n) > plan.room - plain)  # type: ignore[operator]
    with pytest.raises(DocumentTooLong, match=f"document of {tokens:,} tokens needs"):
        await replica.append(parent.manifest.id, AppendCache(token_ids=ids(tokens), policy="full"), caller=DEFAULT)
    less = await replica.append(parent.manifest.id, AppendCache(token_ids=ids(tokens // 2)), caller=DEFAULT)
    assert less.manifest.num_tokens == 3000 + tokens // 2


@pytest.mark.anyio
async def test_what_is_appended_in_chunks_and_has_no_room_is_refused_before_any_work(replica: Replica) -> None:
    """More stays of both than there is room for; less has room, beside the cache before it, which counts once."""
    made = (await create(replica, 3000, **READ_ON, **in_chunks(256))).manifest
    plan = replica.creations.plan = limited(replica.engine, 1900)
    more = {"token_ids": ids(1000), **in_chunks(256)}
    with pytest.raises(DocumentTooLong, match=r"1,000 tokens needs .* lower chunk or what stays") as refused:
        await replica.append(made.id, AppendCache(**more, budget_tokens=2400), caller=DEFAULT)
    assert refused.value.details["needed_bytes"] > refused.value.details["there_bytes"] == plan.room
    assert [one.id for one in replica.store.list().data] == [made.id]
    assert replica.scheduler.idle
    taken = await replica.append(made.id, AppendCache(**more, budget_tokens=1500), caller=DEFAULT)
    assert (taken.manifest.num_tokens, taken.manifest.kept_tokens) == (4000, 1500)


@pytest.mark.slow
@pytest.mark.anyio
async def test_a_choice_leaves_out_what_has_no_room(replica: Replica) -> None:
    """Of policy auto the candidates that run the document twice; the others share one prefill and its entries."""
    text = make_document("multikey", "prose", 800, 1, replica.engine.text.count_tokens).text
    made = await replica.create(CreateCache(document=text, policy="auto", min_quality=1.0), caller=DEFAULT)
    reasons = {(one.policy, one.compression_ratio): one.reason or "" for one in made.manifest.tried}
    assert {policy for (policy, _), reason in reasons.items() if "under policy full" in reason} == {"kvcues"}
    choice = auto(replica.engine, ids(1000))
    assert len({id(level.job) for level in choice.levels if level.job.policy.name == "full"}) == 1
    assert replica.creations.plan is not None
    none = replace(replica.creations.plan, there=1)
    assert none.fitting(replica.engine, choice) is choice
    with pytest.raises(DocumentTooLong):
        none.require_room(replica.engine, choice)


@dataclass(frozen=True)
class Swelling:
    """Work that runs a prefill and, between two of its layers, asks the allocator for more than there is."""

    job: Job
    num_tokens: int = 1

    def run(self, engine: Engine, *, checkpoint: Checkpoint) -> Any:
        del checkpoint
        return engine.run(self.job, checkpoint=lambda: torch.empty(1 << 55))  # type: ignore[arg-type, return-value]


def test_a_prefill_without_memory_ends_alone(tiny: Engine) -> None:
    """An open answer goes on, what the prefill held is given back, and the next document is compressed."""
    scheduler, job = Scheduler(tiny), tiny.prepare(ids(2000), policy="full")
    cache = tiny.compress(ids(400), policy="full")
    alone = tiny.start(cache, [9, 9], Sampling(max_tokens=40))
    batch = tiny.batch()
    while not alone.finished:
        batch.step([alone])
    scheduler.start()
    try:
        answer = scheduler.generate(cache, [9, 9], Sampling(max_tokens=40))
        swelling = scheduler.compress(Swelling(job))
        error = swelling.future.exception(WAIT_S)
        assert isinstance(error, OutOfMemory)
        assert "DefaultCPUAllocator" in error.message
        assert answer.future.result(WAIT_S).token_ids == alone.answer().token_ids
        assert scheduler.compress(Levels((tiny.compressor.level(job),), False)).future.result(WAIT_S)
        assert isinstance(scheduler.pass_of(lambda: torch.empty(1 << 55)).future.exception(WAIT_S), OutOfMemory)
    finally:
        scheduler.stop()


def test_nothing_that_the_work_held_outlives_its_error() -> None:
    """Whoever keeps the error: its traceback has the frames, and they would have the tensors."""
    left = []

    def work() -> None:
        tensor = torch.empty(1000)
        left.append(weakref.ref(tensor))
        torch.empty(1 << 55)

    with pytest.raises(RuntimeError, match="DefaultCPUAllocator") as failed:
        work()
    assert left[0]() is not None
    assert isinstance(out_of_memory(failed.value), OutOfMemory)
    assert left[0]() is None
    for error in (MemoryError(), torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 TiB")):
        assert isinstance(out_of_memory(error), OutOfMemory)
    assert out_of_memory(RuntimeError("shapes differ")) is None
    assert not out_of_memory(MemoryError()).is_final  # type: ignore[union-attr]


def test_only_work_on_the_model_can_find_no_memory(tiny: Engine, caplog: pytest.LogCaptureFixture) -> None:
    """A wrong size anywhere else is a bug; of what runs out on the model the log says where."""
    with capture_logs() as lines:
        with pytest.raises(InternalError), named_errors():
            b"x" * (1 << 62)
        scheduler = Scheduler(tiny)
        scheduler.start()
        try:
            assert isinstance(scheduler.pass_of(lambda: b"x" * (1 << 62)).future.exception(WAIT_S), OutOfMemory)
        finally:
            scheduler.stop()
    assert [line["event"] for line in lines if line["exc_info"]] == ["a bug in a replica"]
    (record,) = (record for record in caplog.records if record.name == "kvshelf.workers")
    assert record.getMessage() == "work on the model found no memory"
    assert record.exc_info


LIMITED = """
import resource, sys, threading
import structlog
import torch
from kvshelf.engine.engine import Engine
from kvshelf.engine.decode.generation import Sampling
from kvshelf.errors import OutOfMemory
from kvshelf.workers.replica.create.spec import Levels
from kvshelf.workers.replica.scheduler import Scheduler

def size(name):
    return next(int(line.split()[1]) << 10 for line in open("/proc/self/status") if line.startswith(name))

structlog.configure([structlog.processors.format_exc_info, structlog.processors.JSONRenderer()])  # as a service's
torch.set_num_threads(1)
engine = Engine.load("kvshelf-tiny", device="cpu")
def work(tokens):
    return Levels((engine.compressor.level(engine.prepare([7 + n % 90 for n in range(tokens)], policy="full")),), False)
cache = engine.compress(list(range(7, 90)), policy="full")
scheduler = Scheduler(engine)
scheduler.start()
scheduler.compress(work(2000)).future.result(60)
resource.setrlimit(resource.RLIMIT_AS, (size("VmSize") + (48 << 20), resource.RLIM_INFINITY))
answer = scheduler.generate(cache, [9, 9], Sampling(max_tokens=200))
for _ in range(3):
    assert isinstance(scheduler.compress(work(16000)).future.exception(60), OutOfMemory)
assert len(answer.future.result(60).token_ids) == 200
assert scheduler.compress(work(2000)).future.result(60)
scheduler.stop()
"""


@pytest.mark.slow
def test_a_process_at_its_limit_goes_on() -> None:
    """A limit that the kernel enforces: long documents end with their error, an answer and a short one are made."""
    done = subprocess.run(
        [sys.executable, "-c", LIMITED], cwd=ROOT, capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]


def test_a_control_group_s_limit_is_the_machine_s(tmp_path: Path) -> None:
    own, inner = tmp_path / "cgroup", tmp_path / "system.slice" / "kvshelf.service"
    inner.mkdir(parents=True)
    (tmp_path / "memory").mkdir()
    own.write_text("0::/system.slice/kvshelf.service\n")
    everything = machine_bytes(tmp_path, tmp_path / "none")
    (inner / "memory.max").write_text("max\n")
    assert machine_bytes(tmp_path, own) == everything
    (inner.parent / "memory.max").write_text("1000000\n")
    assert machine_bytes(tmp_path, own) == 1_000_000
    (inner / "memory.max").write_text("2000000\n")
    assert machine_bytes(tmp_path, own) == 1_000_000
    own.write_text("4:freezer:/\n5:cpu,memory:/\n")
    (tmp_path / "memory" / "memory.limit_in_bytes").write_text("9223372036854771712\n")
    assert machine_bytes(tmp_path, own) == everything
    (tmp_path / "memory" / "memory.limit_in_bytes").write_text("3000000\n")
    assert machine_bytes(tmp_path, own) == 3_000_000
