"""A card that is not there: where the host would wait for one, counted on a CPU.

The card's tensors are tensors of the CPU behind a wrapper that says it is on CUDA. So the engine takes the ways that it
takes on a card, Triton's kernels under their interpreter among them, each number is computed, and an operation on a
tensor of the card and one of the host is refused as a card refuses it, as is a kernel of Triton that starts while
another card is the current one: models are put on the second, and their last layers on the first where a test has two.
What is copied to the host without a wait is zeros there until
somebody waits: who reads it too early gets wrong numbers, as with a card. Work on streams that is not behind what it
needs is an error (`scripts/card_order.py`).
"""

from __future__ import annotations

import os
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar, Final, NamedTuple, Self
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

import kvshelf
from kvshelf.kernels import staging
from scripts import card_order
from scripts.card_order import Order, Stream

if TYPE_CHECKING:
    from kvshelf.engine.engine import Engine

CARD: Final = torch.device("cuda", 1)
FIRST_CARD: Final = torch.device("cuda", 0)

_PACKAGE: Final = str(Path(kvshelf.__file__).parent) + os.sep

_PROPERTIES: Final = SimpleNamespace(name="no card", multi_processor_count=132)

_READING: Final = (
    "_local_scalar_dense", "nonzero", "masked_select", "_unique2", "unique_consecutive", "unique_dim", "bincount",
    "equal", "_linalg_check_errors", "_linalg_eigh", "_linalg_svd",
)  # fmt: skip
"""Operations whose result, or its size, the host reads off the card before they return."""


class Waits(NamedTuple):
    """How often the host waited: at lines that waited at least once for each layer, and beside them."""

    layer: int
    beside: int

    @classmethod
    def of(cls, waits: Counter[str], layers: int) -> Waits:
        layer = sum(count // layers for count in waits.values())
        return cls(layer, waits.total() - layer * layers)

    def __str__(self) -> str:
        return f"{self.layer} + {self.beside}"


class Card:
    """`with Card() as card:` a card, and how often this thread waits for it inside. Models are loaded before. What
    pools of threads are given inside uses it, too; their waits are not counted.

    waits: by the operation and the line of kvshelf's code, or of what called it where no line is kvshelf's. A copy
    between host and card waits unless it is `non_blocking` and the host's memory is pinned: CUDA may wait for a copy
    from other memory, too.
    """

    def __init__(self) -> None:
        self.waits: Counter[str] = Counter()
        self._order = Order(self._noted)
        self._local = threading.local()
        self._pinned: dict[int, Tensor] = {}
        self._within = ExitStack()

    def __enter__(self) -> Self:
        self._thread = threading.get_ident()
        for name, form in (
            ("get_device_properties", lambda _device: _PROPERTIES),
            ("current_stream", self._order.current),
            ("stream", self._order.on),
            ("Stream", lambda device: Stream(self._order, device)),
            ("device", self._made_current),
            ("device_of", lambda tensor: self._made_current(tensor.device)),
        ):
            self._within.enter_context(patch.object(torch.cuda, name, form))
        self._within.enter_context(patch.object(ThreadPoolExecutor, "submit", self._submitting()))
        self._within.enter_context(patch.object(_OnCard, "order", self._order))
        if find_spec("triton") is not None:
            self._within.enter_context(self._starts_watched())
        for kept in (staging.arriving, staging.leaving, staging.decoding):  # of another card
            kept.clear()
            self._within.callback(kept.clear)
        self._using(self._within)
        return self

    def __exit__(self, *error: Any) -> None:
        self._within.close()

    @contextmanager
    def _made_current(self, device: torch.device) -> Iterator[None]:
        before = self._current
        self._local.current = device if device.type == "cuda" else before
        try:
            yield
        finally:
            self._local.current = before

    @property
    def _current(self) -> torch.device:
        """The one that this thread gives kernels to: the first, as long as nobody said another."""
        current: torch.device = getattr(self._local, "current", FIRST_CARD)
        return current

    def _starts_watched(self) -> Any:
        from triton.runtime.interpreter import GridExecutor

        start = GridExecutor.__call__

        def watched(kernel: GridExecutor, *args: Any, **kwargs: Any) -> None:
            for card in _cards(tree_leaves((args, kwargs))) - {self._current}:
                raise RuntimeError(f"a kernel starts on {self._current}, and its tensors are on {card}, at {_place()}")
            start(kernel, *args, **kwargs)

        return patch.object(GridExecutor, "__call__", watched)

    def _using(self, within: ExitStack) -> None:
        """Have this thread's operations be the card's."""
        within.enter_context(_Operations(self._order, self._pinned))
        within.enter_context(_Lists())

    def _submitting(self) -> Callable[..., Future[Any]]:
        submit = ThreadPoolExecutor.submit

        def submitted(pool: ThreadPoolExecutor, run: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
            def on_the_card() -> Any:
                with ExitStack() as within:
                    self._using(within)
                    return run(*args, **kwargs)

            return submit(pool, on_the_card)

        return submitted

    def _noted(self, name: str) -> None:
        if threading.get_ident() == self._thread:
            self.waits[f"{name} at {_place()}"] += 1

    def compression(self, engine: Engine, document: str, policy: str, codecs: Sequence[str]) -> dict[str, Waits]:
        """The waits of a prefill that is compressed by `policy`, under "none", and those of encoding its cache under
        each codec."""
        layers, counts = len(engine.kinds), dict[str, Waits]()
        self.waits.clear()
        cache = engine.compress(document, policy=policy)
        for codec in ("none", *codecs):
            engine.encoded(cache, codec)
            counts[codec] = Waits.of(self.waits, layers)
            self.waits.clear()
        return counts

    def put(self, model: nn.Module, card: torch.device = CARD) -> None:
        """Have a model's weights and buffers, or those of a part of it, on a card."""
        for module in model.modules():
            for name, weight in module._parameters.items():
                if weight is not None:
                    module._parameters[name] = nn.Parameter(_OnCard(_host(weight), card), requires_grad=False)
            for name, buffer in module._buffers.items():
                module._buffers[name] = None if buffer is None else _OnCard(_host(buffer), card)


class _OnCard(Tensor):
    """host: the tensor of the CPU. card: where it is. To torch's C++ it is on "meta", because it asks a driver for any
    other device."""

    host: Tensor
    card: torch.device
    order: ClassVar[Order | None] = None
    device = property(lambda self: self.card)
    is_cuda = property(lambda _: True)
    is_meta = property(lambda _: False)
    __torch_function__ = torch._C._disabled_torch_function_impl

    def __new__(cls, host: Tensor, card: torch.device = CARD) -> Self:
        made: Self = Tensor._make_wrapper_subclass(
            cls, host.shape, strides=host.stride(), storage_offset=host.storage_offset(), dtype=host.dtype,
            device=torch.device("meta"),
        )  # fmt: skip
        made.host, made.card = host, card
        return made

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def data_ptr(self) -> int:  # Triton's interpreter asks for it, and for the storage
        if self.order is not None:
            self.order.require_behind(self.card, self.host)
        return self.host.data_ptr()

    def record_stream(self, s: Any) -> None:
        """Nothing: memory of this card is not given out again while anybody has it."""

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.host.untyped_storage()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RuntimeError(f"{func} on a tensor of a card that is no longer there")


class _Operations(TorchDispatchMode):
    """Runs each operation on the CPU, and wraps what is then on the card."""

    def __init__(self, order: Order, pinned: dict[int, Tensor]) -> None:
        """pinned: memory of the host, by where it begins."""
        super().__init__()
        self._mode_key = torch._C._TorchDispatchModeKey.FAKE  # then torch does not look for a driver
        self._order = order
        self._pinned = pinned
        self._last = CARD
        """Where torch's C++ makes a tensor beside others, for which it asks "meta"."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = func._schema.name.removeprefix("aten::"), dict(kwargs or {})
        tensors = tree_leaves((args, kwargs))
        cards = _cards(tensors)
        if len(cards) > 1 and name not in ("_to_copy", "copy_"):
            raise RuntimeError(f"{func} was given tensors of {' and '.join(sorted(map(str, cards)))}")
        on_card = bool(cards)
        if cards:
            self._last = args[0].card if isinstance(args[0], _OnCard) else min(cards, key=str)
        card = self._last
        to_card = on_card
        if (device := kwargs.get("device")) is not None:
            to_card, kwargs["device"] = torch.device(device).type != "cpu", torch.device("cpu")
            card = torch.device(device) if torch.device(device).index is not None else card
        same = name == "_to_copy" and on_card and device == args[0].card
        if same and kwargs.get("dtype", args[0].dtype) == args[0].dtype:
            return args[0]  # C++ asks for it, because it takes "cuda" and "meta" for two devices
        pinned = kwargs.pop("pin_memory", False) or name == "_pin_memory"
        if pinned and name == "_pin_memory":
            result = args[0].clone()
        else:
            wait, queued = self._look(func, name, args, kwargs, on_card, to_card)
            own_args, own_kwargs = tree_map_only(_OnCard, lambda tensor: tensor.host, (args, kwargs))
            result = func(*own_args, **own_kwargs)
            for other in cards - {card}:
                self._order.meet(card, other)
            self._note(func, (args, kwargs), result, card, queued=queued, to_card=to_card)
            for other in cards - {card}:
                self._order.meet(card, other)
            if wait:
                self._order.wait(wait, self._order.current(card).seen)
            if func._schema.is_mutable:  # it returns what it changed
                same = zip(tree_leaves((own_args, own_kwargs)), tensors, strict=True)
                changed = [leaf for own, leaf in same if own is result]
                return changed[0] if changed else result
        if pinned:
            self._pinned[result.untyped_storage().data_ptr()] = result
        return tree_map_only(Tensor, lambda made: _OnCard(made, card), result) if to_card else result

    def _note(self, func: Any, args: Any, result: Any, card: torch.device, *, queued: bool, to_card: bool) -> None:
        """Tell the order what was done. queued: it is a copy that nobody waited for."""
        inputs = [leaf.host for leaf in tree_leaves(args) if isinstance(leaf, _OnCard)]
        results = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        if inputs or to_card:
            memory = {tensor.untyped_storage().data_ptr() for tensor in inputs}
            changed = [leaf for leaf in results if any(leaf is own for own in inputs)]
            new = [leaf for leaf in results if to_card and leaf.untyped_storage().data_ptr() not in memory]
            self._order.done(card, inputs, changed if func._schema.is_mutable else new)
        if not queued:
            return
        source = args[0][1] if func._schema.is_mutable else args[0][0]
        if isinstance(source, _OnCard):
            self._order.copies(card, result, result.clone())
            result.zero_()
        else:
            self._order.copies(card, source)

    def _look(self, func: Any, name: str, args: Any, kwargs: Any, on_card: bool, to_card: bool) -> tuple[str, bool]:
        """For what an operation waits, and whether it is a copy between the host and the card that is only queued."""
        host = [
            leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor) and not isinstance(leaf, _OnCard)
        ]
        if func._schema.is_mutable and any(args[0] is tensor for tensor in host):
            self._order.require_free(args[0])
        if name in ("_to_copy", "copy_"):
            crosses = on_card != to_card if name == "_to_copy" else on_card and bool(host)
            blocks = not (kwargs.get("non_blocking") or (name == "copy_" and args[2:] == (True,)))
            other = any(tensor.untyped_storage().data_ptr() not in self._pinned for tensor in host)
            where = "card" if isinstance(args[0], _OnCard) == (name == "copy_") else "host"
            waits = crosses and (blocks or other)
            return f"copy to the {where}" if waits else "", crosses and not waits
        if not on_card:
            return "", False
        if name in _READING or (name == "repeat_interleave" and kwargs.get("output_size") is None):
            return name, False
        if name.removesuffix("_") in ("index", "index_put", "_index_put_impl", "_unsafe_index"):
            chosen = [index for index in args[1] if index is not None]
            if any(index.dtype == torch.bool for index in chosen) and not _fills(args):
                return f"{name} by a mask", False
            if not all(isinstance(index, _OnCard) for index in chosen):
                return f"{name} from the host", False
        elif any(tensor.dim() for tensor in host):
            raise RuntimeError(f"{func} was given tensors of the host and of the card")
        return "", False


class _Lists(TorchFunctionMode):
    """Tensors on the card of Python's numbers, which torch makes without an operation."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        device = kwargs.get("device")
        if func in (torch.tensor, torch.as_tensor) and device is not None and torch.device(device).type != "cpu":
            card = torch.device(device)
            return func(*args, **{**kwargs, "device": "cpu"}).to(card if card.index is not None else CARD)
        if func is Tensor.__getitem__ and isinstance(args[0], _OnCard):
            tensor, places = args[0], args[1] if isinstance(args[1], tuple) else (args[1],)
            # torch's C++ would make tensors of lists on "meta".
            return tensor[*(torch.tensor(own).to(tensor.device) if isinstance(own, list) else own for own in places)]
        if func is Tensor.new_tensor and isinstance(args[0], _OnCard) and device is None:
            return torch.tensor(args[1], dtype=kwargs.get("dtype", args[0].dtype)).to(args[0].device)
        return func(*args, **kwargs)


def _host(tensor: Tensor) -> Tensor:
    return tensor.host if isinstance(tensor, _OnCard) else tensor.detach()


def _cards(leaves: Iterable[Any]) -> set[torch.device]:
    return {leaf.card for leaf in leaves if isinstance(leaf, _OnCard)}


def _fills(args: Any) -> bool:
    """Whether an assignment by a mask is of one number, which needs no places."""
    return len(args) > 2 and args[2].numel() == 1


def _place() -> str:
    """The file and the line that asked, of the package, or of what called torch."""
    frame: FrameType | None = sys._getframe(1)
    outside = ""
    while frame is not None:
        path = frame.f_code.co_filename
        if path.startswith(_PACKAGE):
            return f"{path.removeprefix(_PACKAGE)}:{frame.f_lineno}"
        if not outside and "/torch/" not in path and path not in (__file__, card_order.__file__):
            outside = f"{path.rpartition('/site-packages/')[2]}:{frame.f_lineno}"
        frame = frame.f_back
    return outside
