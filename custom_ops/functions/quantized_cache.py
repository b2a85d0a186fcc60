"""The body that quantizes rows and writes them into a cache of codes, scales and zero points.

Legend: see the bodies of caches. Codes are int8 [B,C,H,D] or packed int4 [B,C,H,D/2]; scales and zero points that are
chosen here are [B,C,H,n], one for each of n groups of D/n elements; static ones have a shape that broadcasts to [H,D].
"""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from graphrewrite.custom_ops.functions.cache import placed, write_rows
from graphrewrite.custom_ops.functions.dequantization import MIDDLE_OF_INT4, pack, static_parameter
from graphrewrite.custom_ops.functions.expression import Body, Term
from graphrewrite.custom_ops.functions.quantization import (
    INT4,
    INT8,
    SIGNED_INT4,
    choose_asymmetric,
    choose_symmetric,
    codes_of,
    quantize,
    quantized_zero_points,
    wide_zero_points,
)
from graphrewrite.custom_ops.functions.signature import Signature
from graphrewrite.errors import InputError

__all__ = ["update_quantized_cache"]

DataType = ir.DataType


@dataclass(frozen=True)
class _Quantized:
    """Codes 0..15 or int8 of the shape of the rows, and the scale and zero point of each group [..,n,1]."""

    codes: Term
    scales: Term
    zero_points: Term


def update_quantized_cache(signature: Signature, body: Body) -> None:
    """(value, codes, scales, start_pos, zero_points?) -> (new_codes, new_scales?, new_zero_points?)"""
    if signature.scheme == "asymmetric" and not signature.has(4):
        raise InputError(f"{signature.op_type}: the asymmetric scheme needs zero_points")
    value = body.input("value", signature.type(0))
    codes = body.input("codes", signature.type(1))
    scales = body.input("scales", signature.type(2))
    start_pos = body.input("start_pos", DataType.INT64)
    zero_points = body.optional_input("zero_points", signature.type(1), signature.has(4))
    rows, slots = placed(signature, body, start_pos, value, codes)
    rows = rows.cast(DataType.FLOAT)

    def write(new: Term, cache: Term) -> Term:
        return write_rows(body, new, cache, slots, signature.layout)

    if signature.scheme == "static":
        new_codes = _with_static_scales(signature, body, rows, scales, zero_points)
        body.output("new_codes", write(_stored(body, new_codes, codes), codes))
        return
    extents: list[Term | int] = [rows.size(axis) for axis in range(3)]
    groups = scales.size(3)
    grouped = rows.reshape([*extents, groups, rows.size(3) / groups])
    quantized = (_symmetric if signature.scheme == "symmetric" else _asymmetric)(signature, body, grouped)
    new_codes = body.Reshape(quantized.codes, body.shape(rows), allowzero=1)
    body.output("new_codes", write(_stored(body, new_codes, codes), codes))
    body.output("new_scales", write(quantized.scales.reshape([*extents, groups]), scales))
    if zero_points is not None:
        body.output("new_zero_points", write(quantized.zero_points.reshape([*extents, groups]), zero_points))


def _is_int4(signature: Signature) -> bool:
    return signature.type(1) == DataType.UINT8


def _stored(body: Body, codes: Term, cache: Term) -> Term:
    """Codes, still of a float type, as the cache holds them."""
    assert cache.dtype is not None
    typed = codes.cast(cache.dtype)
    return pack(body, typed) if cache.dtype == DataType.UINT8 else typed


def _asymmetric(signature: Signature, body: Body, rows: Term) -> _Quantized:
    limits = INT4 if _is_int4(signature) else INT8
    scales, zero_points = choose_asymmetric(body, rows, limits)
    wide = wide_zero_points(body, zero_points)
    if signature.rounding == "after_zero_point":
        # torch hands the scales on in float64, so that is what the codes are computed in.
        codes = quantize(body, rows, scales.cast(DataType.DOUBLE), wide, limits)
    else:
        codes = quantize(body, rows, scales, wide.cast(DataType.FLOAT), limits, signature.rounding)
    return _Quantized(codes, scales, quantized_zero_points(body, zero_points, signature.type(1)))


def _symmetric(signature: Signature, body: Body, rows: Term) -> _Quantized:
    limits = SIGNED_INT4 if _is_int4(signature) else INT8
    scales = choose_symmetric(body, rows, limits)
    codes = quantize(body, rows, scales, None, limits)
    zero_point = MIDDLE_OF_INT4 if _is_int4(signature) else 0
    zero_points = body.Expand(body.constant(zero_point, signature.type(1)), body.shape(scales))
    return _Quantized(codes + float(zero_point), scales, zero_points)


def _with_static_scales(signature: Signature, body: Body, rows: Term, scales: Term, zero_points: Term | None) -> Term:
    """Codes of rows [B,S,H,D] or [B,H,S,D] in the type of the scales: ONNX's QuantizeLinear, which divides."""
    is_valid = (scales > 0.0) & ~body.IsInf(scales)
    all_valid = body.reduce("ReduceMin", is_valid.cast(DataType.INT32)) > 0
    checked = body.require(
        all_valid, scales, f"{signature.op_type} requires static scales that are positive and finite"
    )

    def broadcast(parameter: Term) -> Term:
        return parameter.expand([1, 1]) if signature.layout == "BSNH" else static_parameter(body, parameter)

    precision = signature.type(2)
    if zero_points is None:
        zero = body.constant(float(MIDDLE_OF_INT4), precision) if _is_int4(signature) else None
    else:
        zero = broadcast(zero_points).cast(precision)
    limits = INT4 if _is_int4(signature) else INT8
    return codes_of(body, rows.cast(precision) / broadcast(checked), zero, limits, signature.rounding)
