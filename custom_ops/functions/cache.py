"""Bodies that write rows into a cache.

Legend: B batch, S new tokens, C capacity, H heads, D head size. A cache is [B,C,H,D] (layout BSNH) or [B,H,C,D]
(BNSH), the new rows have S in the place of C. `start_pos` is a scalar or [B]; row i of sequence b goes to position
start_pos[b] + i. The write is a ScatterND, which fails on a position outside the cache instead of dropping it.
"""

from __future__ import annotations

import onnx_ir as ir

from graphrewrite.custom_ops.functions.expression import Body, Term
from graphrewrite.custom_ops.functions.quantization import (
    choose_asymmetric,
    choose_symmetric,
    quantize,
    quantized_zero_points,
    wide_zero_points,
)
from graphrewrite.custom_ops.functions.signature import Signature

__all__ = [
    "sequence_axis",
    "start_positions",
    "update_cache",
    "update_cache_with_indices",
    "update_quantized_cache",
    "write_rows",
]


def sequence_axis(layout: str) -> int:
    return 1 if layout == "BSNH" else 2


def start_positions(body: Body, op_type: str, start_pos: Term, rows: Term, cache: Term, layout: str) -> Term:
    """`start_pos` as int64 [1,1] or [B,1], checked: running fails where a write would leave the cache."""
    axis = sequence_axis(layout)
    column = start_pos.reshape([-1, 1])
    # A zero keeps the reductions defined when start_pos is [B] and B is 0.
    padded = body.Concat(column, body.constant([[0]]), axis=0)
    last = body.reduce("ReduceMax", padded) + rows.size(axis)
    fits = ~(last > cache.size(axis)) & ~(body.reduce("ReduceMin", padded) < 0)
    return body.require(
        body.Squeeze(fits, body.constant([0])),
        column,
        f"{op_type} requires 0 <= start_pos and start_pos + new rows <= cache capacity",
    )


def write_rows(body: Body, rows: Term, cache: Term, start: Term, layout: str) -> Term:
    """The cache with `rows` written from `start` (int64 [1|B, 1]) on."""
    return _write_at(body, rows, cache, start + body.count(rows.size(sequence_axis(layout))), layout)


def _write_at(body: Body, rows: Term, cache: Term, positions: Term, layout: str) -> Term:
    """The cache with row i of sequence b written at positions[b, i] (int64 [1|B, S])."""
    batch, second, third = rows.size(0), rows.size(1), rows.size(2)
    sequence = body.count(batch)
    if layout == "BSNH":
        grid: list[Term | int] = [batch, second, 1]
        coordinates = [sequence.reshape([-1, 1, 1]), body.Unsqueeze(positions, body.constant([2]))]
    else:
        grid = [batch, second, third, 1]
        coordinates = [
            sequence.reshape([-1, 1, 1, 1]),
            body.count(second).reshape([1, -1, 1, 1]),
            body.Unsqueeze(positions, body.constant([1, 3])),
        ]
    indices = body.Concat(*(coordinate.expand(grid) for coordinate in coordinates), axis=-1)
    return body.ScatterND(cache, indices, rows, dtype=cache.dtype)


def update_cache(signature: Signature, body: Body) -> None:
    """(value, cache, start_pos) -> (new_cache)"""
    value, cache, start_pos = body.input("value"), body.input("cache"), body.input("start_pos", ir.DataType.INT64)
    start = start_positions(body, signature.op_type, start_pos, value, cache, signature.layout)
    body.output("new_cache", write_rows(body, value, cache, start, signature.layout))


def update_cache_with_indices(signature: Signature, body: Body) -> None:
    """(value, cache, start_pos, indices int64 [B,S]) -> (new_cache): row i of sequence b goes to indices[b, i]."""
    value, cache, _ = body.input("value"), body.input("cache"), body.input("start_pos", ir.DataType.INT64)
    indices = body.input("indices", ir.DataType.INT64)
    # ScatterND counts negative indices from the end; a zero keeps the reduction defined when there are none.
    padded = body.Concat(indices.reshape([-1]), body.constant([0]), axis=0)
    is_valid = ~(body.reduce("ReduceMin", padded) < 0)
    checked = body.require(is_valid, indices, "update_cache_with_indices requires 0 <= indices < cache capacity")
    body.output("new_cache", _write_at(body, value, cache, checked, signature.layout))


def update_quantized_cache(signature: Signature, body: Body) -> None:
    """(value, codes, scales, start_pos, zero_points?) -> (new_codes, new_scales, new_zero_points?)"""
    value = body.input("value", ir.DataType.FLOAT)
    codes = body.input("codes", ir.DataType.INT8)
    scales = body.input("scales", ir.DataType.FLOAT)
    start_pos = body.input("start_pos", ir.DataType.INT64)
    zero_points = body.optional_input("zero_points", ir.DataType.INT8, signature.has(4))
    layout = signature.layout
    start = start_positions(body, signature.op_type, start_pos, value, codes, layout)

    if signature.scheme == "asymmetric":
        row_scales, row_zero_points = choose_asymmetric(body, value)
        # torch hands the scales on in float64, so that is what the codes are computed in.
        row_codes = quantize(body, value, row_scales.cast(ir.DataType.DOUBLE), wide_zero_points(body, row_zero_points))
        new_zero_points = quantized_zero_points(body, row_zero_points)
    else:
        row_scales = choose_symmetric(body, value)
        row_codes = quantize(body, value, row_scales, None)
        new_zero_points = body.Expand(body.constant(0, ir.DataType.INT8), body.shape(row_scales))

    body.output("new_codes", write_rows(body, row_codes, codes, start, layout))
    body.output("new_scales", write_rows(body, row_scales, scales, start, layout))
    if zero_points is not None:
        body.output("new_zero_points", write_rows(body, new_zero_points, zero_points, start, layout))
