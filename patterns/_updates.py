"""Finding the writes that filled a cache.

codes = write(codes', quantize(x, s, z), start), scales = write(scales', s, start), ... where (s, z) = choose_qparams(x)
codes = write(codes', quantize(x, s, z), start) with static s and z
rows  = write(rows', x, start)
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Generic

from graphrewrite.graph import Graph
from graphrewrite.patterns._caches import CacheRead, shaped, static_shape
from graphrewrite.positions import same_position, slots_of
from graphrewrite.site import Cache, CacheUpdate, Shaped
from graphrewrite.vocabulary import ChooseQParams, Layout, Operand, Parameter, Quantize, Scheme, Slots, V
from graphrewrite.walk import peel, quantize, skip, uncast, written


@dataclass(frozen=True)
class _Write(Generic[V]):
    """A write of rows, and the cache before it in the layout of the one after."""

    before: V
    rows: Operand[V]
    slots: Slots[V]


def find_update(graph: Graph[V], read: CacheRead[V]) -> CacheUpdate[V] | None:
    """The quantize-and-write that produced the cache, when it is what UpdateQuantizedCache does to the last bit."""
    cache, layout = read.cache, read.layout
    codes = _write(graph, cache.data, layout)
    if codes is None or cache.scales is None:
        return None
    rows = peel(graph, codes.rows)
    found = quantize(graph, rows.value)
    if found is None or graph.dtype(found.input) != "float32":
        return None
    value = Operand(found.input, rows.layout)
    if isinstance(graph.concept(skip(graph, found.scales.value)), ChooseQParams):
        return _dynamic_update(graph, read, found, value, codes)
    return _static_update(graph, cache, found, value, codes)


def find_float_update(graph: Graph[V], read: CacheRead[V]) -> CacheUpdate[V] | None:
    """The write of rows as they are that produced a cache of floats."""
    write = _write(graph, read.cache.data, read.layout)
    if write is None:
        return None
    return CacheUpdate(peel(graph, write.rows), Cache(write.before), read.cache, write.slots, None)


def same_slots(graph: Graph[V], left: tuple[Slots[V], Operand[V]], right: tuple[Slots[V], Operand[V]]) -> bool:
    """Whether two writes go to the same slots. Each: the slots, and the rows that are written there."""
    (first, first_rows), (second, second_rows) = left, right
    if first.start is None or second.start is None:
        if first.indices is None or second.indices is None:
            return False
        return graph.key(first.indices) == graph.key(second.indices)
    new = slots_of(graph, first_rows), slots_of(graph, second_rows)
    return first.ring == second.ring and same_position(graph, first.start, second.start, new)


def _write(graph: Graph[V], value: V, layout: Layout) -> _Write[V] | None:
    found = written(graph, Operand(value, layout))
    if found is None or found.cache.layout is not layout:
        return None
    return _Write(found.cache.value, found.rows, found.slots)


def _dynamic_update(
    graph: Graph[V], read: CacheRead[V], found: Quantize[V], value: Operand[V], codes: _Write[V]
) -> CacheUpdate[V] | None:
    cache = read.cache
    parts = [_write(graph, part, read.layout) for part in cache.parts[1:]]
    writes = [write for write in parts if write is not None]
    here = (codes.slots, codes.rows)
    if len(writes) < len(parts) or not all(same_slots(graph, (w.slots, w.rows), here) for w in writes):
        return None
    if len({graph.scope(part) for part in cache.parts}) > 1:
        return None  # written in different branches
    scheme = _scheme(graph, found, value, writes)
    if scheme is None or (scheme is Scheme.ASYMMETRIC and cache.zero_points is None):
        return None
    before = Cache(codes.before, *(Shaped(write.before) for write in writes))
    return CacheUpdate(value, before, cache, codes.slots, scheme, found.rounding)


# Element types that hold every scale (a float32 value, whatever its type) and every zero point (-128 to 127).
_HOLD_SCALES = ("float32", "float64")
_HOLD_ZERO_POINTS = ("int8", "int16", "int32", "int64", "float32", "float64")


def _scheme(graph: Graph[V], found: Quantize[V], rows: Operand[V], writes: list[_Write[V]]) -> Scheme | None:
    """The one scheme by which the rows' scales and zero points, used and written, are all chosen from the rows."""
    if found.zero_points is None or found.divides:
        return None
    choices = [
        _chosen(graph, Operand(found.scales.value, rows.layout), rows, 0),
        _chosen(graph, Operand(found.zero_points.value, rows.layout), rows, 1),
    ]
    for output, write in enumerate(writes):
        held = _HOLD_SCALES if output == 0 else _HOLD_ZERO_POINTS
        stored = peel(graph, write.rows)
        stored = peel(graph, replace(stored, value=uncast(graph, stored.value, held)))
        choices.append(_chosen(graph, stored, rows, output))
    schemes = {None if choice is None else choice.scheme for choice in choices}
    return schemes.pop() if len(schemes) == 1 else None


def _chosen(graph: Graph[V], parameters: Operand[V], rows: Operand[V], output: int) -> ChooseQParams[V] | None:
    """How `parameters` were chosen, when they are that output of choosing them for `rows`."""
    parameters = peel(graph, parameters)
    concept = graph.concept(parameters.value)
    if not isinstance(concept, ChooseQParams) or concept.output != output or parameters.layout is not rows.layout:
        return None
    return concept if graph.key(skip(graph, concept.input)) == graph.key(skip(graph, rows.value)) else None


def _static_update(
    graph: Graph[V], cache: Cache[V], found: Quantize[V], value: Operand[V], codes: _Write[V]
) -> CacheUpdate[V] | None:
    """By given scales, where the rows are divided by them: a multiplication by the reciprocal may round another way."""
    scales = _static(graph, found.scales, value)
    zero_points = None if found.zero_points is None else _static(graph, found.zero_points, value)
    if not found.divides or scales is None or (found.zero_points is not None and zero_points is None):
        return None
    before = Cache(codes.before, scales, zero_points)
    return CacheUpdate(value, before, cache, codes.slots, Scheme.STATIC, found.rounding)


def _static(graph: Graph[V], parameter: Parameter[V], rows: Operand[V]) -> Shaped[V] | None:
    sizes = graph.shape(rows.value)
    shape = None if sizes is None else static_shape(parameter.shape, sizes, rows.layout)
    return None if shape is None else shaped(graph, parameter.value, shape)
