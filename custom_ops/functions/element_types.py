"""Element types and ranks of the inputs of nodes, looked up through nodes that keep them.

A pass that edits a graph may leave the type of a value it made unset. Where the value comes from a node that keeps the
type of an input, or from an operator of the domain `graphrewrite`, it is known all the same.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

import onnx_ir as ir

from graphrewrite.errors import InputError

__all__ = ["RETURNED_TYPES", "element_type", "label", "rank", "type_before_widening"]

DataType = ir.DataType

RETURNED_TYPES = {("quantized_decomposed", "choose_qparams_per_token"): DataType.FLOAT}
"""Element type of all outputs of an operator that returns others than torch's shape function declares."""

# Standard operators whose outputs have the element type of the first input, and those that keep its rank too.
_KEEP_RANK = frozenset({"Concat", "Identity", "Slice", "Transpose"})
_KEEP_TYPE = _KEEP_RANK | {"Expand", "Gather", "Reshape", "Squeeze", "Unsqueeze"}

# For each output of our operators the input it is like.
_LIKE = {
    "UpdateCache": (1,),
    "UpdateCacheWithIndices": (1,),
    "UpdateQuantizedCache": (1, 2, 4),
    "CustomSdpa": (0,),
    "SdpaWithKvCache": (0, 3, 4),
}
_DOMAIN = "graphrewrite"


def element_type(node: ir.Node, position: int, allowed: Collection[DataType] | None = None) -> DataType:
    """The element type of an input.

    Raises:
        InputError: it is not known, or not one of `allowed`.
    """
    known = (value.dtype for value in _sources(node.inputs[position], _KEEP_TYPE))
    dtype = next((dtype for dtype in known if dtype is not None), None)
    if dtype is None:
        raise _unknown(node, position, "element type")
    if allowed is not None and dtype not in allowed:
        names = " or ".join(kind.name for kind in allowed)
        raise InputError(f"{label(node)}: input {position} has element type {dtype.name}; expected {names}")
    return dtype


def rank(node: ir.Node, position: int) -> int:
    """The number of axes of an input.

    Raises:
        InputError: it is not known.
    """
    known = (value.shape for value in _sources(node.inputs[position], _KEEP_RANK))
    shape = next((shape for shape in known if shape is not None), None)
    if shape is None:
        raise _unknown(node, position, "rank")
    return shape.rank()


def type_before_widening(node: ir.Node, position: int) -> DataType:
    """The element type of an input before a cast that changes no value."""
    dtype = element_type(node, position)
    value = node.inputs[position]
    producer = None if value is None else value.producer()
    if producer is None or producer.op_type != "Cast" or producer.domain not in ("", "ai.onnx"):
        return dtype
    source = producer.inputs[0]
    exact = {(DataType.FLOAT, DataType.DOUBLE), (DataType.INT8, dtype)}
    if source is not None and source.dtype is not None and (source.dtype, dtype) in exact:
        return source.dtype
    return dtype


def label(node: ir.Node) -> str:
    return f"{node.domain}::{node.op_type} {node.name or ''}".rstrip()


def _sources(value: ir.Value | None, keeping: frozenset[str]) -> Iterator[ir.Value]:
    """The value, and the values that it has its type from."""
    while value is not None:
        producer = value.producer()
        if producer is None:
            yield value
            return
        returned = RETURNED_TYPES.get((producer.domain, producer.op_type))
        yield value if returned is None else ir.Value(type=ir.TensorType(returned), shape=value.shape)
        if producer.domain in ("", "ai.onnx"):
            value = producer.inputs[0] if producer.op_type in keeping else None
        else:
            like = _LIKE.get(producer.op_type, ()) if producer.domain == _DOMAIN else ()
            index = producer.outputs.index(value)
            value = producer.inputs[like[index]] if index < len(like) else None


def _unknown(node: ir.Node, position: int, fact: str) -> InputError:
    value = node.inputs[position]
    return InputError(
        f"{label(node)}: the {fact} of input {position} ({None if value is None else value.name}) is not known and its "
        "function body depends on it; run shape inference on the model first"
    )
