"""Bodies of the operators that quantize and dequantize by token: ours and torch's (`quantized_decomposed`).

A token is a row along the last axis; its scale and zero point are [..,1].
"""

from __future__ import annotations

import onnx_ir as ir

from graphrewrite.custom_ops.functions.dequantization import dequantize_each, dequantize_rows
from graphrewrite.custom_ops.functions.expression import Body, Term
from graphrewrite.custom_ops.functions.quantization import (
    choose_asymmetric,
    choose_symmetric,
    quantize,
    wide_zero_points,
)
from graphrewrite.custom_ops.functions.signature import Signature

__all__ = [
    "choose_qparams_per_token",
    "dequantize_per_token",
    "quantize_limits",
    "quantize_per_token",
    "source_choose_qparams_per_token",
    "source_choose_qparams_per_token_asymmetric",
    "source_dequantize_per_token",
    "source_quantize_per_token",
]

DataType = ir.DataType


def choose_qparams_per_token(signature: Signature, body: Body) -> None:
    """(input) -> (scales float64, zero_points int64). torch computes in the element type of the input."""
    kind = signature.type(0)
    x = body.input("input", kind).cast(DataType.FLOAT)

    def rounded(step: Term) -> Term:
        return step.cast(kind).cast(DataType.FLOAT)

    if signature.scheme == "symmetric":
        # float16 would overflow there, so torch goes on in float32.
        scales = choose_symmetric(body, x) if kind == DataType.FLOAT16 else choose_symmetric(body, x, rounded=rounded)
        zero_points = body.Expand(body.constant(0), body.shape(scales))
    else:
        scales, narrow = choose_asymmetric(body, x, rounded=rounded)
        zero_points = wide_zero_points(body, narrow).cast(DataType.INT64)
    body.output("scales", scales.cast(DataType.DOUBLE))
    body.output("zero_points", zero_points)


def source_choose_qparams_per_token(signature: Signature, body: Body) -> None:
    """(input) -> (scales float32, zero_points float32): torch declares float64 and int64 and returns these."""
    scales = choose_symmetric(body, body.input("input", DataType.FLOAT))
    body.output("scales", scales)
    body.output("zero_points", body.Expand(body.constant(0.0), body.shape(scales)))


def source_choose_qparams_per_token_asymmetric(signature: Signature, body: Body) -> None:
    """(input) -> (scales float64, zero_points int64)"""
    scales, zero_points = choose_asymmetric(body, body.input("input", DataType.FLOAT))
    body.output("scales", scales.cast(DataType.DOUBLE))
    body.output("zero_points", wide_zero_points(body, zero_points).cast(DataType.INT64))


def quantize_per_token(signature: Signature, body: Body) -> None:
    """(input, scales, zero_points?) -> (codes), in the element type of the scales."""
    x, scales = body.input("input", signature.type(0)), body.input("scales", signature.type(1))
    zero_points = body.optional_input("zero_points", signature.type(2), signature.has(2))
    zero = None if zero_points is None else zero_points.cast(signature.type(1))
    codes = quantize(body, x, scales, zero, quantize_limits(body, signature.type(1)), signature.rounding)
    body.output("codes", codes.cast(DataType.INT8))


def source_quantize_per_token(signature: Signature, body: Body) -> None:
    """(input, scales, zero_points) -> (codes), in the element type of the scales; torch adds before it rounds."""
    precision = signature.type(1)
    x = body.input("input", DataType.FLOAT)
    scales = body.input("scales").as_type(precision)
    zero_points = body.input("zero_points").as_type(precision)
    codes = quantize(body, x, scales, zero_points, quantize_limits(body, precision))
    body.output("codes", codes.cast(signature.result or DataType.INT8))


def dequantize_per_token(signature: Signature, body: Body) -> None:
    """(codes, scales, zero_points?) -> (values float32): (code - zero_point) * scale in the type of the scales."""
    codes, scales = body.input("codes", signature.type(0)), body.input("scales", signature.type(1))
    zero_points = body.optional_input("zero_points", signature.type(2), signature.has(2))
    body.output("values", dequantize_each(codes, scales, zero_points).cast(DataType.FLOAT))


def source_dequantize_per_token(signature: Signature, body: Body) -> None:
    """(input, scales, zero_points) -> (values): (code - zero_point) * scale, the difference in a wide type."""
    codes = body.input("input", DataType.INT8)
    precision = signature.type(1)
    scales = body.input("scales").as_type(precision)
    zero_points = body.input("zero_points").as_type(signature.type(2))
    if (precision, zero_points.dtype) == (DataType.FLOAT, DataType.INT8):
        values = dequantize_rows(body, codes, scales, zero_points)
    else:
        values = dequantize_each(codes, scales, zero_points)
    body.output("values", values.cast(signature.result or DataType.FLOAT))


def quantize_limits(body: Body, precision: ir.DataType) -> tuple[Term, Term]:
    """The attributes quant_min and quant_max."""
    lowest, highest = (
        body.attribute(name, ir.AttributeType.INT).cast(precision) for name in ("quant_min", "quant_max")
    )
    return lowest, highest
