"""The page of exclusions is the table, and the table is true: every pair of features that one request can have is made
on small models. What a row names is refused with its message before the model runs; everything else works.

What each model, policy and option has is written down here and not asked of the table.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import Any, ClassVar, Final

import pytest
import torch
import transformers
from packaging.version import Version

from kvshelf.api import CreateCache
from kvshelf.engine import exclusions as x
from kvshelf.engine.attention.attached import CACHE_ARGUMENT
from kvshelf.engine.engine import Engine
from kvshelf.engine.exclusions import EXCLUSIONS, Exclusion, Feature
from kvshelf.engine.parallel.engine import ParallelEngine
from kvshelf.errors import CallerError, PolicyUnsupported
from kvshelf.methods.method import Needs
from kvshelf.methods.policies import POLICIES, ScoringPolicy
from kvshelf.methods.policies.gate_file import gate_path
from kvshelf.model import calibration
from kvshelf.model.calibration import Calibration, Origin, Skews
from kvshelf.workers.replica.create.spec import require_policy
from kvshelf_bench.models.small import small_model
from scripts import publish_exclusions
from tests.amounts import amount
from tests.conftest import save_random_model, save_transforms
from tests.images import block, picture, save_image_model
from tests.methods.policies.gates import random_gates
from tests.tokenizers import metaspace

TEXT: Final = "the book is on the boat. he took the book. the boat is on the hook. "
QUESTION: Final = [9, 11, 12, 13]
OLDER: Final = Version(transformers.__version__) < Version("5.24")


@dataclass(frozen=True)
class Pressed(ScoringPolicy):
    """One that sees calls of attention modules, as a press does."""

    name: ClassVar[str] = "pressed"
    source: ClassVar[str] = "a test"
    needs: ClassVar[Needs] = Needs.CALL

    def score(self, layer: Any) -> torch.Tensor:
        assert layer.call is not None
        return -layer.keys.float().norm(dim=-1)


# What there is


def dynamic() -> Any:
    """A Llama whose frequencies change with the length."""
    return changed("llama", rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0})


def longrope() -> Any:
    """A Llama whose frequencies are others beyond 64 tokens."""
    factors = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "original_max_position_embeddings": 64}
    return changed("llama", rope_parameters={"rope_type": "longrope", "rope_theta": 1e4, "factor": 8.0, **factors})


def changed(kind: str, **more: Any) -> Any:
    torch.manual_seed(0)
    model = small_model(kind)
    config = type(model.config)(**{**model.config.to_dict(), **more})
    return type(model)(config).eval().requires_grad_(False)


def mapped() -> Any:
    model = small_model("llama")
    model.config.layer_map = [0, 0, 2, 2]
    return model


def spread() -> Any:
    """A model of as many KV heads as query heads, with accelerate's hooks, as one that is on several devices has."""
    accelerate = pytest.importorskip("accelerate")
    return accelerate.dispatch_model(changed("llama", num_key_value_heads=4), {"": "cpu"}, force_hooks=True)


@dataclass(frozen=True)
class Model:
    """within: policies all of whose passes over this document are on one side of the turn of a LongRoPE."""

    features: frozenset[Feature]
    made: Callable[[], Any]
    text: bool = True
    document: str | list[Any] = TEXT * 3
    within: tuple[str, ...] = ()


def of(kind: str) -> Callable[[], Any]:
    return lambda: small_model(kind)


ONE_CHUNK: Final = "lagkv chunked", "snapkv chunked", "trimkv chunked"
"""Policies that read a document of 60 tokens in one."""

PLAIN: Final = "plain"
IMAGES: Final = "images"
"""A model and a document of its own."""
MODELS: Final = {
    "windows": Model(frozenset({x.WIDE, x.WINDOWS, x.NO_ROPE, x.OTHER_LINEAR, x.NO_PREFIX}), of("gemma2")),
    "windows alone": Model(frozenset({x.WIDE, x.WINDOWS, x.ALL_WHOLE, x.OTHER_LINEAR, x.NO_PREFIX}), of("mistral")),
    "chunks": Model(
        frozenset({x.WIDE, x.CHUNKS, x.NO_ROPE, x.NO_OUTPUT, x.OTHER_LINEAR, x.NO_PREFIX}), of("llama4_text")
    ),
    "states": Model(frozenset({x.WIDE, x.STATES, x.NO_KEYS, x.OTHER_LINEAR}), of("qwen3_next")),
    "states beside keys": Model(frozenset({x.WIDE, x.STATES, x.OTHER_LINEAR}), of("falcon_h1")),
    "latents": Model(frozenset({x.WIDE, x.LATENTS, x.NO_ROPE, x.OTHER_LINEAR}), of("deepseek_v3")),
    "layer_map": Model(frozenset({x.WIDE, x.LAYER_MAP, x.NO_KEYS, x.OTHER_LINEAR}), mapped),
    "shared layers": Model(
        frozenset({x.WIDE, x.WINDOWS, x.NO_KEYS, x.NO_ROPE, x.OTHER_LINEAR, x.NO_PREFIX}), of("gemma3n_text")
    ),
    "no RoPE": Model(frozenset({x.NO_ROPE, x.MOVING_KEYS, x.NO_OUTPUT, x.OTHER_LINEAR}), of("gpt2")),
    "changing RoPE": Model(frozenset({x.WIDE, x.CHANGING_ROPE, x.MOVING_KEYS}), dynamic),
    "no tokenizer": Model(frozenset({x.WIDE, x.NO_TOKENIZER}), of("llama"), text=False, document=list(range(5, 125))),
    "hooks": Model(frozenset({x.SPREAD}), spread),
    "LongRoPE": Model(
        frozenset({x.WIDE, x.TURNING_ROPE, x.CHANGING_ROPE}), longrope, document=TEXT[:60], within=ONE_CHUNK
    ),
    "LongRoPE, a long document": Model(
        frozenset({x.WIDE, x.TURNING_ROPE, x.CHANGING_ROPE}), longrope, within=("dapq", "kvzip", "lookaheadkv")
    ),
    IMAGES: Model(
        frozenset({x.WIDE, x.IMAGES}), of("llama"), document=[{"text": TEXT * 3}, block(picture(1)), {"text": TEXT}]
    ),
}


TOGETHER: Final = (
    "full",
    "streaming_llm",
    "sablock",
    "compresskv",
    "duo_attention",
    "pyramidinfer",
    "infllm",
    "sirllm",
    "kvdirect",
)
"""Policies of which the heads of a layer, or those that can be read in part, keep the same tokens."""


@dataclass(frozen=True)
class Chosen:
    """A policy. entries: of its caches, what `UNREAD` names."""

    policy: str
    features: frozenset[Feature]
    params: dict[str, Any] = field(default_factory=dict)
    sized: bool = False
    entries: frozenset[str] = frozenset()


def chosen(policy: str, *features: Feature, entries: Sequence[str] = (), sized: bool = False, **params: Any) -> Chosen:
    """Most reduce, look at no question, and say no shares."""
    usual = {x.NO_PRECISION} | (set() if sized else {x.REDUCES})
    features = (*features, x.NO_PREFIX) if {"uneven", "merged", "layers"} & {*entries} else features
    more = set() if x.INDEXES in features else {"no index"}
    more |= set() if policy in TOGETHER else {"apart"}
    return Chosen(policy, frozenset({*usual, *features}), params, sized, frozenset({*entries, *more}))


SMALL: Final = {"lag": 8, "sink": 1}
IN_CHUNKS: Final = {"prefill": "chunked", "chunk": 64, "window": 4}
CHOSEN: Final = {
    "full": chosen("full", x.KEEPS_ALL, x.BLIND, sized=True),
    "keydiff": chosen("keydiff", x.BLIND),
    "lagkv:r": chosen("lagkv", x.BLIND, x.SIZED, x.REDUCES, x.APART, sized=True, r=0.5, **SMALL),
    "snapkv": chosen("snapkv"),
    "positions=cache": chosen("streaming_llm", x.BLIND, x.MOVES, x.UNROTATES, positions="cache"),
    "expected_attention": chosen("expected_attention", x.BLIND, x.UNROTATES),
    "sablock": chosen("sablock", x.READS_TEXT),
    "defensivekv": chosen("defensivekv", x.READS_OUTPUT, entries=["uneven"], window=4),
    "compresskv": chosen("compresskv", x.CALIBRATED, entries=["layers"]),
    "headkv": chosen("headkv", x.CALIBRATED, x.HEAD_BUDGETS, x.APART, entries=["uneven"]),
    "duo_attention": chosen("duo_attention", x.BLIND, x.CALIBRATED, x.HEAD_BUDGETS, x.APART, entries=["uneven"]),
    "ada": chosen("ada", x.HEAD_BUDGETS, x.APART, entries=["uneven"]),
    "think": chosen("think", x.BLIND, x.PRUNES, entries=["pruned"], whole_keys=8),
    "ems": chosen("ems", x.APART, entries=["merged", "uneven"]),
    "cam": chosen("cam", x.BLIND, x.APART),
    "keep_scores": chosen("h2o", x.BLIND, x.KEEPS_SCORES, x.APART, keep_scores=True),
    "dapq": chosen("dapq", x.ELSEWHERE, x.BEHIND, offset=7),
    "lagkv chunked": chosen("lagkv", x.BLIND, x.APART, x.IN_CHUNKS, x.ASKS_CHUNKS, prefill="chunked", **SMALL),
    "kvzip chunked": chosen(
        "kvzip", x.BLIND, x.IN_CHUNKS, x.ASKS_CHUNKS, x.AGAIN, prefill="chunked", chunk=64, entries=["uneven"]
    ),
    "snapkv chunked": chosen("snapkv", x.BLIND, x.IN_CHUNKS, x.ASKS_CHUNKS, x.AGAIN, **IN_CHUNKS),
    "trimkv chunked": chosen(
        "trimkv", x.BLIND, x.IN_CHUNKS, x.ASKS_CHUNKS, x.AGAIN, x.UNROTATES, prefill="chunked", chunk=64
    ),
    "kvzip": chosen("kvzip", x.BLIND, x.BEHIND, x.REPEATS_IMAGES, entries=["uneven"]),
    "lookaheadkv": chosen("lookaheadkv", x.BLIND, x.SOFT, x.BEHIND),
    "infllm": chosen(
        "infllm", x.BLIND, x.KEEPS_ALL, x.INDEXES, x.IN_BLOCKS, x.UNROTATES, x.REDUCES, sized=True, block=32
    ),
    "mikv": Chosen(
        "mikv", frozenset({x.BLIND, x.KEEPS_ALL, x.REDUCES}), {}, sized=True, entries=frozenset({"no index"})
    ),
    "pyramidinfer": chosen("pyramidinfer", x.BLIND, decay=1.0),  # of two layers none keeps fewer, of four some do
    "sirllm": chosen("sirllm", x.BLIND, x.SURPRISED),
    "kvdirect": chosen("kvdirect", x.BLIND, x.KEEPS_ALL, x.RESIDUALS, x.MADE_AGAIN, x.REDUCES, sized=True),
    "pressed": chosen("pressed", x.BLIND, x.CALLS),
}


@dataclass(frozen=True)
class Option:
    """What a request has beside model and policy. policy: of `CHOSEN`, that it is tried with. codec, select: its
    texts. tokens, params: of the selector."""

    features: frozenset[Feature]
    policy: str = "keydiff"
    codec: str = ""
    select: str = ""
    tokens: int = 32
    params: dict[str, int] = field(default_factory=dict)


def option(*features: Feature, **more: Any) -> Option:
    return Option(frozenset(features), **more)


OPTIONS: Final = {
    "ratio": option(x.RATIO),
    "budget": option(x.BUDGET),
    "levels": option(x.LEVELS),
    "questions": option(x.QUESTIONS, policy="snapkv"),
    "protect": option(x.PROTECT),
    "int8": option(x.ENCODED, codec="int8"),
    "group=64": option(x.ENCODED, x.CUTS, codec="int4:group=64", policy="infllm"),
    "mixed": option(x.ENCODED, x.SPLITS, codec="mixed"),
    "share=policy": option(x.ENCODED, x.SPLITS, x.SHARE_OF_POLICY, codec="mixed:share=policy", policy="mikv"),
    "klt": option(x.ENCODED, x.KLT, codec="klt"),
    "append": option(x.APPEND, x.READ_OTHERWISE),
    "behind positions=cache": option(x.APPEND, x.READ_OTHERWISE, x.REPOSITIONED),
    "behind an index": option(x.APPEND, x.READ_OTHERWISE, x.INDEXED),
    "no sentences": option(x.NO_SENTENCES),
    "select quest": option(x.SELECT, select="quest"),
    "select snapkv": option(x.SELECT, x.SELECT_POLICY, select="policy:snapkv", params={"window": 4}),
    "select sablock": option(
        x.SELECT, x.SELECT_POLICY, x.READS_TEXT, select="policy:sablock", params={"window": 4}, policy="sablock"
    ),
    "select sentencekv": option(x.SELECT, x.SELECT_SENTENCES, select="sentencekv", params={"sink": 2, "recent": 2}),
    "select infllm": option(
        x.SELECT, x.SELECT_UNROTATED, select="infllm", tokens=64, params={"recent": 0}, policy="infllm"
    ),
    "select infinigen": option(x.SELECT, x.SELECT_EARLY, select="infinigen"),
    "several": option(x.SEVERAL),
    "suffix": option(x.SUFFIX),
    "scope": option(x.SUFFIX, x.SHRINK),
    "store": option(x.STORE),
    "search": option(x.SEARCH),
    "export": option(x.EXPORT, policy="full"),
    "attached": option(x.ATTACH),
}
UNREAD: Final = (
    ("", "pruned", "the keys of this cache have lost channels"),
    ("", "merged", "the cache has merged tokens or keys without their rotation"),
    ("policy:", "uneven", "the heads of layer .* a policy chooses at the question where all keep equally many"),
    ("infllm", "no index", "the cache has no index, which selector infllm chooses by"),
    ("sablock", "apart", "the heads of layer .* keep different tokens, and a policy that reads sentences"),
)
"""What selectors cannot read in place, by their names, and an answer cannot copy."""

ONE_OF: Final = (
    {"ratio", "budget", "levels"},
    {name for name, one in OPTIONS.items() if one.codec},
    {name for name, one in OPTIONS.items() if one.select},
    {"suffix", "scope"},
    {name for name in OPTIONS if name == "append" or name.startswith("behind")},
    {"protect", "append", "behind positions=cache", "behind an index"},  # what is appended has no protect
    {"mixed", "behind an index"},  # that cache is a pair of its own
    {"share=policy", "append", "behind positions=cache", "behind an index"},  # of a parent under full
)
"""Options of which a request has one at most."""

# Requests


@dataclass(frozen=True)
class Tried:
    model: str
    chosen: str
    options: tuple[str, ...] = ()

    @property
    def features(self) -> frozenset[Feature]:
        model = MODELS.get(self.model)
        own = CHOSEN[self.chosen].features.union(*(OPTIONS[one].features for one in self.options))
        if model is None:
            return own
        return own | model.features - ({x.TURNING_ROPE} if self.chosen in model.within else set())


def tried(model: str) -> list[Tried]:
    """All pairs of a feature of the model, or of the plain one, with those that a request can have."""
    found = [Tried(model, name) for name in CHOSEN]
    if "LongRoPE" in model:  # its rows are of policies
        return found
    if model != PLAIN:  # there what stands in a parent is refused itself, and without a tokenizer no text is taken
        left = {"behind positions=cache", "behind an index", *(() if MODELS[model].text else {"questions"})}
        return found + [Tried(model, one.policy, (name,)) for name, one in OPTIONS.items() if name not in left]
    found += [Tried(model, name, (option,)) for name in CHOSEN for option in OPTIONS]
    for pair in combinations(OPTIONS, 2):
        policies = {OPTIONS[name].policy for name in pair} - {"keydiff"} or {"keydiff"}
        if len(policies) == 1 and not any({*pair} <= group for group in ONE_OF):
            found.append(Tried(model, *policies, pair))
    return list(dict.fromkeys(found))


LATER: Final = {x.SELECT, x.SELECT_POLICY, x.SELECT_SENTENCES, x.SELECT_UNROTATED, x.SELECT_EARLY} | {
    x.SEVERAL, x.SUFFIX, x.SHRINK, x.STORE, x.SEARCH, x.EXPORT, x.ATTACH,
}  # fmt: skip
"""What is asked of a cache that is there."""

ALL: Final = [one for model in (PLAIN, *MODELS) for one in tried(model)]


class Maker:
    """Makes requests of one engine. document: what they compress. tokens: that an answer reads by quest."""

    def __init__(self, engine: Engine, document: str | list[Any], tokens: int = 32) -> None:
        self.engine = engine
        self.document = document
        self.tokens = tokens
        self.parents: dict[str, Any] = {}

    def parent(self, kind: str) -> Any:
        """A stored cache of another document."""
        if kind not in self.parents:
            params = {"full": {}, "streaming_llm": {"positions": "cache"}, "infllm": {"block": 32}}[kind]
            ratio = {"compression_ratio": 0.5} if kind == "streaming_llm" else {}
            half = self.document[: len(self.document) // 2]
            self.parents[kind] = self.engine.compress(half, policy=kind, **ratio, **params)
        return self.parents[kind]

    def make(self, one: Tried) -> Iterator[None]:
        """Goes on each time before the model runs for this request."""
        engine, asked, options = self.engine, CHOSEN[one.chosen], {*one.options}
        more: dict[str, Any] = {"policy": asked.policy, "policy_params": asked.params}
        if "levels" in options:
            require_policy(CreateCache(document="x", levels=[0.5, 0.25], **more))
        if "budget" in options:
            more["budget_tokens"] = self.tokens + 20
        elif "ratio" in options or not asked.sized:
            more["compression_ratio"] = 0.5
        if "questions" in options:
            more["expected_questions"] = ["is the book on the boat"]
        codec = next((OPTIONS[name].codec for name in one.options if OPTIONS[name].codec), "none")
        behind = {"append": "full", "behind positions=cache": "streaming_llm", "behind an index": "infllm"}
        if kind := next((behind[name] for name in one.options if name in behind), None):
            parent = engine.encoded(self.parent(kind), codec)
            job = engine.prepare_append(parent, self.document, **more)
        else:
            protect = {"protect": ["tokens:2-6"]} if "protect" in options else {}
            job = engine.prepare(self.document, **more, **protect)
        level = engine.compressor.level(job, codec)
        yield
        cache = engine.compressor.prefill([level]).compressions[0].cache
        self.ask(cache, one)

    def ask(self, cache: Any, one: Tried) -> None:
        engine, options = self.engine, {*one.options}
        if "no sentences" in options:  # as one made without a tokenizer
            cache = replace(cache, sentence_ends=())
        other = "infllm" if "select infllm" in options else "full"
        documents = [cache, self.parent(other)] if "several" in options else [cache]
        joined = engine.joined([engine.attach(part) for part in documents])
        more: dict[str, Any] = {}
        if asked := next((OPTIONS[name] for name in one.options if OPTIONS[name].select), None):
            size = {"tokens": self.tokens if asked.select == "quest" else asked.tokens, "params": asked.params}
            selection = engine.select(joined, asked.select, question_tokens=len(QUESTION), **size)
            whole = asked.select == "infinigen" and len(engine.facts.kinds) == 2  # it reads two layers whole
            assert whole or selection, "reads a part"
            more = {"select": asked.select, **{f"select_{name}": value for name, value in size.items()}}
        if "suffix" in options:
            engine.bound("window", question_tokens=len(QUESTION), budget=64)
            more["suffix"] = {"policy": "window", "budget": 64}
        if "scope" in options:
            shrunk = engine.joined([engine.attach(cache)])
            engine.bound("window", question_tokens=len(QUESTION), params={"sink": 0}, document=shrunk)
            more["suffix"] = {"policy": "window", "scope": "cache", "params": {"sink": 0}}
        if "store" in options:
            engine.turns.require()
        if "search" in options:
            engine.searcher.require()
            assert len(engine.searcher.codes(QUESTION)) == 2
        if "export" in options:
            engine.export(cache)
        if "attached" in options:
            with torch.no_grad(), engine.attached(cache) as past:
                engine.model(torch.tensor([QUESTION]), **{CACHE_ARGUMENT: past})
        answer = engine.answer(documents, QUESTION, max_new_tokens=2, **more)
        assert 1 <= len(answer.token_ids) <= 2


def refusals(one: Tried) -> list[Exclusion]:
    return [row for row in EXCLUSIONS if {*row.features} <= one.features]


def said(row: Exclusion) -> str:
    """A pattern of its message."""
    return ".*?".join(re.escape(part) for part in re.split(r"\{[^}]*\}", row.message))


@pytest.fixture(scope="module", params=[PLAIN, *MODELS])
def maker(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Maker]]:
    """An engine with gates, a calibration and skews of its own, random as it is."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("trained")
        patch.setenv("KVSHELF_GATES", str(folder))
        patch.setenv("XDG_DATA_HOME", str(folder))
        patch.setitem(POLICIES, Pressed.name, Pressed)
        name = request.param
        if name == PLAIN:
            plain = save_random_model(tmp_path_factory.mktemp("plain") / "m", kv_heads=4)  # residuals are smaller
            save_transforms(plain)
            engine = Engine.load(str(plain), device="cpu")
            made = Maker(engine, TEXT * 20, 140)
        elif name == IMAGES:
            if OLDER:
                pytest.skip("this transformers needs torchvision to see")
            save_image_model(folder)
            made = Maker(engine := Engine.load(str(folder), device="cpu"), MODELS[name].document)
        else:
            model = MODELS[name]
            try:
                engine = Engine(model.made(), metaspace("always") if model.text else None, name=name)
                engine.passes.layer_shapes  # noqa: B018 - raises
            except PolicyUnsupported:
                if OLDER:
                    pytest.skip("not with this transformers")
                raise
            made = Maker(engine, model.document)
        geometry, weights = engine.preparer.geometry, engine.identity.weights
        for policy in ("lookaheadkv", "trimkv"):
            gates = random_gates(policy, geometry, weights=weights)
            gate_path(weights, policy).write_bytes(gates.to_bytes())
        heads = tuple(
            tuple(1.0 + head + layer * geometry.q_heads for head in range(geometry.q_heads))
            for layer in range(geometry.layers)
        )
        shares = tuple((at + 1) / sum(range(geometry.layers + 1)) for at in range(geometry.layers))
        if heads:
            origin = Origin(model="random", documents=1, tokens=1, answered=1.0, compression_ratio=0.5)
            found = Calibration(weights=weights, head_scores=heads, layer_errors=shares, origin=origin)
            calibration.data_folder().mkdir(parents=True)
            (calibration.data_folder() / f"{weights}.json").write_text(found.model_dump_json())
            skews = [torch.eye(geometry.head).half().repeat(geometry.q_heads, 1, 1) for _ in engine.facts.kinds]
            calibration.save(Skews(weights, tuple(skews)), calibration.paths(weights).skews)
        yield name, made


def outcome(maker: Maker, one: Tried) -> tuple[str, CallerError | None]:
    """The stage that a request came to, and its refusal."""
    stage, steps = "asked", maker.make(one)
    try:
        next(steps)
        stage = "ran"
        next(steps, None)
    except CallerError as error:
        return stage, error
    return "answered", None


def unread(one: Tried) -> list[str]:
    """Patterns of what a selector says of the entries of this cache."""
    asked = [OPTIONS[name].select or name for name in one.options if OPTIONS[name].select or name == "scope"]
    if one.model == PLAIN:  # its two layers infinigen reads whole
        asked = [name for name in asked if name != "infinigen"]
    entries = CHOSEN[one.chosen].entries
    return [said for part, word, said in UNREAD for name in asked if part in name and word in entries]


def refused_by(rows: Sequence[Exclusion], error: CallerError) -> bool:
    return any(
        isinstance(error, row.error) and error.param == row.param and re.fullmatch(said(row), error.message)
        for row in rows
    )


@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=pytest.mark.slow) for part in range(1, 6))])
def test_every_pair_is_refused_or_works_as_the_page_says(maker: tuple[str, Maker], part: int) -> None:
    """A sixth of them in each part."""
    model, of_model = maker
    wrong = []
    for one in tried(model)[part::6]:
        rows, (stage, error) = refusals(one), outcome(of_model, one)
        if stage == "ran":  # of the cache that was made
            rows = [row for row in rows if LATER & {*row.features}]
        if error is None:
            fine = not refusals(one) and not unread(one)
        elif stage == "ran" and any(re.match(pattern, error.message) for pattern in unread(one)):
            fine = True
        elif "klt" in one.options and model != PLAIN and "codec klt needs the transforms" in error.message:
            fine = not refusals(one)
        else:
            fine = refused_by(rows, error)
        if not fine:
            wrong.append((one, stage, error, [row.message for row in rows]))
    assert not wrong, "\n".join(map(str, wrong))


def test_every_row_is_tried() -> None:
    """But for those of several processes, which are below."""
    missed = [row.message for row in EXCLUSIONS if not any({*row.features} <= one.features for one in ALL)]
    assert [
        message for message in missed if "several processes" not in message and "processes, and a" not in message
    ] == []


def test_the_page_is_the_table() -> None:
    assert publish_exclusions.PAGE.read_text() == publish_exclusions.text(), "python -m scripts.publish_exclusions"


def test_what_chunks_are_refused_for_a_prefill_in_one_pass_is_not() -> None:
    """Policies that others are advised to take read in chunks, too."""
    rows = [row for row in EXCLUSIONS if {x.IN_CHUNKS, x.AGAIN} & {*row.features}]
    assert rows
    assert {row.param for row in rows} == {"policy_params.prefill"}
    assert all("take prefill=whole" in row.message for row in rows)


def test_what_can_be_formatted_is_there() -> None:
    """A message names what its features promise: no refusal ends in an error of its own."""
    unknown = {name for row in EXCLUSIONS for name in re.findall(r"\{(?!c\.|policy!r|model!r)[^}]*\}", row.message)}
    assert not unknown


@pytest.mark.slow
@pytest.mark.skipif(OLDER, reason="this transformers shares no model")
@pytest.mark.timeout(600)
def test_several_processes_refuse_what_the_page_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """All that they alone refuse, and every fourth of the others: those run."""
    monkeypatch.setitem(POLICIES, Pressed.name, Pressed)
    rows = [row for row in EXCLUSIONS if x.RANKS in row.features]
    met: set[int] = set()
    engine = ParallelEngine.load("kvshelf-tiny", ranks=2, device="cpu")
    try:
        of_engine = Maker(engine, TEXT * 20)
        for number, one in enumerate(tried(PLAIN)):
            own = [at for at, row in enumerate(rows) if {*row.features} - {x.RANKS} <= one.features]
            if len(one.options) <= 1 and "behind" not in str(one.options) and (own or number % amount(4, 1) == 0):
                stage, error = outcome(of_engine, one)
                others = [row for row in EXCLUSIONS if {*row.features} <= one.features]
                if error is None:
                    assert not own, one
                elif not any(re.match(pattern, error.message) for pattern in unread(one)):
                    assert refused_by([*(rows[at] for at in own), *others], error), (one, stage, error)
                    met |= {at for at in own if refused_by([rows[at]], error)}
    finally:
        engine.close()
    assert met == {*range(len(rows))}
