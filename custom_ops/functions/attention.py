"""Bodies of attention over a cache.

Legend: B batch, S new tokens, C capacity, n key positions of one part, Hq query heads, Hkv key/value heads,
G = Hq / Hkv, D head size, kv key positions a mask covers. Tensors called heads first are [B, H, rows, D].

    weights = softmax(scale * query keys^T + mask, over the visible keys)
    output  = weights values

Row i sees key j where j < valid, and (is_causal) j <= start_pos + i, and the mask is true or above minus infinity.
Here valid is kv, or without a mask start_pos + S.
"""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from graphrewrite.custom_ops.functions.cache import sequence_axis, write_rows
from graphrewrite.custom_ops.functions.expression import Body, Term
from graphrewrite.custom_ops.functions.quantization import dequantize
from graphrewrite.custom_ops.functions.signature import DOMAIN, Signature

__all__ = ["CachedRows", "attend"]

_INFINITY = float("inf")


@dataclass(frozen=True)
class CachedRows:
    """Keys or values: float rows, or int8 codes with scales and perhaps zero points.

    `recent`, float rows [B,S,Hkv,D] in the layout of the cache, stands in the place of positions
    [start_pos, start_pos + S).
    """

    cache: Term
    scales: Term | None = None
    zero_points: Term | None = None
    recent: Term | None = None


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

    def heads(self, width: Term) -> list[Term]:
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
) -> Term:
    """The attention output in the layout of the query; `start` is int64 [1|B, 1]."""
    axis = sequence_axis(signature.layout)
    sizes = _Extents(query.size(0), query.size(axis), query.size(3), query.size(3 - axis), keys.cache.size(3 - axis))
    if mask is None and keys.recent is not None and values.recent is not None:
        parts = _past_and_recent(signature, body, keys, values, start, sizes.rows)
    else:
        parts = [_whole(signature, body, keys, values, start, sizes.rows, mask)]

    scaled = _heads_first(query, signature.layout) * _scale(signature, body, sizes.dim)
    grouped = scaled.reshape(sizes.groups(sizes.dim))
    scores = [_scores(body, grouped, part, sizes) for part in parts]
    weights = body.Softmax(scores[0] if len(scores) == 1 else body.Concat(*scores, axis=-1), axis=-1)
    output = _weighted_sum(body, weights if len(parts) == 1 else weights.leading(parts[0].count, 3), parts[0], sizes)
    for part in parts[1:]:
        output = output + _weighted_sum(body, weights.trailing(part.count, 3), part, sizes)
    return _heads_first(output.reshape(sizes.heads(sizes.dim)), signature.layout)


def _past_and_recent(
    signature: Signature, body: Body, keys: CachedRows, values: CachedRows, start: Term, rows: Term
) -> list[_Part]:
    """The cache before start_pos, and the recent rows: no position of the cache has to be written for reading."""
    layout = signature.layout
    before = _largest(body, start)
    # The source operators have one position for the whole batch.
    shared = signature.domain != DOMAIN
    in_past = None if shared else body.count(before) < start.reshape([-1, 1, 1, 1])
    token = body.count(rows)
    in_order = token <= token.reshape([-1, 1]) if signature.is_causal else None
    past = _Part(_read(body, keys, before, layout), _read(body, values, before, layout), before, in_past)
    assert keys.recent is not None and values.recent is not None
    return [past, _Part(_heads_first(keys.recent, layout), _heads_first(values.recent, layout), rows, in_order)]


def _whole(
    signature: Signature,
    body: Body,
    keys: CachedRows,
    values: CachedRows,
    start: Term,
    rows: Term,
    mask: Term | None,
) -> _Part:
    """All positions that are read as one part, recent rows laid over the cache's."""
    width = _largest(body, start) + rows if mask is None else mask.size(-1)
    reads = width
    if mask is not None and keys.recent is not None:
        # Recent rows reach beyond a narrower mask.
        reads = body.Max(width, _largest(body, start) + rows)

    def rows_of(cached: CachedRows) -> Term:
        read = _read(body, cached, reads, signature.layout)
        if cached.recent is None:
            return read
        return write_rows(body, _heads_first(cached.recent, signature.layout), read, start, "BNSH")

    key = body.count(reads)
    first = start.reshape([-1, 1, 1, 1])
    conditions = []
    bias = None
    if signature.is_causal:
        conditions.append(key <= first + body.count(rows).reshape([-1, 1]))
    elif mask is None:
        conditions.append(key < first + rows)
    if mask is not None:
        if reads is not width:
            # Positions beyond the mask are hidden; until then they get any value of it.
            mask = body.Gather(mask, body.Min(key, width - 1), axis=-1)
            conditions.append(key < width)
        is_bool = mask.dtype == ir.DataType.BOOL
        bias = None if is_bool else mask
        conditions.append(mask if is_bool else ~mask.equals(-_INFINITY))
    visible = conditions[0]
    for condition in conditions[1:]:
        visible = visible & condition
    return _Part(rows_of(keys), rows_of(values), reads, visible, bias)


def _largest(body: Body, start: Term) -> Term:
    """The largest start position as int64 [1]; 0 for an empty batch."""
    padded = body.Concat(start.reshape([-1]), body.constant([0]), axis=0)
    return body.reduce("ReduceMax", padded).reshape([1])


def _heads_first(tensor: Term, layout: str) -> Term:
    """From `layout` to heads first, or back: the permutation is its own inverse."""
    return tensor.transpose(0, 2, 1, 3) if layout == "BSNH" else tensor


def _scale(signature: Signature, body: Body, dim: Term) -> Term:
    if signature.has_scale:
        return body.attribute("scale", ir.AttributeType.FLOAT)
    return 1.0 / body.Sqrt(dim.cast(ir.DataType.FLOAT))


def _read(body: Body, cached: CachedRows, count: Term, layout: str) -> Term:
    """The first `count` rows of a cache, heads first, as float32."""
    tensors = [tensor for tensor in (cached.cache, cached.scales, cached.zero_points) if tensor is not None]
    # Codes are permuted before they are widened to four times the bytes.
    rows, *parameters = (_heads_first(tensor.leading(count, sequence_axis(layout)), layout) for tensor in tensors)
    return dequantize(body, rows, *parameters) if parameters else rows


def _scores(body: Body, query: Term, part: _Part, sizes: _Extents) -> Term:
    """[B,Hq,S,n], minus infinity where a row does not see a key."""
    # The reshape between this transpose and the one that put the heads first keeps runtimes from joining the two into
    # one slow copy; this one is then part of the matrix product.
    transposed = part.keys.reshape(sizes.keys(part.count)).transpose(0, 2, 1)
    scores = (query @ transposed).reshape(sizes.heads(part.count))
    if part.bias is not None:
        scores = scores + part.bias
    return scores if part.visible is None else body.where(part.visible, scores, -_INFINITY)


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
    not_finite = body.ReduceSum(body.IsNaN(product - product).cast(ir.DataType.FLOAT), keepdims=0) > 0.0

    def careful() -> Term:
        seen = visible.expand(sizes.heads(part.count)).cast(ir.DataType.FLOAT).reshape(groups)

        def where_seen(condition: Term, value: float) -> Term:
            return body.where(seen @ condition.cast(ir.DataType.FLOAT) > 0.0, value, 0.0)

        result = weights @ body.where(body.IsNaN(values - values), 0.0, values)
        result = result + where_seen(values.equals(_INFINITY), _INFINITY)
        result = result + where_seen(values.equals(-_INFINITY), -_INFINITY)
        return result + where_seen(body.IsNaN(values), float("nan"))

    return body.choose(not_finite, careful, lambda: product)
