"""Bodies of torch's per-token operators, the domain `quantized_decomposed`."""

from __future__ import annotations

import onnx_ir as ir

from graphrewrite.custom_ops.functions.expression import Body
from graphrewrite.custom_ops.functions.quantization import (
    choose_asymmetric,
    choose_symmetric,
    dequantize,
    quantize,
    wide_zero_points,
)
from graphrewrite.custom_ops.functions.signature import Signature

__all__ = [
    "choose_qparams_per_token",
    "choose_qparams_per_token_asymmetric",
    "dequantize_per_token",
    "quantize_per_token",
]


def choose_qparams_per_token(signature: Signature, body: Body) -> None:
    """(input) -> (scales float32, zero_points float32): torch declares float64 and int64 and returns these."""
    scales = choose_symmetric(body, body.input("input", ir.DataType.FLOAT))
    body.output("scales", scales)
    body.output("zero_points", body.Expand(body.constant(0.0), body.shape(scales), dtype=ir.DataType.FLOAT))


def choose_qparams_per_token_asymmetric(signature: Signature, body: Body) -> None:
    """(input) -> (scales float64, zero_points int64)"""
    scales, zero_points = choose_asymmetric(body, body.input("input", ir.DataType.FLOAT))
    body.output("scales", scales.cast(ir.DataType.DOUBLE))
    body.output("zero_points", wide_zero_points(body, zero_points).cast(ir.DataType.INT64))


def quantize_per_token(signature: Signature, body: Body) -> None:
    """(input, scales, zero_points) -> (codes), in the element type of the scales; torch adds before it rounds."""
    precision = _known(signature.scales)
    x = body.input("input", ir.DataType.FLOAT)
    scales = body.input("scales").as_type(precision)
    zero_points = body.input("zero_points").as_type(precision)
    lowest, highest = (
        body.attribute(name, ir.AttributeType.INT).cast(precision) for name in ("quant_min", "quant_max")
    )
    codes = quantize(body, x, scales, zero_points, lowest, highest, _known(signature.result))
    body.output("codes", codes)


def dequantize_per_token(signature: Signature, body: Body) -> None:
    """(input, scales, zero_points) -> (values): (code - zero_point) * scale, the difference in a wide type."""
    codes = body.input("input", ir.DataType.INT8)
    scales, zero_points = body.input("scales"), body.input("zero_points")
    precision = _known(signature.scales)
    if (precision, signature.zero_points) == (ir.DataType.FLOAT, ir.DataType.INT8):
        values = dequantize(body, codes, scales.as_type(ir.DataType.FLOAT), zero_points.as_type(ir.DataType.INT8))
    else:
        values = (codes.cast(precision) - zero_points.as_type(precision)) * scales.as_type(precision)
    body.output("values", values.cast(_known(signature.result)))


def _known(dtype: ir.DataType | None) -> ir.DataType:
    assert dtype is not None
    return dtype
