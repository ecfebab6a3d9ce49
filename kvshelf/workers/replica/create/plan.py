"""What a replica holds of its device's memory: planned before its weights are read, and kept while it works."""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypedDict, Unpack

from kvshelf.engine.inputs.job import Level, shared
from kvshelf.errors import DocumentTooLong, OutOfMemory
from kvshelf.methods.method import parameter_fields
from kvshelf.methods.policies.chunked import ChunkAbsorber
from kvshelf.model.layers import LayerKind, reducible
from kvshelf.workers.replica.create.sizes import Dimensions

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from kvshelf.artifact.cache import CompressedCache
    from kvshelf.engine.engine import Engine
    from kvshelf.engine.inputs.job import Job
    from kvshelf.methods.policies.base import Absorber
    from kvshelf.workers.replica.create.auto import PolicyChoice
    from kvshelf.workers.replica.create.spec import Levels

LEAST_TOKENS: Final = 1024
"""Of a document that every replica must have room for, unless its model or its settings say less."""

_CARD_SHARE: Final = 1 / 16
"""Of a card, beside the plan: CUDA itself, and gaps between the allocator's blocks. Assumed: no card was measured."""

_CASCADE: Final = 1.125
"""Of its budget a policy that shares it among layers holds so much before it cuts, see `prefill.reducing`."""


class PlanLimits(TypedDict, total=False):
    """What a replica's settings say. memory: a share of the device up to 1, or bytes; None: all of a card, and no limit
    on a CPU. attached, suffixes: see `MemoryPlan`. answers: that share a step at most. longest: tokens of a document
    that the settings allow."""

    memory: float | None
    attached: int
    suffixes: int
    answers: int
    longest: int | None


@dataclass(frozen=True)
class MemoryPlan:
    """The bytes of one model's replica. Finished caches that wait for their store have no part of their own, nor have
    the passes of a vision part. there: of the device, that it may use; None: nothing limits it. beside: what
    the process holds before it has a model. attached, suffixes, recorded: the most that caches, open answers and, on a
    card, recorded decode steps may take. wanted: tokens of a document that must fit; max_tokens: of the longest that is
    taken. shape: of the model's caches. token_bytes: that a pass holds for each of its tokens, see `token_bytes`.
    share: of the model's layers, where others are on other devices; shape and bytes are then of those that are here."""

    model: str
    device: str
    there: int | None
    beside: int
    weights: int
    attached: int
    suffixes: int
    recorded: int
    wanted: int
    shape: Dimensions
    token_bytes: int
    max_tokens: int
    share: Fraction = Fraction(1)

    @classmethod
    def of(cls, model: PreTrainedModel, name: str, device: torch.device, **limits: Unpack[PlanLimits]) -> MemoryPlan:
        """The plan of a model on its way to `device`; it may be one without weights."""
        from kvshelf.model.loading import max_positions

        most, longest, recorded = max_positions(model.config), limits.get("longest"), 0
        there, per_token = _there(device, limits.get("memory")), token_bytes(model)
        if device.type == "cuda":
            from kvshelf.engine.decode.slots.slots import recorded_bytes

            vocabulary, itemsize = model.config.vocab_size, int(model.dtype.itemsize)
            recorded = recorded_bytes(limits.get("answers", 0), vocabulary, itemsize, per_token)
        return cls(
            model=name,
            device=str(device),
            there=there,
            beside=_beside(device, there),
            weights=sum(weight.nbytes for weight in (*model.parameters(), *model.buffers())),
            attached=limits.get("attached", 0),
            suffixes=limits.get("suffixes", 0),
            recorded=recorded,
            wanted=min(most, longest or LEAST_TOKENS),
            shape=replace(Dimensions.of(model), device=device.type),
            token_bytes=per_token,
            max_tokens=min(most, longest or most),
        )

    @classmethod
    def of_name(
        cls, name: str, shown: str, *, device: str, dtype: str, rounded: bool = False, **limits: Unpack[PlanLimits]
    ) -> MemoryPlan:
        """As `of`, before any weight is read. shown: the model's name for callers. rounded: linear layers of
        a byte for each weight, in a model of float32. Raises `InvalidRequest` for a device that cannot be used, and for
        a dtype that it lacks."""
        from kvshelf.model.loading import chosen_device, outline
        from kvshelf.model.weights.int8 import saved_bytes

        where = chosen_device(device)
        model = outline(name, device=device, dtype="float32" if rounded else dtype)
        plan = cls.of(model, shown, where, **limits)
        return replace(plan, weights=plan.weights - saved_bytes(model)) if rounded else plan

    def on(self, device: torch.device, weights: int, kinds: Sequence[LayerKind], num_layers: int) -> MemoryPlan:
        """The plan of a device that has these bytes of weights, and these layers of `num_layers`."""
        share, there = Fraction(len(kinds), num_layers), _there(device, None)
        shape = replace(
            self.shape,
            device=device.type,
            layers=len(reducible(kinds)),
            recent=tuple(kind for kind in kinds if not kind.sees_all),
            states=ceil(self.shape.states * share),
        )
        attached, suffixes = ceil(self.attached * share), ceil(self.suffixes * share)
        return replace(
            self, device=str(device), there=there, beside=_beside(device, there), weights=weights, attached=attached,
            suffixes=suffixes, shape=shape, share=share,
        )  # fmt: skip

    def loaded(self, engine: Engine) -> MemoryPlan:
        """The same plan, with the weights of an engine as they are, and as it runs its passes."""
        model = engine.model
        weights = sum(weight.nbytes for weight in (*model.parameters(), *model.buffers()))
        weights += 0 if engine.facts.images is None else engine.facts.images.nbytes
        recorded = engine.passes.program_of_documents is not None
        return replace(self, weights=weights, token_bytes=token_bytes(model, recorded=recorded))

    @property
    def room(self) -> int | None:
        """Bytes for one prefill; None: no limit."""
        if self.there is None:
            return None
        return self.there - self.beside - self.weights - self.attached - self.suffixes - self.recorded - self.decoding

    def prefill_bytes(self, tokens: int) -> int:
        """The bytes of a document in one pass that keeps everything."""
        return tokens * self.token_bytes + self.shape.held_bytes(tokens, tokens)

    @property
    def longest(self) -> int:
        """Tokens of the longest document that fits in one pass under policy `full`, without cues of a quality; 0 if
        none does. Policies that keep less take more, and those with passes of their own less."""
        if self.room is None:
            return self.max_tokens
        return bisect_right(range(1, self.max_tokens + 1), self.room, key=self.prefill_bytes)

    @property
    def parts(self) -> dict[str, int]:
        """The bytes of each part, by what they are for."""
        return {
            "weights": self.weights,
            "attached caches": self.attached,
            "suffixes": self.suffixes,
            **({"recorded decode steps": self.recorded} if self.recorded else {}),
            **({"decoding klt": self.decoding} if self.decoding else {}),
            "the process itself": self.beside,
            f"a document of {self.wanted:,} tokens": self.prefill_bytes(self.wanted),
        }

    @property
    def needed(self) -> int:
        return sum(self.parts.values())

    @property
    def fits(self) -> bool:
        return self.there is None or self.needed <= self.there

    @property
    def for_weights(self) -> int:
        """Bytes of weights that leave room for the parts of their layers, which become fewer as the weights do. Where
        there is a limit."""
        fixed = self.beside + self.wanted * self.token_bytes
        return max(0, int(self.weights * ((self.there or 0) - fixed) / (self.needed - fixed)))

    @property
    def beside_others(self) -> int:
        """Bytes of weights that leave room for the other parts as they are. Where there is a limit."""
        return max(0, (self.there or 0) - (self.needed - self.weights))

    @property
    def _more(self) -> str:
        """Where more memory may come from."""
        return "KVSHELF_GPU_MEMORY, a larger device" if self.share == 1 else "more GPUs, or larger ones"

    @property
    def decoding(self) -> int:
        """Bytes of a card that decodes klt, of a document of `wanted` tokens: the codes of layers that are decoded
        together and their rows, what is made of one layer's, and the transforms that the card holds. Of longer ones
        the CPU decodes what has no room."""
        if self.shape.device != "cuda" or not self.share:
            return 0
        from kvshelf.artifact.transforms import HELD_BYTES
        from kvshelf.engine.attention.attachment import BYTES_TOGETHER

        channels = [self.shape.kv_heads * dim for dim in self.shape.dims]
        layer = self.wanted * sum(channels) * 4
        together = max(layer, min(self.shape.layers * layer, BYTES_TOGETHER))
        # The bases and slopes of all heads together, and four of each head.
        sizes = [(2 * own + 4 * dim) * own * 4 for own, dim in zip(channels, self.shape.dims, strict=True)]
        transforms = self.shape.layers * sum(size for size in sizes if size <= HELD_BYTES)
        return together + together // 2 + 2 * layer + transforms

    @property
    def pinned(self) -> int:
        """Bytes of the host's memory that stay pinned for copies from and to a card, see `kernels.staging`."""
        from kvshelf.kernels.staging import PINNED_BYTES

        return PINNED_BYTES if self.shape.device == "cuda" else 0

    @property
    def _listing(self) -> str:
        return ", ".join(f"{name} {nbytes:,}" for name, nbytes in self.parts.items())

    def __str__(self) -> str:
        parts = self._listing + (f"; of the host {self.pinned:,} pinned for copies" if self.pinned else "")
        if self.there is None:
            return f"{self.model} on {self.device}: {self.needed:,} bytes and no limit ({parts})"
        return (
            f"{self.model} on {self.device}: {self.needed:,} of {self.there:,} bytes ({parts}); under policy full, "
            f"without cues of quality, the longest document that fits in one pass has {self.longest:,} tokens of "
            f"{self.max_tokens:,}"
        )

    def require(self) -> None:
        """Raise `OutOfMemory` where the parts do not fit together."""
        if not self.fits:
            raise OutOfMemory(
                f"{self.model!r} does not fit on {self.device}: it needs {self.needed:,} bytes ({self._listing}), and "
                f"this replica may use {self.there:,}; give it more ({self._more}), lower KVSHELF_RESIDENT_BYTES, "
                "KVSHELF_MAX_SUFFIX_BYTES or KVSHELF_MAX_DOCUMENT_TOKENS, or take --dtype bfloat16 or a smaller model",
                param="gpu_memory",
                fits=False,
                needed_bytes=self.needed,
                there_bytes=self.there,
            )

    def keep(self) -> None:
        """Hold this process to the plan: on a card, CUDA's allocator gives it no more than is there for it. Raises
        `OutOfMemory` where other programs leave no room for the weights."""
        import torch

        device = torch.device(self.device)
        if device.type != "cuda" or self.there is None:
            return
        free, total = torch.cuda.mem_get_info(device)
        if self.weights > free:
            raise OutOfMemory(
                f"the weights of {self.model!r} take {self.weights:,} bytes, and of {self.device} only {free:,} are "
                "free: other programs hold the rest; end them, or take another device",
                param="device",
                needed_bytes=self.weights,
                there_bytes=free,
            )
        torch.cuda.set_per_process_memory_fraction(min(1.0, self.there / total), device)

    def require_room(self, engine: Engine, work: Levels | PolicyChoice) -> None:
        """Raise `DocumentTooLong` for a document of which a prefill would not fit beside the other parts, its cues
        included. A policy that reads chunk by chunk needs room for what stays and a chunk. The model does not run."""
        for _, refusal in self._without_room(engine, work):
            raise refusal

    def fitting(self, engine: Engine, choice: PolicyChoice) -> PolicyChoice:
        """A choice without the levels whose prefill has no room; the same where none has. The model does not run."""
        refusals = self._without_room(engine, choice)
        reasons = {choice.levels.index(level): refusal.message for group, refusal in refusals for level in group}
        return choice.without(reasons) if len(reasons) < len(choice.levels) else choice

    def _without_room(
        self, engine: Engine, work: Levels | PolicyChoice
    ) -> Iterator[tuple[Sequence[Level], DocumentTooLong]]:
        """The levels of each prefill that does not fit, and why."""
        if self.room is None:
            return
        for group in shared(work.levels):
            needed = self._group_bytes(engine, group, work.cues)
            if needed > self.room:
                refusal = DocumentTooLong(
                    f"the document of {work.num_tokens:,} tokens needs {needed:,} bytes on {self.device}, and "
                    f"{self.model!r} has {self.room:,} for one ({self.longest:,} tokens under policy full); "
                    f"shorten it, have it split (split), remove more of it, {_advice(group[0].job)}, or give the "
                    f"replica more memory ({'KVSHELF_GPU_MEMORY' if self.share == 1 else self._more})",
                    param="document",
                    needed_bytes=needed,
                    there_bytes=self.room,
                )
                yield group, refusal

    def _group_bytes(self, engine: Engine, group: Sequence[Level], cues: int) -> int:
        """The bytes of a prefill that these levels share."""
        jobs = list({id(level.job): level.job for level in group}.values())
        first = jobs[0]
        if first.absorber is None:
            quality = engine.probe(first, cues)
            work = (first.run_tokens + (0 if quality is None else quality.num_tokens)) * self.token_bytes
        else:
            work = self._chunk_bytes(first, first.absorber)
        behind = 0 if first.parent is None else self._parent_bytes(first.parent.cache, first)
        return work + behind + sum(map(self._kept_bytes, jobs))

    def _chunk_bytes(self, job: Job, absorber: Absorber) -> int:
        """Of a pass over a chunk. Where all that is left is judged again, a layer joined with the chunk and what is
        made of it, beside the half of a pass that is then left, may be more."""
        chunk = max(absorber.chunks)
        reading = (chunk + max((len(probe.token_ids) for probe in job.passes), default=0)) * self.token_bytes
        if not isinstance(absorber, ChunkAbsorber):
            return reading
        entries = min(job.document.end, job.budget.tokens + chunk)
        layer = self.shape.held_bytes(job.document.end, entries) // max(1, self.shape.layers)
        return max(reading, reading // 2 + 2 * layer) + ceil(absorber.policy.own_bytes(job.document) * self.share)

    def _parent_bytes(self, cache: CompressedCache, job: Job) -> int:
        """Of a cache that is appended to: as it is, as attention reads it, and on a CPU joined with the rest, unless a
        policy that reads on in chunks keeps what stays of both."""
        plain = self.shape.held_bytes(cache.num_tokens, cache.kept_tokens) if cache.coded else 0
        joined = self.shape.device == "cpu" and job.absorber is None
        return ceil(cache.nbytes * self.share) * (2 if joined else 1) + plain

    def _kept_bytes(self, job: Job) -> int:
        """Of all layers, when the last one is reduced; of a document in chunks, when it has read one."""
        entries, tokens = job.budget.tokens, job.num_tokens if job.absorber is None else job.document.end
        if job.policy.phase != "during":
            if job.absorber is not None:
                entries += max(job.absorber.chunks)
            else:
                entries = job.num_tokens if job.policy.phase == "after" else int(_CASCADE * entries)
        if job.policy.ragged or job.policy.phase != "during":  # the layers here may have what those elsewhere have not
            entries = ceil(entries / self.share) if self.share else 0
        columns = job.policy.stored_beside.get("columns", 0)
        return self.shape.held_bytes(tokens, min(tokens, entries), columns)


def _advice(job: Job) -> str:
    """How the document of a job takes less memory under a policy."""
    if job.absorber is not None:
        return f"lower {'chunk' if isinstance(job.absorber, ChunkAbsorber) else 'lag'} or what stays"
    chunked = any(field.name == "prefill" for field in parameter_fields(type(job.policy)))
    other = "" if chunked else "policy lagkv with "
    return f"read it in chunks ({other}prefill=chunked)"


def token_bytes(model: PreTrainedModel, *, recorded: bool = False) -> int:
    """Bytes that a pass holds for each of its tokens while the layer computes that holds most, beside what stays.

    Counted in the code of transformers' models. The feed-forward part holds the embeddings, a layer's input, its
    residual and its normed copy, and three rows of the inner width (four where two of them are one product; experts
    have theirs for each that a token goes to). The attention holds these but for the residual, queries, and twice keys,
    values and what it gives. recorded: by `ForwardProgram`, whose instructions hold the residual alone of these four,
    and no inner row.
    """
    from kvshelf.model.loading import head_sizes, kv_heads

    config, itemsize = model.config, int(model.dtype.itemsize)
    width, (key, value) = int(config.hidden_size), head_sizes(config)
    outputs = {getattr(module, "out_features", None) for module in model.modules()}
    queries, entry = int(config.num_attention_heads) * key, kv_heads(config) * (key + value)
    attention = queries + 2 * int(config.num_attention_heads) * value + 2 * entry + 2 * key  # and the RoPE's tables
    if recorded:
        copied = queries + entry if queries + entry in outputs else 0  # parts of one product, laid out again
        return (width + attention + copied) * itemsize
    inner = int(getattr(config, "intermediate_size", None) or 4 * width)
    feeding = (4 if 2 * inner in outputs else 3) * inner
    if experts := int(getattr(config, "num_experts_per_tok", None) or 0):
        expert = int(getattr(config, "moe_intermediate_size", None) or inner)
        feeding = max(feeding, experts * (2 * width + 4 * expert))
    return max(4 * width + feeding + 2 * key, 3 * width + attention) * itemsize


def _there(device: torch.device, memory: float | None) -> int | None:
    """Bytes of a device that a replica may use. A card is asked for no memory of its own by this."""
    if device.type == "cuda":
        import torch

        total = int(torch.cuda.get_device_properties(device).total_memory)
    elif memory is None:
        return None
    else:
        total = machine_bytes()
    memory = 1.0 if memory is None else memory
    return min(total, int(memory * total if memory <= 1 else memory))


def _beside(device: torch.device, there: int | None) -> int:
    if device.type == "cuda":
        return int((there or 0) * _CARD_SHARE)
    resident = Path("/proc/self/statm").read_text().split()[1]
    return int(resident) * os.sysconf("SC_PAGE_SIZE")


def machine_bytes(root: Path = Path("/sys/fs/cgroup"), groups: Path = Path("/proc/self/cgroup")) -> int:
    """Memory of this machine, or the least that a control group of this process may use (as of `docker --memory`).
    root: where their files are. groups: the file with this process's group."""
    least = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for line in groups.read_text().splitlines() if groups.is_file() else ():
        _, kinds, name = line.split(":", 2)
        if kinds and "memory" not in kinds.split(","):
            continue
        file, top = ("memory.limit_in_bytes", root / "memory") if kinds else ("memory.max", root)
        folder = top / name.lstrip("/")
        for group in (folder, *folder.parents):
            limit = (group / file).read_text().strip() if (group / file).is_file() else "max"
            if limit != "max":
                least = min(least, int(limit))
            if group == top:
                break
    return least
