"""Dequantize both caches, overwrite the current tokens' rows with the exact ones, then attend.

    custom_sdpa(q, write(dequantize(key cache), k, start), write(dequantize(value cache), v, start), start, ...)

The overwritten rows are the recent rows of the fused operator, provided both writes and the attention agree on start.
"""

from __future__ import annotations

from graphrewrite.patterns._quantized_cache import build_site, read_caches
from graphrewrite.report import Mismatch
from graphrewrite.site import SdpaSite
from graphrewrite.vocabulary import Attention, CacheWrite, Graph, Operand, V
from graphrewrite.walk import peel, same_position

NAME = "overlaid-sdpa"


def match(attention: Attention[V], graph: Graph[V]) -> SdpaSite[V] | Mismatch | None:
    if attention.new_key is not None:
        return None
    core = graph.name(attention.output)
    key, value = peel(graph, attention.key), peel(graph, attention.value)
    key_write, value_write = graph.concept(key.value), graph.concept(value.value)
    if not (isinstance(key_write, CacheWrite) and isinstance(value_write, CacheWrite)):
        return None
    reads = read_caches(graph, Operand(key_write.cache, key.layout), Operand(value_write.cache, value.layout), core)
    if reads is None:
        return Mismatch(
            "cache-not-quantized",
            "the caches hold floats, so there is no dequantization to remove",
            (core, graph.name(key.value), graph.name(value.value)),
        )
    if isinstance(reads, Mismatch):
        return reads
    writes = (core, graph.name(key.value), graph.name(value.value))
    if key_write.axis != key.layout.sequence_axis or value_write.axis != value.layout.sequence_axis:
        return Mismatch("write-axis", "the current rows are not written along the sequence axis", writes)
    if not same_position(graph, key_write.start, value_write.start) or (
        attention.start is not None and not same_position(graph, key_write.start, attention.start)
    ):
        return Mismatch(
            "position-differs", "the rows overwritten and the positions attended to start at different values", writes
        )
    recent = (Operand(key_write.value, key.layout), Operand(value_write.value, value.layout))
    return build_site(graph, attention, NAME, *reads, key_write.start, recent)
