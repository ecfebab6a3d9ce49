"""The language part of a model that is made of several: of text and images, or of text and sound."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, islice
from typing import Any, ClassVar, Final

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from kvshelf.errors import PolicyUnsupported
from kvshelf.model.devices import input_device

_COMPARED: Final = 7
"""Tokens whose logits are compared, to see whether a part gives those of the whole."""

_ALIKE: Final = 1e-3
"""Differences of logits up to this share of the largest are rounding: the operations are the same ones."""


_CACHE: Final = ("cache", "past_key_values")
"""Names of a cache in the output of a decoder, in new and old versions of transformers 5."""


class LanguageModel(PreTrainedModel, GenerationMixin):  # type: ignore[misc]
    """A decoder and the matrix of its logits, where transformers has no class for the two without the rest."""

    base_model_prefix = "model"
    main_input_name = "input_ids"
    _supports_sdpa = _supports_flash_attn = _supports_flex_attn = _supports_attention_backend = True
    _can_compile_fullgraph = False
    _no_split_modules: ClassVar[list[str]] = []

    def __init__(self, decoder: PreTrainedModel, head: nn.Module) -> None:
        super().__init__(decoder.config)
        self.model = decoder
        self.lm_head = head

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        logits_to_keep: int | Tensor = 0,
        **options: Any,
    ) -> CausalLMOutputWithPast:
        """input_ids, position_ids: `[B, T]`. logits_to_keep: so many of the last tokens, 0 for all, or which tokens."""
        out = self.model(input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids, **options)
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        cache = {name: past for name, past in out.items() if name in _CACHE}
        return CausalLMOutputWithPast(logits=self.lm_head(out[0][:, kept]), **cache)


def language_part(whole: PreTrainedModel, name: str) -> PreTrainedModel:
    """The causal model of text in a model made of several, with the same weights; nothing is copied.

    Raises `PolicyUnsupported` where there is none that gives the logits of the whole for a text. Without weights it is
    not compared.
    """
    compared = input_device(whole).type != "meta"
    text = _some_text(whole.config)
    expected = _logits_of(whole.eval(), text) if compared else None
    for part in _parts(whole):
        if expected is None or _alike(_logits_of(part.eval(), text), expected):
            part.config.name_or_path = name
            if whole.generation_config is not None:
                part.generation_config = whole.generation_config
            return part
    raise PolicyUnsupported(
        f"{type(whole).__name__} has no language part that says about a text what the whole does, so kvshelf cannot "
        "attach to it",
        param="model",
    )


def require_weights(model: PreTrainedModel, missing: set[str], part: PreTrainedModel, name: str) -> None:
    """Refuse a checkpoint that lacks weights of the part that is used: they would be random. missing: names in the
    whole model, from transformers."""
    used = {id(tensor) for tensor in _tensors(part)}
    whole = dict(chain(model.named_parameters(), model.named_buffers()))
    random = sorted(key for key in missing if key in whole and id(whole[key]) in used)
    if random:
        shown = ", ".join(random[:4]) + (", ..." if len(random) > 4 else "")
        raise PolicyUnsupported(
            f"the checkpoint of {name!r} lacks {len(random)} weights of {type(part).__name__} ({shown}), which "
            "transformers would make up at random",
            param="model",
        )


def _parts(whole: PreTrainedModel) -> Iterator[PreTrainedModel]:
    """Candidates for the language part, the best first."""
    decoder, head = whole.get_decoder(), whole.get_output_embeddings()
    if decoder is None or decoder is whole or head is None:
        return
    if decoder.get_output_embeddings() is not None:  # it is a causal model itself
        yield decoder
        return
    if (part := _of_own_class(decoder, head)) is not None:
        yield part
    # A causal model may scale logits where the whole does not (Cohere 2 in Aya Vision). transformers reads in a class's
    # module whether its attention and its experts can be set.
    yield type("LanguageModel", (LanguageModel,), {"__module__": type(decoder).__module__})(decoder, head)


def _of_own_class(decoder: PreTrainedModel, head: nn.Module) -> PreTrainedModel | None:
    """A causal model of transformers' own; None where it has none around this decoder."""
    with torch.device("meta"):  # where tensors take no memory
        try:
            part: PreTrainedModel = AutoModelForCausalLM.from_config(decoder.config, trust_remote_code=False)
        except ValueError:
            return None
    if type(part.base_model) is not type(decoder):
        return None
    part.config = decoder.config  # one and the same: modules look up their attention function in it
    setattr(part, part.base_model_prefix, decoder)
    part.set_output_embeddings(head)
    rest = [tensor for tensor in _tensors(part) if tensor.is_meta]
    return None if rest and not all(tensor.is_meta for tensor in _tensors(decoder)) else part


def _tensors(model: nn.Module) -> Iterator[Tensor]:
    return chain(model.parameters(), model.buffers())


def _logits_of(model: PreTrainedModel, text: Tensor) -> Tensor:
    """Logits of a text alone, `[1, T, vocabulary]` fp32."""
    try:
        with torch.no_grad():
            logits: Tensor = model(input_ids=text.to(input_device(model)), use_cache=False).logits
    except Exception as error:  # whatever a model's code raises without an image
        raise PolicyUnsupported(
            f"{type(model).__name__} takes no text alone: {type(error).__name__}: {error}", param="model"
        ) from error
    return logits.float().to(text.device)


def _alike(logits: Tensor, expected: Tensor) -> bool:
    return logits.shape == expected.shape and torch.allclose(
        logits, expected, rtol=0, atol=_ALIKE * float(expected.nan_to_num().abs().max()), equal_nan=True
    )


def _some_text(config: Any) -> Tensor:
    """Ids `[1, T]` of tokens that stand for themselves: none that the configuration names, as it names the tokens of
    images."""
    named = {value for value in config.to_dict().values() if isinstance(value, int)}
    tokens = range(config.get_text_config(decoder=True).vocab_size)
    return torch.tensor([list(islice((token for token in tokens if token not in named), _COMPARED))])
