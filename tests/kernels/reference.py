"""The operators in float64 numpy, straight from their definitions, and random arguments for them.

Shapes here are always in B, S, H, D order; `to_layout` gives the same tensor in another layout.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from tests.kernels.quantization import Array, dequantize, pack, quantize, quantize_static, unpack

__all__ = [
    "FLOATS",
    "Array",
    "Sdpa",
    "dequantize",
    "make_mask",
    "make_sdpa",
    "pack",
    "quantize",
    "quantize_static",
    "sdpa",
    "sdpa_with_bound",
    "to_layout",
    "unpack",
    "update_cache",
    "update_cache_with_indices",
    "visible_slots",
]

FLOATS: dict[str, Any] = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
"""Element types of attention by name. A number of theirs is exact in float32 and float64."""

_UNIT = 2.0**-24  # half the distance from 1 to the next float32


def to_layout(array: Array, layout: str) -> Array:
    """[B,S,H,D] to `layout`, contiguous, and back (the exchange of two axes is its own inverse)."""
    return np.ascontiguousarray(array if layout == "BSNH" else array.transpose(0, 2, 1, 3))


def update_cache(value: Array, cache: Array, start_pos: Array, mode: str = "linear") -> Array:
    """Row i of a sequence becomes row start_pos + i of its cache, modulo the capacity in mode "circular"."""
    result: Array = cache.copy()
    for b, start in enumerate(np.broadcast_to(start_pos, (len(cache),))):
        if mode == "linear":
            result[b, start : start + value.shape[1]] = value[b]
            continue
        for i in range(value.shape[1]):
            result[b, (int(start) + i) % cache.shape[1]] = value[b, i]
    return result


def update_cache_with_indices(value: Array, cache: Array, indices: Array) -> Array:
    """Row i of sequence b becomes row indices[b,i] of its cache; the last one of an index stays."""
    result: Array = cache.copy()
    slots = np.broadcast_to(indices, value.shape[:2])
    for b, i in np.ndindex(*value.shape[:2]):
        result[b, slots[b, i]] = value[b, i]
    return result


@dataclass
class Sdpa:
    """Arguments of CustomSdpa and CustomQuantizedSdpa, each [B,S,H,D]; `None` where absent."""

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
    sinks: Array | None = None
    is_causal: bool = False
    scale: float | None = None
    softcap: float = 0.0
    window: int = 0
    sink_tokens: int = 0
    # Of an int8 query.
    query_scales: Array | None = None
    query_zero_points: Array | None = None

    def rows(self, which: str) -> Array:
        """The float rows of "key" or "value", [B,C,Hkv,D]: dequantized, with the recent rows in their places."""
        cache, scales = getattr(self, f"{which}_cache"), getattr(self, f"{which}_scales")
        rows = cache if scales is None else dequantize(cache, scales, getattr(self, f"{which}_zero_points"))
        recent = getattr(self, f"recent_{which}")
        if recent is None:
            return rows
        # A recent row may be of a wider type than the cache.
        return update_cache(recent, rows.astype(np.promote_types(rows.dtype, recent.dtype)), self.start_pos)

    def float_query(self) -> Array:
        """[B,S,Hq,D], dequantized."""
        if self.query_scales is None:
            return self.query
        return dequantize(self.query, self.query_scales, self.query_zero_points)


def visible_slots(arguments: Sdpa) -> Array:
    """[B,Hq,S,C]: which slots each row sees."""
    a = arguments
    batch, rows, heads, _ = a.query.shape
    capacity = a.key_cache.shape[1]
    start = np.broadcast_to(a.start_pos, (batch,)).reshape(batch, 1, 1, 1)
    slot = np.arange(capacity).reshape(1, 1, 1, capacity)
    own = start + np.arange(rows).reshape(1, 1, rows, 1)
    visible: Array = np.broadcast_to(slot < start + rows, (batch, heads, rows, capacity)).copy()
    if a.attn_mask is not None:
        covered = a.attn_mask.shape[-1]
        visible[...] = slot < covered
        shown = a.attn_mask if a.attn_mask.dtype == bool else a.attn_mask != -np.inf
        visible[..., :covered] &= np.broadcast_to(shown, (batch, heads, rows, covered))
    if a.is_causal:
        visible &= slot <= own
    if a.window:
        visible &= (slot > own - a.window) | (slot < a.sink_tokens)
    return visible


def sdpa(arguments: Sdpa) -> Array:
    """softmax(scale q k^T + mask) v in float64, zeros for rows that see nothing. Hidden slots are not read."""
    return sdpa_with_bound(arguments)[0]


def sdpa_with_bound(arguments: Sdpa, *, lanes: int = 8) -> tuple[Array, Array]:
    """`sdpa`, and for each element how far a float32 kernel may be from it.

    With u = 2^-24 and sums kept in at least `lanes` parallel parts (a chain of D/lanes or keys/1 roundings each), to
    first order:
        a score s = sum_d q_d k_d scale + bias is off by at most e = u ((D/lanes + 8) scale sum_d |q_d k_d| + |s| +
            |bias|): D/lanes + 3 additions, and the rounding of the scaled query, of scale and difference in k (and in
            a quantized q), and of the product;
        softcap tanh(s / softcap) has a slope of at most 1, and adds 4 ulp of tanh and 2 roundings, 10 u softcap;
        each weight exp(s - max) is off by a factor within 1 +- (2 e + 4 u): both scores, and 2 ulp of exp;
        the sums over n keys round at most n + 8 times: n products, the dequantized value, the merge, the division.
    So |error| <= 2 (2 e + 4 u + (n + 8) u) sum_j w_j |v_j|; the factor 2 is for numerator and denominator. A sink is
    one more weight. Below the least normal float32 weights vanish, which adds n times 2^-126. A result of fewer bits
    is rounded once more, by half a unit in its last place.
    """
    a = arguments
    batch, rows, heads, dim = a.query.shape
    group = heads // a.key_cache.shape[2]
    queries, keys, values = (x.astype(np.float64) for x in (a.float_query(), a.rows("key"), a.rows("value")))
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
        key, value, query = keys[b, seen, h // group], values[b, seen, h // group], queries[b, i, h]
        scores = key @ query * scale
        magnitude = (dim / lanes + 8) * abs(scale) * (np.abs(key) @ np.abs(query)) + 10 * a.softcap
        if a.softcap:
            scores = a.softcap * np.tanh(scores / a.softcap)
        scores = scores + bias
        magnitude += np.abs(scores) + np.abs(bias)
        sink = -np.inf if a.sinks is None else float(a.sinks[h])
        highest = max(scores.max(), sink)
        weights = np.exp(scores - highest)
        weights /= weights.sum() + np.exp(sink - highest)
        output[b, i, h] = weights @ value
        relative = 2 * _UNIT * (2 * magnitude.max() + 4 + len(seen) + 8)
        bound[b, i, h] = relative * (weights @ np.abs(value)) + len(seen) * 2.0**-126
    return output, bound + _last_rounding(np.abs(output) + bound, np.dtype(a.query.dtype))


def _last_rounding(magnitude: Array, dtype: np.dtype[Any]) -> Any:
    """Half a unit in the last place of numbers of this magnitude; zero for float32, whose roundings are counted."""
    if dtype not in (np.float16, ml_dtypes.bfloat16):
        return 0.0
    kind = ml_dtypes.finfo(dtype)
    return np.maximum(float(kind.eps) / 2 * magnitude, float(kind.smallest_subnormal) / 2)


def make_mask(kind: str | None, shape: tuple[int, ...], random: np.random.Generator) -> Array | None:
    """A mask of `shape` that hides about a third of the keys; None for no mask.

    Args:
        kind: "bool", "float" or the name of another float type.
    """
    if kind is None:
        return None
    visible = random.random(shape) < 0.7
    if kind == "bool":
        return visible
    return np.where(visible, random.standard_normal(shape), -np.inf).astype(FLOATS.get(kind, np.float32))


def make_sdpa(
    random: np.random.Generator,
    *,
    batch: int = 1,
    rows: int = 1,
    capacity: int = 16,
    start: Any = 0,
    heads: tuple[int, int] = (1, 1),
    dim: int = 8,
    dtype: str = "float32",
    cache: str = "int8",
    scales: str | tuple[str, str] = "rows",
    scales_type: str = "float32",
    groups: int = 1,
    zero_points: bool | str = True,
    recent: bool = False,
    recent_type: str | None = None,
    mask: str | None = None,
    mask_shape: tuple[int, ...] | None = None,
    sinks: bool = False,
    is_causal: bool = False,
    scale: float | None = None,
    softcap: float = 0.0,
    window: int = 0,
    sink_tokens: int = 0,
) -> Sdpa:
    """Random arguments.

    Args:
        heads: query heads and key/value heads.
        start: a position, or one for each sequence.
        dtype: of the query, the recent rows and the sinks; "int8" is CustomQuantizedSdpa's, whose other floats are
            float32.
        cache: "float" or the name of a float type, "int8" or "int4".
        scales: "rows" ([B,C,Hkv,groups]) or a static shape: "[]", "[1]", "[D]", "[H,1]" or "[H,D]"; or one for keys
            and one for values.
        zero_points: whether there are any, or their shape where it is not that of the scales.
        recent_type: of the recent rows where it is not `dtype`, as in SdpaWithKvCache.
        mask, mask_shape: see `make_mask`; shape None: [S, capacity].
    """
    is_quantized = dtype == "int8"
    exact = np.float32 if is_quantized else FLOATS[dtype]

    def floats(*shape: int, kind: Any = exact) -> Array:
        return random.standard_normal(shape, dtype=np.float32).astype(kind)

    query_heads, kv_heads = heads
    shape = (batch, capacity, kv_heads, dim)
    rows_shape = (batch, rows, kv_heads, dim)
    position = np.asarray(start, np.int64)
    kind = FLOATS.get(cache, np.float32)
    query = floats(batch, rows, query_heads, dim)
    arguments = Sdpa(query, floats(*shape, kind=kind), floats(*shape, kind=kind), position)
    if cache in ("int8", "int4"):
        shapes = {"rows": (*shape[:3], groups), "[]": (), "[1]": (1,), "[D]": (dim,), "[H,1]": (kv_heads, 1)}
        shapes["[H,D]"] = shape[2:]
        both = (scales, scales) if isinstance(scales, str) else scales
        for which, granularity in zip(("key", "value"), both, strict=True):
            of_points = granularity if zero_points is True else zero_points
            points_shape = shapes[of_points] if of_points else None
            codes, factors, points = _random_codes(random, cache, shape, shapes[granularity], points_shape)
            setattr(arguments, f"{which}_cache", codes)
            setattr(arguments, f"{which}_scales", factors.astype(scales_type))
            setattr(arguments, f"{which}_zero_points", points)
    if recent:
        recent_kind = exact if recent_type is None else FLOATS[recent_type]
        arguments.recent_key = floats(*rows_shape, kind=recent_kind)
        arguments.recent_value = floats(*rows_shape, kind=recent_kind)
    arguments.attn_mask = make_mask(mask, mask_shape or (rows, capacity), random)
    arguments.is_causal, arguments.scale, arguments.softcap = is_causal, scale, softcap
    arguments.window, arguments.sink_tokens = window, sink_tokens
    if sinks:
        arguments.sinks = floats(query_heads)
    if is_quantized:
        one = (batch, rows, query_heads, 1)
        parts = _random_codes(random, "int8", query.shape, one, one if zero_points else None)
        arguments.query, arguments.query_scales, arguments.query_zero_points = parts
    return arguments


def _random_codes(
    random: np.random.Generator,
    kind: str,
    shape: tuple[int, ...],
    scales_shape: tuple[int, ...],
    points_shape: tuple[int, ...] | None,
) -> tuple[Array, Array, Array | None]:
    """Codes that stand for [..,D], scales that make numbers of the order of 1 of them, and zero points if wanted."""
    low, high, step = {"int8": (-128, 128, 0.01), "int4": (0, 16, 0.15)}[kind]
    dtype = np.int8 if kind == "int8" else np.uint8
    codes = random.integers(low, high, shape).astype(dtype)
    scales = np.asarray(random.uniform(step / 2, step * 2, scales_shape), np.float32)
    points = None if points_shape is None else np.asarray(random.integers(low, high, points_shape), dtype)
    return pack(codes) if kind == "int4" else codes, scales, points
