"""Dequantize both caches, overwrite the current tokens' rows with the exact ones, then attend.

    custom_sdpa(q, write(dequantize(key cache), k, start), write(dequantize(value cache), v, start), start, ...)

The overwritten rows are the recent rows of the fused operator, provided both writes and the attention agree on start.
"""

from __future__ import annotations

from dataclasses import replace

from graphrewrite.graph import Graph
from graphrewrite.patterns._caches import CacheRead, read_caches, unsliced
from graphrewrite.patterns._sites import build_site
from graphrewrite.patterns._updates import same_slots
from graphrewrite.positions import same_position, slots_of
from graphrewrite.report import Mismatch
from graphrewrite.site import SdpaSite
from graphrewrite.vocabulary import Attention, CacheWrite, Position, V
from graphrewrite.walk import Written, written

NAME = "overlaid-sdpa"


def match(attention: Attention[V], graph: Graph[V]) -> SdpaSite[V] | Mismatch | None:
    if attention.new_key is not None or attention.codes is not None:
        return None
    dtype = graph.dtype(attention.query.value) or ""
    (key, key_end), (value, value_end) = (
        unsliced(graph, operand, dtype) for operand in (attention.key, attention.value)
    )
    where = (graph.name(attention.output.value), graph.name(key.value), graph.name(value.value))
    key_write, value_write = written(graph, key), written(graph, value)
    if key_write is None or value_write is None:
        if all(isinstance(graph.concept(operand.value), CacheWrite) for operand in (key, value)):
            return Mismatch("write-axis", "the current rows are not written along the sequence axis", where)
        return None
    reads = read_caches(graph, attention, key_write.cache, value_write.cache)
    if reads is None or isinstance(reads, Mismatch):
        return reads
    if not same_slots(graph, (key_write.slots, key_write.rows), (value_write.slots, value_write.rows)):
        return Mismatch("position-differs", "the rows of keys and values are overwritten at different slots", where)
    ends = zip(reads, (key_end, value_end), strict=True)
    key_read, value_read = (read if end is None else replace(read, end=end) for read, end in ends)
    return _site(graph, attention, (key_read, value_read), (key_write, value_write), where)


def _site(
    graph: Graph[V],
    attention: Attention[V],
    reads: tuple[CacheRead[V], CacheRead[V]],
    writes: tuple[Written[V], Written[V]],
    where: tuple[str, ...],
) -> SdpaSite[V] | Mismatch:
    slots = writes[0].slots
    is_run = slots.start is not None and not slots.ring
    start: Position[V] | None = attention.start or (slots.start if is_run else None)
    recent = (writes[0].rows, writes[1].rows)
    site = build_site(graph, attention, NAME, *reads, start, recent, None if is_run else slots)
    if isinstance(site, SdpaSite) and is_run and slots.start is not None:
        new = slots_of(graph, site.query), slots_of(graph, recent[0])
        if not same_position(graph, site.start, slots.start, new):
            message = "the rows overwritten and the positions attended to start at different values"
            return Mismatch("position-differs", message, where)
    return site
