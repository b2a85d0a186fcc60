"""Whether a node has what its operator needs, before anything is read from it.

A model file can say anything: an operator without inputs, an attribute of another type, an element type that does not
exist. onnxruntime refuses such a node; here it has no meaning, and where it is an attention core the report says so.
"""

from __future__ import annotations

import math

import onnx_ir as ir

from graphrewrite.source_calls import SOURCE_OPS

_INT, _INTS, _FLOAT = ir.AttributeType.INT, ir.AttributeType.INTS, ir.AttributeType.FLOAT
_STRING = ir.AttributeType.STRING
# Of each operator that is read: how many inputs must be there.
_REQUIRED_INPUTS = {
    ".Add": 2,
    ".Attention": 3,
    ".Cast": 1,
    ".Clip": 1,
    ".DequantizeLinear": 2,
    ".Div": 2,
    ".Expand": 2,
    ".Flatten": 1,
    ".Gather": 2,
    ".Identity": 1,
    ".IsNaN": 1,
    ".MatMul": 2,
    ".Mod": 2,
    ".Mul": 2,
    ".Not": 1,
    ".QuantizeLinear": 2,
    ".Range": 3,
    ".Reshape": 2,
    ".Round": 1,
    ".ScatterElements": 3,
    ".ScatterND": 3,
    ".Shape": 1,
    ".Slice": 3,
    ".Softmax": 1,
    ".Squeeze": 1,
    ".Sub": 2,
    ".Tanh": 1,
    ".TensorScatter": 2,
    ".Tile": 2,
    ".Transpose": 1,
    ".Unsqueeze": 1,
    ".Where": 3,
    "com.microsoft.MultiHeadAttention": 3,
}
_OPTIONAL_OPERANDS = {"attn_mask", "zero_point", "zero_points"}
# Attributes have the same type under the same name in all of these operators but one.
_ATTRIBUTE_TYPES = {
    "axis": _INT,
    "block_size": _INT,
    "drpout_p": _FLOAT,
    "dtype": _INT,
    "end": _INT,
    "input_dtype": _INT,
    "is_causal": _INT,
    "is_seq_at_dim_2": _INT,
    "kv_num_heads": _INT,
    "left_window_size": _INT,
    "mode": _STRING,
    "num_heads": _INT,
    "out_dtype": _INT,
    "output_dtype": _INT,
    "perm": _INTS,
    "q_num_heads": _INT,
    "quant_max": _INT,
    "quant_min": _INT,
    "reduction": _STRING,
    "right_window_size": _INT,
    "scale": _FLOAT,
    "softcap": _FLOAT,
    "start": _INT,
    "to": _INT,
    "unidirectional": _INT,
}
_ELEMENT_TYPES = {"dtype", "input_dtype", "out_dtype", "output_dtype", "to"}


def fault(node: ir.Node) -> str | None:
    """What is wrong with a node of an operator that is read; None when nothing is, or the operator is not read."""
    required = _required_inputs(node)
    if required is None:
        return None
    if not node.outputs:
        return f"{node.op_type} has no outputs"
    for index in required:
        if index >= len(node.inputs) or node.inputs[index] is None:
            return f"{node.op_type} lacks input {index}"
    for name, attribute in node.attributes.items():
        wanted = _INTS if (node.domain, name) == ("torchao", "block_size") else _ATTRIBUTE_TYPES.get(name)
        if wanted is not None and (attribute.type is not wanted or attribute.is_ref()):
            return f"{node.op_type}: attribute {name} is {attribute.type.name}, not {wanted.name}"
        if wanted is not None and not _in_range(name, attribute.value):
            return f"{node.op_type}: attribute {name} is {attribute.value}"
    return None


def _required_inputs(node: ir.Node) -> list[int] | None:
    qualified = f"{node.domain}.{node.op_type}"
    source = SOURCE_OPS.get(qualified)
    if source is None:
        count = _REQUIRED_INPUTS.get(qualified)
        return None if count is None else list(range(count))
    return [index for index, name in enumerate(source.operands) if name not in _OPTIONAL_OPERANDS]


def _in_range(name: str, value: object) -> bool:
    if name == "is_causal":
        return value in (0, 1)
    if name in ("scale", "softcap") and isinstance(value, float):
        return math.isfinite(value) and (name == "scale" or value >= 0)
    if name in _ELEMENT_TYPES:
        return value in {dtype.value for dtype in ir.DataType}
    return True
