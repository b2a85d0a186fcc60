"""Bodies of the operators that quantize and dequantize by channel: ours and torch's (`quantized_decomposed`).

A channel is an index along the attribute `axis`, counted from the end where negative; scales and zero points are [n].
"""

from __future__ import annotations

import onnx_ir as ir

from graphrewrite.custom_ops.functions.dequantization import dequantize_each
from graphrewrite.custom_ops.functions.expression import Body, Term
from graphrewrite.custom_ops.functions.per_token import quantize_limits
from graphrewrite.custom_ops.functions.quantization import quantize
from graphrewrite.custom_ops.functions.signature import Signature

__all__ = [
    "dequantize_per_channel",
    "quantize_per_channel",
    "source_dequantize_per_channel",
    "source_quantize_per_channel",
]

DataType = ir.DataType


def quantize_per_channel(signature: Signature, body: Body) -> None:
    """(input, scales, zero_points?) -> (codes), in the element type of the scales."""
    x, scales = body.input("input", signature.type(0)), body.input("scales", signature.type(1))
    zero_points = body.optional_input("zero_points", signature.type(2), signature.has(2))
    zero = None if zero_points is None else zero_points.cast(signature.type(1))
    body.output("codes", _quantized(body, x, scales, zero, signature.rounding).cast(DataType.INT8))


def source_quantize_per_channel(signature: Signature, body: Body) -> None:
    """(input, scales, zero_points) -> (codes), in the element type of the scales; torch rounds before it adds."""
    x, scales = body.input("input", DataType.FLOAT), body.input("scales", signature.type(1))
    zero_points = body.input("zero_points").as_type(signature.type(1))
    codes = _quantized(body, x, scales, zero_points, "before_zero_point")
    body.output("codes", codes.cast(signature.result or DataType.INT8))


def dequantize_per_channel(signature: Signature, body: Body) -> None:
    """(codes, scales, zero_points?) -> (values float32): (code - zero_point) * scale in the type of the scales."""
    _dequantized(signature, body, body.input("codes", signature.type(0)), DataType.FLOAT)


def source_dequantize_per_channel(signature: Signature, body: Body) -> None:
    """(input, scales, zero_points?) -> (values): (code - zero_point) * scale, the difference in a wide type."""
    _dequantized(signature, body, body.input("input", DataType.INT8), signature.result or DataType.FLOAT)


def _quantized(body: Body, x: Term, scales: Term, zero_points: Term | None, rounding: str) -> Term:
    assert scales.dtype is not None
    limits = quantize_limits(body, scales.dtype)
    zero_points = None if zero_points is None else _along_axis(body, zero_points, x)
    return quantize(body, x, _along_axis(body, scales, x), zero_points, limits, rounding)


def _dequantized(signature: Signature, body: Body, codes: Term, result: ir.DataType) -> None:
    scales = _along_axis(body, body.input("scales", signature.type(1)), codes)
    zero_points = body.optional_input("zero_points", signature.type(2), signature.has(2))
    if zero_points is not None:
        zero_points = _along_axis(body, zero_points, codes)
    body.output("values", dequantize_each(codes, scales, zero_points).cast(result))


def _along_axis(body: Body, parameter: Term, x: Term) -> Term:
    """A scale or zero point [n] as [1,..,n,..,1], n at `axis` of x; running fails where x has another extent there."""
    axis = body.attribute("axis", ir.AttributeType.INT)
    shape = body.shape(x)
    rank = body.shape(shape)
    own = body.count(rank).equals(body.where(axis < 0, axis + rank, axis))
    return body.Reshape(parameter, body.where(own, shape, 1), allowzero=1)
