"""What kvshelf-tiny and small random models keep and answer on this device, beside recorded results of a CPU.

`python scripts/gpu.py --record` records them. Kept positions may differ where two entries are as good as equal: such
ties are told. Where answers differ, the CPU of this machine is asked, too: other versions of torch or transformers can
make another random model, and that is no fault of the card.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import as_completed
from dataclasses import dataclass
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvshelf.artifact.cache import CompressedCache
from kvshelf.artifact.records import entries_of, parts_of
from kvshelf.engine.engine import Engine
from kvshelf.errors import InvalidRequest, PolicyUnsupported
from kvshelf.methods.policies.registry import POLICIES
from kvshelf.methods.selectors.registry import UNIT_SELECTORS
from kvshelf.methods.suffixes.registry import untrained
from kvshelf.samples.suite import make_case
from kvshelf_bench.engines import endless_answers
from kvshelf_bench.models.small import NotBuilt, small_model
from kvshelf_bench.quality.retrieval import EVALUATION_SEED, counter
from scripts.gpu_parts.part import Part

RECORDED = Path(__file__).with_name("answers.json")

_TOKENS, _NEW = 600, 12
_SUFFIX_BUDGET = 200
_CODECS = ("none", "int8", "int4", "int2", "mixed:share=0.5", "klt", "klt:heads=each")
_FAMILIES = ("gemma3_text", "llama4_text", "qwen3_next", "falcon_h1", "deepseek_v3", "gpt2")
"""Windows; chunks; recurrent states, alone and beside attention; latents; positions that are learned."""
_TOY_POLICIES = ("full", "keydiff", "snapkv", "h2o", "ems", "kvzip", "pyramidkv")

_TIE = 1e-4
"""Scores this near, of the layer's widest score, are a tie: sums in another order differ by a hundredth of it."""


@dataclass(frozen=True)
class Result:
    """Answers as token ids. kept: of each layer and head, the positions of its entries; None where not compared."""

    answers: list[list[int]]
    kept: list[list[list[int]]] | None = None

    def packed(self) -> dict[str, Any]:
        """As JSON: positions as one bit each."""
        if self.kept is None:
            return {"answers": self.answers}
        bits = [[_bits(head) for head in layer] for layer in self.kept]
        data = zlib.compress(json.dumps(bits).encode(), 9)
        return {"answers": self.answers, "kept": base64.b85encode(data).decode()}

    @classmethod
    def unpacked(cls, fields: dict[str, Any]) -> Result:
        if "kept" not in fields:
            return cls(fields["answers"])
        bits = json.loads(zlib.decompress(base64.b85decode(fields["kept"])))
        return cls(fields["answers"], [[_positions(head) for head in layer] for layer in bits])


Case = Callable[[], Result]


def measure(part: Part) -> None:
    """A row for each group of cases: how many differ from the recorded ones. Cases run side by side, as most of
    their time goes to compiling kernels."""
    device, differences = str(part.device), dict[str, list[Differences]]()
    names = [name for name, _ in cases(_engine("cpu"), torch.device("cpu"), toy=part.toy)]
    pool = part.workers()
    running = {pool.submit(compared, name, device, part.toy): name for name in names}
    try:
        for done in as_completed(running, timeout=max(1.0, part.left_s - 4)):
            name = running[done]
            with part.trying(name):
                differences.setdefault(name.partition(" ")[0], []).append(done.result())
    except TimeoutError:
        left = [name for future, name in running.items() if not future.done()]
        part.row("cases without time", len(left), at_most=0, note=", ".join(left)[:400])
    for group, cases_of in differences.items():
        wrong, ties, notes = (
            [message for messages in of for message in messages] for of in zip(*cases_of, strict=True)
        )
        lines = [f"{len(cases_of)} cases", *notes, *wrong[:8], *(f"tie: {tie}" for tie in ties[:8])]
        part.row(f"{group}: other than on a CPU", len(wrong), at_most=0, note="; ".join(lines))
    pool.shutdown(wait=False, cancel_futures=True)


class Differences(NamedTuple):
    """What a case showed: what is wrong, what are ties, and what else is to be said."""

    wrong: list[str]
    ties: list[str]
    notes: list[str]


def compared(name: str, device: str, toy: bool) -> Differences:
    """One case on the device beside its record, in this process."""
    torch.set_num_threads(1)
    engine = _engine(device)
    try:
        result = dict(cases(engine, torch.device(device), toy=toy))[name]()
    except (NotBuilt, PolicyUnsupported) as reason:
        if not name.startswith("random "):
            raise
        return Differences([], [], [f"{name}: not with this transformers: {reason}"])
    recorded = Result.unpacked(json.loads(RECORDED.read_text())[name])
    ties, wrong = _compared(engine, name, result, recorded)
    if not wrong:
        return Differences([], ties, [])
    here = dict(cases(_engine("cpu"), torch.device("cpu"), toy=toy))[name]()
    ties_here, wrong_here = _compared(engine, name, result, here)
    if wrong_here:
        return Differences(wrong, ties, [])
    return Differences([], ties_here, [f"{name}: as this machine's CPU, which differs from the recorded one"])


@cache
def _engine(device: str) -> Engine:
    """kvshelf-tiny, once in each process."""
    return Engine.load("kvshelf-tiny", device=device, dtype="float32")


def cases(engine: Engine, device: torch.device, *, toy: bool = False) -> Iterator[tuple[str, Case]]:
    """The name of each case, whose first word is its group, and what runs it."""
    text, question = document(engine, _TOKENS, 0)
    for policy in _TOY_POLICIES if toy else POLICIES:
        yield f"policy {policy}", partial(_policy, engine, text, question, policy)
    for codec in _CODECS:
        yield f"codec {codec}", partial(_codec, engine, text, question, codec)
    for selector in ("quest", "mpcache") if toy else UNIT_SELECTORS:
        yield f"selector {selector}", partial(_selector, engine, text, question, selector)
    for suffix in ("window", "h2o") if toy else untrained():
        yield f"suffix {suffix}", partial(_suffix, engine, text, question, suffix)
    yield "joint documents", partial(_joint, engine)
    yield "joint batch", partial(_batch, engine)
    yield "append", partial(_append, engine, text, question)
    yield "chunked lagkv", partial(_policy, engine, text, question, "lagkv", prefill="chunked")
    for family in _FAMILIES[:3] if toy else _FAMILIES:
        for policy in ("full", "keydiff"):
            yield f"random {family}, {policy}", partial(_random, family, policy, device)


def document(engine: Engine, tokens: int, number: int) -> tuple[str, str]:
    """A text with facts, and a question about one of them."""
    case = make_case("multikey", "prose", tokens, EVALUATION_SEED + number, counter(engine))
    return case.text, case.asks[0].text


def _policy(engine: Engine, text: str, question: str, policy: str, **params: Any) -> Result:
    ratio = 0.5 if POLICIES[policy].takes_budget else None
    cache = engine.compress(text, policy=policy, compression_ratio=ratio, **params)
    return Result([_answer(engine, cache, question)], _kept(cache))


def _codec(engine: Engine, text: str, question: str, codec: str) -> Result:
    cache = engine.encoded(engine.compress(text, policy="keydiff", compression_ratio=0.5), codec)
    read = CompressedCache.from_bytes(cache.to_bytes())
    return Result([_answer(engine, stored, question) for stored in (cache, read)])


def _selector(engine: Engine, text: str, question: str, selector: str) -> Result:
    policy = selector if selector in ("infllm", "mpcache") else "full"
    cache = engine.compress(text, policy=policy)
    options = {"select": selector, "select_tokens": 400 if selector == "infllm" else 160, "max_new_tokens": _NEW}
    answers = [engine.answer(stored, question, **options) for stored in (cache, engine.encoded(cache, "int4"))]
    return Result([list(answer.token_ids) for answer in answers])


def _suffix(engine: Engine, text: str, question: str, suffix: str) -> Result:
    cache = engine.compress(text, policy="full")
    options = {"policy": suffix, "budget": _SUFFIX_BUDGET}
    with endless_answers(engine):
        answer = engine.answer(cache, question, max_new_tokens=_SUFFIX_BUDGET + 48, suffix=options)
    return Result([list(answer.token_ids)])


def _joint(engine: Engine) -> Result:
    texts = [document(engine, 300, number) for number in (1, 2)]
    caches = [engine.compress(text, policy="full") for text, _ in texts]
    return Result([list(engine.answer(caches, question, max_new_tokens=_NEW).token_ids) for _, question in texts])


def _batch(engine: Engine) -> Result:
    """Questions of several lengths on shared and own documents, one of them merged, in one batch."""
    texts = [document(engine, 300, number) for number in (1, 2, 3)]
    caches = [
        engine.compress(text, policy=policy)
        for (text, _), policy in zip(texts, ("full", "keydiff", "ems"), strict=True)
    ]
    asks = [
        (cache, text)
        for cache, (_, question) in zip(caches, texts, strict=True)
        for text in (question, f"Please tell: {question}")
    ]
    return Result([list(answer.token_ids) for answer in engine.answer_all(asks, max_new_tokens=_NEW)])


def _append(engine: Engine, text: str, question: str) -> Result:
    more, other = document(engine, 300, 4)
    cache = engine.extend(engine.compress(text, policy="keydiff", compression_ratio=0.5), more)
    return Result([_answer(engine, cache, question) for question in (question, other)])


def _random(family: str, policy: str, device: torch.device) -> Result:
    """A small random model, its weights by their names, so that no version of transformers makes others."""
    model = small_model(family)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            spread = 0.05 if parameter.dim() > 1 else 0.02
            parameter.copy_(float(parameter.dim() == 1) + spread * torch.randn(parameter.shape, generator=generator))
    engine = Engine(model.to(device), name=family)
    ids = torch.randint(3, model.config.vocab_size, (180,), generator=torch.Generator().manual_seed(1)).tolist()
    cache = engine.compress(ids, policy=policy, **({} if policy == "full" else {"compression_ratio": 0.5}))
    return Result([_answer(engine, cache, ids[:9]), _answer(engine, cache, ids[40:41])], _kept(cache))


def _answer(engine: Engine, cache: CompressedCache, question: Any) -> list[int]:
    return list(engine.answer(cache, question, max_new_tokens=_NEW).token_ids)


def _kept(cache: CompressedCache) -> list[list[list[int]]]:
    """Of each layer with entries, the positions of each head; those of all its parts together."""
    kept = []
    for layer in cache.layers:
        entries = entries_of(layer)
        if entries is None:
            continue
        heads: list[list[int]] = [[] for _ in range(entries.kv_heads)]
        for part in parts_of(entries):
            for head, positions in zip(heads, part.positions, strict=True):
                head += positions.tolist()
        kept.append([sorted(head) for head in heads])
    return kept


def _compared(engine: Engine, name: str, result: Result, expected: Result) -> tuple[list[str], list[str]]:
    """The ties, and what is wrong."""
    ties, wrong = [], []
    if result.answers != expected.answers:
        both = enumerate(zip(result.answers, expected.answers, strict=True))
        differing = [number for number, (mine, theirs) in both if mine != theirs]
        wrong.append(f"{name}: answers {differing} of {len(expected.answers)}")
    if result.kept is not None and result.kept != expected.kept:
        assert expected.kept is not None
        others = [
            (layer, head, set(mine) ^ set(theirs))
            for layer, both in enumerate(zip(result.kept, expected.kept, strict=True))
            for head, (mine, theirs) in enumerate(zip(*both, strict=True))
            if mine != theirs
        ]
        gap = _gap(engine, name, others)
        note = f"{name}: {sum(len(positions) for *_, positions in others)} positions in {len(others)} heads"
        if gap is not None and gap <= _TIE:
            ties.append(f"{note}, whose scores differ by {gap:.0e}")
        else:
            wrong.append(f"{note}, whose scores differ by {'an unknown amount' if gap is None else f'{gap:.0e}'}")
    return ties, wrong


def _gap(engine: Engine, name: str, others: list[tuple[int, int, set[int]]]) -> float | None:
    """The widest difference between the scores of entries that one device keeps and another does not, of the range of
    the layer's scores; None for a policy that gives none of the whole document."""
    group, _, policy = name.partition(" ")
    if group != "policy":
        return None
    text, _ = document(engine, _TOKENS, 0)
    try:
        scores: list[Tensor] = engine.compressor.scores(engine.prepare(text, policy=policy, compression_ratio=0.5))
    except (InvalidRequest, PolicyUnsupported):
        return None
    gaps = []
    for layer, head, positions in others:
        own = scores[layer][head].float().cpu()
        of = own[sorted(positions)]
        spread = own[own.isfinite()]
        gaps.append(float((of.max() - of.min()) / (spread.max() - spread.min()).clamp_min(1e-30)))
    return max(gaps, default=0.0)


def _bits(positions: list[int]) -> str:
    """Positions as a number in hexadecimal; twice the same is told as such, which no policy keeps."""
    assert all(one < other for one, other in pairwise(positions))
    return f"{sum(1 << position for position in positions):x}"


def _positions(bits: str) -> list[int]:
    number = int(bits, 16)
    return [position for position in range(number.bit_length()) if number >> position & 1]


def record() -> None:
    """Run every case on this CPU and write what it kept and answered."""
    engine, results = _engine("cpu"), {}
    for name, case in cases(engine, torch.device("cpu")):
        try:
            results[name] = case().packed()
        except NotBuilt as reason:
            print(f"{name}: {reason}")
    lines = (f"{json.dumps(name)}: {json.dumps(result)}" for name, result in results.items())
    RECORDED.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    print(f"{len(results)} cases, {RECORDED.stat().st_size / 1024:.0f} KiB in {RECORDED}")
