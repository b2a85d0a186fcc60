"""Per-token quantization with the numerics of torch's quantized_decomposed operators, bit for bit.

A token is one row along the last axis. With x in float32 and int8 codes in [-128, 127]:

    symmetric    scale = max(max |x|, 1e-5) / 127
                 code = clamp(round(x * (1 / scale)))
    asymmetric   low = min(min x, 0), high = max(max x, 0), scale = max((high - low) / 255, eps)
                 zero_point = round(clamp(-128 - low / scale)), or from 127 - high / scale where that errs less
                 code = clamp(round(x * (1 / scale) + zero_point)), in float64

Source of the formulas: torch/ao/quantization/fx/_decomposed.py. Rounding is half to even. ONNX leaves open what
reductions and clamps make of NaN and what a cast to an integer makes of values out of range, so both are spelled out.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from graphrewrite.custom_ops.functions.expression import Body, Operand, Term

__all__ = [
    "choose_asymmetric",
    "choose_symmetric",
    "dequantize",
    "quantize",
    "quantized_zero_points",
    "wide_zero_points",
]

_LOWEST, _HIGHEST = -128.0, 127.0
_EPSILON = float(np.finfo(np.float32).eps)
# What torch's conversion of NaN to int64 yields.
_INT64_LOWEST = -(2**63)


def choose_asymmetric(body: Body, x: Term) -> tuple[Term, Term]:
    """Scale and zero point of each row, float32 [..,1]. The zero point of a row with NaN or infinity may be NaN."""
    low = body.Min(body.reduce("ReduceMin", x, axis=-1), 0.0)
    high = body.Max(body.reduce("ReduceMax", x, axis=-1), 0.0)
    scale = _nan_where_row_has(body, x, body.Max((high - low) / 255.0, _EPSILON))

    low_in_codes = low / scale
    high_in_codes = high / scale
    zero_point = body.where(
        (_LOWEST + low_in_codes) + (_HIGHEST + high_in_codes) > 0.0,
        _LOWEST - low_in_codes,
        _HIGHEST - high_in_codes,
    )
    rounded = body.Round(body.Clip(zero_point, _LOWEST, _HIGHEST))
    return scale, body.where(body.IsNaN(zero_point), float("nan"), rounded)


def choose_symmetric(body: Body, x: Term) -> Term:
    """Scale of each row, float32 [..,1]."""
    largest = body.reduce("ReduceMax", body.Abs(x), axis=-1)
    return _nan_where_row_has(body, x, body.Max(largest, 1e-5) / 127.0)


def quantize(
    body: Body,
    x: Term,
    scale: Term,
    zero_point: Term | None,
    lowest: Operand = _LOWEST,
    highest: Operand = _HIGHEST,
    dtype: ir.DataType = ir.DataType.INT8,
) -> Term:
    """Codes of x, computed in the element type of `scale`, which `zero_point` shares."""
    # x * (1 / scale), which is rounded twice. Written so, onnxruntime would fuse it into x / scale, rounded once.
    code = -x.cast(_known(scale)) * (-1.0 / scale)
    if zero_point is not None:
        code = code + zero_point
    # torch converts NaN, which its clamp keeps, to 0.
    clamped = body.Clip(body.Round(code), lowest, highest)
    return body.where(body.IsNaN(code), 0.0, clamped).cast(dtype)


def wide_zero_points(body: Body, zero_point: Term) -> Term:
    """Zero points as float64, which holds what torch holds as int64."""
    return body.where(body.IsNaN(zero_point), float(_INT64_LOWEST), zero_point.cast(ir.DataType.DOUBLE))


def quantized_zero_points(body: Body, zero_point: Term) -> Term:
    """Zero points as int8. The int64 that NaN becomes in torch has a low byte of 0."""
    return body.where(body.IsNaN(zero_point), 0.0, zero_point).cast(ir.DataType.INT8)


def dequantize(body: Body, codes: Term, scales: Term, zero_points: Term | None = None) -> Term:
    """float32((code - zero_point) * scale) for int8 codes [..,D], float32 scales and int8 zero points [..,1].

    DequantizeLinear takes the difference in 32 bits, so the int8 range does not wrap. Its form with one scale per slice
    of the first axis is older than opset 21's blocks and, with every token a slice, no slower.
    """
    rows = codes.reshape([-1, codes.size(-1)])
    flat = [scales.reshape([-1])] + ([] if zero_points is None else [zero_points.reshape([-1])])
    values = body.DequantizeLinear(rows, *flat, axis=0, dtype=ir.DataType.FLOAT)
    return body.Reshape(values, body.shape(codes), allowzero=1)


def _known(term: Term) -> ir.DataType:
    assert term.dtype is not None
    return term.dtype


def _nan_where_row_has(body: Body, x: Term, result: Term) -> Term:
    has_nan = body.reduce("ReduceMax", body.IsNaN(x).cast(ir.DataType.FLOAT), axis=-1) > 0.0
    return body.where(has_nan, float("nan"), result)
