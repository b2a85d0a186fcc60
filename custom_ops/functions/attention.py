"""Bodies of attention over a cache.

Legend: B batch, S new tokens, C capacity, n key positions of one part, Hq query heads, Hkv key/value heads,
G = Hq / Hkv, D head size, kv key positions a mask covers. Tensors called heads first are [B, H, rows, D].

    scores  = scale * query keys^T, or softcap * tanh(scale * query keys^T / softcap), + mask
    weights = softmax(scores over the visible keys, and the sink of the head), without the sink's
    output  = weights values

All of it in float32, whatever the element types of query, keys and values.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import onnx_ir as ir

from graphrewrite.custom_ops.functions.cache import sequence_axis, write_rows
from graphrewrite.custom_ops.functions.dequantization import dequantize
from graphrewrite.custom_ops.functions.expression import Body, Term
from graphrewrite.custom_ops.functions.signature import DOMAIN, Signature
from graphrewrite.custom_ops.functions.visibility import Positions, all_of

__all__ = ["CachedRows", "attend"]

_INFINITY = float("inf")
_FLOAT = ir.DataType.FLOAT


@dataclass(frozen=True)
class CachedRows:
    """Keys or values: float rows, or codes with scales and perhaps zero points.

    `recent`, float rows [B,S,Hkv,D] in the layout of the cache, stands in the place of positions
    [start_pos, start_pos + S). `static` says of scales and zero points whether they belong to channels, not to rows.
    """

    cache: Term
    scales: Term | None = None
    zero_points: Term | None = None
    recent: Term | None = None
    static: tuple[bool, bool] = (False, False)


@dataclass(frozen=True)
class _Part:
    """A run of key positions: heads-first keys and values of `count` rows, and which rows of the query see which.

    `visible` is bool, broadcast to [B,Hq,S,n]; None where every row sees every key.
    """

    keys: Term
    values: Term
    count: Term
    visible: Term | None
    bias: Term | None = None


@dataclass(frozen=True)
class _Extents:
    batch: Term
    rows: Term
    dim: Term
    query_heads: Term
    kv_heads: Term

    def heads(self, width: Term | int) -> list[Term | int]:
        """[B,Hq,S,width]"""
        return [self.batch, self.query_heads, self.rows, width]

    def groups(self, width: Term) -> list[Term]:
        """[B*Hkv,G*S,width]: the query heads of a key/value head as further rows of one matrix."""
        return [self.batch * self.kv_heads, self.query_heads / self.kv_heads * self.rows, width]

    def keys(self, count: Term) -> list[Term]:
        """[B*Hkv,count,D]"""
        return [self.batch * self.kv_heads, count, self.dim]


def attend(
    signature: Signature,
    body: Body,
    query: Term,
    keys: CachedRows,
    values: CachedRows,
    start: Term,
    mask: Term | None,
    sinks: Term | None = None,
) -> Term:
    """The attention output, float32 in the layout of the query; `start` is int64 [1|B, 1]."""
    axis = sequence_axis(signature.layout)
    sizes = _Extents(query.size(0), query.size(axis), query.size(3), query.size(3 - axis), keys.cache.size(3 - axis))
    positions = Positions(signature, body, start, sizes.rows)
    if mask is None:
        parts = _stored_and_recent(positions, keys, values)
    else:
        parts = [_under_mask(positions, keys, values, mask)]

    scaled = _heads_first(query.cast(_FLOAT), signature.layout) * _scale(signature, body, sizes.dim)
    grouped = scaled.reshape(sizes.groups(sizes.dim))
    weights = _softmax(body, [_scores(signature, body, grouped, part, sizes) for part in parts], parts, sinks, sizes)
    output = _weighted_sum(body, weights[0], parts[0], sizes)
    for weight, part in zip(weights[1:], parts[1:], strict=True):
        output = output + _weighted_sum(body, weight, part, sizes)
    return _heads_first(output.reshape(sizes.heads(sizes.dim)), signature.layout)


def _stored_and_recent(positions: Positions, keys: CachedRows, values: CachedRows) -> list[_Part]:
    """The keys without a mask: of the cache those that some row may see, and the recent rows.

    No position of the cache has to be written for reading.
    """
    signature, body = positions.signature, positions.body
    has_recent = keys.recent is not None and values.recent is not None
    end = positions.largest_start if has_recent else positions.largest_start + positions.rows
    spans = [(body.constant([0]), end)]
    if signature.has_window:
        begin = body.Min(positions.first_in_window, end)
        spans = [(begin, end)]
        if signature.has_sink_tokens:
            spans.append((body.constant([0]), body.Min(begin, positions.sink_tokens)))
    parts = []
    for begin, end in spans:
        key = body.count(end, begin)
        conditions = positions.near(key, causal=signature.is_causal and not has_recent)
        # The source operators have one position for the whole batch.
        if has_recent and signature.domain == DOMAIN:
            conditions.append(key < positions.first)
        elif not has_recent and not signature.is_causal:
            conditions.append(key < positions.first + positions.rows)
        key_rows, value_rows = (_read(body, cached, begin, end, signature.layout) for cached in (keys, values))
        parts.append(_Part(key_rows, value_rows, end - begin, all_of(conditions)))
    if keys.recent is not None and values.recent is not None:
        own = positions.first + body.count(positions.rows)
        visible = all_of(positions.near(own, causal=signature.is_causal))
        key_rows, value_rows = (
            _heads_first(rows.cast(_FLOAT), signature.layout) for rows in (keys.recent, values.recent)
        )
        parts.append(_Part(key_rows, value_rows, positions.rows, visible))
    return parts


def _under_mask(positions: Positions, keys: CachedRows, values: CachedRows, mask: Term) -> _Part:
    """All keys the mask covers as one part, recent rows laid over the cache's."""
    signature, body = positions.signature, positions.body
    reads = width = mask.size(-1)
    if keys.recent is not None:
        # Recent rows reach beyond a narrower mask.
        reads = body.Max(width, positions.largest_start + positions.rows)
    key = body.count(reads)
    conditions = positions.near(key, causal=signature.is_causal)
    if reads is not width:
        # Positions beyond the mask are hidden; until then they get any value of it.
        mask = body.Gather(mask, body.Min(key, width - 1), axis=-1)
        conditions.append(key < width)
    is_bool = mask.dtype == ir.DataType.BOOL
    bias = None if is_bool else mask.cast(_FLOAT)
    conditions.append(mask if bias is None else ~bias.equals(-_INFINITY))

    def rows_of(cached: CachedRows) -> Term:
        read = _read(body, cached, body.constant([0]), reads, signature.layout)
        if cached.recent is None:
            return read
        slots = positions.start + body.count(positions.rows)
        return write_rows(body, _heads_first(cached.recent.cast(_FLOAT), signature.layout), read, slots, "BNSH")

    return _Part(rows_of(keys), rows_of(values), reads, all_of(conditions), bias)


def _heads_first(tensor: Term, layout: str) -> Term:
    """From `layout` to heads first, or back: the permutation is its own inverse."""
    return tensor.transpose(0, 2, 1, 3) if layout == "BSNH" else tensor


def _scale(signature: Signature, body: Body, dim: Term) -> Term:
    if signature.has_scale:
        return body.attribute("scale", ir.AttributeType.FLOAT)
    return 1.0 / body.Sqrt(dim.cast(_FLOAT))


def _read(body: Body, cached: CachedRows, begin: Term, end: Term, layout: str) -> Term:
    """Rows begin, .., end - 1 of a cache, heads first, as float32."""

    def read(tensor: Term) -> Term:
        # Codes are permuted before they are widened to four times the bytes.
        return _heads_first(tensor.between(begin, end, sequence_axis(layout)), layout)

    rows = read(cached.cache)
    if cached.scales is None:
        return rows.cast(_FLOAT)
    static_scales, static_zero_points = cached.static
    scales = cached.scales if static_scales else read(cached.scales)
    zero_points = cached.zero_points
    if zero_points is not None and not static_zero_points:
        zero_points = read(zero_points)
    return dequantize(body, rows, scales, zero_points, cached.static)


def _scores(signature: Signature, body: Body, query: Term, part: _Part, sizes: _Extents) -> Term:
    """[B,Hq,S,n], minus infinity where a row does not see a key."""
    # The reshape between this transpose and the one that put the heads first keeps runtimes from joining the two into
    # one slow copy; this one is then part of the matrix product.
    transposed = part.keys.reshape(sizes.keys(part.count)).transpose(0, 2, 1)
    scores = (query @ transposed).reshape(sizes.heads(part.count))
    if signature.has_softcap:
        softcap = body.attribute("softcap", ir.AttributeType.FLOAT)
        scores = body.Tanh(scores / softcap) * softcap
    if part.bias is not None:
        scores = scores + part.bias
    return scores if part.visible is None else body.where(part.visible, scores, -_INFINITY)


def _softmax(body: Body, scores: list[Term], parts: list[_Part], sinks: Term | None, sizes: _Extents) -> list[Term]:
    """The weights of each part, [B,Hq,S,n]. Those of a row that sees nothing, and has no sink, are NaN."""
    if sinks is not None:
        # A key of every row that has no value: its weight is left out.
        scores = [*scores, sinks.cast(_FLOAT).reshape([1, -1, 1, 1]).expand(sizes.heads(1))]
    if len(scores) == 1:
        return [body.Softmax(scores[0], axis=-1)]
    weights = body.Softmax(body.Concat(*scores, axis=-1), axis=-1)
    ends = list(accumulate((part.count for part in parts), lambda end, count: end + count))
    return [weights.between(begin, end, 3) for begin, end in zip([body.constant([0]), *ends], ends, strict=False)]


def _weighted_sum(body: Body, weights: Term, part: _Part, sizes: _Extents) -> Term:
    """weights @ values, [B*Hkv,G*S,D], for the weights of this part. Values of hidden keys are never read.

    0 * NaN is NaN, so where the plain product is not finite, visible values that are not finite are added apart.
    """
    values = part.values.reshape(sizes.keys(part.count))
    groups = sizes.groups(part.count)
    if part.visible is None:
        return weights.reshape(groups) @ values
    visible = part.visible
    # A row that sees nothing has NaN for weights.
    weights = body.where(visible, weights, 0.0).reshape(groups)
    product = weights @ values
    not_finite = body.ReduceSum(body.IsNaN(product - product).cast(_FLOAT), keepdims=0) > 0.0

    def careful() -> Term:
        seen = visible.expand(sizes.heads(part.count)).cast(_FLOAT).reshape(groups)

        def where_seen(condition: Term, value: float) -> Term:
            return body.where(seen @ condition.cast(_FLOAT) > 0.0, value, 0.0)

        result = weights @ body.where(body.IsNaN(values - values), 0.0, values)
        result = result + where_seen(values.equals(_INFINITY), _INFINITY)
        result = result + where_seen(values.equals(-_INFINITY), -_INFINITY)
        return result + where_seen(body.IsNaN(values), float("nan"))

    return body.choose(not_finite, careful, lambda: product)
