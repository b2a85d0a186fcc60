"""What nodes of the standard ONNX operators mean."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import onnx_ir as ir

from graphrewrite.graph import Graph
from graphrewrite.onnx.numbering import only_element
from graphrewrite.positions import slots
from graphrewrite.vocabulary import (
    Binary,
    CacheWrite,
    Cast,
    Clamp,
    Concept,
    Dequantize,
    Dim,
    Expand,
    Forward,
    Leading,
    MatMul,
    Parameter,
    Permute,
    Position,
    Quantize,
    Range,
    Reshape,
    Rounding,
    Select,
    Size,
    Slots,
    Softmax,
    Unary,
)

_OnnxGraph = Graph[ir.Value]
_OnnxConcept = Concept[ir.Value]
_Reader = Callable[[_OnnxGraph, ir.Node, ir.Value], "_OnnxConcept | None"]

_RESHAPES = {"Flatten", "Reshape", "Squeeze", "Unsqueeze"}
_REPEATS = {"Expand", "Tile"}
_UNARY = {"IsNaN": "isnan", "Not": "not", "Round": "round", "Tanh": "tanh"}
_BINARY = {"Add": "+", "Sub": "-", "Mul": "*", "Div": "/", "Mod": "%"}
_SOFTMAX_OVER_ONE_AXIS = 13  # the opset version; before it, Softmax flattened its input


def concept_of_node(graph: _OnnxGraph, node: ir.Node, value: ir.Value) -> _OnnxConcept | None:
    """What a node of the default domain makes; None where it has no meaning here."""
    inner = only_element(node)
    if inner is not None:
        return Forward(inner)
    source = node.inputs[0] if node.inputs else None
    if source is None:
        return None
    name = node.op_type
    if name == "Identity":
        return Forward(source)
    if name in _RESHAPES or name in _REPEATS:
        return _in_another_shape(graph, value, name, source)
    if name in _UNARY:
        return Unary(_UNARY[name], source)
    if name in _BINARY:
        return _binary(graph, node, value, source)
    read = _READERS.get(name)
    return None if read is None else read(graph, node, source)


def dtype_name(dtype: ir.DataType) -> str:
    """The element type as numpy names it."""
    return {"FLOAT": "float32", "DOUBLE": "float64"}.get(dtype.name, dtype.name.lower())


def attribute(node: ir.Node, name: str, default: Any) -> Any:
    given = node.attributes.get(name)
    return default if given is None else given.value


def operand(node: ir.Node, index: int) -> ir.Value | None:
    """An input that may be absent."""
    return node.inputs[index] if index < len(node.inputs) else None


def _in_another_shape(graph: _OnnxGraph, value: ir.Value, name: str, source: ir.Value) -> _OnnxConcept | None:
    before, after = graph.shape(source), graph.shape(value)
    if before is None or after is None:
        return None
    if before == after:
        return Forward(source)
    if name in _RESHAPES:
        return Reshape(source)
    # Tile repeats whole tensors, which for an axis of size 1 is what Expand does.
    aligned = (*(1,) * (len(after) - len(before)), *before)
    # Two sizes that are both symbolic may be equal under different names.
    sizes = zip(aligned, after, strict=True)
    is_expanded = all(old in (1, new) or (isinstance(old, str) and isinstance(new, str)) for old, new in sizes)
    return Expand(source) if is_expanded else None


def _binary(graph: _OnnxGraph, node: ir.Node, value: ir.Value, left: ir.Value) -> Binary[ir.Value] | None:
    right = operand(node, 1)
    if right is None:
        return None
    sign: Any = _BINARY[node.op_type]
    return Binary(sign, left, right, graph.dtype(value) or graph.dtype(left) or "")


def _cast(graph: _OnnxGraph, node: ir.Node, source: ir.Value) -> _OnnxConcept | None:
    before, after = graph.dtype(source), graph.dtype(node.outputs[0])
    if before is None or after is None:
        return None
    return Forward(source) if before == after else Cast(source, before, after)


def _transpose(graph: _OnnxGraph, node: ir.Node, source: ir.Value) -> Permute[ir.Value]:
    perm = attribute(node, "perm", None)
    if perm is None:
        perm = reversed(range(len(graph.shape(source) or ())))
    return Permute(source, tuple(perm))


def _dequantize_linear(graph: _OnnxGraph, node: ir.Node, codes: ir.Value) -> Dequantize[ir.Value] | None:
    scales, zero_points = operand(node, 1), operand(node, 2)
    if scales is None:
        return None
    applied = _applied(graph, node, codes, scales)
    given = attribute(node, "output_dtype", 0)
    dtype = dtype_name(ir.DataType(given)) if given else graph.dtype(scales) or ""
    points = None if zero_points is None else Parameter(zero_points, applied)
    return Dequantize(codes, Parameter(scales, applied), points, dtype)


def _quantize_linear(graph: _OnnxGraph, node: ir.Node, source: ir.Value) -> Quantize[ir.Value] | None:
    scales, zero_points = operand(node, 1), operand(node, 2)
    if scales is None or graph.dtype(node.outputs[0]) != "int8" or graph.dtype(scales) != graph.dtype(source):
        return None
    applied = _applied(graph, node, source, scales)
    points = None if zero_points is None else Parameter(zero_points, applied)
    return Quantize(source, Parameter(scales, applied), points, Rounding.BEFORE_ZERO_POINT, divides=True)


def _applied(graph: _OnnxGraph, node: ir.Node, codes: ir.Value, scales: ir.Value) -> tuple[Dim, ...]:
    """The shape in which the scales of a node that quantizes or dequantizes apply: one, per axis or blocked."""
    shape, given = graph.shape(codes), graph.shape(scales)
    block, axis = attribute(node, "block_size", 0), attribute(node, "axis", 1)
    if shape is None or given is None:
        return ("?",) * 4
    if given in ((), (1,)):
        return (1,) * len(shape)
    axis %= len(shape)
    if block:
        return given if axis == len(shape) - 1 and len(given) == len(shape) else ("?",) * len(shape)
    return tuple(size if index == axis else 1 for index, size in enumerate(shape))


def _tensor_scatter(graph: _OnnxGraph, node: ir.Node, cache: ir.Value) -> CacheWrite[ir.Value] | None:
    rows, shape = operand(node, 1), graph.shape(cache)
    if rows is None or shape is None:
        return None
    written = Slots(Position(operand(node, 2)), attribute(node, "mode", "linear") == "circular")
    return CacheWrite(cache, rows, written, attribute(node, "axis", -2) % len(shape))


def _scatter_nd(graph: _OnnxGraph, node: ir.Node, cache: ir.Value) -> CacheWrite[ir.Value] | None:
    """Whole slices along the first axis: indices [S,1]."""
    indices, rows = operand(node, 1), operand(node, 2)
    if indices is None or rows is None or attribute(node, "reduction", "none") != "none":
        return None
    shape, places = graph.shape(cache), graph.shape(indices)
    if shape is None or places is None or len(places) != 2 or places[1] != 1:
        return None
    return CacheWrite(cache, rows, slots(graph, indices, shape[0]), 0)


def _scatter_elements(graph: _OnnxGraph, node: ir.Node, cache: ir.Value) -> CacheWrite[ir.Value] | None:
    """Whole slices along an axis: indices that are one vector along it, expanded to the shape of the rows."""
    indices, rows, shape = operand(node, 1), operand(node, 2), graph.shape(cache)
    if indices is None or rows is None or shape is None or attribute(node, "reduction", "none") != "none":
        return None
    axis = attribute(node, "axis", 0) % len(shape)
    expand = graph.concept(indices)
    if not isinstance(expand, Expand):
        return None
    vector, written = graph.shape(expand.input), graph.shape(rows)
    if vector is None or written is None or len(written) != len(shape):
        return None
    vector = (*(1,) * (len(shape) - len(vector)), *vector)
    others = [index for index in range(len(shape)) if index != axis]
    if any(vector[index] != 1 or written[index] != shape[index] for index in others):
        return None
    return CacheWrite(cache, rows, slots(graph, expand.input, shape[axis]), axis)


def _slice(graph: _OnnxGraph, node: ir.Node, source: ir.Value) -> _OnnxConcept | None:
    starts, ends, axes = operand(node, 1), operand(node, 2), operand(node, 3)
    before = graph.shape(source)
    if starts is None or ends is None or axes is None or before is None or graph.shape(ends) != (1,):
        return None
    steps = operand(node, 4)
    axis = graph.number(axes)
    if graph.number(starts) != 0 or axis is None or (steps is not None and graph.number(steps) != 1):
        return None
    if before == graph.shape(node.outputs[0]):
        return Forward(source)
    end = graph.number(ends)
    if end is not None and end < 0:
        return None
    position = Position(ends) if end is None else Position[ir.Value](None, int(end))
    return Leading(source, int(axis) % len(before), position)


def _size(graph: _OnnxGraph, node: ir.Node, source: ir.Value) -> Size[ir.Value] | None:
    """Shape of one axis."""
    rank = len(graph.shape(source) or ())
    start, end = attribute(node, "start", 0), attribute(node, "end", rank)
    if not rank or end % (rank + 1) - start % rank != 1:
        return None
    return Size(source, start % rank)


def _gather(graph: _OnnxGraph, node: ir.Node, source: ir.Value) -> Size[ir.Value] | None:
    """One size out of a shape."""
    shape, index = source.producer(), operand(node, 1)
    if shape is None or shape.op_type != "Shape" or shape.attributes or index is None or shape.inputs[0] is None:
        return None
    axis = graph.number(index)
    return None if axis is None or graph.shape(index) not in ((), (1,)) else Size(shape.inputs[0], int(axis))


def _range(graph: _OnnxGraph, node: ir.Node, start: ir.Value) -> Range[ir.Value] | None:
    step = operand(node, 2)
    if step is None or graph.number(step) != 1:
        return None
    first = graph.number(start)
    return Range(start if first is None else int(first))


def _clip(graph: _OnnxGraph, node: ir.Node, source: ir.Value) -> Clamp[ir.Value] | None:
    bounds = [None if bound is None else graph.number(bound) for bound in (operand(node, 1), operand(node, 2))]
    low, high = bounds
    return None if low is None or high is None else Clamp(source, low, high)


def _min(graph: _OnnxGraph, node: ir.Node, left: ir.Value) -> Clamp[ir.Value] | None:
    """Min(Max(x, low), high), as which torch.onnx writes a clamp."""
    right, inner = operand(node, 1), left.producer()
    high = None if right is None or len(node.inputs) != 2 else graph.number(right)
    if high is None or inner is None or inner.op_type != "Max" or len(inner.inputs) != 2:
        return None
    source, bound = inner.inputs
    low = None if bound is None else graph.number(bound)
    return None if source is None or low is None else Clamp(source, low, high)


def _where(graph: _OnnxGraph, node: ir.Node, condition: ir.Value) -> Select[ir.Value] | None:
    then, otherwise = operand(node, 1), operand(node, 2)
    return None if then is None or otherwise is None else Select(condition, then, otherwise)


def _softmax(graph: _OnnxGraph, node: ir.Node, source: ir.Value) -> Softmax[ir.Value] | None:
    rank = len(graph.shape(source) or ())
    is_new = (node.version or _SOFTMAX_OVER_ONE_AXIS) >= _SOFTMAX_OVER_ONE_AXIS
    return Softmax(source) if is_new and attribute(node, "axis", -1) in (-1, rank - 1) else None


def _matmul(graph: _OnnxGraph, node: ir.Node, left: ir.Value) -> MatMul[ir.Value] | None:
    right = operand(node, 1)
    return None if right is None else MatMul(left, right)


_READERS: dict[str, _Reader] = {
    "Cast": _cast,
    "Clip": _clip,
    "DequantizeLinear": _dequantize_linear,
    "Gather": _gather,
    "MatMul": _matmul,
    "Min": _min,
    "QuantizeLinear": _quantize_linear,
    "Range": _range,
    "ScatterElements": _scatter_elements,
    "ScatterND": _scatter_nd,
    "Shape": _size,
    "Slice": _slice,
    "Softmax": _softmax,
    "TensorScatter": _tensor_scatter,
    "Transpose": _transpose,
    "Where": _where,
}
