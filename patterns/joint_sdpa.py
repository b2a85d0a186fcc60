"""Dequantize both caches, then the joint operator that writes the new rows into the copies and attends.

    sdpa_with_kv_cache(q, k, v, dequantize(key cache), dequantize(value cache), start, ...)

The copies hold the exact k and v at [start, start+S), so the fused operator takes k and v as its recent rows.
"""

from __future__ import annotations

from graphrewrite.patterns._quantized_cache import build_site, read_caches
from graphrewrite.report import Mismatch
from graphrewrite.site import SdpaSite
from graphrewrite.vocabulary import Attention, Graph, V

NAME = "joint-sdpa"


def match(attention: Attention[V], graph: Graph[V]) -> SdpaSite[V] | Mismatch | None:
    if attention.new_key is None or attention.new_value is None or attention.start is None:
        return None
    core = graph.name(attention.output)
    reads = read_caches(graph, attention.key, attention.value, core)
    if reads is None:
        return Mismatch(
            "cache-not-quantized",
            "the caches hold floats, so there is no dequantization to remove",
            (core, graph.name(attention.key.value), graph.name(attention.value.value)),
        )
    if isinstance(reads, Mismatch):
        return reads
    return build_site(graph, attention, NAME, *reads, attention.start, (attention.new_key, attention.new_value))
