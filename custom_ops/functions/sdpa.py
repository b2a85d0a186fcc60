"""Bodies of the attention operators, ours and the source's: formal inputs and outputs around `attend`."""

from __future__ import annotations

import onnx_ir as ir

from graphrewrite.custom_ops.functions.attention import CachedRows, attend
from graphrewrite.custom_ops.functions.cache import start_positions, write_rows
from graphrewrite.custom_ops.functions.expression import Body
from graphrewrite.custom_ops.functions.signature import Signature

__all__ = ["custom_sdpa", "sdpa_with_kv_cache", "source_custom_sdpa", "source_sdpa_with_kv_cache"]


def custom_sdpa(signature: Signature, body: Body) -> None:
    """(query, key_cache, value_cache, start_pos, key_scales?, key_zero_points?, value_scales?, value_zero_points?,
    recent_key?, recent_value?, attn_mask?) -> (output)"""
    element = ir.DataType.INT8 if signature.has(4) else ir.DataType.FLOAT
    query = body.input("query", ir.DataType.FLOAT)
    key_cache, value_cache = body.input("key_cache", element), body.input("value_cache", element)
    start_pos = body.input("start_pos", ir.DataType.INT64)
    key_scales = body.optional_input("key_scales", ir.DataType.FLOAT, signature.has(4))
    key_zero_points = body.optional_input("key_zero_points", ir.DataType.INT8, signature.has(5))
    value_scales = body.optional_input("value_scales", ir.DataType.FLOAT, signature.has(6))
    value_zero_points = body.optional_input("value_zero_points", ir.DataType.INT8, signature.has(7))
    recent_key = body.optional_input("recent_key", ir.DataType.FLOAT, signature.has(8))
    recent_value = body.optional_input("recent_value", ir.DataType.FLOAT, signature.has(9))
    mask = body.optional_input("attn_mask", signature.mask, signature.has(10))
    start = start_positions(body, signature.op_type, start_pos, query, key_cache, signature.layout)
    keys = CachedRows(key_cache, key_scales, key_zero_points, recent_key)
    values = CachedRows(value_cache, value_scales, value_zero_points, recent_value)
    body.output("output", attend(signature, body, query, keys, values, start, mask))


def sdpa_with_kv_cache(signature: Signature, body: Body) -> None:
    """(query, key, value, key_cache, value_cache, start_pos, attn_mask?) -> (output, new_key_cache, new_value_cache)"""
    _joint(signature, body, ("attn_mask",))


def source_sdpa_with_kv_cache(signature: Signature, body: Body) -> None:
    """(query, key, value, key_cache, value_cache, start_pos, seq_len, attn_mask?)
    -> (output, new_key_cache?, new_value_cache?)"""
    # seq_len always equals S, so nothing reads it.
    _joint(signature, body, ("seq_len", "attn_mask"))


def source_custom_sdpa(signature: Signature, body: Body) -> None:
    """(query, key, value, start_pos, attn_mask?) -> (output), where key and value are whole float caches."""
    query, key, value = (body.input(name, ir.DataType.FLOAT) for name in ("query", "key", "value"))
    start_pos = body.input("start_pos", ir.DataType.INT64)
    mask = body.optional_input("attn_mask", signature.mask, signature.has(4))
    if mask is None or signature.is_causal:
        start = start_positions(body, signature.op_type, start_pos, query, key, signature.layout)
    else:
        # The mask alone says what a row sees; start_pos may be anything.
        start = body.constant([[0]])
    body.output("output", attend(signature, body, query, CachedRows(key), CachedRows(value), start, mask))


def _joint(signature: Signature, body: Body, last: tuple[str, ...]) -> None:
    query, key, value, key_cache, value_cache = (
        body.input(name, ir.DataType.FLOAT) for name in ("query", "key", "value", "key_cache", "value_cache")
    )
    start_pos = body.input("start_pos", ir.DataType.INT64)
    mask = None
    for position, name in enumerate(last, start=6):
        mask = body.optional_input(name, signature.mask, signature.has(position))
    start = start_positions(body, signature.op_type, start_pos, query, key_cache, signature.layout)
    keys, values = CachedRows(key_cache, recent=key), CachedRows(value_cache, recent=value)
    body.output("output", attend(signature, body, query, keys, values, start, mask))
    outputs = signature.outputs or 3
    if outputs > 1:
        body.output("new_key_cache", write_rows(body, key, key_cache, start, signature.layout))
    if outputs > 2:
        body.output("new_value_cache", write_rows(body, value, value_cache, start, signature.layout))
