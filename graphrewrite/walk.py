"""Walking back from a value to what it was made of, past whatever does not change its meaning."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Generic

from graphrewrite.graph import Graph
from graphrewrite.vocabulary import (
    Binary,
    CacheWrite,
    Cast,
    Clamp,
    Concept,
    Dequantize,
    Dim,
    Expand,
    Forward,
    Layout,
    Operand,
    Parameter,
    Permute,
    Quantize,
    Repeat,
    Reshape,
    Rounding,
    Slots,
    Unary,
    V,
)

_LAYOUTS = {layout.value for layout in Layout}


def skip(graph: Graph[V], value: V) -> V:
    """The value behind operations that pass it on unchanged."""
    while isinstance(concept := meaning(graph, value), Forward):
        value = concept.input
    return value


def narrow(graph: Graph[V], value: V) -> V:
    """The value behind no-ops and behind casts to a type that holds every value of the one before."""
    while True:
        value = skip(graph, value)
        concept = graph.concept(value)
        if not (isinstance(concept, Cast) and concept.widens):
            return value
        value = concept.input


def uncast(graph: Graph[V], value: V, exact: Collection[str]) -> V:
    """The value behind no-ops and behind casts between the types of `exact`, which all hold what it can be."""
    while isinstance(concept := meaning(graph, value := skip(graph, value)), Cast):
        if concept.from_dtype not in exact or concept.to_dtype not in exact:
            return value
        value = concept.input
    return value


def meaning(graph: Graph[V], value: V) -> Concept[V] | None:
    """The concept of `value`, where a change of shape that undoes the one before is no change.

    And where one ends a transpose that another began by merging the first two axes, it is that transpose:
    [B,N,S,H] -> [B*N,S,H] -> [B*N,H,S] -> [B,N,H,S], as torch.onnx writes it.
    """
    concept = graph.concept(value)
    if not isinstance(concept, Reshape):
        return concept
    before = graph.concept(concept.input)
    if isinstance(before, Reshape) and graph.shape(before.input) == graph.shape(value):
        return Forward(before.input)
    merged = graph.concept(before.input) if isinstance(before, Permute) and before.perm == (0, 2, 1) else None
    if not isinstance(merged, Reshape):
        return concept
    first, inner, last = (graph.shape(each) for each in (merged.input, concept.input, value))
    if first is None or inner is None or len(first) != 4:
        return concept
    batch, heads, rows, size = first
    is_transpose = last == (batch, heads, size, rows) and inner[1:] == (size, rows)
    return Permute(merged.input, (0, 1, 3, 2)) if is_transpose else concept


def permuted(axes: str, perm: Collection[int]) -> str:
    """The axes of x, a letter each, where transpose(x, perm) has `axes`."""
    before = [""] * len(axes)
    for axis, source in zip(axes, perm, strict=True):
        before[source] = axis
    return "".join(before)


def peel(
    graph: Graph[V], operand: Operand[V], *, casts: Collection[str] | None = None, heads: bool = False
) -> Operand[V]:
    """The operand behind no-ops and transposes, in the layout it has there.

    casts: also behind widening casts, and any cast to one of these types. heads: also behind the repetition of each
    head for the G query heads that share it, so that the operand has Hkv heads where it had Hq.
    """
    value, axes = operand.value, operand.layout.value
    reached = operand
    while True:
        if axes in _LAYOUTS:
            reached = Operand(value, Layout(axes), operand.heads)
        concept = meaning(graph, value)
        unrepeated = repeated_heads(graph, value, axes) if heads and axes in _LAYOUTS else None
        if isinstance(concept, Permute) and len(concept.perm) == len(axes):
            value, axes = concept.input, permuted(axes, concept.perm)
        elif isinstance(concept, Forward) or (
            isinstance(concept, Cast) and casts is not None and (concept.widens or concept.to_dtype in casts)
        ):
            value = concept.input
        elif unrepeated is not None:
            value = unrepeated
        else:
            return reached


def repeated_heads(graph: Graph[V], value: V, axes: str) -> V | None:
    """The value of which `value` repeats each head several times in a row.

    [B,N,S,H] -> [B,N,1,S,H] -> [B,N,G,S,H] -> [B,N*G,S,H], or in the other layout, or one operation that says so.
    """
    axis = axes.index("N")
    concept = graph.concept(value)
    if isinstance(concept, Repeat):
        return concept.input if concept.axis == axis else None
    if not isinstance(concept, Reshape):
        return None
    repeated = skip(graph, concept.input)
    expand = graph.concept(repeated)
    if not isinstance(expand, Expand):
        return None
    reshape = graph.concept(skip(graph, expand.input))
    if not isinstance(reshape, Reshape):
        return None
    shapes = [graph.shape(each) for each in (reshape.input, repeated, value)]
    before, between, after = shapes
    if before is None or between is None or after is None or len(before) != 4 or len(between) != 5:
        return None
    group = between[axis + 1]
    is_inserted = between == (*before[: axis + 1], group, *before[axis + 1 :])
    is_merged = after == (*before[:axis], _product(before[axis], group), *before[axis + 1 :])
    was_one = (graph.shape(expand.input) or ())[axis + 1 : axis + 2] == (1,)
    return reshape.input if is_inserted and is_merged and was_one else None


def _product(left: Dim, right: Dim) -> Dim:
    return left * right if isinstance(left, int) and isinstance(right, int) else "?"


def dequantize(graph: Graph[V], value: V) -> Dequantize[V] | None:
    """The dequantization that made `value`: one operation, or spelled (cast(codes) - cast(zero_points)) * scales."""
    concept = graph.concept(value)
    if isinstance(concept, Dequantize):
        return concept
    if not isinstance(concept, Binary) or concept.operator != "*":
        return None
    for difference, scales in ((concept.left, concept.right), (concept.right, concept.left)):
        if not isinstance(difference, (int, float)) and not isinstance(scales, (int, float)):
            found = _spelled(graph, difference, scales, concept.dtype)
            if found is not None:
                return found
    return None


def _spelled(graph: Graph[V], difference: V, scales: V, dtype: str) -> Dequantize[V] | None:
    behind = narrow(graph, difference)
    codes, points, wraps = behind, None, False
    subtraction = graph.concept(behind)
    if isinstance(subtraction, Binary) and subtraction.operator == "-":
        if isinstance(subtraction.left, (int, float)) or isinstance(subtraction.right, (int, float)):
            return None
        codes, points = narrow(graph, subtraction.left), subtraction.right
        wraps = subtraction.dtype == "int8"
    elif behind == difference:
        return None
    rank = len(graph.shape(codes) or ())
    if graph.dtype(codes) != "int8" or not rank:
        return None
    zero_points = None if points is None else broadcast(graph, narrow(graph, points), rank)
    if points is not None and zero_points is None:
        return None
    applied = broadcast(graph, scales, rank)
    return None if applied is None else Dequantize(codes, applied, zero_points, dtype, wraps)


def quantize(graph: Graph[V], value: V) -> Quantize[V] | None:
    """The quantization to int8 that made `value`: one operation, or cast(clamp(round(x / scales) + zero_points))."""
    concept = graph.concept(value)
    if isinstance(concept, Quantize):
        return concept
    if not isinstance(concept, Cast) or concept.to_dtype != "int8":
        return None
    clamp = graph.concept(skip(graph, concept.input))
    if not isinstance(clamp, Clamp) or (clamp.low, clamp.high) != (-128, 127):
        return None
    return _rounded_quotient(graph, skip(graph, clamp.input))


def _rounded_quotient(graph: Graph[V], value: V) -> Quantize[V] | None:
    """round(x / scales), to which nothing is added."""
    rounded = graph.concept(value)
    if not isinstance(rounded, Unary) or rounded.function != "round":
        return None
    quotient = graph.concept(skip(graph, rounded.input))
    if not isinstance(quotient, Binary) or quotient.operator != "/":
        return None
    if isinstance(quotient.left, (int, float)) or isinstance(quotient.right, (int, float)):
        return None
    scales = broadcast(graph, quotient.right, len(graph.shape(quotient.left) or ()))
    same_type = graph.dtype(quotient.left) == quotient.dtype == graph.dtype(quotient.right)
    if scales is None or not same_type:
        return None
    return Quantize(quotient.left, scales, None, Rounding.BEFORE_ZERO_POINT, divides=True)


@dataclass(frozen=True)
class Written(Generic[V]):
    """A write along the sequence axis: the cache before it, the rows, and their slots."""

    cache: Operand[V]
    rows: Operand[V]
    slots: Slots[V]


def written(graph: Graph[V], operand: Operand[V]) -> Written[V] | None:
    """The write that made `operand`, behind no-ops and transposes of any kind; None where none did.

    The cache before is given in the layout of `operand`, or, where the graph has no such value, in the other one.
    """
    value, axes = operand.value, operand.layout.value
    concept = meaning(graph, value)
    while isinstance(concept, (Forward, Permute)):
        if isinstance(concept, Permute):
            if len(concept.perm) != len(axes):
                return None
            axes = permuted(axes, concept.perm)
        value = concept.input
        concept = meaning(graph, value)
    if not isinstance(concept, CacheWrite) or axes[concept.axis] != "S":
        return None
    cache = in_layout(graph, concept.cache, axes, operand.layout)
    rows = in_layout(graph, concept.value, axes, operand.layout)
    return None if cache is None or rows is None else Written(cache, rows, concept.slots)


def in_layout(graph: Graph[V], value: V, axes: str, wanted: Layout) -> Operand[V] | None:
    """The 4-D value with `axes`, or what it is a transpose of, in one of the layouts, and in `wanted` if it can be."""
    reached: Operand[V] | None = None
    while True:
        if axes == wanted.value:
            return Operand(value, wanted)
        if axes in _LAYOUTS and reached is None:
            reached = Operand(value, Layout(axes))
        concept = meaning(graph, value)
        if isinstance(concept, Permute) and len(concept.perm) == len(axes):
            axes = permuted(axes, concept.perm)
        elif not isinstance(concept, Forward):
            return reached
        value = concept.input


def broadcast(graph: Graph[V], value: V, rank: int) -> Parameter[V] | None:
    """Scales or zero points that meet codes of `rank` as numpy broadcasts."""
    shape = graph.shape(value)
    if shape is None or len(shape) > rank:
        return None
    return Parameter(value, (*(1,) * (rank - len(shape)), *shape))
