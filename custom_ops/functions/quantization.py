"""The formulas of quantization, with the numerics of torch's quantized_decomposed operators bit for bit.

A row is what shares one scale: a token and head, or a group of its elements. With x in float32 and codes in
[lowest, highest], int8's [-128, 127] or int4's [0, 15] or [-8, 7]:

    symmetric    scale = max(max |x|, 1e-5) / highest, no zero point
    asymmetric   low = min(min x, 0), high = max(max x, 0), scale = max((high - low) / (highest - lowest), 2^-23)
                 zero_point = round(clamp(lowest - low / scale)), or from highest - high / scale where that errs less
    code         clamp(round(x * (1 / scale) + zero_point)) or clamp(round(x * (1 / scale)) + zero_point)
    value        (code - zero_point) * scale

Sources: torch/ao/quantization/fx/_decomposed.py, and torchao's quantize_affine for the zero point added after rounding.
Rounding is half to even. ONNX leaves open what reductions and clamps make of NaN and what a cast to an integer makes of
values out of range, so both are spelled out.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx_ir as ir

from graphrewrite.custom_ops.functions.expression import Body, Operand, Term

__all__ = [
    "INT4",
    "INT8",
    "SIGNED_INT4",
    "choose_asymmetric",
    "choose_symmetric",
    "codes_of",
    "quantize",
    "quantized_zero_points",
    "wide_zero_points",
]

CodeRange = tuple[float, float]
INT8: CodeRange = (-128.0, 127.0)
INT4: CodeRange = (0.0, 15.0)
SIGNED_INT4: CodeRange = (-8.0, 7.0)

Rounding = Callable[[Term], Term]

_EPSILON = float(np.finfo(np.float32).eps)
# What torch's conversion of NaN to int64 yields.
_INT64_LOWEST = -(2**63)


def choose_asymmetric(
    body: Body, x: Term, codes: CodeRange = INT8, rounded: Rounding = lambda step: step
) -> tuple[Term, Term]:
    """Scale and zero point of each row of float32 x, float32 [..,1].

    The zero point of a row with NaN or infinity may be NaN. `rounded` is applied to the result of every step.
    """
    lowest, highest = codes
    low = body.Min(body.reduce("ReduceMin", x, axis=-1), 0.0)
    high = body.Max(body.reduce("ReduceMax", x, axis=-1), 0.0)
    step = rounded(rounded(high - low) / (highest - lowest))
    scale = _nan_where_row_has(body, x, body.Max(step, _EPSILON))

    low_in_codes = rounded(low / scale)
    high_in_codes = rounded(high / scale)
    zero_point = body.where(
        rounded(rounded(lowest + low_in_codes) + rounded(highest + high_in_codes)) > 0.0,
        rounded(lowest - low_in_codes),
        rounded(highest - high_in_codes),
    )
    nearest = body.Round(body.Clip(zero_point, lowest, highest))
    return scale, body.where(body.IsNaN(zero_point), float("nan"), nearest)


def choose_symmetric(body: Body, x: Term, codes: CodeRange = INT8, rounded: Rounding = lambda step: step) -> Term:
    """Scale of each row of float32 x, float32 [..,1]. `rounded` is applied to the quotient."""
    _, highest = codes
    largest = body.Max(body.reduce("ReduceMax", body.Abs(x), axis=-1), 1e-5)
    return _nan_where_row_has(body, x, rounded(largest / highest))


def quantize(
    body: Body,
    x: Term,
    scale: Term,
    zero_point: Term | None,
    limits: tuple[Operand, Operand] = INT8,
    rounding: str = "after_zero_point",
) -> Term:
    """Codes of x, computed in the element type of `scale`, which `zero_point` shares, and still of that type."""
    # x * (1 / scale), which is rounded twice. Written so, onnxruntime would fuse it into x / scale, rounded once.
    return codes_of(body, -x.cast(_known(scale)) * (-1.0 / scale), zero_point, limits, rounding)


def codes_of(
    body: Body,
    scaled: Term,
    zero_point: Term | None,
    limits: tuple[Operand, Operand] = INT8,
    rounding: str = "after_zero_point",
) -> Term:
    """Codes of values that are in units of the scale already, still of their element type."""
    if zero_point is None:
        code = body.Round(scaled)
    elif rounding == "after_zero_point":
        code = body.Round(scaled + zero_point)
    else:
        code = body.Round(scaled) + zero_point
    # torch converts NaN, which its clamp keeps, to 0.
    return body.where(body.IsNaN(code), 0.0, body.Clip(code, *limits))


def wide_zero_points(body: Body, zero_point: Term) -> Term:
    """Zero points as float64, which holds what torch holds as int64."""
    return body.where(body.IsNaN(zero_point), float(_INT64_LOWEST), zero_point.cast(ir.DataType.DOUBLE))


def quantized_zero_points(body: Body, zero_point: Term, dtype: ir.DataType = ir.DataType.INT8) -> Term:
    """Zero points as codes. The int64 that NaN becomes in torch has a low byte of 0."""
    return body.where(body.IsNaN(zero_point), 0.0, zero_point).cast(dtype)


def _known(term: Term) -> ir.DataType:
    assert term.dtype is not None
    return term.dtype


def _nan_where_row_has(body: Body, x: Term, result: Term) -> Term:
    has_nan = body.reduce("ReduceMax", body.IsNaN(x).cast(ir.DataType.FLOAT), axis=-1) > 0.0
    return body.where(has_nan, float("nan"), result)
