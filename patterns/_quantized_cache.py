"""Reading a dequantized cache back to its codes, and finding the writes that filled it. Shared by the patterns.

dequantized = (codes - zero_points) * scales                          one scale and zero point per token and head
codes       = write(codes', quantize(x, s, z), start)                 and scales = write(scales', s, start), ...
(s, z)      = choose_qparams(x)
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Generic

from graphrewrite.report import Mismatch
from graphrewrite.site import CacheUpdate, QuantizedCache, SdpaSite
from graphrewrite.vocabulary import (
    Attention,
    CacheWrite,
    ChooseQParams,
    Dequantize,
    Graph,
    Layout,
    Operand,
    Position,
    Quantize,
    Scheme,
    V,
)
from graphrewrite.walk import dequantize, narrow, peel, same_position, skip, uncast


@dataclass(frozen=True)
class CacheRead(Generic[V]):
    """A quantized cache as an attention reads it, and the layout it lies in."""

    cache: QuantizedCache[V]
    layout: Layout


def read_cache(graph: Graph[V], operand: Operand[V], core: str) -> CacheRead[V] | Mismatch | None:
    """The quantized cache that `operand` is the dequantized copy of; None when it is not a dequantized value.

    core: the name of the attention, for the refusal.
    """
    operand = peel(graph, operand)
    found = dequantize(graph, operand.value)
    if found is None:
        return None
    where = (core, graph.name(operand.value))
    if found.wraps:
        return Mismatch(
            "zero-point-wraps",
            "the zero points are subtracted in int8, where 127 - (-128) is -1; the fused operator does not wrap",
            where,
            remedy="cast codes and zero points to a wider type before subtracting",
        )
    if found.dtype != "float32":
        return Mismatch(
            "dequantized-dtype", f"the cache is dequantized to {found.dtype}; the kernel reads float32", where
        )
    codes = peel(graph, Operand(found.codes, operand.layout), casts=True)
    refusal = _check_granularity(graph, found, codes, where)
    if refusal is not None:
        return refusal
    scales = peel(graph, Operand(found.scales, operand.layout), casts=True)
    if scales.layout is not codes.layout:
        return Mismatch("scale-layout", "codes and scales are transposed differently", where)
    if graph.dtype(scales.value) != "float32":
        return Mismatch("scale-dtype", f"scales are {graph.dtype(scales.value)}; the kernel reads float32", where)
    zero_points = None
    if found.zero_points is not None:
        zeros = peel(graph, Operand(found.zero_points, operand.layout), casts=True)
        if zeros.layout is not codes.layout:
            return Mismatch("scale-layout", "codes and zero points are transposed differently", where)
        if graph.dtype(zeros.value) != "int8":
            dtype = graph.dtype(zeros.value)
            return Mismatch("zero-point-dtype", f"zero points are {dtype}; the kernel reads int8", where)
        zero_points = zeros.value
    return CacheRead(QuantizedCache(codes.value, scales.value, zero_points), codes.layout)


def read_caches(
    graph: Graph[V], key: Operand[V], value: Operand[V], core: str
) -> tuple[CacheRead[V], CacheRead[V]] | Mismatch | None:
    """Both caches; None when neither is a dequantized copy, a refusal when only one is, or one cannot be fused."""
    reads = (read_cache(graph, key, core), read_cache(graph, value, core))
    for read, other, operand in ((reads[0], reads[1], key), (reads[1], reads[0], value)):
        if isinstance(read, Mismatch):
            return read
        if read is None and other is not None:
            floating = graph.name(operand.value)
            return Mismatch(
                "half-quantized", f"one cache is dequantized and the other, {floating}, is not", (core, floating)
            )
    read_key, read_value = reads
    if isinstance(read_key, CacheRead) and isinstance(read_value, CacheRead):
        return read_key, read_value
    return None


# Element types that hold every scale (a float32 value, whatever its type) and every zero point (-128 to 127).
_HOLD_SCALES = ("float32", "float64")
_HOLD_ZERO_POINTS = ("int8", "int16", "int32", "int64", "float32", "float64")


def _check_granularity(
    graph: Graph[V], found: Dequantize[V], codes: Operand[V], where: tuple[str, ...]
) -> Mismatch | None:
    """int8 codes [B,C,Hkv,D] with one scale (and zero point) per token and head: [B,C,Hkv,1]."""
    if graph.dtype(codes.value) != "int8":
        return Mismatch("codes-dtype", f"the codes are {graph.dtype(codes.value)}; the kernel reads int8", where)
    shape, scales = graph.shape(found.codes), graph.shape(found.scales)
    blocks = found.block is None or (shape is not None and found.block == shape[-1])
    if shape is None or scales is None or scales != (*shape[:3], 1) or not blocks:
        return Mismatch(
            "scale-granularity",
            f"scales of shape {scales} for a cache of shape {shape}; one scale per token and head is fused",
            where,
        )
    if found.zero_points is not None and graph.shape(found.zero_points) != scales:
        shapes = f"{graph.shape(found.zero_points)} beside scales {scales}"
        return Mismatch("scale-granularity", f"zero points of shape {shapes}", where)
    return None


def find_update(graph: Graph[V], read: CacheRead[V]) -> CacheUpdate[V] | None:
    """The quantize-and-write that produced the cache, when it is exactly what UpdateQuantizedCache does."""
    cache, layout = read.cache, read.layout
    found = [write for part in cache.parts if (write := _written(graph, part, layout)) is not None]
    if len(found) < len(cache.parts) or not all(same_position(graph, write.start, found[0].start) for write in found):
        return None
    if len({graph.scope(part) for part in cache.parts}) > 1:
        return None  # written in different branches
    codes = peel(graph, Operand(found[0].value, layout))
    quantize = graph.concept(codes.value)
    if not isinstance(quantize, Quantize) or graph.dtype(quantize.input) != "float32":
        return None
    rows = Operand(quantize.input, codes.layout)
    # The scales and zero points quantized with, and those written, each chosen from the rows themselves.
    choices = [
        _chosen(graph, Operand(quantize.scales, codes.layout), rows, 0),
        _chosen(graph, Operand(quantize.zero_points, codes.layout), rows, 1),
    ]
    for output, write in enumerate(found[1:]):
        written = peel(graph, Operand(write.value, layout))
        value = uncast(graph, written.value, _HOLD_SCALES if output == 0 else _HOLD_ZERO_POINTS)
        choices.append(_chosen(graph, Operand(value, written.layout), rows, output))
    schemes = {None if choice is None else choice.scheme for choice in choices}
    scheme = schemes.pop()
    if scheme is None or schemes or (scheme is Scheme.ASYMMETRIC and cache.zero_points is None):
        return None
    before = QuantizedCache(found[0].cache, found[1].cache, found[2].cache if len(found) > 2 else None)
    return CacheUpdate(rows, before, cache, found[0].start, scheme)


def _written(graph: Graph[V], value: V, layout: Layout) -> CacheWrite[V] | None:
    concept = graph.concept(skip(graph, value))
    return concept if isinstance(concept, CacheWrite) and concept.axis == layout.sequence_axis else None


def _chosen(graph: Graph[V], parameters: Operand[V], rows: Operand[V], output: int) -> ChooseQParams[V] | None:
    """How `parameters` were chosen, when they are that output of choosing them for `rows`."""
    parameters = peel(graph, parameters)
    concept = graph.concept(parameters.value)
    if not isinstance(concept, ChooseQParams) or concept.output != output or parameters.layout is not rows.layout:
        return None
    return concept if graph.same(skip(graph, concept.input), skip(graph, rows.value)) else None


def build_site(
    graph: Graph[V],
    attention: Attention[V],
    pattern: str,
    key: CacheRead[V],
    value: CacheRead[V],
    start: Position[V],
    recent: tuple[Operand[V], Operand[V]] | None = None,
) -> SdpaSite[V] | Mismatch:
    """The site of an attention whose two quantized caches have been read."""
    core = graph.name(attention.output)
    refusal = _check_operands(graph, attention, key, value, recent, core)
    if refusal is not None:
        return refusal
    notes = []
    if attention.mask is not None:
        notes.append("a row whose mask hides every key yields zeros")
    if start.minus_new and start.value is not None:
        notes.append("a valid length of less than the number of new tokens is an error")
    return SdpaSite(
        pattern=pattern,
        name=core,
        layout=key.layout,
        query=peel(graph, attention.query),
        key=key.cache,
        value=value.cache,
        start=start,
        is_causal=attention.is_causal,
        mask=attention.mask,
        scale=attention.scale,
        output=Operand(attention.output, attention.query.layout),
        recent_key=None if recent is None else peel(graph, recent[0]),
        recent_value=None if recent is None else peel(graph, recent[1]),
        key_update=find_update(graph, key),
        value_update=find_update(graph, value),
        notes=tuple(notes),
    )


def _check_operands(
    graph: Graph[V],
    attention: Attention[V],
    key: CacheRead[V],
    value: CacheRead[V],
    recent: tuple[Operand[V], Operand[V]] | None,
    core: str,
) -> Mismatch | None:
    """What CustomSdpa asks of its operands, as far as the graph says it."""
    if key.layout is not value.layout:
        return Mismatch("cache-layout", f"keys lie in {key.layout.value}, values in {value.layout.value}", (core,))
    shapes = graph.shape(key.cache.codes), graph.shape(value.cache.codes)
    if shapes[0] != shapes[1]:
        return Mismatch("cache-shapes", f"the caches of keys {shapes[0]} and values {shapes[1]} differ", (core,))
    dtype = graph.dtype(attention.query.value)
    if dtype != "float32":
        return Mismatch("query-dtype", f"the query is {dtype}; the kernel takes float32", (core,))
    if attention.mask is not None:
        dtype, shape = graph.dtype(attention.mask), graph.shape(attention.mask)
        if dtype not in ("bool", "float32") or shape is None or not 2 <= len(shape) <= 4:
            message = f"the mask is {dtype} of shape {shape}; the kernel takes bool or float32 of 2 to 4 dimensions"
            return Mismatch("mask-type", message, (core, graph.name(attention.mask)))
    for rows in recent or ():
        if not _may_be_recent(graph, rows, attention.query):
            message = f"{graph.name(rows.value)} does not have one float32 row for each row of the query"
            return Mismatch("recent-rows", message, (core, graph.name(rows.value)))
    return None


def _may_be_recent(graph: Graph[V], rows: Operand[V], query: Operand[V]) -> bool:
    """Whether `rows` has as many rows as the query; two symbolic sizes may be equal under different names."""
    shapes = graph.shape(rows.value), graph.shape(query.value)
    if graph.dtype(rows.value) != "float32" or shapes[0] is None or shapes[1] is None:
        return False
    sizes = shapes[0][rows.layout.sequence_axis], shapes[1][query.layout.sequence_axis]
    return sizes[0] == sizes[1] or (isinstance(sizes[0], str) and isinstance(sizes[1], str))


def quantized_current_tokens(graph: Graph[V], site: SdpaSite[V]) -> SdpaSite[V] | Mismatch:
    """The site with the current tokens read back from the cache, provided the cache holds just those tokens by then."""
    if site.recent_key is None or site.recent_value is None:
        return site
    for update, recent in ((site.key_update, site.recent_key), (site.value_update, site.recent_value)):
        held = (
            update is not None
            and same_position(graph, update.start, site.start)
            and update.value.layout is recent.layout
            and graph.same(narrow(graph, update.value.value), narrow(graph, recent.value))
        )
        if not held:
            return Mismatch(
                "current-tokens-not-cached",
                "the cache that is read does not hold the quantized current tokens at start_pos",
                (site.name,),
                site.pattern,
                'rewrite with current_tokens="exact"',
            )
    return replace(site, recent_key=None, recent_value=None)
