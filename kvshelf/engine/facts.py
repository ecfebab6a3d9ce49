"""The facts of a loaded model, known before any document. Everything of an engine is made from them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.nn import Module

from kvshelf.engine.ranks import SharedModel
from kvshelf.errors import InvalidRequest
from kvshelf.model import loading as models
from kvshelf.model.images import ImageEncoder
from kvshelf.model.layers import layer_kinds
from kvshelf.model.rope import Rope, changes_with_length, reach
from kvshelf.model.text import TextFormat

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from kvshelf.artifact.packed import Rotate


class ModelFacts:
    """The facts of one model and its tokenizer, for any thread.

    text: the tokenizer and its template; None where documents and questions are token ids. max_tokens: the longest
    sequence. kv_bytes_per_token: of all layers, uncompressed. rope: None where there is none that could be read. kinds:
    of the layers. ranks: the processes that share the model's heads, this one among them; None where there is one.
    one_by_one: whether the keys of a token may change with the length of its call. recordable: whether the operations
    on a token are the same whatever the length of the call. images: reads images; None for a model that reads none.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: Any = None,
        *,
        name: str | None = None,
        ranks: SharedModel | None = None,
    ) -> None:
        """Raises as `loading.require_attachable`, and `InvalidRequest` for what is no model."""
        _require_model(model)
        models.require_attachable(model)
        self.model = model
        self.text = TextFormat(tokenizer) if tokenizer is not None else None
        self.name = name or model.config.name_or_path or type(model).__name__
        self.identity = models.identify(model, self.text, self.name)
        self.max_tokens = models.max_positions(model.config)
        self.kv_bytes_per_token = models.kv_bytes_per_token(model.config, model.dtype)
        self.kv_heads = models.kv_heads(model.config)
        """KV heads of each layer, of all processes together."""
        self.rope = Rope.of(model)
        self.kinds = layer_kinds(model.config)
        self.images = ImageEncoder.of(model)
        self.ranks = ranks
        # Where no RoPE could be read nobody knows, unless the layers say why: those that do not see all differ in their
        # frequencies alone, latents have a RoPE in a part of their own, and states have none.
        known = self.rope is not None or any(not kind.sees_all or kind.states or kind.latents for kind in self.kinds)
        self.one_by_one = not known or changes_with_length(model.config)
        plain = not any(kind.states or kind.latents for kind in self.kinds)
        own_keys = all(kind.attends or kind.reads is not None for kind in self.kinds)
        self.recordable = plain and own_keys and not self.one_by_one and ranks is None
        self.endless = False
        """Whether no token ends an answer, for benches of its time. A caller may change it at any time."""

    @property
    def folder(self) -> str:
        """The folder that the model came from; "" where there is none."""
        return self.model.config.name_or_path or ""

    @property
    def residual_width(self) -> int:
        """Numbers of a token in the residual stream, the input of each layer."""
        return int(self.model.config.hidden_size)

    @property
    def entry_width(self) -> int:
        """Numbers of a token's keys and values in a layer."""
        return self.kv_heads * sum(models.head_sizes(self.model.config))

    @property
    def token_bytes(self) -> int:
        """UTF-8 bytes of text that one token stands for at most."""
        return 1 if self.text is None else self.text.bound.token_bytes

    @property
    def rotate(self) -> Rotate | None:
        """The model's RoPE, for keys that are stored without it; None where it is not known."""
        return None if self.rope is None or self.rope.length_dependent else self.rope.rotate

    def longest(self, num_tokens: int) -> int:
        """Most tokens of a sequence that begins with a document of so many. A LongRoPE may rotate longer ones by other
        frequencies."""
        reached = reach(self.model.config, num_tokens)
        return self.max_tokens if reached is None else min(self.max_tokens, reached)

    def end_ids(self) -> frozenset[int]:
        """The tokens that end an answer: those of the model's two configurations and of its tokenizer. A caller may
        change the configurations at any time."""
        if self.endless:
            return frozenset()
        ends = [getattr(of, "eos_token_id", None) for of in (self.model.generation_config, self.model.config)]
        ends.append(None if self.text is None else self.text.end_id)
        lists = ([end] if isinstance(end, int) else end or () for end in ends)
        return frozenset(end for of_one in lists for end in of_one)


def _require_model(model: object) -> None:
    if not isinstance(model, Module):
        raise InvalidRequest(f"{model!r:.80} is no model of transformers; Engine.load loads one by name", param="model")
