"""Numbers that an ONNX graph says: constants, and what is computed from constants alone."""

from __future__ import annotations

import math

import numpy as np
import onnx_ir as ir

_MOST_ELEMENTS = 4096  # looked at in a constant
_DEEPEST = 16  # an expression of constants
_PASS_ON = {"Cast", "Expand", "Identity", "Reshape", "Squeeze", "Unsqueeze"}
# Of each operator that is computed: how many of its inputs are numbers.
_OPERANDS = {"Div": 2, "Mul": 2, **dict.fromkeys((*_PASS_ON, "Neg", "Reciprocal", "Sqrt"), 1)}


def number_of(value: ir.Value, depth: int = 0) -> float | None:
    """The value of every element of a constant; None for anything else. An initializer that is an input may change."""
    tensor = _tensor(value)
    if tensor is not None:
        return _only_value(tensor)
    node = value.producer()
    if node is None or node.domain != "" or depth > _DEEPEST:
        return None
    if node.op_type == "ConstantOfShape":
        filler = node.attributes.get("value")
        return 0.0 if filler is None else _only_value(filler.as_tensor())
    numbers = []
    for operand in node.inputs[: _OPERANDS.get(node.op_type, 0)]:
        number = None if operand is None else number_of(operand, depth + 1)
        if number is None:  # the others need not be looked at, of which each may be an expression
            return None
        numbers.append(number)
    return _computed(node, numbers) if numbers else None


def _tensor(value: ir.Value) -> ir.TensorProtocol | None:
    if value.const_value is not None:
        return None if value.is_graph_input() else value.const_value
    node = value.producer()
    if node is None or node.op_type != "Constant" or node.domain != "" or len(node.attributes) != 1:
        return None
    return ir.convenience.get_const_tensor(value)


def _only_value(tensor: ir.TensorProtocol) -> float | None:
    if not 0 < tensor.size <= _MOST_ELEMENTS or tensor.dtype == ir.DataType.STRING:
        return None
    array = tensor.numpy().reshape(-1)
    if not (array == array[0]).all():
        return None
    return int(array[0]) if np.issubdtype(array.dtype, np.integer) else float(array[0])


def _computed(node: ir.Node, numbers: list[float]) -> float | None:
    first, last = numbers[0], numbers[-1]
    match node.op_type:
        case "Cast":
            to = ir.DataType(node.attributes.get_int("to", 1))
            return float(first) if to.is_floating_point() else int(first)
        case "Mul":
            return first * last
        case "Div" if last != 0 and isinstance(first, float):
            return first / last
        case "Sqrt" if first >= 0:
            return math.sqrt(first)
        case "Reciprocal" if first != 0:
            return 1.0 / first
        case "Neg":
            return -first
    return first if node.op_type in _PASS_ON else None
