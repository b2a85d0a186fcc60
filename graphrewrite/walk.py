"""Walking back from a value to what it was made of, past whatever does not change its meaning."""

from __future__ import annotations

from collections.abc import Collection

from graphrewrite.vocabulary import (
    Cast,
    Dequantize,
    Forward,
    Graph,
    Multiply,
    Operand,
    Permute,
    Position,
    Subtract,
    V,
)


def skip(graph: Graph[V], value: V) -> V:
    """The value behind operations that pass it on unchanged."""
    while isinstance(concept := graph.concept(value), Forward):
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
    while isinstance(concept := graph.concept(value := skip(graph, value)), Cast):
        if concept.from_dtype not in exact or concept.to_dtype not in exact:
            return value
        value = concept.input
    return value


def peel(graph: Graph[V], operand: Operand[V], *, casts: bool = False) -> Operand[V]:
    """The operand behind no-ops and transposes of sequence and heads, in the layout it has there.

    casts: also behind widening casts.
    """
    value, layout = operand.value, operand.layout
    while True:
        value = narrow(graph, value) if casts else skip(graph, value)
        concept = graph.concept(value)
        if not isinstance(concept, Permute):
            return Operand(value, layout)
        behind = layout.permuted(concept.perm)
        if behind is None:
            return Operand(value, layout)
        value, layout = concept.input, behind


def same_position(graph: Graph[V], left: Position[V], right: Position[V]) -> bool:
    if (left.offset, left.minus_new) != (right.offset, right.minus_new):
        return False
    if left.value is None or right.value is None:
        return left.value is right.value
    return graph.same(left.value, right.value)


def dequantize(graph: Graph[V], value: V) -> Dequantize[V] | None:
    """The dequantization that made `value`: one operation, or spelled (cast(codes) - cast(zero_points)) * scales."""
    concept = graph.concept(value)
    if isinstance(concept, Dequantize):
        return concept
    if not isinstance(concept, Multiply):
        return None
    for difference, scales in ((concept.left, concept.right), (concept.right, concept.left)):
        behind = narrow(graph, difference)
        if graph.dtype(behind) == "int8" and behind != difference:
            wraps = isinstance(graph.concept(behind), Subtract)  # computed in int8, widened too late
            return Dequantize(behind, scales, None, None, concept.dtype, wraps)
        subtraction = graph.concept(behind)
        if isinstance(subtraction, Subtract):
            codes, zero_points = narrow(graph, subtraction.left), narrow(graph, subtraction.right)
            if graph.dtype(codes) == "int8" == graph.dtype(zero_points):
                return Dequantize(codes, scales, zero_points, None, concept.dtype, subtraction.dtype == "int8")
    return None
