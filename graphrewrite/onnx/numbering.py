"""Which values of an ONNX graph are one computation."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir

# Operators that give back the only element of their input, or its value in another shape or integer type.
_ONLY_ELEMENT = {"Cast", "Flatten", "Gather", "Identity", "Reshape", "Slice", "Squeeze", "Unsqueeze"}
_RANDOM = {"Bernoulli", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike"}
_GRAPHS = (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS)
_MOST_ELEMENTS = 16  # of a constant that is compared by its values


def number_values(nodes: tuple[ir.Node, ...]) -> dict[ir.Value, Any]:
    """Number the values so that equal computations of equal inputs share a number, in one pass.

    The only element of an integer tensor has the number of the tensor, whichever way it was taken out. A value without
    a number (an input) stands for itself.
    """
    numbers: dict[ir.Value, Any] = {}
    known: dict[Any, int] = {}
    for node in nodes:
        source = only_element(node)
        if source is not None:
            numbers[node.outputs[0]] = numbers.get(source, source)
            continue
        if node.op_type in _RANDOM or any(a.type in _GRAPHS for a in node.attributes.values()):
            continue
        inputs = tuple(None if value is None else numbers.get(value, value) for value in node.inputs)
        attributes = tuple(sorted((name, _attribute_key(a)) for name, a in node.attributes.items()))
        for index, output in enumerate(node.outputs):
            # The shape too: that of an only element and of its tensor differ, and with them what is made of either.
            shape = str(output.shape)
            key = (node.domain, node.op_type, node.overload, inputs, attributes, index, shape)
            numbers[output] = known.setdefault(key, len(known))
    return numbers


def only_element(node: ir.Node) -> ir.Value | None:
    """The integer tensor of one element that `node` takes the element out of, or passes on in another shape or type."""
    if node.domain != "" or node.op_type not in _ONLY_ELEMENT or not node.inputs or not node.outputs:
        return None
    source = node.inputs[0]
    return source if source is not None and _is_one_integer(source) and _is_one_integer(node.outputs[0]) else None


def _attribute_key(attribute: ir.Attr) -> str:
    if attribute.type is ir.AttributeType.TENSOR:
        tensor = attribute.as_tensor()
        is_small = tensor.size <= _MOST_ELEMENTS
        return f"{tensor.dtype}{list(tensor.shape)}{tensor.tobytes()!r}" if is_small else f"tensor {id(tensor)}"
    return f"{attribute.type} {attribute.value!r}"


def _is_one_integer(value: ir.Value) -> bool:
    if value.shape is None or value.dtype not in (ir.DataType.INT64, ir.DataType.INT32):
        return False
    return all(dim == 1 for dim in value.shape)
