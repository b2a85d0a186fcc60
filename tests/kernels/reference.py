"""The operators in float64 numpy, straight from their definitions, and random arguments for them.

Shapes here are always in B, S, H, D order; `to_layout` gives the same tensor in another layout.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


def to_layout(array: Array, layout: str) -> Array:
    """[B,S,H,D] to `layout`, contiguous, and back (the exchange of two axes is its own inverse)."""
    return np.ascontiguousarray(array if layout == "BSNH" else array.transpose(0, 2, 1, 3))


def update_cache(value: Array, cache: Array, start_pos: Array) -> Array:
    """Rows [start_pos, start_pos + S) of the cache become `value`."""
    result: Array = cache.copy()
    for b, start in enumerate(np.broadcast_to(start_pos, (len(cache),))):
        result[b, start : start + value.shape[1]] = value[b]
    return result


def dequantize(codes: Array, scales: Array, zero_points: Array | None) -> Array:
    """float32(code - zero_point) * scale, the difference in a type that holds it."""
    wide = codes.astype(np.int32) - (0 if zero_points is None else zero_points.astype(np.int32))
    rows: Array = wide.astype(np.float32) * scales
    return rows


def quantize(value: Array, scheme: str = "asymmetric") -> tuple[Array, Array, Array]:
    """Codes, scales and zero points of torch's per-token operators, for finite values."""
    one = np.float32(1)
    if scheme == "symmetric":
        scale = np.maximum(np.abs(value).max(-1, keepdims=True), np.float32(1e-5)) / np.float32(127)
        codes = np.rint(value * (one / scale))
        return np.clip(codes, -128, 127).astype(np.int8), scale, np.zeros(scale.shape, np.int8)
    low = np.minimum(value.min(-1, keepdims=True), np.float32(0))
    high = np.maximum(value.max(-1, keepdims=True), np.float32(0))
    scale = np.maximum((high - low) / np.float32(255), np.finfo(np.float32).eps)
    from_low, from_high = low / scale, high / scale
    nearer_low = (np.float32(-128) + from_low) + (np.float32(127) + from_high) > 0
    zero = np.where(nearer_low, np.float32(-128) - from_low, np.float32(127) - from_high)
    zero = np.rint(np.clip(zero, -128, 127))
    codes = np.rint(value.astype(np.float64) * (1.0 / scale.astype(np.float64)) + zero.astype(np.float64))
    return np.clip(codes, -128, 127).astype(np.int8), scale, zero.astype(np.int8)


@dataclass
class Sdpa:
    """Arguments of CustomSdpa, each [B,S,H,D]; `None` where absent."""

    query: Array
    key_cache: Array
    value_cache: Array
    start_pos: Array
    key_scales: Array | None = None
    key_zero_points: Array | None = None
    value_scales: Array | None = None
    value_zero_points: Array | None = None
    recent_key: Array | None = None
    recent_value: Array | None = None
    attn_mask: Array | None = None
    is_causal: bool = False
    scale: float | None = None

    def rows(self, which: str) -> Array:
        """The float rows of "key" or "value", [B,C,Hkv,D]: dequantized, with the recent rows in their places."""
        cache, scales = getattr(self, f"{which}_cache"), getattr(self, f"{which}_scales")
        rows = cache if scales is None else dequantize(cache, scales, getattr(self, f"{which}_zero_points"))
        recent = getattr(self, f"recent_{which}")
        return rows if recent is None else update_cache(recent, rows, self.start_pos)


def visible_slots(arguments: Sdpa) -> Array:
    """[B,Hq,S,C]: which slots each row sees."""
    a = arguments
    batch, rows, heads, _ = a.query.shape
    capacity = a.key_cache.shape[1]
    start = np.broadcast_to(a.start_pos, (batch,)).reshape(batch, 1, 1, 1)
    slot = np.arange(capacity).reshape(1, 1, 1, capacity)
    visible: Array = np.broadcast_to(slot < start + rows, (batch, heads, rows, capacity)).copy()
    if a.attn_mask is not None:
        covered = a.attn_mask.shape[-1]
        visible[...] = slot < covered
        shown = a.attn_mask if a.attn_mask.dtype == bool else a.attn_mask != -np.inf
        visible[..., :covered] &= np.broadcast_to(shown, (batch, heads, rows, covered))
    if a.is_causal:
        visible &= slot <= start + np.arange(rows).reshape(1, 1, rows, 1)
    return visible


def sdpa(arguments: Sdpa) -> Array:
    """softmax(scale q k^T + mask) v in float64, zeros for rows that see nothing. Hidden slots are not read."""
    return sdpa_with_bound(arguments)[0]


def sdpa_with_bound(arguments: Sdpa) -> tuple[Array, Array]:
    """`sdpa`, and for each element how far a float32 kernel may be from it.

    With u = 2^-24 and sums kept in at least 8 parallel parts (a chain of D/8 or keys/1 roundings each), to first order:
        a score s = sum_d q_d k_d scale + bias is off by at most e = u ((D/8 + 8) scale sum_d |q_d k_d| + |s| + |bias|):
            D/8 + 3 additions, and the rounding of the scaled query, of scale and difference in k, and of the product;
        each weight exp(s - max) is off by a factor within 1 +- (2 e + 4 u): both scores, and 2 ulp of exp;
        the sums over n keys round at most n + 8 times: n products, the dequantized value, the merge, the division.
    So |error| <= 2 (2 e + 4 u + (n + 8) u) sum_j w_j |v_j|; the factor 2 is for numerator and denominator. Below the
    least normal float32 weights vanish, which adds n times 2^-126.
    """
    a = arguments
    unit = 2.0**-24
    batch, rows, heads, dim = a.query.shape
    group = heads // a.key_cache.shape[2]
    keys, values = a.rows("key").astype(np.float64), a.rows("value").astype(np.float64)
    visible = visible_slots(a)
    scale = 1 / np.sqrt(dim) if a.scale is None else a.scale
    output, bound = np.zeros((2, batch, rows, heads, dim))
    for b, h, i in np.ndindex(batch, heads, rows):
        seen = np.flatnonzero(visible[b, h, i])
        if not len(seen):
            continue
        bias = np.zeros(len(seen))
        if a.attn_mask is not None and a.attn_mask.dtype != bool:
            bias += np.broadcast_to(a.attn_mask, (batch, heads, rows, a.attn_mask.shape[-1]))[b, h, i, seen]
        key, value, query = keys[b, seen, h // group], values[b, seen, h // group], a.query[b, i, h].astype(np.float64)
        scores = key @ query * scale + bias
        weights = np.exp(scores - scores.max())
        weights /= weights.sum()
        output[b, i, h] = weights @ value
        magnitude = (dim / 8 + 8) * abs(scale) * (np.abs(key) @ np.abs(query)) + np.abs(scores) + np.abs(bias)
        relative = 2 * unit * (2 * magnitude.max() + 4 + len(seen) + 8)
        bound[b, i, h] = relative * (weights @ np.abs(value)) + len(seen) * 2.0**-126
    return output, bound


def make_mask(kind: str | None, shape: tuple[int, ...], random: np.random.Generator) -> Array | None:
    """A mask of `shape`, "bool" or "float", that hides about a third of the keys; None for no mask."""
    if kind is None:
        return None
    visible = random.random(shape) < 0.7
    if kind == "bool":
        return visible
    return np.where(visible, random.standard_normal(shape), -np.inf).astype(np.float32)


def make_sdpa(
    random: np.random.Generator,
    *,
    batch: int = 1,
    rows: int = 1,
    capacity: int = 16,
    start: Any = 0,
    heads: tuple[int, int] = (1, 1),
    dim: int = 8,
    cache: str = "int8",
    zero_points: bool = True,
    recent: bool = False,
    mask: str | None = None,
    mask_shape: tuple[int, ...] | None = None,
    is_causal: bool = False,
    scale: float | None = None,
) -> Sdpa:
    """Random arguments.

    Args:
        heads: query heads and key/value heads.
        start: a position, or one for each sequence.
        cache: "float" or "int8".
        mask, mask_shape: see `make_mask`; shape None: [S, capacity].
    """

    def floats(*shape: int) -> Array:
        return random.standard_normal(shape, dtype=np.float32)

    query_heads, kv_heads = heads
    shape = (batch, capacity, kv_heads, dim)
    position = np.asarray(start, np.int64)
    arguments = Sdpa(floats(batch, rows, query_heads, dim), floats(*shape), floats(*shape), position)
    if cache == "int8":
        for which in ("key", "value"):
            setattr(arguments, f"{which}_cache", random.integers(-128, 128, shape).astype(np.int8))
            scales = random.uniform(0.005, 0.02, (*shape[:3], 1)).astype(np.float32)
            setattr(arguments, f"{which}_scales", scales)
            if zero_points:
                points = random.integers(-128, 128, scales.shape).astype(np.int8)
                setattr(arguments, f"{which}_zero_points", points)
    if recent:
        arguments.recent_key = floats(batch, rows, kv_heads, dim)
        arguments.recent_value = floats(batch, rows, kv_heads, dim)
    arguments.attn_mask = make_mask(mask, mask_shape or (rows, capacity), random)
    arguments.is_causal = is_causal
    arguments.scale = scale
    return arguments
