"""Bodies of the attention operators, ours and the source's: formal inputs and outputs around `attend`."""

from __future__ import annotations

import onnx_ir as ir

from graphrewrite.custom_ops.functions.attention import CachedRows, attend
from graphrewrite.custom_ops.functions.cache import sequence_axis, start_positions, write_rows
from graphrewrite.custom_ops.functions.dequantization import dequantize_rows
from graphrewrite.custom_ops.functions.expression import Body, Term
from graphrewrite.custom_ops.functions.signature import Signature
from graphrewrite.errors import InputError

__all__ = [
    "custom_quantized_sdpa",
    "custom_sdpa",
    "sdpa_with_kv_cache",
    "source_custom_quantized_sdpa",
    "source_custom_sdpa",
    "source_sdpa_with_kv_cache",
]

DataType = ir.DataType


def custom_sdpa(signature: Signature, body: Body) -> None:
    """(query, key_cache, value_cache, start_pos, key_scales?, key_zero_points?, value_scales?, value_zero_points?,
    recent_key?, recent_value?, attn_mask?, sinks?) -> (output)"""
    query = body.input("query", signature.type(0))
    caches = [body.input(name, signature.type(at)) for at, name in enumerate(("key_cache", "value_cache"), start=1)]
    start_pos = body.input("start_pos", DataType.INT64)
    output = _over_caches(signature, body, query, caches, start_pos, 4)
    body.output("output", output.cast(signature.type(0)))


def custom_quantized_sdpa(signature: Signature, body: Body) -> None:
    """(query, key_cache, value_cache, start_pos, query_scales, query_zero_points?, key_scales?, key_zero_points?,
    value_scales?, value_zero_points?, recent_key?, recent_value?, attn_mask?, sinks?) -> (output)"""
    query = body.input("query", DataType.INT8)
    caches = [body.input(name, signature.type(at)) for at, name in enumerate(("key_cache", "value_cache"), start=1)]
    start_pos = body.input("start_pos", DataType.INT64)
    scales = body.input("query_scales", DataType.FLOAT)
    zero_points = body.optional_input("query_zero_points", DataType.INT8, signature.has(5))
    query = dequantize_rows(body, query, scales, zero_points)
    body.output("output", _over_caches(signature, body, query, caches, start_pos, 6))


def sdpa_with_kv_cache(signature: Signature, body: Body) -> None:
    """(query, key, value, key_cache, value_cache, start_pos, attn_mask?, sinks?)
    -> (output, new_key_cache, new_value_cache)"""
    _joint(signature, body, ("attn_mask", "sinks"))


def source_sdpa_with_kv_cache(signature: Signature, body: Body) -> None:
    """(query, key, value, key_cache, value_cache, start_pos, seq_len, attn_mask?)
    -> (output, new_key_cache?, new_value_cache?)"""
    # seq_len always equals S, so nothing reads it.
    _joint(signature, body, ("seq_len", "attn_mask"))


def source_custom_sdpa(signature: Signature, body: Body) -> None:
    """(query, key, value, start_pos, attn_mask?) -> (output), where key and value are whole float caches."""
    query, key, value = (body.input(name, DataType.FLOAT) for name in ("query", "key", "value"))
    start_pos = body.input("start_pos", DataType.INT64)
    mask = body.optional_input("attn_mask", signature.type(4), signature.has(4))
    start = _source_start(signature, body, start_pos, query, key)
    body.output("output", attend(signature, body, query, CachedRows(key), CachedRows(value), start, mask))


def source_custom_quantized_sdpa(signature: Signature, body: Body) -> None:
    """(query, key, value, start_pos, attn_mask?, q_zero_points, q_scales, k_zero_points, k_scales, v_zero_points,
    v_scales) -> (output): int8 tensors, where key and value are whole caches, with parameters of every row."""
    query, key, value = (body.input(name, DataType.INT8) for name in ("query", "key", "value"))
    start_pos = body.input("start_pos", DataType.INT64)
    mask = body.optional_input("attn_mask", signature.type(4), signature.has(4))
    parameters = [
        (body.input(f"{which}_zero_points", DataType.INT8), body.input(f"{which}_scales", DataType.FLOAT))
        for which in ("q", "k", "v")
    ]
    (query_points, query_scales), (key_points, key_scales), (value_points, value_scales) = parameters
    start = _source_start(signature, body, start_pos, query, key)
    rows = dequantize_rows(body, query, query_scales, query_points)
    keys, values = CachedRows(key, key_scales, key_points), CachedRows(value, value_scales, value_points)
    body.output("output", attend(signature, body, rows, keys, values, start, mask))


def _source_start(signature: Signature, body: Body, start_pos: Term, query: Term, key: Term) -> Term:
    if signature.has(4) and not signature.is_causal:
        # The mask alone says what a row sees; start_pos may be anything.
        return body.constant([[0]])
    return start_positions(signature, body, start_pos, query, key)


def _over_caches(
    signature: Signature, body: Body, query: Term, caches: list[Term], start_pos: Term, first: int
) -> Term:
    """Attention over two caches with the optional inputs that CustomSdpa has from its input 4 on, here from `first`."""

    def given(name: str, position: int) -> Term | None:
        return body.optional_input(name, signature.type(position), signature.has(position))

    names = ("key_scales", "key_zero_points", "value_scales", "value_zero_points", "recent_key", "recent_value")
    optional = {name: given(name, position) for position, name in enumerate(names, start=first)}
    mask, sinks = given("attn_mask", first + 6), given("sinks", first + 7)
    if (optional["recent_key"] is None) != (optional["recent_value"] is None):
        raise InputError(f"{signature.op_type}: recent_key and recent_value come together")
    rows = []
    for which, cache, position in zip(("key", "value"), caches, (first, first + 2), strict=True):
        static = (position in signature.static, position + 1 in signature.static)
        scales, zero_points = optional[f"{which}_scales"], optional[f"{which}_zero_points"]
        has_codes = cache.dtype in (DataType.INT8, DataType.UINT8)
        if has_codes != (scales is not None) or (zero_points is not None and not has_codes):
            raise InputError(f"{signature.op_type}: {which}_scales go with a {which}_cache of codes, and only with one")
        rows.append(CachedRows(cache, scales, zero_points, optional[f"recent_{which}"], static))
    start = start_positions(signature, body, start_pos, query, caches[0])
    return attend(signature, body, query, rows[0], rows[1], start, mask, sinks)


def _joint(signature: Signature, body: Body, last: tuple[str, ...]) -> None:
    names = ("query", "key", "value", "key_cache", "value_cache")
    query, key, value, key_cache, value_cache = (body.input(name, signature.type(at)) for at, name in enumerate(names))
    start_pos = body.input("start_pos", DataType.INT64)
    optional = {
        name: body.optional_input(name, signature.type(position), signature.has(position))
        for position, name in enumerate(last, start=6)
    }
    mask, sinks = optional["attn_mask"], optional.get("sinks")
    start = start_positions(signature, body, start_pos, query, key_cache)
    keys, values = CachedRows(key_cache, recent=key), CachedRows(value_cache, recent=value)
    output = attend(signature, body, query, keys, values, start, mask, sinks)
    body.output("output", output.cast(signature.type(0)))
    slots = start + body.count(key.size(sequence_axis(signature.layout)))
    outputs = signature.outputs or 3
    if outputs > 1:
        body.output("new_key_cache", write_rows(body, key, key_cache, slots, signature.layout))
    if outputs > 2:
        body.output("new_value_cache", write_rows(body, value, value_cache, slots, signature.layout))
