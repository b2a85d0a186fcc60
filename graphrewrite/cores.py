"""Attention written out: softmax(mask(cap(scale * query keyT))) value, assembled from its softmax.

scores  = matmul(query, transposed key)                 each of the two possibly scaled
scores  = scores * scale, or / sqrt(D)
scores  = cap * tanh(scores / cap)                      optional
scores  = scores + mask, or where(mask, scores, -inf)   optional
weights = softmax(scores)                               guarded, perhaps, against rows that see nothing
output  = matmul(weights, value)
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Generic

from graphrewrite.graph import Graph
from graphrewrite.positions import every_slot
from graphrewrite.report import Mismatch
from graphrewrite.vocabulary import (
    AllHidden,
    Attention,
    Binary,
    Cast,
    Expand,
    Forward,
    Layout,
    Mask,
    MatMul,
    Operand,
    Permute,
    Reshape,
    Select,
    Softmax,
    Unary,
    V,
)
from graphrewrite.walk import dequantize, meaning, permuted, skip

# A score this low has weight 0 in float32 beside any that is not: models use -1e4, -1e9 and the least finite number.
_HIDDEN = -1e4
_FLOATS = ("float16", "bfloat16", "float32", "float64")
_LAYOUTS = {layout.value for layout in Layout}
_MOST_USERS = 32  # looked at between a softmax and its product with the values


@dataclass(frozen=True)
class _Scores(Generic[V]):
    """What is done to a product of query and keys before its softmax."""

    product: MatMul[V]
    scale: float
    softcap: float = 0.0
    mask: Mask[V] | None = None


def attention_of_softmax(graph: Graph[V], softmax: V) -> Attention[V] | Mismatch | None:
    """The attention around `softmax`; None when it is none, as in a router or a sampler."""
    concept = graph.concept(softmax)
    assert isinstance(concept, Softmax)
    output, scores = _weighted(graph, softmax), _masked(graph, concept.input)
    if output is None or scores is None:
        return _unread(graph, softmax, output, scores)
    name = graph.name(output)
    weighted = graph.concept(output)
    assert isinstance(weighted, MatMul)
    if any(_rank(graph, value) != 4 for value in (scores.product.left, scores.product.right, weighted.right)):
        return Mismatch("attention-rank", "query, keys and values are not known to have 4 dimensions", (name,))
    query, query_scale = _unscaled(graph, scores.product.left, "BNSH")
    key, key_scale = _unscaled(graph, scores.product.right, "BNHS")
    value, value_scale = _unscaled(graph, weighted.right, "BNSH")
    if query is None or key is None or value is None or value_scale != 1.0:
        message = "the operands of the products are transposed or scaled in another way"
        return Mismatch("attention-form", message, (name,))
    return Attention(
        output=Operand(output, Layout.BNSH),
        query=query,
        key=key,
        value=value,
        start=None if scores.mask is not None else every_slot(graph, key),
        is_causal=False,
        mask=scores.mask,
        scale=scores.scale * query_scale * key_scale,
        softcap=scores.softcap,
    )


def _unread(graph: Graph[V], softmax: V, output: V | None, scores: _Scores[V] | None) -> Mismatch | None:
    """A softmax of which half is attention: of a product of activations, or the weights of some."""
    if scores is not None and _rank(graph, scores.product.right) > 2:
        message = "the weights of a softmax over a product go to something else than another product"
        return Mismatch("attention-form", message, (graph.name(softmax),))
    weighted = None if output is None else graph.concept(output)
    if output is not None and isinstance(weighted, MatMul) and _rank(graph, weighted.right) > 2:
        message = "the scores are not a product of query and keys, scaled, capped and masked"
        return Mismatch("attention-form", message, (graph.name(output), graph.name(softmax)))
    return None


def _rank(graph: Graph[V], value: V) -> int:
    return len(graph.shape(value) or ())


def _weighted(graph: Graph[V], softmax: V) -> V | None:
    """The product of the softmax, past casts and guards, with a matrix on its right."""
    pending, seen = list(graph.users(softmax)), 0
    while pending and seen < _MOST_USERS:
        value = pending.pop(0)
        seen += 1
        concept = graph.concept(value)
        if isinstance(concept, MatMul) and _is_weights(graph, concept.left, softmax):
            return value
        # None: the inner product of a batched one, which only means something together with its views.
        if concept is None or isinstance(concept, (Forward, Cast, Reshape, Expand, Select, Unary)):
            pending.extend(graph.users(value))
    return None


def _is_weights(graph: Graph[V], value: V, softmax: V) -> bool:
    """Whether `value` is the softmax, cast, or zero in the rows that see nothing."""
    while value != softmax:
        concept = graph.concept(value)
        if isinstance(concept, (Forward, Cast)):
            value = concept.input
        elif isinstance(concept, Select) and not isinstance(concept.otherwise, (int, float)):
            if _number(graph, concept.then) != 0.0 or not _is_guard(
                graph, concept.condition, concept.otherwise, softmax
            ):
                return False
            value = concept.otherwise
        else:
            return False
    return True


def _is_guard(graph: Graph[V], condition: V, weights: V, softmax: V) -> bool:
    """Whether `condition` is true just where a row sees nothing: its weights are NaN, or all of its scores -inf."""
    concept = graph.concept(condition)
    if isinstance(concept, Unary):
        return concept.function == "isnan" and skip(graph, concept.input) == skip(graph, weights)
    scores = graph.concept(softmax)
    assert isinstance(scores, Softmax)
    return isinstance(concept, AllHidden) and concept.input == scores.input


def _masked(graph: Graph[V], value: V) -> _Scores[V] | None:
    value = _uncast(graph, value)
    concept = graph.concept(value)
    if isinstance(concept, Binary) and concept.operator == "+":
        for scores, mask in ((concept.left, concept.right), (concept.right, concept.left)):
            if isinstance(scores, (int, float)) or isinstance(mask, (int, float)):
                continue
            found = _capped(graph, scores)
            if found is not None:
                return replace(found, mask=Mask(mask))
    if isinstance(concept, Select):
        for scores, filler, hides in (
            (concept.then, concept.otherwise, False),
            (concept.otherwise, concept.then, True),
        ):
            number = _number(graph, filler)
            if number is None or number > _HIDDEN or isinstance(scores, (int, float)):
                continue
            found = _capped(graph, scores)
            if found is not None:
                return replace(found, mask=_mask(graph, concept.condition, hides))
    return _capped(graph, value)


def _mask(graph: Graph[V], condition: V, hides: bool) -> Mask[V]:
    """The mask without negations."""
    concept = graph.concept(condition)
    while isinstance(concept, Unary) and concept.function == "not":
        condition, hides = concept.input, not hides
        concept = graph.concept(condition)
    return Mask(condition, hides)


def _capped(graph: Graph[V], value: V) -> _Scores[V] | None:
    value, cap = _factor(graph, value)
    concept = graph.concept(value)
    if not (isinstance(concept, Unary) and concept.function == "tanh"):
        return None if not isinstance(concept, MatMul) else _Scores(concept, cap)
    inner, scale = _factor(graph, concept.input)
    product = graph.concept(inner)
    # cap * tanh(scale * x) caps the scores (cap * scale) * x.
    return _Scores(product, cap * scale, cap) if isinstance(product, MatMul) and cap > 0 else None


def _factor(graph: Graph[V], value: V) -> tuple[V, float]:
    """The value without the numbers that it is multiplied and divided by, and their product."""
    factor = 1.0
    while True:
        value = _uncast(graph, value)
        scaled = _scaled(graph, value)
        if scaled is None:
            return value, factor
        value, factor = scaled[0], factor * scaled[1]


def _scaled(graph: Graph[V], value: V) -> tuple[V, float] | None:
    """x and c where `value` is x * c, c * x or x / c."""
    concept = graph.concept(value)
    if not isinstance(concept, Binary) or concept.operator not in ("*", "/"):
        return None
    for scaled, by in ((concept.left, concept.right), (concept.right, concept.left)):
        number = _number(graph, by)
        if number is None or isinstance(scaled, (int, float)) or not math.isfinite(number) or number == 0:
            continue
        if concept.operator == "*":
            return scaled, number
        return (scaled, 1.0 / number) if by == concept.right else None
    return None


def _unscaled(graph: Graph[V], value: V, axes: str) -> tuple[Operand[V] | None, float]:
    """The operand of a product without transposes and scales, and the product of the scales.

    axes: those of `value`.
    """
    factor = 1.0
    reached: tuple[Operand[V] | None, float] = (None, 1.0)
    while True:
        if axes in _LAYOUTS:
            reached = Operand(value, Layout(axes)), factor
        concept = meaning(graph, value)
        if isinstance(concept, Forward):
            value = concept.input
        elif isinstance(concept, Permute) and len(concept.perm) == len(axes):
            value, axes = concept.input, permuted(axes, concept.perm)
        elif dequantize(graph, value) is None and (scaled := _scaled(graph, value)) is not None:
            value, factor = scaled[0], factor * scaled[1]
        else:
            return reached


def _uncast(graph: Graph[V], value: V) -> V:
    """The value behind no-ops and behind casts between floats, whose rounding no fused operator does."""
    while isinstance(concept := graph.concept(value := skip(graph, value)), Cast):
        if concept.from_dtype not in _FLOATS or concept.to_dtype not in _FLOATS:
            return value
        value = concept.input
    return value


def _number(graph: Graph[V], operand: V | float) -> float | None:
    return operand if isinstance(operand, (int, float)) else graph.number(operand)
