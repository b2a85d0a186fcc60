"""Quantization in numpy, straight from its definitions. Shapes are in B, S, H, D order.

int8 codes are [..,D]. int4 codes 0..15 are uint8 [..,D/2], element 2k in the low four bits of byte k. Parameters
(scales and zero points) are [B,S,H,n], one for each of n groups of D/n elements, or static: of a shape that broadcasts
to [H,D].
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

CODE_TYPES = {"int8": np.int8, "int4": np.uint8}
RANGES = {"int8": (-128, 127), "int4": (0, 15)}
MIDDLE_OF_INT4 = 8
"""The zero point of int4 codes that come without one."""


def pack(codes: Array) -> Array:
    """Codes 0..15 [..,D] to bytes [..,D/2]."""
    packed: Array = (codes[..., ::2] | codes[..., 1::2] << 4).astype(np.uint8)
    return packed


def unpack(packed: Array) -> Array:
    """Bytes [..,D/2] to codes 0..15 [..,D]."""
    return np.stack([packed & 15, packed >> 4], axis=-1).reshape(*packed.shape[:-1], -1)


def per_element(parameters: Array, dim: int) -> Array:
    """Parameters in a shape that broadcasts with rows [B,S,H,D]."""
    return np.repeat(parameters, dim // parameters.shape[-1], axis=-1) if parameters.ndim == 4 else parameters


def dequantize(codes: Array, scales: Array, zero_points: Array | None) -> Array:
    """float32(code - zero_point) * scale, the difference in a type that holds it and the scale rounded to float32."""
    is_packed = codes.dtype == np.uint8
    wide = (unpack(codes) if is_packed else codes).astype(np.int32)
    if zero_points is not None:
        wide = wide - per_element(zero_points, wide.shape[-1]).astype(np.int32)
    elif is_packed:
        wide = wide - MIDDLE_OF_INT4
    rows: Array = wide.astype(np.float32) * per_element(scales, wide.shape[-1]).astype(np.float32)
    return rows


def quantize(
    value: Array,
    scheme: str = "asymmetric",
    *,
    codes: str = "int8",
    groups: int = 1,
    rounding: str = "after_zero_point",
) -> tuple[Array, Array, Array]:
    """Codes, scales and zero points of finite rows.

    For int8 and one group these are torch's per-token operators, or torchao's quantize_affine where the zero point is
    added after rounding.
    """
    grouped = value.astype(np.float32).reshape(*value.shape[:-1], groups, -1)
    chosen = _symmetric(grouped, codes) if scheme == "symmetric" else _asymmetric(grouped, codes, rounding)
    result, scale, zero = (np.reshape(part, (*value.shape[:-1], -1)) for part in chosen)
    typed = result.astype(CODE_TYPES[codes])
    return pack(typed) if codes == "int4" else typed, scale, zero.astype(CODE_TYPES[codes])


def _symmetric(rows: Array, codes: str) -> tuple[Array, Array, Array]:
    highest, zero = {"int8": (127, 0), "int4": (7, MIDDLE_OF_INT4)}[codes]
    scale = np.maximum(np.abs(rows).max(-1, keepdims=True), np.float32(1e-5)) / np.float32(highest)
    rounded = np.clip(np.rint(rows * (np.float32(1) / scale)), -highest - 1, highest)
    return rounded + zero, scale, np.full(scale.shape, zero)


def _asymmetric(rows: Array, codes: str, rounding: str) -> tuple[Array, Array, Array]:
    lowest, highest = (np.float32(end) for end in RANGES[codes])
    low = np.minimum(rows.min(-1, keepdims=True), np.float32(0))
    high = np.maximum(rows.max(-1, keepdims=True), np.float32(0))
    scale = np.maximum((high - low) / (highest - lowest), np.finfo(np.float32).eps)
    from_low, from_high = low / scale, high / scale
    nearer_low = (lowest + from_low) + (highest + from_high) > 0
    zero = np.rint(np.clip(np.where(nearer_low, lowest - from_low, highest - from_high), lowest, highest))
    if rounding == "before_zero_point":
        code = np.rint(rows * (np.float32(1) / scale)) + zero
    else:
        code = np.rint(rows.astype(np.float64) * (1.0 / scale.astype(np.float64)) + zero.astype(np.float64))
    return np.clip(code, lowest, highest), scale, zero


def quantize_static(
    value: Array,
    scales: Array,
    zero_points: Array | None = None,
    *,
    codes: str = "int8",
    rounding: str = "after_zero_point",
) -> Array:
    """Codes of finite rows with given scales, computed in the type of the scales as ONNX's QuantizeLinear does."""
    quotient = value.astype(scales.dtype) / scales
    zero: Any = zero_points
    if zero is None:
        zero = np.asarray(MIDDLE_OF_INT4 if codes == "int4" else 0)
    zero = zero.astype(scales.dtype)
    rounded = np.rint(quotient) + zero if rounding == "before_zero_point" else np.rint(quotient + zero)
    typed = np.clip(rounded, *RANGES[codes]).astype(CODE_TYPES[codes])
    return pack(typed) if codes == "int4" else typed
