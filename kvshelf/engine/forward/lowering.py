"""A trace as lists of instructions over rows, one list before, between and after the attentions.

On a CPU products are those of packed weights, and the values between them are in fp32. On a GPU weights are plain, and
products and attentions give numbers in the model's dtype, as torch has them there.

Torch runs the operations on token ids and positions at the beginning (the embedding, the angles of the RoPE), and on
the last hidden states at the end (a head whose weights are not packed, a cap on logits). In between every operation
must be one of `kernels.rowwise`, and must take each token by itself.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn

from kvshelf.engine.forward.calls import TOKENS, Trace
from kvshelf.kernels.rowwise.instructions import Buffer, Instruction, Place
from kvshelf.kernels.rowwise.native import PANEL

_ATEN = torch.ops.aten
_LINEAR = torch.ops.kvshelf.linear.default
_PLAIN = {_ATEN.mm.default: 0, _ATEN.addmm.default: 1}
"""Products as torch has them, and the place of the argument that is multiplied with the weight."""
_ATTENTION = torch.ops.kvshelf.traced_attention.default

_VIEWS = {
    _ATEN.view.default, _ATEN._unsafe_view.default, _ATEN.transpose.int, _ATEN.permute.default, _ATEN.slice.Tensor,
    _ATEN.unsqueeze.default, _ATEN.squeeze.dim, _ATEN.expand.default, _ATEN.select.int, _ATEN.split.Tensor,
    _ATEN.split_with_sizes.default, _ATEN.alias.default, _ATEN.detach.default,
}  # fmt: skip
_COPIES = {_ATEN.clone.default, _ATEN._to_copy.default}
"""Nothing in a trace writes, so a copy may be the same numbers, in any order in memory."""

_BINARY = {_ATEN.mul.Tensor: "mul", _ATEN.add.Tensor: "add", _ATEN.sub.Tensor: "sub"}
_UNARY = {
    _ATEN.silu.default: "silu", _ATEN.rsqrt.default: "rsqrt", _ATEN.tanh.default: "tanh", _ATEN.relu.default: "relu",
}  # fmt: skip


_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes of a model's values. All are computed in fp32, and rounded to 16 bits only where they are multiplied with
weights or attended to: that rounds less often than the model does by its modules."""


class CannotLower(Exception):
    """The trace has an operation that is no list of instructions."""


Eager = Callable[..., Sequence[Tensor]]
"""Operations that torch runs, from the number of rows and their inputs in any dtype."""


@dataclass(frozen=True, eq=False)
class Value:
    """Numbers of every token in a buffer. layout: on the meta device; its dimension `at` has `TOKENS` elements, one for
    each row of the buffer."""

    layout: Tensor
    at: int
    buffer: int

    def tensor(self, buffer: Tensor) -> Tensor:
        """These numbers in the buffer's tensor `[rows, width]`, in the model's shape."""
        sizes, strides = list(self.layout.shape), list(self.layout.stride())
        sizes[self.at], strides[self.at] = buffer.shape[0], buffer.stride(0)
        return buffer.as_strided(sizes, strides, buffer.storage_offset() + self.layout.storage_offset())


@dataclass(eq=False)
class Lowered:
    """segments[i]: the instructions before attention i; the last ones are those after the last attention. attended[i]:
    queries, keys and values of attention i, in the model's dtype, and its result, in fp32. early[i]: its early queries,
    where they are recorded. first: makes `entries`, the values with which the segments begin, of token ids and
    positions. last: makes the logits of `leavings`, the values with which the segments end."""

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
        self._lists = Lowered()
        self._values: dict[fx.Node, Any] = {}
        """For each node a `Value`, a list of them, or a constant tensor; nothing for a node that torch runs."""
        self._entries: dict[fx.Node, Value] = {}
        self._inputs: list[fx.Node] = []
        self._first: list[fx.Node] = []
        self._last: list[fx.Node] = []
        self._logits: fx.Node | None = None
        self._narrowed: dict[tuple[int, int, int], Value] = {}
        """Copies in 16 bits of values that are multiplied so, by buffer, offset and size."""

    def run(self) -> Lowered:
        for node in self._trace.graph.graph.nodes:
            self._take(node)
        assert self._logits is not None
        lists = self._lists
        lists.entries = list(self._entries.values())
        lists.first = self._eager(self._first, self._inputs, list(self._entries))
        read = [node for end in (*self._last, self._logits) for node in (end, *end.all_input_nodes)]
        leavings = list(dict.fromkeys(node for node in read if isinstance(self._values.get(node), Value)))
        lists.leavings = [self._values[node] for node in leavings]
        lists.last = self._eager(self._last, leavings, [self._logits])
        return lists

    def _take(self, node: fx.Node) -> None:
        not_constant = [arg for arg in node.all_input_nodes if not isinstance(self._values.get(arg), Tensor)]
        if node.op == "placeholder":
            self._inputs.append(node)
        elif node.op == "get_attr":
            self._values[node] = getattr(self._trace.graph, str(node.target))
        elif node.op == "output":
            (self._logits,) = node.all_input_nodes
        elif node.all_input_nodes and not not_constant:
            self._values[node] = _function(node)(
                *fx.node.map_arg(node.args, self._values.__getitem__),
                **fx.node.map_arg(dict(node.kwargs), self._values.__getitem__),
            )
        elif node.target not in (*self._products, _ATTENTION) and {*not_constant} <= {*self._inputs, *self._first}:
            self._first.append(node)  # no instruction before it, and no product of weights, with which they begin
        elif self._last:
            self._last.append(node)
        else:
            try:
                self._values[node] = self._lowered(node)
            except CannotLower:
                if len(self._lists.attended) < len(self._trace.calls):
                    raise
                self._last.append(node)

    def _eager(self, nodes: list[fx.Node], inputs: list[fx.Node], results: list[fx.Node]) -> Eager:
        """A function of the number of rows and of the nodes `inputs`."""
        graph, constants = fx.Graph(), nn.Module()
        rows = graph.placeholder("rows")
        placeholders = [graph.placeholder(f"input_{i}") for i in range(len(inputs))]
        copies = {
            node: graph.call_method("to", (placeholder, node.meta["val"].dtype))
            for node, placeholder in zip(inputs, placeholders, strict=True)
        }

        def copied(argument: Any) -> Any:
            if type(argument) is int:
                _require(argument % TOKENS != 0 or argument in (0, TOKENS), "an operation that joins tokens")
                return rows if argument == TOKENS else argument
            if not isinstance(argument, fx.Node):
                return argument
            if argument in copies:
                return copies[argument]
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
        _require(all(value.dtype in _DTYPES for value in results), f"{target} gives {results[0].dtype}")
        if target in _VIEWS:
            return self._view(node)
        if target in _COPIES:
            return self._value(args[0])
        if target in self._products:
            return self._plain_product(node, _PLAIN[target]) if self._plain else self._linear(*args)
        if target in (_ATEN.cat.default, _ATEN.stack.default):
            return self._joined(result, *args, stacked=target == _ATEN.stack.default)
        if target == _ATEN.native_layer_norm.default:
            return [self._layer_norm(*args)]
        if target == _ATEN.mean.dim:
            _require(args[1] == [-1] and args[2:] == (True,), "a mean over other than the last dimension")
            return self._mean(self._rows(args[0]))
        if target == _ATEN.pow.Tensor_Scalar and args[1] in (2, 3):
            value = self._rows(args[0])
            square = self._computed("mul", value, value)
            return square if args[1] == 2 else self._computed("mul", square, value)
        operation, *operands = _operation(node)
        return self._computed(operation, *map(self._value, operands))

    # Values

    def _value(self, argument: Any) -> Value | Tensor:
        """A node's value, or a constant."""
        if isinstance(argument, int | float):
            return torch.tensor(float(argument))
        if argument not in self._values:
            result, call = argument.meta["val"], (argument.target, argument.args, argument.kwargs)
            _require(result.dtype in _DTYPES, f"values in {result.dtype}")
            equal = (value for node, value in self._entries.items() if (node.target, node.args, node.kwargs) == call)
            if (entry := next(equal, None)) is None:
                entry = self._entries[argument] = self._fresh(result.shape, self._buffer_dtype(result.dtype))
            self._values[argument] = entry
        value: Value | Tensor = self._values[argument]
        return value

    def _rows(self, argument: Any) -> Value:
        value = self._value(argument)
        _require(isinstance(value, Value), "a constant where each token has its own numbers")
        assert isinstance(value, Value)
        return value

    def _fresh(self, shape: torch.Size, dtype: torch.dtype = torch.float32) -> Value:
        """A new buffer of values of this shape, row after row."""
        at = _tokens_at(shape)
        rest = [size for i, size in enumerate(shape) if i != at]
        layout = torch.empty([TOKENS, *rest], device="meta").movedim(0, at)
        self._lists.buffers.append(Buffer(layout.numel() // TOKENS, dtype=dtype))
        return Value(layout, at, len(self._lists.buffers) - 1)

    def _buffer_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype of a buffer for values that torch, a product or an attention makes in a dtype of the model."""
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
        _require(self._plain or self._lists.buffers[copy.buffer].width % 2 == 0, "bf16 in rows of an odd number")
        self._emit("narrow", copy, value)
        return copy

    # Operations

    def _attention(self, node: fx.Node) -> Value:
        dtype = node.meta["val"].dtype
        apart = self._plain or dtype == torch.bfloat16  # in rows of their own: parts of a joined product lie apart
        query, key, value, *early = (
            self._narrow(states, dtype) if apart else self._contiguous(states)
            for states in map(self._rows, filter(None, node.args))
        )
        out = self._fresh(node.meta["val"].shape, self._buffer_dtype(dtype))
        self._lists.attended.append((query, key, value, out))
        self._lists.early.append(early[0] if early else None)
        self._lists.segments.append([])
        return out

    def _view(self, node: fx.Node) -> Any:
        value = self._value(node.args[0])
        if isinstance(value, Tensor):
            return _function(node)(value, *node.args[1:], **node.kwargs)
        try:
            return self._viewed(node, value)
        except RuntimeError:  # numbers that lie apart here are one dimension there
            return self._viewed(node, self._contiguous(value))

    def _viewed(self, node: fx.Node, value: Value) -> Any:
        view = _function(node)(value.layout, *node.args[1:], **node.kwargs)
        row = value.layout.stride(value.at)
        parts = [Value(layout, _tokens_at(layout.shape), value.buffer) for layout in _listed(view)]
        _require(all(part.layout.stride(part.at) == row for part in parts), f"{node.target} mixes tokens")
        return parts if isinstance(view, list | tuple) else parts[0]

    def _linear(self, x: fx.Node, packed: fx.Node, bias: fx.Node | None, scales: fx.Node | None) -> Value:
        weight: Tensor = self._values[packed]
        panels, inputs = weight.shape[:2]
        wide = weight.numel() // (panels * PANEL)
        dtype = torch.bfloat16 if weight.dtype == torch.bfloat16 else torch.float32
        constants = (None if node is None else self._values[node].float() for node in (scales, bias))
        return self._product(self._rows(x), dtype, (panels, inputs, 1), (wide, panels * PANEL), weight, *constants)

    def _plain_product(self, node: fx.Node, at: int) -> Value:
        x, weight = node.args[at : at + 2]
        constant = self._values.get(weight)  # type: ignore[arg-type]
        _require(isinstance(constant, Tensor) and not node.kwargs, "a product of two values")
        assert isinstance(constant, Tensor)
        inputs, outputs = constant.shape
        bias = self._values[node.args[0]] if at else None  # type: ignore[index]
        shape = inputs, outputs
        return self._product(self._rows(x), constant.dtype, (outputs, inputs, 1), shape, constant, None, bias)

    def _product(
        self, value: Value, dtype: torch.dtype, sizes: tuple[int, int, int], shape: tuple[int, int],
        *weight: Tensor | None,
    ) -> Value:  # fmt: skip
        """dtype: in which it is multiplied. shape: of the weight, inputs and outputs."""
        value = self._contiguous(value)
        _require(value.layout.numel() == TOKENS * shape[0], "a product of several rows a token")
        out = self._fresh(torch.Size([*value.layout.shape[:-1], shape[1]]), self._buffer_dtype(dtype))
        if self._lists.buffers[value.buffer].dtype != dtype:
            place = value.buffer, int(value.layout.storage_offset()), value.layout.numel()
            if place not in self._narrowed:
                self._narrowed[place] = self._narrow(value, dtype)
            value = self._narrowed[place]
        line = (0, 0, 1)
        from_, to = Place(value.buffer, int(value.layout.storage_offset()), line), Place(out.buffer, 0, line)
        self._lists.segments[-1].append(Instruction("linear", sizes, to, from_, from_, *weight))
        return out

    def _joined(self, result: Tensor, parts: list[fx.Node], dim: int = 0, *, stacked: bool) -> Value:
        """Parts one behind the other in a dimension; stacked: in a new one."""
        out, start = self._fresh(result.shape), 0
        for part in map(self._rows, parts):
            if stacked:
                layout = part.layout.unsqueeze(dim)
                part = Value(layout, _tokens_at(layout.shape), part.buffer)
            size = part.layout.shape[dim]
            self._emit("copy", Value(out.layout.narrow(dim, start, size), out.at, out.buffer), part)
            start += size
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
        """Written as RMS norms are in models, about the mean."""
        _require(len(shape) == 1, "a norm over several dimensions")
        value = self._rows(x)
        around = self._computed("sub", value, self._mean(value))
        variance = self._mean(self._computed("mul", around, around))
        scale = self._computed("rsqrt", self._computed("add", variance, self._value(epsilon)))
        out = self._computed("mul", around, scale)
        out = out if weight is None else self._computed("mul", out, self._value(weight))
        return out if bias is None else self._computed("add", out, self._value(bias))

    def _computed(self, operation: str, *operands: Value | Tensor) -> Value:
        """A pointwise operation on values and constants."""
        shapes = (operand.shape if isinstance(operand, Tensor) else operand.layout.shape for operand in operands)
        out = self._fresh(torch.broadcast_shapes(*shapes))  # type: ignore[no-untyped-call]
        self._emit(operation, out, *operands)
        return out

    def _emit(self, operation: str, out: Value, *operands: Value | Tensor, outer: int | None = None) -> None:
        """Append one instruction. outer: the number of dimensions before the one of which a mean is taken."""
        shape = (operands[0].layout if outer is not None and isinstance(operands[0], Value) else out.layout).shape
        spread, buffers = [out.layout.expand(shape)], [out.buffer]
        offsets: list[Any] = [out.layout.storage_offset()]
        for operand in operands:
            if isinstance(operand, Tensor):
                constant = operand.float()
                spread.append(constant.expand(shape))
                buffers.append(self._constant(constant))
                offsets.append(0)  # a constant's address is of its first element
                aligned = spread[-1].stride(out.at) == 0
            else:
                spread.append(operand.layout.expand(shape))
                buffers.append(operand.buffer)
                offsets.append(operand.layout.storage_offset())
                aligned = len(shape) - operand.layout.dim() + operand.at == out.at
            _require(aligned, "tokens in two dimensions")
        if 0 in shape:
            return
        kept = [i for i, size in enumerate(shape) if i != out.at and (size > 1 or i == outer)]
        sizes, strides = _merged([shape[i] for i in kept], [[s.stride(i) for i in kept] for s in spread], outer)
        places = [
            Place(buffer, offset, tuple(line))  # type: ignore[arg-type]
            for buffer, offset, line in zip(buffers, offsets, strides, strict=True)
        ]
        self._lists.segments[-1].append(Instruction(operation, tuple(sizes), places[0], places[1], places[-1]))  # type: ignore[arg-type]

    def _constant(self, tensor: Tensor) -> int:
        _require(self._plain or tensor.device.type == "cpu", "a constant that is not on the CPU")
        self._lists.buffers.append(Buffer(tensor.numel(), tensor.detach()))
        return len(self._lists.buffers) - 1


def _operation(node: fx.Node) -> tuple[Any, ...]:
    """The name of a pointwise operation, and its operands."""
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
    stays by itself. strides: of each operand."""
    merged: list[int] = []
    lines: list[list[int]] = [[] for _ in strides]
    for i, size in enumerate(sizes):
        alone = not i or (outer is not None and i == len(sizes) - 1)
        if not alone and all(line[-1] == steps[i] * size for line, steps in zip(lines, strides, strict=True)):
            merged[-1] *= size
            for line in lines:
                line.pop()
        else:
            merged.append(size)
        for line, steps in zip(lines, strides, strict=True):
            line.append(steps[i])
    _require(len(merged) <= 3, "more than three dimensions")
    missing = 3 - len(merged)
    return [1] * missing + merged, [[0] * missing + line for line in lines]


def _tokens_at(shape: torch.Size) -> int:
    dimensions = [i for i, size in enumerate(shape) if size == TOKENS]
    _require(len(dimensions) == 1, f"a shape without one dimension of tokens: {tuple(shape)}")
    return dimensions[0]


def _function(node: fx.Node) -> Callable[..., Any]:
    assert callable(node.target)
    return node.target


def _listed(result: Any) -> list[Tensor]:
    return list(result) if isinstance(result, list | tuple) else [result]


def _require(holds: bool, reason: str) -> None:
    if not holds:
        raise CannotLower(reason)
