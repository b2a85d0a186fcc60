"""The numbers of a case: random rows, their quantized form, and attention in float64.

Quantization here prepares what a cache holds before the step; the new rows are written by the contender itself.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from graphrewrite.bench.case import Case

Array = npt.NDArray[Any]

_CHUNK = 4096  # positions that are quantized at once; bounds the memory for intermediate results
_CHECKED_ROWS = 64


@dataclass(frozen=True)
class Data:
    """float32 rows of a case.

    Attributes:
        query: [B,S,Hq,D].
        key, value: the new rows, [B,S,Hkv,D].
        keys, values: the caches before the step, [B,C,Hkv,D]; zero where nothing is written yet.
    """

    case: Case
    query: Array
    key: Array
    value: Array
    keys: Array
    values: Array
    _coded: dict[Quantization, tuple[Quantized, Quantized]] = field(default_factory=dict, repr=False, compare=False)

    def quantized(self, how: Quantization) -> tuple[Quantized, Quantized]:
        """The caches before the step in quantized form; made once for all contenders."""
        if how not in self._coded:
            self._coded[how] = quantize(self.keys, how), quantize(self.values, how)
        return self._coded[how]

    def written(self, caches: tuple[Array, Array] | None = None) -> tuple[Array, Array]:
        """Copies of float caches, these or others, with the new rows written to them."""
        keys, values = (cache.copy() for cache in caches or (self.keys, self.values))
        for sequence, start in enumerate(self.case.starts):
            keys[sequence, start : start + self.case.rows] = self.key[sequence]
            values[sequence, start : start + self.case.rows] = self.value[sequence]
        return keys, values


def random_data(case: Case, seed: int = 0) -> Data:
    """Normal rows of standard deviation 1: the scores have that, too, and no position gets all the weight."""
    random = np.random.default_rng(seed)
    layer = case.layer

    def rows(count: int, heads: int) -> Array:
        return random.standard_normal((layer.batch, count, heads, layer.head_size), dtype=np.float32)

    query, key, value = (rows(case.rows, heads) for heads in (layer.query_heads, layer.kv_heads, layer.kv_heads))
    keys, values = rows(case.capacity, layer.kv_heads), rows(case.capacity, layer.kv_heads)
    for sequence, start in enumerate(case.starts):
        keys[sequence, start:], values[sequence, start:] = 0, 0
    return Data(case, query, key, value, keys, values)


@dataclass(frozen=True)
class Quantization:
    """How a row of D elements is coded: `bits` a code, one scale for each of `groups` groups, zero points or none."""

    bits: int
    groups: int
    symmetric: bool

    def row_bytes(self, head_size: int) -> float:
        """Bytes of one row of one head: codes, float32 scales, and zero points of a byte."""
        return head_size * self.bits / 8 + self.groups * (4 if self.symmetric else 5)


@dataclass(frozen=True)
class Quantized:
    """codes [...,D] unpacked, scales float32 [...,groups], zero points like the scales (zeros when symmetric)."""

    codes: Array
    scales: Array
    zero_points: Array

    def values(self) -> Array:
        """(code - zero_point) * scale, float32 [...,D]."""
        groups = self.scales.shape[-1]
        codes = self.codes.reshape(*self.codes.shape[:-1], groups, -1).astype(np.float32)
        return ((codes - self.zero_points[..., None]) * self.scales[..., None]).reshape(self.codes.shape)


def quantize(rows: Array, how: Quantization) -> Quantized:
    """Codes rows float32 [B,C,H,D]; int8 codes for 8 bits, uint8 codes 0 to 15 for 4."""
    batch, capacity, heads, size = rows.shape
    kind = np.int8 if how.bits == 8 else np.uint8
    result = Quantized(
        np.empty(rows.shape, kind),
        np.empty((batch, capacity, heads, how.groups), np.float32),
        np.empty((batch, capacity, heads, how.groups), kind),
    )
    for first in range(0, capacity, _CHUNK):
        part = slice(first, first + _CHUNK)
        grouped = rows[:, part].reshape(batch, -1, heads, how.groups, size // how.groups)
        codes, scales, zero_points = _codes(grouped, how)
        result.codes[:, part] = codes.reshape(batch, -1, heads, size)
        result.scales[:, part], result.zero_points[:, part] = scales, zero_points
    return result


def _codes(grouped: Array, how: Quantization) -> tuple[Array, Array, Array]:
    lowest, highest = (-128, 127) if how.bits == 8 else (0, 15)
    if how.symmetric:
        scales = np.maximum(np.abs(grouped).max(-1), 1e-5) / np.float32(highest)
        zeros = np.zeros_like(scales)
    else:
        low, high = np.minimum(grouped.min(-1), 0), np.maximum(grouped.max(-1), 0)
        scales = np.maximum((high - low) / np.float32(highest - lowest), np.finfo(np.float32).eps)
        zeros = np.clip(np.rint(lowest - low / scales), lowest, highest)
    codes = np.clip(np.rint(grouped / scales[..., None]) + zeros[..., None], lowest, highest)
    return codes, scales, zeros


def pack_nibbles(codes: Array) -> Array:
    """Two codes 0 to 15 a byte, the even element in the low half: uint8 [...,D] to [...,D/2]."""
    packed: Array = codes[..., 0::2] | (codes[..., 1::2] << 4)
    return packed


def unpack_nibbles(packed: Array) -> Array:
    """The inverse of `pack_nibbles`."""
    codes: Array = np.stack([packed & 15, packed >> 4], axis=-1).reshape(*packed.shape[:-1], -1)
    return codes


def checked_rows(case: Case) -> Array:
    """The rows of a step that are compared with the reference: all of a few, or some from first to last."""
    return np.unique(np.linspace(0, case.rows - 1, min(case.rows, _CHECKED_ROWS)).astype(int))


def attention64(data: Data, keys: Array, values: Array) -> Array:
    """Attention of the checked rows in float64: [B,R,Hq,D].

    Row i of sequence b sees the positions j <= start + i; out = softmax(q k^T / sqrt(D)) v.

    Args:
        keys, values: caches after the step, [B,C,Hkv,D].
    """
    case, layer, rows = data.case, data.case.layer, checked_rows(data.case)
    query = data.query[:, rows].astype(np.float64) / np.sqrt(layer.head_size)
    output: Array = np.empty_like(query)
    for sequence, (length, start) in enumerate(zip(case.lengths, case.starts, strict=True)):
        seen = np.arange(length) <= start + rows[:, None]
        for head in range(layer.kv_heads):
            heads = slice(head * layer.group, (head + 1) * layer.group)
            scores = query[sequence, :, heads] @ keys[sequence, :length, head].astype(np.float64).T
            scores = np.where(seen[:, None], scores, -np.inf)
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            weights /= weights.sum(-1, keepdims=True)
            output[sequence, :, heads] = weights @ values[sequence, :length, head].astype(np.float64)
    return output
