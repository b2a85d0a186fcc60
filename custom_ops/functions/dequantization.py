"""From codes back to float32: value = float32(code - zero_point) * scale.

int4 codes come packed: uint8 [..,D/2], two codes 0..15 a byte, element 2k in the low four bits; without zero points
they are relative to 8. Tensors of four axes are heads first here, [B,H,n,D]. Their parameters, scales and zero points,
are [B,H,n,g] with one for each of g groups of D/g elements, or static, of shape [], [1], [D], [H,1] or [H,D].
"""

from __future__ import annotations

import onnx_ir as ir

from graphrewrite.custom_ops.functions.expression import Body, Term

__all__ = ["dequantize", "dequantize_each", "dequantize_rows", "pack", "static_parameter", "unpack"]

DataType = ir.DataType

MIDDLE_OF_INT4 = 8


def pack(body: Body, codes: Term) -> Term:
    """Codes 0..15, uint8 [a,b,c,D], in bytes [a,b,c,D/2]."""
    pairs = codes.reshape([codes.size(0), codes.size(1), codes.size(2), codes.size(3) / 2, 2])
    low, high = (body.Gather(pairs, body.constant(half), axis=-1) for half in (0, 1))
    # Not every runtime adds bytes.
    return (low.cast(DataType.INT32) + high.cast(DataType.INT32) * 16).cast(DataType.UINT8)


def unpack(body: Body, packed: Term) -> Term:
    """Bytes [a,b,c,D/2] as codes 0..15, uint8 [a,b,c,D]."""
    # onnxruntime divides bytes ten times slower than it shifts them, and old ones neither multiply nor subtract them.
    high = body.BitShift(packed, 4, direction="RIGHT")
    low = body.BitShift(body.BitShift(packed, 4, direction="LEFT"), 4, direction="RIGHT")
    pairs = body.Concat(low.unsqueeze(-1), high.unsqueeze(-1), axis=-1)
    return pairs.reshape([packed.size(0), packed.size(1), packed.size(2), packed.size(3) * 2])


def static_parameter(body: Body, parameter: Term) -> Term:
    """A static scale or zero point as [H or 1, 1, D or 1], which broadcasts heads first."""
    return parameter.expand([1, 1]).unsqueeze(1)


def dequantize(
    body: Body, codes: Term, scales: Term, zero_points: Term | None, static: tuple[bool, bool] = (False, False)
) -> Term:
    """float32 [B,H,n,D] of int8 or packed int4 codes; `static` tells of scales and zero points which are."""
    static_scales, static_zero_points = static
    if codes.dtype == DataType.UINT8:
        codes = unpack(body, codes)
    if not static_scales and not (zero_points is not None and static_zero_points):
        return dequantize_rows(body, codes, scales, zero_points)
    if zero_points is not None:
        zero_points = _per_element(body, zero_points, codes, static_zero_points)
    elif codes.dtype == DataType.UINT8:
        zero_points = body.constant(MIDDLE_OF_INT4, DataType.UINT8)
    factors = _per_element(body, scales.cast(DataType.FLOAT), codes, static_scales)
    return dequantize_each(codes, factors, zero_points)


def dequantize_rows(body: Body, codes: Term, scales: Term, zero_points: Term | None = None) -> Term:
    """float32 of int8 codes, or int4 codes as uint8, [..,D] with float32 scales and zero points [..,g].

    DequantizeLinear takes the difference in 32 bits, so the int8 range does not wrap. Its form with one scale per slice
    of the first axis is older than opset 21's blocks and, with every group a slice, no slower.
    """
    if zero_points is None and codes.dtype == DataType.UINT8:
        zero_points = body.Expand(body.constant(MIDDLE_OF_INT4, DataType.UINT8), body.shape(scales))
    groups = codes.reshape([-1, codes.size(-1) / scales.size(-1)])
    flat = [scales.reshape([-1])] + ([] if zero_points is None else [zero_points.reshape([-1])])
    values = body.DequantizeLinear(groups, *flat, axis=0, dtype=DataType.FLOAT)
    return body.Reshape(values, body.shape(codes), allowzero=1)


def dequantize_each(codes: Term, scales: Term, zero_points: Term | None) -> Term:
    """(code - zero_point) * scale in the element type of the scales, for parameters that broadcast with the codes.

    The difference of integers of more than 8 bits is an integer of 64 bits, as in torch.
    """
    precision = scales.dtype
    assert precision is not None
    if zero_points is None:
        return codes.cast(precision) * scales
    exact = DataType.INT64 if zero_points.dtype in (DataType.INT32, DataType.INT64) else precision
    return (codes.cast(exact) - zero_points.cast(exact)).cast(precision) * scales


def _per_element(body: Body, parameter: Term, codes: Term, is_static: bool) -> Term:
    """A scale or zero point in a shape that broadcasts with codes [B,H,n,D]."""
    if is_static:
        return static_parameter(body, parameter)
    dim = codes.size(3)
    repeated = parameter.unsqueeze(-1).expand([1, 1, 1, 1, dim / parameter.size(3)])
    return repeated.reshape([codes.size(0), codes.size(1), codes.size(2), dim])
