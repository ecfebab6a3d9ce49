"""What the operations of a step launch on a device and move through its memory, counted where there is no device.

Torch's operations are seen as they are dispatched, whatever they run on, and Triton's kernels as they start, also under
the interpreter. So a step on a CPU whose kernels are forced to Triton's counts what the same step does on a card, but
for what torch splits there into several launches (a matrix product in parts) or fuses.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, Self

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_WITHOUT_A_LAUNCH = (
    "_local_scalar_dense",
    "empty",
    "new_empty",
    "set_",
    "resize_",
    "detach",
    "lift_fresh",
    "alias",
    "prim",
)


class Counts(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """`with Counts() as counts:` launches and bytes of what runs inside.

    launches: how often each operation or kernel ran. nbytes: of all tensors that they read or write, each counted in
    full once for each launch: what has to move where no cache keeps it.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.launches: Counter[str] = Counter()
        self.nbytes = 0
        self._hooked: list[Any] = []

    @property
    def total(self) -> int:
        return self.launches.total()

    def __enter__(self) -> Self:
        for kernel in _kernels():
            kernel.add_pre_run_hook(hook := self._hook(kernel.__name__))
            self._hooked.append((kernel, hook))
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        for kernel, hook in self._hooked:
            kernel.pre_run_hooks.remove(hook)

    def _hook(self, name: str) -> Callable[..., None]:
        def started(*args: Any, **kwargs: Any) -> None:
            self._count(name, [args, kwargs])

        return started

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func._schema.name.removeprefix("aten::")
        if not name.startswith(_WITHOUT_A_LAUNCH) and not _is_view(func, args, result) and not _interpreting():
            self._count(name, [args, kwargs, result])
        return result

    def _count(self, name: str, tensors: Any) -> None:
        self.launches[name] += 1
        leaves = [leaf for leaf in tree_leaves(tensors) if isinstance(leaf, Tensor)]
        self.nbytes += sum(
            {(leaf.data_ptr(), leaf.numel()): leaf.numel() * leaf.element_size() for leaf in leaves}.values()
        )


def _is_view(func: Any, args: Any, result: Any) -> bool:
    """Whether an operation only looks at its first argument in another way."""
    taken, made = (next((x for x in tree_leaves(of) if isinstance(x, Tensor)), None) for of in (args, result))
    if taken is None or made is None or func._schema.is_mutable:
        return False
    return taken.untyped_storage().data_ptr() == made.untyped_storage().data_ptr()


def _interpreting() -> bool:
    """Whether Triton's interpreter called: it copies what its kernel is given, and back."""
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_globals.get("__name__") != "triton.runtime.interpreter":
        frame = frame.f_back
    return frame.f_back is not None


def _kernels() -> Iterator[Any]:
    """Triton's kernels of the package that are imported."""
    for name, module in list(sys.modules.items()):
        if name.startswith("kvshelf.kernels.") and name.endswith(".triton"):
            yield from (kernel for kernel in vars(module).values() if hasattr(kernel, "pre_run_hooks"))
