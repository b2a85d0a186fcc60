"""Comparing numbers of cache slots that a graph computes in different ways."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass

from graphrewrite.graph import Graph
from graphrewrite.vocabulary import Binary, Cast, Dim, Forward, Operand, Position, Range, Reshape, Size, Slots, V

_INTEGERS = ("int32", "int64")
_MOST_STEPS = 64  # a longer sum is taken for a value of its own


@dataclass(frozen=True)
class Sum:
    """A constant, and how often each value counts."""

    constant: int
    terms: frozenset[tuple[Hashable, int]]


def same_position(graph: Graph[V], left: Position[V], right: Position[V], new: tuple[Dim, Dim]) -> bool:
    """Whether two positions are one number of slots. new: the number of new tokens as each side calls it."""
    return total(graph, left, new[0]) == total(graph, right, new[1])


def total(graph: Graph[V], position: Position[V], new: Dim) -> Sum:
    """The position as a sum of values that are no sums themselves."""
    constant = position.offset
    terms: Counter[Hashable] = Counter()
    pending: list[tuple[V, int]] = [] if position.value is None else [(position.value, 1)]
    sizes = [(new, -1)] if position.minus_new else []
    if position.slots_of is not None:
        sizes.append((slots_of(graph, position.slots_of), 1))
    steps = 0
    while pending:
        value, sign = pending.pop()
        steps += 1
        concept = graph.concept(value) if steps < _MOST_STEPS else None
        number = graph.number(value)
        if number is not None:
            constant += sign * int(number)
        elif isinstance(concept, Forward) or (isinstance(concept, Cast) and concept.to_dtype in _INTEGERS):
            pending.append((concept.input, sign))
        elif isinstance(concept, Size):
            sizes.append(((graph.shape(concept.input) or ("?",) * 8)[concept.axis], sign))
        elif isinstance(concept, Binary) and concept.operator in ("+", "-"):
            for operand, factor in ((concept.left, sign), (concept.right, sign if concept.operator == "+" else -sign)):
                if isinstance(operand, (int, float)):
                    constant += factor * int(operand)
                else:
                    pending.append((operand, factor))
        else:
            terms[graph.key(value)] += sign
    for size, sign in sizes:
        if isinstance(size, int):
            constant += sign * size
        else:
            terms[("size", size)] += sign
    return Sum(constant, frozenset((term, count) for term, count in terms.items() if count))


def slots_of(graph: Graph[V], operand: Operand[V]) -> Dim:
    """The extent of a 4-D operand along its sequence axis."""
    return (graph.shape(operand.value) or ("?",) * 4)[operand.layout.sequence_axis]


def every_slot(graph: Graph[V], key: Operand[V]) -> Position[V]:
    """The start of an attention, neither causal nor masked, that sees all of `key`."""
    capacity = slots_of(graph, key)
    if isinstance(capacity, int):
        return Position(None, capacity, minus_new=True)
    return Position(None, minus_new=True, slots_of=key)


def slots(graph: Graph[V], indices: V, capacity: Dim) -> Slots[V]:
    """The slots that integers [S] or [B,S] name: a run of them where the graph says that they are one."""
    unknown = Slots[V](None, indices=indices)
    value, is_ring = _behind(graph, indices), False
    concept = graph.concept(value)
    if isinstance(concept, Binary) and concept.operator == "%" and not isinstance(concept.left, (int, float)):
        if _number(graph, concept.right) != capacity:
            return unknown
        value, is_ring = _behind(graph, concept.left), True
    start = _start(graph, value)
    return unknown if start is None else Slots(start, is_ring, indices)


def _behind(graph: Graph[V], value: V) -> V:
    """The integers behind casts and changes of shape, each of which keeps their order."""
    while isinstance(concept := graph.concept(value), (Forward, Reshape, Cast)):
        if isinstance(concept, Cast) and concept.to_dtype not in _INTEGERS:
            return value
        value = concept.input
    return value


def _start(graph: Graph[V], value: V) -> Position[V] | None:
    """The start of a run of integers: a range, or a range and one number added to all of it."""
    concept = graph.concept(value)
    if isinstance(concept, Range):
        return Position(None, concept.start) if isinstance(concept.start, int) else Position(concept.start)
    if not (isinstance(concept, Binary) and concept.operator == "+"):
        return None
    for run, added in ((concept.left, concept.right), (concept.right, concept.left)):
        if isinstance(run, (int, float)):
            continue
        inner = graph.concept(_behind(graph, run))
        if not isinstance(inner, Range) or not isinstance(inner.start, int):
            continue
        if isinstance(added, (int, float)):
            return Position(None, inner.start + int(added))
        if all(size == 1 for size in graph.shape(added) or ("?",)):
            return Position(added, inner.start)
    return None


def _number(graph: Graph[V], operand: V | float) -> float | None:
    return operand if isinstance(operand, (int, float)) else graph.number(operand)
