"""The table of features that do not go together, by which a request is checked before any work. It is published as
docs/internals/exclusions.md (`python -m scripts.publish_exclusions`)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from kvshelf.api.queries import SuffixScope
from kvshelf.artifact import codecs
from kvshelf.artifact.cache import CompressedCache
from kvshelf.artifact.codecs import Codec
from kvshelf.artifact.records import Indexed, parts_of
from kvshelf.engine.export import UNEXPORTED, no_prefix
from kvshelf.engine.facts import ModelFacts
from kvshelf.errors import CallerError, InvalidRequest, PolicyUnsupported
from kvshelf.methods.method import Needs
from kvshelf.methods.policies.base import Absorber, Policy
from kvshelf.methods.policies.budgets import Budget
from kvshelf.methods.policies.together import chooses_together
from kvshelf.methods.policies.view import DocumentView, ProbePass, output_weight
from kvshelf.methods.selectors.base import Selector
from kvshelf.model.devices import hooked
from kvshelf.model.layers import LayerKind, readers, reducible
from kvshelf.model.rope import Rope, reach

Verb = Literal["append", "join", "suffix", "store", "search", "export", "attach"]
"""What is done to a cache beside compressing and asking: append tokens to it; ask it with others; bound the entries of
an answer; keep an answer behind it; search; make transformers' cache of it; run the model behind it in the caller's own
code."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Combination:
    """The parts of one request, as far as its check knows them: no feature of a part that is left out is used.

    sizes: the fields of a request that say how much stays. document, budget, passes, absorber: of a compression; a
    policy without a document chooses at the question. cache: the one that `verb` is done to. residuals: whether a cache
    with residuals is read. ends: of the sentences of each document that is asked. scope: of the suffix policy.
    appends_images: whether images are to be appended.
    """

    facts: ModelFacts | None = None
    policy: Policy | None = None
    sizes: Collection[str] = ()
    questions: Sequence[str] = ()
    document: DocumentView | None = None
    budget: Budget | None = None
    passes: Sequence[ProbePass] = ()
    absorber: Absorber | None = None
    codec: Codec | None = None
    selector: Selector | None = None
    ends: Sequence[Sequence[int]] = ()
    scope: SuffixScope = "suffix"
    verb: Verb | None = None
    cache: CompressedCache | None = None
    appends_images: bool = False
    residuals: bool = False

    @property
    def kinds(self) -> tuple[LayerKind, ...]:
        return () if self.facts is None else self.facts.kinds

    @property
    def at_work(self) -> Policy | None:
        """The policy that reduces the document; None for a policy that has nothing to do."""
        if self.policy is None or self.document is None or self.budget is None:
            return None
        return self.policy if self.policy.has_work(self.budget, self.document.num_tokens) else None

    def observes(self, needed: Needs) -> bool:
        """Whether the policy needs this, in a prefill or at the question."""
        policy = self.policy if self.selector is not None else self.at_work
        return policy is not None and needed in policy.needs

    @property
    def moved(self) -> bool:
        """Whether the policy counts positions within the cache."""
        policy, document, budget = self.at_work, self.document, self.budget
        if policy is None or document is None or budget is None:
            return False
        return policy.next_position(document.num_tokens, budget) != document.num_tokens

    @property
    def stored_whole(self) -> str:
        """The name of the states that some layers store whole."""
        if any(kind.states for kind in self.kinds):
            return "recurrent states"
        return "a sliding window" if all(kind.chunk is None for kind in self.kinds) else "chunked attention"

    @property
    def module(self) -> str:
        """A linear layer that learned tokens add to and that not all layers of the model have; "": there is none."""
        tensors = {name for probe in self.passes if probe.soft is not None for name in probe.soft.tensors}
        if self.facts is None or not tensors:
            return ""
        plain = all(kind.sees_all and kind.attends and not kind.states for kind in self.kinds)
        layers = getattr(self.facts.model.base_model, "layers", ()) if plain else ()
        modules = [{name for name, _ in layer.named_modules()} for layer in layers]
        added = {name.partition(".")[2].rpartition(".")[0] for name in tensors if "." in name}
        return next((name for name in sorted(added) if not modules or any(name not in names for names in modules)), "")

    @property
    def repeats_images(self) -> bool:
        """Whether a pass has tokens of images, which would stand there without their images."""
        images = None if self.facts is None else self.facts.images
        return images is not None and any(images.token_id in probe.token_ids for probe in self.passes)

    @property
    def no_prefix(self) -> str:
        """Why the entries of the cache are no plain prefix; "" where they are one."""
        return "" if self.cache is None else no_prefix(self.cache)

    @property
    def last_position(self) -> int:
        """The end of the document and of all passes behind it."""
        end = 0 if self.document is None else self.document.end
        return max([end, *(probe.first_position + len(probe.token_ids) for probe in self.passes)])

    @property
    def turning_point(self) -> int | None:
        """The longest sequence with the frequencies of the first pass, under a LongRoPE; None: any."""
        if self.facts is None or self.document is None or self.at_work is None:
            return None
        first = None if self.absorber is None else self.document.judged.behind(self.absorber.chunks[0])
        return reach(self.facts.model.config, self.document.end if first is None else first)


@dataclass(frozen=True, eq=False)
class Feature:
    """A property of a request or its model. name: on the page."""

    name: str
    used: Callable[[Combination], bool]
    of_model: bool = False


@dataclass(frozen=True, eq=False)
class Exclusion:
    """Features that do not go together. message: with the names of `{policy}` and `{model}`, and fields of the
    `Combination`, `{c.codec}`. param: the field of the request that is refused."""

    features: tuple[Feature, ...]
    message: str
    param: str
    error: type[CallerError] = PolicyUnsupported


def require_possible(combination: Combination) -> None:
    """Raises the error of the first exclusion of which all features are used."""
    for exclusion in EXCLUSIONS:
        if all(feature.used(combination) for feature in exclusion.features):
            facts, policy = combination.facts, combination.policy
            model, named = facts and facts.name, policy and policy.name
            message = exclusion.message.format(c=combination, model=model, policy=named)
            raise exclusion.error(message, param=exclusion.param)


def rope_to_undo(facts: ModelFacts) -> Rope:
    """The model's RoPE, for codec klt. Raises `PolicyUnsupported` for a model that klt does not go with."""
    require_possible(Combination(facts=facts, codec=Codec("klt")))
    assert facts.rope is not None
    return facts.rope


def _of_model(name: str, used: Callable[[ModelFacts], bool]) -> Feature:
    return Feature(name, lambda c: c.facts is not None and used(c.facts), of_model=True)


def _of_layers(name: str, used: Callable[[LayerKind], object]) -> Feature:
    return Feature(name, lambda c: any(used(kind) for kind in c.kinds), of_model=True)


def _of_policy(name: str, used: Callable[[Policy], bool]) -> Feature:
    """Of a policy, whatever it does to the document."""
    return Feature(name, lambda c: c.policy is not None and used(c.policy))


def _at_work(name: str, used: Callable[[Policy], bool]) -> Feature:
    """Of a policy that reduces the document."""
    return Feature(name, lambda c: c.at_work is not None and used(c.at_work))


def _of_codec(name: str, used: Callable[[Codec], bool]) -> Feature:
    return Feature(name, lambda c: c.codec is not None and used(c.codec))


def _of_selector(name: str, used: Callable[[Selector], bool]) -> Feature:
    return Feature(name, lambda c: c.selector is not None and used(c.selector))


def _verb(name: str, verb: Verb) -> Feature:
    return Feature(name, lambda c: c.verb == verb)


WINDOWS: Final = _of_layers("sliding windows", lambda kind: kind.window is not None)
CHUNKS: Final = _of_layers("chunked attention", lambda kind: kind.chunk is not None)
STATES: Final = _of_layers("recurrent states", lambda kind: kind.states)
LATENTS: Final = _of_layers("latents (MLA)", lambda kind: kind.latents)
LAYER_MAP: Final = _of_model("layers that read others (layer_map)", lambda facts: bool(readers(facts.kinds)))
NO_KEYS: Final = _of_layers("layers without keys of their own", lambda kind: not kind.attends)
ALL_WHOLE: Final = _of_model("no layer that sees all tokens", lambda facts: not reducible(facts.kinds))
NO_ROPE: Final = _of_model("no RoPE that could be read", lambda facts: facts.rope is None)
CHANGING_ROPE: Final = _of_model(
    "a RoPE that changes with the length", lambda facts: facts.rope is not None and facts.rope.length_dependent
)
MOVING_KEYS: Final = _of_model("keys that may change with the length", lambda facts: facts.one_by_one)
NO_TOKENIZER: Final = _of_model("no tokenizer", lambda facts: facts.text is None)
WIDE: Final = _of_model(
    "residuals no smaller than keys and values", lambda facts: facts.residual_width >= facts.entry_width
)
SPREAD: Final = _of_model("weights on several devices", lambda facts: hooked(facts.model))
RANKS: Final = _of_model("several processes", lambda facts: facts.ranks is not None)


def _lacks_output(facts: ModelFacts) -> bool:
    layers = zip(getattr(facts.model.base_model, "layers", [None]), facts.kinds, strict=False)
    return any(output_weight(getattr(layer, "self_attn", None)) is None for layer, kind in layers if kind.attends)


NO_OUTPUT: Final = _of_model("no o_proj weight", _lacks_output)
OTHER_LINEAR: Final = Feature("other linear layers", lambda c: bool(c.module), of_model=True)

RATIO: Final = Feature("compression_ratio", lambda c: "compression_ratio" in c.sizes)
BUDGET: Final = Feature("budget_tokens", lambda c: "budget_tokens" in c.sizes)
LEVELS: Final = Feature("levels", lambda c: "levels" in c.sizes)
KEEPS_ALL: Final = _of_policy(
    "a policy that keeps everything", lambda policy: policy.sizes_itself and not policy.takes_budget
)
SIZED: Final = _of_policy(
    "a policy whose parameters say its size", lambda policy: policy.sizes_itself and policy.takes_budget
)
QUESTIONS: Final = Feature("expected_questions", lambda c: bool(c.questions))
BLIND: Final = _of_policy("a policy that looks at no question", lambda policy: not policy.takes_questions)
REDUCES: Final = _at_work("a policy that reduces", lambda _: True)
UNROTATES: Final = Feature("a policy that undoes RoPE", lambda c: c.observes(Needs.ROPE))
READS_TEXT: Final = Feature("a policy that reads the text", lambda c: c.observes(Needs.TEXT))
READS_OUTPUT: Final = Feature("a policy that reads o_proj", lambda c: c.observes(Needs.WEIGHTS))
CALIBRATED: Final = _at_work("a policy with calibration", lambda policy: Needs.CALIBRATION in policy.needs)
CALLS: Final = _at_work("a policy that sees calls (press)", lambda policy: Needs.CALL in policy.needs)
HEAD_BUDGETS: Final = _at_work("budgets of heads", lambda policy: policy.budgets_heads)
PRUNES: Final = _of_policy("channels removed (think)", lambda policy: policy.prunes)
RESIDUALS: Final = _of_policy("policy kvdirect", lambda policy: policy.has_residuals)
MADE_AGAIN: Final = Feature("residuals, stored or to be", lambda c: c.residuals or RESIDUALS.used(c))
APART: Final = _at_work("other tokens in each head", lambda policy: not chooses_together(policy.chooser))
KEEPS_SCORES: Final = _at_work("keep_scores", lambda policy: "columns" in policy.stored_beside)
MOVES: Final = Feature("positions=cache", lambda c: c.moved)
ELSEWHERE: Final = Feature(
    "passes from other positions",
    lambda c: c.document is not None and any(probe.first_position != c.document.end for probe in c.passes),
)
BEHIND: Final = Feature("passes behind the document", lambda c: c.absorber is None and bool(c.passes))
IN_CHUNKS: Final = Feature("prefill=chunked", lambda c: c.absorber is not None)
AGAIN: Final = Feature("prefill=chunked, decided again", lambda c: c.absorber is not None and c.absorber.again)
TURNING_ROPE: Final = Feature(
    "a LongRoPE that turns among them",
    lambda c: c.turning_point is not None and c.last_position > c.turning_point,
    of_model=True,
)
SOFT: Final = Feature("learned tokens", lambda c: any(probe.soft is not None for probe in c.passes))
PROTECT: Final = Feature("protect", lambda c: c.document is not None and bool(c.document.protect))
IMAGES: Final = Feature(
    "images in the document", lambda c: c.appends_images or (c.document is not None and bool(c.document.images))
)
REPEATS_IMAGES: Final = Feature("passes that repeat images", lambda c: c.repeats_images)
SURPRISED: Final = _at_work("a policy that asks what surprises", lambda policy: Needs.SURPRISALS in policy.needs)
INDEXES: Final = _of_policy("an index (infllm)", lambda policy: policy.indexes)
IN_BLOCKS: Final = _of_policy("an index in blocks (infllm)", lambda policy: policy.index_block is not None)
NO_PRECISION: Final = _of_policy("a policy that says no shares", lambda policy: not policy.sets_precision)

ENCODED: Final = _of_codec("a codec", lambda codec: codec.name != "none")
SHARE_OF_POLICY: Final = _of_codec("mixed:share=policy", lambda codec: codec.share == "policy")
SPLITS: Final = _of_codec("mixed, or klt with classes", lambda codec: codec.splits)
CUTS: Final = Feature("a group that cuts the blocks", lambda c: _cuts(c.codec, c.policy))
KLT: Final = _of_codec("klt", lambda codec: codec.name == "klt")


def _goes_on(c: Combination) -> bool:
    """Whether the policy of what is appended goes on from the cache."""
    if c.cache is None or c.policy is None or PROTECT.used(c):
        return False
    return c.policy.resumes(c.cache.identity) and not Codec.parse(c.cache.codec).splits


def _cuts(codec: Codec | None, policy: Policy | None) -> bool:
    block = None if policy is None else policy.index_block
    return codec is not None and block is not None and codec.cuts(block)


APPEND: Final = _verb("append", "append")
ASKS_CHUNKS: Final = _of_policy(
    "prefill=chunked, asked for", lambda policy: policy.parameters().get("prefill") == "chunked"
)
READ_OTHERWISE: Final = Feature("a cache that was read otherwise", lambda c: not _goes_on(c))
REPOSITIONED: Final = Feature("a cache under positions=cache", lambda c: c.cache is not None and c.cache.repositioned)
INDEXED: Final = Feature(
    "a cache with an index",
    lambda c: c.cache is not None and any(isinstance(part, Indexed) for e in c.cache.reduced for part in parts_of(e)),
)
SEVERAL: Final = _verb("several documents", "join")
SUFFIX: Final = _verb("a suffix policy", "suffix")
SHRINK: Final = Feature("suffix.scope=cache", lambda c: c.scope == "cache")
STORE: Final = _verb("store", "store")
SEARCH: Final = _verb("search", "search")
EXPORT: Final = _verb("export", "export")
ATTACH: Final = _verb("attached", "attach")
NO_PREFIX: Final = Feature("entries that are no plain prefix", lambda c: bool(c.no_prefix))
SELECT: Final = _of_selector("select", lambda _: True)
SELECT_POLICY: Final = Feature("select by a policy", lambda c: c.selector is not None and c.policy is not None)
SELECT_SENTENCES: Final = _of_selector("select sentencekv", lambda selector: Needs.SENTENCES in selector.needs)
SELECT_UNROTATED: Final = _of_selector("select infllm", lambda selector: Needs.ROPE in selector.needs)
SELECT_EARLY: Final = _of_selector("select infinigen", lambda selector: Needs.EARLY in selector.needs)
NO_SENTENCES: Final = Feature("a cache of token ids", lambda c: not all(c.ends))


def _pairs(
    feature: Feature,
    others: Sequence[tuple[Feature, str]],
    message: str,
    param: str,
    error: type[CallerError] = PolicyUnsupported,
) -> list[Exclusion]:
    """The exclusions of a feature with each of the others, for a reason of its own. message: with `{why}`."""
    return [Exclusion((feature, other), message.replace("{why}", why), param, error) for other, why in others]


def _beside(
    feature: Feature, why: str, layers: Sequence[Feature], advice: str = "choose another policy", param: str = "policy"
) -> list[Exclusion]:
    """The exclusions of a policy's feature with kinds of layers that are stored whole."""
    message = "policy {policy!r} {why}, and some layers of {model!r} have {c.stored_whole}; " + advice
    return _pairs(feature, [(kind, why) for kind in layers], message, param)


def _sizes(size: Feature, param: str) -> list[Exclusion]:
    whose = [(KEEPS_ALL, "keeps everything"), (SIZED, "has its size from its parameters")]
    return _pairs(size, whose, f"policy {{policy!r}} {{why}} and takes no {param}", param, InvalidRequest)


_OF_CODEC: Final = {"codec": "{c.codec}", "group": "{c.codec.group}", "block": "{c.policy.index_block}"}
_TURNS: Final = (
    "{model!r} has a LongRoPE, which rotates sequences of more than {c.turning_point} tokens by other frequencies, and "
    "its "
)
_NOT_UNDONE: Final = [(rope, "cannot be undone") for rope in (NO_ROPE, CHANGING_ROPE)]

EXCLUSIONS: Final[tuple[Exclusion, ...]] = (
    # What a request says of a policy.
    *_sizes(RATIO, "compression_ratio"),
    *_sizes(BUDGET, "budget_tokens"),
    *_sizes(LEVELS, "levels"),
    Exclusion(
        (QUESTIONS, BLIND),
        "policy {policy!r} does not look at questions; leave expected_questions out, or choose a policy that "
        "scores by the end of the prompt, snapkv say, with prefill=whole",
        "expected_questions",
        InvalidRequest,
    ),
    # Selectors: those of several processes and of shared layers first, whatever chooses.
    *_pairs(
        SELECT,
        [
            (RANKS, "runs in several processes, which read whole caches"),
            (LAYER_MAP, "has layers that read the keys and values of others (layer_map)"),
        ],
        "{model!r} {why}; ask without select",
        "select",
    ),
    *_pairs(
        SELECT_SENTENCES,
        [
            (NO_TOKENIZER, "needs the text of answers, and {model!r} has no tokenizer here"),
            (LATENTS, "compares queries with keys, and {model!r} stores latents"),
        ],
        "selector {c.selector.name!r} {why}; take selector quest",
        "select.method",
    ),
    Exclusion(
        (SELECT_SENTENCES, NO_SENTENCES),
        "the cache has no sentence ends: it was made from token ids; take selector quest",
        "select.method",
    ),
    *_pairs(
        SELECT_UNROTATED,
        _NOT_UNDONE,
        "selector {c.selector.name} compares queries and keys without their rotation, and that of {model!r} {why}; "
        "take selector quest",
        "select.method",
    ),
    *_pairs(
        SELECT_EARLY,
        [
            (LATENTS, "stores latents"),
            (STATES, "has recurrent states"),
            (NO_KEYS, "has layers without keys of their own"),
        ],
        "selector {c.selector.name!r} gives each layer the input of the one before it, and {model!r} {why}; take "
        "selector quest",
        "select.method",
    ),
    # What a policy observes, in a prefill or at the question.
    *_pairs(
        UNROTATES,
        [(NO_ROPE, "is not to be had"), (CHANGING_ROPE, "changes with the length of the sequence")],
        "policy {policy!r} has to undo the model's rotary embedding, and that of {model!r} {why}; choose "
        "a policy that does not",
        "policy",
    ),
    Exclusion(
        (READS_TEXT, NO_TOKENIZER),
        "policy {policy!r} reads the document's text, and this engine has no tokenizer; choose a policy that does not",
        "policy",
    ),
    Exclusion(
        (SELECT_POLICY, READS_TEXT, NO_SENTENCES),
        "policy {policy!r} reads sentences, and the cache has no sentence ends: it was made from token ids; take "
        "selector policy:snapkv",
        "select.method",
    ),
    Exclusion(
        (READS_OUTPUT, NO_OUTPUT),
        "policy {policy!r} weighs values by the attention's output projection, and {model!r} has no "
        "o_proj weight in every layer that could be read; choose a policy that does not",
        "policy",
    ),
    Exclusion(
        (SELECT_POLICY, LATENTS),
        "the heads of {model!r} share latents, of which no policy can choose at the question; take selector quest",
        "select.method",
    ),
    # What a policy does to layers.
    *_pairs(
        LATENTS,
        [
            (HEAD_BUDGETS, "gives each head a budget of its own"),
            (PRUNES, "removes channels of each head's keys"),
            (APART, "chooses other tokens in each head"),
            (KEEPS_SCORES, "keeps the scores of each head (keep_scores)"),
        ],
        "policy {policy!r} {why}, and all heads of a layer of {model!r} share the latents of a token (MLA); choose "
        "another policy",
        "policy",
    ),
    Exclusion(
        (REDUCES, ALL_WHOLE),
        "every layer of {model!r} has {c.stored_whole}, which is stored whole, so policy {policy!r} has "
        "nothing to reduce; take policy full",
        "policy",
    ),
    *_pairs(
        MADE_AGAIN,
        [
            (STATES, "has recurrent states"),
            (LATENTS, "stores latents (MLA) in place of keys and values already"),
            (NO_KEYS, "has layers that read the keys and values of others"),
            (CHANGING_ROPE, "rotates keys by frequencies that change with the length of the sequence"),
            (MOVING_KEYS, "has positions that may change with a document's length"),
            (RANKS, "runs in several processes, each of which has a part of a layer"),
            (SPREAD, "is spread over several devices"),
            (
                WIDE,
                "has residuals of {c.facts.residual_width} numbers for each token and layer, and keys and values of "
                "{c.facts.entry_width}",
            ),
        ],
        "keys and values are made again of residuals (policy kvdirect), and {model!r} {why}; take policy full, with "
        "codec int8 say",
        "policy",
    ),
    *_beside(MOVES, "counts positions within the cache", (WINDOWS, CHUNKS)),
    *_beside(CALLS, "sees the calls of attention modules in one pass", (STATES,)),
    *_beside(CALIBRATED, "needs a calibration over layers that all see the whole document", (WINDOWS, CHUNKS, NO_KEYS)),
    # How a document is read.
    Exclusion(
        (PROTECT, MOVES),
        "positions=cache rotates every key to its place in the cache, and protected tokens stay as the model makes "
        "them; take positions=absolute, or leave protect out",
        "protect",
        InvalidRequest,
    ),
    *_pairs(
        IN_CHUNKS,
        [
            (LATENTS, "all heads of a layer of {model!r} share the latents of a token (MLA)"),
            (LAYER_MAP, "layers of {model!r} read those of others (layer_map), which would be reduced before"),
        ],
        "policy {policy!r} reads the document in chunks, and {why}; take prefill=whole, or another policy",
        "policy_params.prefill",
    ),
    *_beside(
        IN_CHUNKS,
        "reads the document in chunks that see only what was kept of those before",
        (WINDOWS, CHUNKS, STATES),
        "take prefill=whole, or another policy",
        "policy_params.prefill",
    ),
    *_beside(ELSEWHERE, "asks from other positions than the document's end", (WINDOWS, CHUNKS, STATES)),
    Exclusion(
        (TURNING_ROPE, BEHIND),
        _TURNS + "passes behind the document reach beyond that; choose a policy that makes one pass over the document, "
        "keydiff say",
        "policy",
    ),
    Exclusion(
        (TURNING_ROPE, IN_CHUNKS),
        _TURNS + "chunks begin before and end beyond that; take prefill=whole, or another policy",
        "policy_params.prefill",
    ),
    Exclusion(
        (SOFT, OTHER_LINEAR),
        "learned tokens add to {c.module} in every layer, and {model!r} has other layers; take policy kvzip_gate",
        "policy",
    ),
    # Images, which stand in the place of tokens in the pass over the document alone.
    Exclusion(
        (IMAGES, IN_CHUNKS),
        "policy {policy!r} reads the document in chunks, and images are read in one pass over it; take prefill=whole, "
        "or policy full",
        "policy_params.prefill",
    ),
    *_pairs(
        IMAGES,
        [
            (READS_TEXT, "reads the document's text, and images have none"),
            (SURPRISED, "reads the document twice"),
            (REPEATS_IMAGES, "reads tokens of the document again behind it, and those of images would be words there"),
        ],
        "policy {policy!r} {why}; of a document with images take full, keydiff or snapkv",
        "policy",
    ),
    Exclusion(
        (APPEND, IMAGES),
        "images are read with the document that they are in, and not behind a cache; compress the whole document "
        "anew, or append text",
        "document",
    ),
    # What is appended to a cache.
    *_pairs(
        APPEND,
        [
            (RANKS, "{model!r} runs in several processes, which append to no cache"),
            (
                REPOSITIONED,
                "policy {c.cache.identity.policy!r} counted its positions within the cache, and no document goes on "
                "from there",
            ),
            (
                INDEXED,
                "policy {c.cache.identity.policy!r} made an index of the whole document, which appended tokens would "
                "not be in",
            ),
        ],
        "{why}; compress the whole document anew",
        "cache_id",
    ),
    *_pairs(
        APPEND,
        [
            (SOFT, "runs learned tokens in the same pass as the document"),
            (MOVES, "counts positions within the cache"),
            (INDEXES, "makes an index of a whole document"),
            (CALLS, "sees the calls of attention modules of a whole document"),
            (RESIDUALS, "stores what the layers are given in one pass over a whole document"),
        ],
        "policy {policy!r} {why}, so it cannot reduce what is appended to a cache; choose another, or full",
        "policy",
    ),
    Exclusion(
        (APPEND, ASKS_CHUNKS, READ_OTHERWISE),
        "policy {policy!r} with prefill=chunked goes on from a cache that it read chunk by chunk itself with "
        "keep_scores, by the same parameters, without protected tokens and codecs of classes; only trimkv and "
        "make_each_token_count do, and this cache is of {c.cache.identity.policy!r}, read "
        "{c.cache.identity.prefill!r}; take prefill=whole",
        "policy_params.prefill",
    ),
    # Several processes see a part of the heads each.
    *_pairs(
        RANKS,
        [
            (CALLS, "and policy {policy!r} sees whole layers; choose another policy"),
            (SOFT, "and learned tokens add to whole layers; choose another policy"),
        ],
        "{model!r} runs in several processes, {why}",
        "policy",
    ),
    Exclusion(
        (RANKS, AGAIN),
        "{model!r} runs in several processes, which reduce whole layers; take prefill=whole",
        "policy_params.prefill",
    ),
    # Codecs.
    Exclusion(
        (SHARE_OF_POLICY, NO_PRECISION),
        "{c.codec} asks the policy how many entries have more bits, and {policy!r} says no such number; take "
        "policy mikv or arkv, or give a number as the share",
        "codec",
        InvalidRequest,
    ),
    Exclusion(
        (IN_BLOCKS, PROTECT, ENCODED),
        "an index needs the entries of its blocks together, and protect holds some apart from codec {c.codec}; take "
        "codec none, or another policy",
        "protect",
        InvalidRequest,
    ),
    Exclusion((IN_BLOCKS, SPLITS), codecs.SPLIT_BLOCKS.format_map(_OF_CODEC), "codec", InvalidRequest),
    Exclusion((IN_BLOCKS, CUTS), codecs.CUT_BLOCKS.format_map(_OF_CODEC), "codec", InvalidRequest),
    Exclusion((PRUNES, KLT), codecs.WHOLE_KEYS.format_map(_OF_CODEC), "codec", InvalidRequest),
    Exclusion((RESIDUALS, KLT), codecs.WHOLE_ENTRIES.format_map(_OF_CODEC), "codec", InvalidRequest),
    Exclusion(
        (KLT, STATES),
        "codec klt transforms keys and values, and {model!r} has recurrent states besides; use int4",
        "codec",
    ),
    *_pairs(
        KLT, _NOT_UNDONE, "codec klt takes the rotation off the keys, and that of {model!r} {why}; use int4", "codec"
    ),
    # What is done to caches.
    *_pairs(
        SEVERAL,
        [
            (STATES, "has recurrent states, and those behind several documents cannot be joined"),
            *(
                (kind, "has layers with {c.stored_whole}, which reach back from the longest document alone")
                for kind in (CHUNKS, WINDOWS)
            ),
            (MOVING_KEYS, "has positions that may change with a document's length"),
            (RANKS, "runs in several processes, which take one document a question"),
        ],
        "{model!r} {why}; ask each document by itself",
        "cache_ids",
    ),
    *_pairs(
        SUFFIX,
        [
            (RANKS, "runs in several processes, which would have to drop the same entries"),
            (LATENTS, "stores latents, which all heads of a layer share"),
            (
                LAYER_MAP,
                "has layers that read the keys and values of others (layer_map), by whose queries none chooses",
            ),
            *(
                (kind, "has layers with {c.stored_whole}, which count what they see by places in the suffix")
                for kind in (CHUNKS, WINDOWS)
            ),
        ],
        "{model!r} {why}; ask without suffix",
        "suffix.policy",
    ),
    *_pairs(
        SHRINK,
        [
            (STATES, "{model!r} has recurrent states, which remember all of the document"),
            (SEVERAL, "of several documents no entry is the last"),
            (SELECT, "a selector chooses anew among all entries of the document, and some leave"),
        ],
        "{why}; leave suffix.scope out",
        "suffix.scope",
    ),
    Exclusion((STORE, RANKS), "{model!r} runs in several processes, which keep no turns; ask without store", "store"),
    Exclusion(
        (EXPORT, LAYER_MAP),
        "{model!r} has layers that read the keys and values of others (layer_map), which transformers' cache "
        "does not know; attach its caches with engine.attached(cache)",
        "positions",
    ),
    Exclusion((EXPORT, NO_PREFIX), UNEXPORTED.format(reason="{c.no_prefix}"), "positions"),
    Exclusion(
        (ATTACH, RANKS),
        "{model!r} runs in {c.facts.ranks.size} processes, and a pass of the model in this one alone would wait "
        "for the others; use answer(), answer_all() or batch()",
        "model",
    ),
    *_pairs(
        SEARCH,
        [
            (RANKS, "runs in several processes, each of which has a part of a key"),
            *(
                (kind, "has layers with windows, chunks, latents or recurrent states")
                for kind in (WINDOWS, CHUNKS, STATES, LATENTS)
            ),
            (NO_KEYS, "has layers that read the keys and values of others"),
            *((rope, f"rotates its keys in a way that {why}") for rope, why in _NOT_UNDONE),
        ],
        "a search reads the keys of the first layers without their rotation, and {model!r} {why}; list caches "
        "by their labels, and ask those by id",
        "model",
    ),
)
"""In the order in which they are checked: the first that holds is raised."""
