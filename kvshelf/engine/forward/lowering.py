"""A trace as lists of instructions over rows, one list before, between and after the attentions.

On a CPU products are those of packed weights, and what lies between is in fp32. On a GPU weights are plain, and
products and attentions give numbers in the model's dtype, as torch has them there.

What the lists cannot say stays with torch: operations on token ids and positions at the beginning (the embedding, the
angles of the RoPE), and those on the last hidden states at the end (a head whose weights are not packed, a cap on
logits). In between every operation must be one of `kernels.rowwise`, and must take each token by itself.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn

from kvshelf.engine.forward.tracing import TOKENS, Trace
from kvshelf.kernels.rowwise.instructions import Buffer, Instruction, Place
from kvshelf.kernels.rowwise.native import PANEL

_ATEN = torch.ops.aten
_LINEAR = torch.ops.kvshelf.linear.default
_PLAIN = {_ATEN.mm.default: 0, _ATEN.addmm.default: 1}
"""Products as torch has them, and which of their arguments is multiplied with the weight."""
_ATTENTION = torch.ops.kvshelf.traced_attention.default

_VIEWS = {
    _ATEN.view.default, _ATEN._unsafe_view.default, _ATEN.transpose.int, _ATEN.permute.default, _ATEN.slice.Tensor,
    _ATEN.unsqueeze.default, _ATEN.squeeze.dim, _ATEN.expand.default, _ATEN.select.int, _ATEN.split.Tensor,
    _ATEN.split_with_sizes.default, _ATEN.alias.default, _ATEN.detach.default,
}  # fmt: skip
_COPIES = {_ATEN.clone.default, _ATEN._to_copy.default}
"""Nothing in a trace writes, so a copy may be the same numbers, in whatever order they lie."""

_BINARY = {_ATEN.mul.Tensor: "mul", _ATEN.add.Tensor: "add", _ATEN.sub.Tensor: "sub"}
_UNARY = {
    _ATEN.silu.default: "silu", _ATEN.rsqrt.default: "rsqrt", _ATEN.tanh.default: "tanh", _ATEN.relu.default: "relu",
}  # fmt: skip


_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Of a model's values. All are computed in fp32, and rounded to 16 bits only where they are multiplied with weights or
attended to: that rounds less often than the model does by its modules."""


class CannotLower(Exception):
    """The trace has an operation that lists of instructions cannot say."""


Eager = Callable[..., Sequence[Tensor]]
"""Operations that torch carries out, given the number of rows and their inputs, in whatever dtype."""


@dataclass(frozen=True, eq=False)
class Value:
    """Numbers of every token in a buffer. layout: on the meta device; the dimension `at` has `TOKENS` elements, one a
    row of the buffer."""

    layout: Tensor
    at: int
    buffer: int

    def tensor(self, held: Tensor) -> Tensor:
        """These numbers in the buffer's tensor `[rows, width]`, as the model has them."""
        sizes = list(self.layout.shape)
        strides = list(self.layout.stride())
        sizes[self.at], strides[self.at] = held.shape[0], held.stride(0)
        return held.as_strided(sizes, strides, held.storage_offset() + self.layout.storage_offset())


@dataclass(eq=False)
class Lowered:
    """`segments[i]`: the instructions before attention i, the last ones those after the last. `attended[i]`: queries,
    keys and values of attention i, in the model's dtype, and where its result goes, in fp32. `early[i]`: its early
    queries, where they are recorded. `first` gives `entries`, the values with which the segments begin, of token ids
    and positions; `last` makes the logits of `leavings`, which the segments leave."""

    buffers: list[Buffer] = field(default_factory=list)
    segments: list[list[Instruction]] = field(default_factory=lambda: [[]])
    attended: list[tuple[Value, Value, Value, Value]] = field(default_factory=list)
    early: list[Value | None] = field(default_factory=list)
    entries: list[Value] = field(default_factory=list)
    first: Eager = tuple
    last: Eager = tuple
    leavings: list[Value] = field(default_factory=list)


def lower(trace: Trace, plain: bool = False) -> Lowered:
    """plain: with products as torch has them, for a GPU; else of packed weights. Raises `CannotLower`."""
    return _Lowering(trace, plain).run()


class _Lowering:
    def __init__(self, trace: Trace, plain: bool) -> None:
        self._trace = trace
        self._plain = plain
        self._products = _PLAIN.keys() if plain else {_LINEAR}
        self._done = Lowered()
        self._values: dict[fx.Node, Any] = {}
        """What each node is: a `Value`, a list of them, or a constant tensor; no node that is left to torch."""
        self._entries: dict[fx.Node, Value] = {}
        self._given: list[fx.Node] = []
        self._first: list[fx.Node] = []
        self._last: list[fx.Node] = []
        self._logits: fx.Node | None = None
        self._narrowed: dict[tuple[int, int, int], Value] = {}
        """Of values that are multiplied in 16 bits, by their buffer, offset and size."""

    def run(self) -> Lowered:
        for node in self._trace.graph.graph.nodes:
            self._take(node)
        assert self._logits is not None
        done = self._done
        done.entries = list(self._entries.values())
        done.first = self._eager(self._first, self._given, list(self._entries))
        ends = [*self._last, self._logits]
        left = list(
            dict.fromkeys(
                g for end in ends for g in (end, *end.all_input_nodes) if isinstance(self._values.get(g), Value)
            )
        )
        done.leavings = [self._values[node] for node in left]
        done.last = self._eager(self._last, left, [self._logits])
        return done

    def _take(self, node: fx.Node) -> None:
        if node.op == "placeholder":
            self._given.append(node)
        elif node.op == "get_attr":
            self._values[node] = getattr(self._trace.graph, str(node.target))
        elif node.op == "output":
            (self._logits,) = node.all_input_nodes
        elif node.all_input_nodes and all(isinstance(self._values.get(g), Tensor) for g in node.all_input_nodes):
            args, options = fx.node.map_aggregate((node.args, dict(node.kwargs)), self._constant_or_plain)
            self._values[node] = _function(node)(*args, **options)
        elif self._is_first(node):
            self._first.append(node)
        elif self._last:
            self._last.append(node)
        else:
            try:
                self._values[node] = self._lowered(node)
            except CannotLower:
                if len(self._done.attended) < len(self._trace.calls):
                    raise
                self._last.append(node)

    def _is_first(self, node: fx.Node) -> bool:
        """Whether nothing before it is an instruction, and it is no product of weights, with which they begin."""
        own = [given for given in node.all_input_nodes if not isinstance(self._values.get(given), Tensor)]
        before = {*self._given, *self._first}
        return node.target not in (*self._products, _ATTENTION) and all(given in before for given in own)

    def _constant_or_plain(self, argument: Any) -> Any:
        return self._values[argument] if isinstance(argument, fx.Node) else argument

    def _eager(self, nodes: list[fx.Node], given: list[fx.Node], results: list[fx.Node]) -> Eager:
        """A function of the number of rows and of the nodes `given`."""
        graph, constants = fx.Graph(), nn.Module()
        rows = graph.placeholder("rows")
        inputs = [(node, graph.placeholder(f"given_{i}")) for i, node in enumerate(given)]
        copies = {node: graph.call_method("to", (held, node.meta["val"].dtype)) for node, held in inputs}

        def copied(argument: Any) -> Any:
            if type(argument) is int:
                _require(argument % TOKENS != 0 or argument in (0, TOKENS), "an operation that joins tokens")
                return rows if argument == TOKENS else argument
            if not isinstance(argument, fx.Node) or argument in copies:
                return copies.get(argument, argument) if isinstance(argument, fx.Node) else argument
            _require(isinstance(self._values.get(argument), Tensor), "an input that is neither given nor constant")
            constants.register_buffer(f"constant_{len(copies)}", self._values[argument])
            copies[argument] = graph.get_attr(f"constant_{len(copies)}")
            return copies[argument]

        for node in nodes:
            args, options = fx.node.map_aggregate((node.args, dict(node.kwargs)), copied)
            copies[node] = graph.call_function(_function(node), args, options)
        graph.output([copied(node) for node in results])
        return fx.GraphModule(constants, graph)

    def _lowered(self, node: fx.Node) -> Any:
        target: Any = node.target
        args: tuple[Any, ...] = node.args
        if target == _ATTENTION:
            return self._attention(node)
        if target is operator.getitem:
            return self._values[args[0]][args[1]]
        result = node.meta["val"]
        results = _listed(result)
        _require(all(each.dtype in _DTYPES for each in results), f"{target} gives {results[0].dtype}")
        if target in _VIEWS:
            return self._view(node)
        if target in _COPIES:
            return self._value(args[0])
        if target in self._products:
            return self._plain_product(node, _PLAIN[target]) if self._plain else self._linear(*args)
        if target == _ATEN.cat.default:
            return self._cat(result, *args)
        if target == _ATEN.stack.default:
            return self._stack(result, *args)
        if target == _ATEN.native_layer_norm.default:
            return [self._layer_norm(*args)]
        if target == _ATEN.mean.dim:
            _require(args[1] == [-1] and args[2:] == (True,), "a mean over other than the last dimension")
            return self._mean(self._rows(args[0]))
        if target == _ATEN.pow.Tensor_Scalar and args[1] in (2, 3):
            value = self._rows(args[0])
            square = self._computed("mul", value, value)
            return square if args[1] == 2 else self._computed("mul", square, value)
        operation, *given = _operation(node)
        return self._computed(operation, *map(self._value, given))

    # Values

    def _value(self, given: Any) -> Value | Tensor:
        """A node's value, or a constant."""
        if isinstance(given, int | float):
            return torch.tensor(float(given))
        if given not in self._values:
            _require(given.meta["val"].dtype in _DTYPES, f"values in {given.meta['val'].dtype}")
            made, what = given.meta["val"], (given.target, given.args, given.kwargs)
            alike = [value for node, value in self._entries.items() if (node.target, node.args, node.kwargs) == what]
            if not alike:
                alike = [self._fresh(made.shape, self._held(made.dtype))]
                self._entries[given] = alike[0]
            self._values[given] = alike[0]
        found: Value | Tensor = self._values[given]
        return found

    def _rows(self, given: Any) -> Value:
        value = self._value(given)
        _require(isinstance(value, Value), "a constant where each token has its own numbers")
        assert isinstance(value, Value)
        return value

    def _fresh(self, shape: torch.Size, dtype: torch.dtype = torch.float32) -> Value:
        """A new buffer of values of this shape, row after row."""
        at = _tokens_at(shape)
        rest = [size for i, size in enumerate(shape) if i != at]
        layout = torch.empty([TOKENS, *rest], device="meta").movedim(0, at)
        self._done.buffers.append(Buffer(layout.numel() // TOKENS, dtype=dtype))
        return Value(layout, at, len(self._done.buffers) - 1)

    def _held(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype of values that lists are given in a dtype of the model."""
        return dtype if self._plain else torch.float32

    def _contiguous(self, value: Value) -> Value:
        if value.layout.movedim(value.at, 0)[0].is_contiguous():
            return value
        copy = self._fresh(value.layout.shape)
        self._emit("copy", copy, value)
        return copy

    def _narrow(self, value: Value, dtype: torch.dtype) -> Value:
        """A copy in a dtype, row after row."""
        copy = self._fresh(value.layout.shape, dtype)
        _require(self._plain or self._done.buffers[copy.buffer].width % 2 == 0, "bf16 in rows of an odd number")
        self._emit("narrow", copy, value)
        return copy

    # Operations

    def _attention(self, node: fx.Node) -> Value:
        dtype = node.meta["val"].dtype
        apart = self._plain or dtype == torch.bfloat16  # in rows of their own: parts of a joined product lie apart
        query, key, value, *early = (
            self._narrow(each, dtype) if apart else self._contiguous(each)
            for each in map(self._rows, filter(None, node.args))
        )
        out = self._fresh(node.meta["val"].shape, self._held(dtype))
        self._done.attended.append((query, key, value, out))
        self._done.early.append(early[0] if early else None)
        self._done.segments.append([])
        return out

    def _view(self, node: fx.Node) -> Any:
        value = self._value(node.args[0])
        if isinstance(value, Tensor):
            return _function(node)(value, *node.args[1:], **node.kwargs)
        try:
            made = self._viewed(node, value)
        except RuntimeError:  # what lies apart here is one dimension there
            made = self._viewed(node, self._contiguous(value))
        return made

    def _viewed(self, node: fx.Node, value: Value) -> Any:
        made = _function(node)(value.layout, *node.args[1:], **node.kwargs)
        row = value.layout.stride(value.at)
        parts = [Value(layout, _tokens_at(layout.shape), value.buffer) for layout in _listed(made)]
        _require(all(part.layout.stride(part.at) == row for part in parts), f"{node.target} mixes tokens")
        return parts if isinstance(made, list | tuple) else parts[0]

    def _linear(self, x: fx.Node, packed: fx.Node, bias: fx.Node | None, scales: fx.Node | None) -> Value:
        weight: Tensor = self._values[packed]
        panels, inputs = weight.shape[:2]
        wide = weight.numel() // (panels * PANEL)
        dtype = torch.bfloat16 if weight.dtype == torch.bfloat16 else torch.float32
        beside = (None if node is None else self._values[node].float() for node in (scales, bias))
        return self._product(self._rows(x), dtype, (panels, inputs, 1), (wide, panels * PANEL), weight, *beside)

    def _plain_product(self, node: fx.Node, at: int) -> Value:
        x, weight = node.args[at : at + 2]
        constant = self._values.get(weight)  # type: ignore[arg-type]
        _require(isinstance(constant, Tensor) and not node.kwargs, "a product of two values")
        assert isinstance(constant, Tensor)
        inputs, outputs = constant.shape
        bias = self._values[node.args[0]] if at else None  # type: ignore[index]
        sizes = outputs, inputs, 1
        return self._product(self._rows(x), constant.dtype, sizes, (inputs, outputs), constant, None, bias)

    def _product(
        self, value: Value, dtype: torch.dtype, sizes: tuple[int, int, int], shape: tuple[int, int],
        *weight: Tensor | None,
    ) -> Value:  # fmt: skip
        """dtype: in which it is multiplied. shape: of the weight, inputs and outputs."""
        value = self._contiguous(value)
        _require(value.layout.numel() == TOKENS * shape[0], "a product of several rows a token")
        out = self._fresh(torch.Size([*value.layout.shape[:-1], shape[1]]), self._held(dtype))
        if self._done.buffers[value.buffer].dtype != dtype:
            place = value.buffer, int(value.layout.storage_offset()), value.layout.numel()
            if place not in self._narrowed:
                self._narrowed[place] = self._narrow(value, dtype)
            value = self._narrowed[place]
        line = (0, 0, 1)
        from_ = Place(value.buffer, int(value.layout.storage_offset()), line)
        self._done.segments[-1].append(Instruction("linear", sizes, Place(out.buffer, 0, line), from_, from_, *weight))
        return out

    def _cat(self, result: Tensor, parts: list[fx.Node], dim: int = 0) -> Value:
        out, start = self._fresh(result.shape), 0
        for part in map(self._rows, parts):
            size = part.layout.shape[dim]
            self._emit("copy", Value(out.layout.narrow(dim, start, size), out.at, out.buffer), part)
            start += size
        return out

    def _stack(self, result: Tensor, parts: list[fx.Node], dim: int = 0) -> Value:
        out = self._fresh(result.shape)
        for i, part in enumerate(map(self._rows, parts)):
            layout = out.layout.select(dim, i)
            self._emit("copy", Value(layout, _tokens_at(layout.shape), out.buffer), part)
        return out

    def _mean(self, value: Value) -> Value:
        last = value.layout.dim() - 1
        _require(value.at != last and value.layout.stride(last) == 1, "a mean over numbers that lie apart")
        out = self._fresh(torch.Size([*value.layout.shape[:-1], 1]))
        self._emit("mean", out, value, outer=last)
        return out

    def _layer_norm(
        self, x: fx.Node, shape: list[int], weight: fx.Node | None, bias: fx.Node | None, epsilon: float
    ) -> Value:
        """As RMS norms are written in models, about the mean."""
        _require(len(shape) == 1, "a norm over several dimensions")
        value = self._rows(x)
        around = self._computed("sub", value, self._mean(value))
        variance = self._mean(self._computed("mul", around, around))
        scale = self._computed("rsqrt", self._computed("add", variance, self._value(epsilon)))
        made = self._computed("mul", around, scale)
        for operation, given in (("mul", weight), ("add", bias)):
            made = made if given is None else self._computed(operation, made, self._value(given))
        return made

    def _computed(self, operation: str, *given: Value | Tensor) -> Value:
        """A pointwise operation on values and constants."""
        shape = torch.broadcast_shapes(  # type: ignore[no-untyped-call]
            *((each if isinstance(each, Tensor) else each.layout).shape for each in given)
        )
        out = self._fresh(shape)
        self._emit(operation, out, *given)
        return out

    def _emit(self, operation: str, out: Value, *given: Value | Tensor, outer: int | None = None) -> None:
        """One instruction. `outer`: the dimensions before the one of which a mean is taken."""
        given = tuple(each.float() if isinstance(each, Tensor) else each for each in given)
        shape = (given[0].layout if outer is not None and isinstance(given[0], Value) else out.layout).shape
        spread, buffers = [out.layout.expand(shape)], [out.buffer]
        offsets: list[Any] = [out.layout.storage_offset()]
        for each in given:
            constant = isinstance(each, Tensor)
            layout = each if isinstance(each, Tensor) else each.layout
            spread.append(layout.expand(shape))
            buffers.append(self._constant(each) if isinstance(each, Tensor) else each.buffer)
            offsets.append(0 if constant else layout.storage_offset())  # a constant's address is of its first element
            own = len(shape) - layout.dim() + _tokens_at(layout.shape) if not constant else out.at
            _require(own == out.at and (not constant or spread[-1].stride(out.at) == 0), "tokens in two dimensions")
        if 0 in shape:
            return
        kept = [i for i, size in enumerate(shape) if i != out.at and (size > 1 or i == outer)]
        sizes, strides = _merged([shape[i] for i in kept], [[s.stride(i) for i in kept] for s in spread], outer)
        places = [
            Place(buffer, offset, tuple(line))  # type: ignore[arg-type]
            for buffer, offset, line in zip(buffers, offsets, strides, strict=True)
        ]
        self._done.segments[-1].append(Instruction(operation, tuple(sizes), places[0], places[1], places[-1]))  # type: ignore[arg-type]

    def _constant(self, tensor: Tensor) -> int:
        _require(self._plain or tensor.device.type == "cpu", "a constant that is not on the CPU")
        self._done.buffers.append(Buffer(tensor.numel(), tensor.detach()))
        return len(self._done.buffers) - 1


def _operation(node: fx.Node) -> tuple[Any, ...]:
    """The name of a pointwise operation, and what it is of."""
    target, args, options = node.target, node.args, dict(node.kwargs)
    if target in _BINARY and not options:
        return _BINARY[target], *args
    if target in _UNARY:
        return _UNARY[target], args[0]
    if target == _ATEN.neg.default:
        return "mul", args[0], -1
    if target == _ATEN.div.Tensor and isinstance(args[1], int | float):
        return "mul", args[0], 1 / args[1]
    if target == _ATEN.gelu.default:
        return "gelu_tanh" if options.get("approximate") == "tanh" else "gelu", args[0]
    raise CannotLower(str(target))


def _merged(sizes: list[int], strides: list[list[int]], outer: int | None) -> tuple[list[int], list[list[int]]]:
    """Dimensions as three: neighbours that every operand steps through alike become one. With `outer` the last one
    stays by itself."""
    made = [1]
    lines: list[list[int]] = [[0] for _ in strides]
    for i, size in enumerate(sizes):
        alone = not i or (outer is not None and i == len(sizes) - 1)
        if not alone and all(line[-1] == own[i] * size for line, own in zip(lines, strides, strict=True)):
            made[-1] *= size
            for line, own in zip(lines, strides, strict=True):
                line[-1] = own[i]
        else:
            made.append(size)
            for line, own in zip(lines, strides, strict=True):
                line.append(own[i])
    made, lines = made[1:], [line[1:] for line in lines]
    _require(len(made) <= 3, "more than three dimensions")
    missing = 3 - len(made)
    return [1] * missing + made, [[0] * missing + line for line in lines]


def _tokens_at(shape: torch.Size) -> int:
    found = [i for i, size in enumerate(shape) if size == TOKENS]
    _require(len(found) == 1, f"a shape without one dimension of tokens: {tuple(shape)}")
    return found[0]


def _function(node: fx.Node) -> Callable[..., Any]:
    assert callable(node.target)
    return node.target


def _listed(made: Any) -> list[Tensor]:
    return list(made) if isinstance(made, list | tuple) else [made]


def _require(holds: bool, said: str) -> None:
    if not holds:
        raise CannotLower(said)
