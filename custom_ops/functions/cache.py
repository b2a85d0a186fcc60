"""Bodies that write rows into a cache.

Legend: B batch, S new tokens, C capacity, H heads, D head size. A cache is [B,C,H,D] (layout BSNH) or [B,H,C,D]
(BNSH), the new rows have S in the place of C. `start_pos` is a scalar, [1] or [B]; row i of sequence b goes to slot
start_pos[b] + i, in mode "circular" modulo C. The write is a ScatterND, which fails on a slot outside the cache instead
of dropping it.
"""

from __future__ import annotations

import onnx_ir as ir

from graphrewrite.custom_ops.functions.expression import Body, Term
from graphrewrite.custom_ops.functions.signature import Signature

__all__ = [
    "placed",
    "sequence_axis",
    "start_positions",
    "update_cache",
    "update_cache_with_indices",
    "update_cache_with_source_indices",
    "write_rows",
]


def sequence_axis(layout: str) -> int:
    return 1 if layout == "BSNH" else 2


def start_positions(signature: Signature, body: Body, start_pos: Term, rows: Term, cache: Term) -> Term:
    """`start_pos` as int64 [1,1] or [B,1], checked: running fails where a write would leave the cache."""
    axis = sequence_axis(signature.layout)
    column = start_pos.reshape([-1, 1])
    # A zero keeps the reductions defined when start_pos is [B] and B is 0.
    padded = body.Concat(column, body.constant([[0]]), axis=0)
    count, capacity = rows.size(axis), cache.size(axis)
    if signature.write_mode == "circular":
        fits, bound = (capacity > 0) | count.equals(0), "a cache that is not empty"
    else:
        fits, bound = body.reduce("ReduceMax", padded) <= capacity - count, "start_pos + new rows <= cache capacity"
    fits = fits & (body.reduce("ReduceMin", padded) >= 0)
    sentence = f"{signature.op_type} requires 0 <= start_pos and {bound}"
    return body.require(body.Squeeze(fits, body.constant([0])), column, sentence)


def placed(signature: Signature, body: Body, start_pos: Term, rows: Term, cache: Term) -> tuple[Term, Term]:
    """Those of `rows` that the cache keeps, and their slots, int64 [1|B, rows kept]."""
    start = start_positions(signature, body, start_pos, rows, cache)
    axis = sequence_axis(signature.layout)
    count, capacity = rows.size(axis), cache.size(axis)
    if signature.write_mode == "linear":
        return rows, start + body.count(count)
    kept = body.Min(count, capacity)
    capacity = body.Max(capacity, 1)
    slots = (start % capacity + body.count(count, begin=count - kept)) % capacity
    return rows.between(count - kept, count, axis), slots


def write_rows(body: Body, rows: Term, cache: Term, slots: Term, layout: str) -> Term:
    """The cache with row i of sequence b written at slots[b, i] (int64 [1|B, S]), of which no two are equal."""
    return body.ScatterND(cache, _coordinates(body, slots, rows, layout), rows, dtype=cache.dtype)


def _coordinates(body: Body, slots: Term, rows: Term, layout: str) -> Term:
    """For each of `rows` where it is in a cache: int64 [B,S,2], or heads first [B,H,S,3]."""
    batch, second, third = rows.size(0), rows.size(1), rows.size(2)
    sequence = body.count(batch)
    if layout == "BSNH":
        grid: list[Term | int] = [batch, second, 1]
        coordinates = [sequence.reshape([-1, 1, 1]), slots.unsqueeze(2)]
    else:
        grid = [batch, second, third, 1]
        coordinates = [
            sequence.reshape([-1, 1, 1, 1]),
            body.count(second).reshape([1, -1, 1, 1]),
            slots.unsqueeze(1, 3),
        ]
    return body.Concat(*(coordinate.expand(grid) for coordinate in coordinates), axis=-1)


def update_cache(signature: Signature, body: Body) -> None:
    """(value, cache, start_pos) -> (new_cache)"""
    value, cache, start_pos = body.input("value"), body.input("cache"), body.input("start_pos", ir.DataType.INT64)
    rows, slots = placed(signature, body, start_pos, value, cache)
    body.output("new_cache", write_rows(body, rows, cache, slots, signature.layout))


def update_cache_with_indices(signature: Signature, body: Body) -> None:
    """(value, cache, indices int64 [B,S], [1,S] or [S]) -> (new_cache): row i of sequence b goes to indices[b, i]."""
    value, cache, indices = body.input("value"), body.input("cache"), body.input("indices", ir.DataType.INT64)
    body.output("new_cache", _write_at_indices(signature, body, value, cache, indices))


def update_cache_with_source_indices(signature: Signature, body: Body) -> None:
    """(value, cache, start_pos, indices int64 [B,S]) -> (new_cache), where start_pos is ignored."""
    value, cache, _ = body.input("value"), body.input("cache"), body.input("start_pos", ir.DataType.INT64)
    indices = body.input("indices", ir.DataType.INT64)
    body.output("new_cache", _write_at_indices(signature, body, value, cache, indices))


def _write_at_indices(signature: Signature, body: Body, value: Term, cache: Term, indices: Term) -> Term:
    """The cache with row i of sequence b written at indices[b, i]; of rows with the same index the last one stays."""
    # A zero keeps the reductions defined when there are no indices.
    padded = body.Concat(indices.reshape([-1]), body.constant([0]), axis=0)
    axis = sequence_axis(signature.layout)
    capacity = body.Max(cache.size(axis), 1)
    fits = (body.reduce("ReduceMin", padded) >= 0) & (body.reduce("ReduceMax", padded) < capacity)
    fits = fits & indices.size(-1).equals(value.size(axis))
    is_valid = body.Squeeze(fits, body.constant([0]))
    sentence = f"{signature.op_type} requires one index for each row, and 0 <= indices < cache capacity"
    slots = body.require(is_valid, indices.expand([1, 1]), sentence)
    # In which order ScatterND writes is open, so all rows of an index are the last one.
    same = slots.unsqueeze(2).equals(slots.unsqueeze(1))
    last = body.ArgMax(same.cast(ir.DataType.FLOAT), axis=-1, keepdims=0, select_last_index=1, dtype=ir.DataType.INT64)
    rows = body.GatherND(value, _coordinates(body, last, value, signature.layout))
    return write_rows(body, rows, cache, slots, signature.layout)
