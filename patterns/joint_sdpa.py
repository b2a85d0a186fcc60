"""Dequantize both caches, then the joint operator that writes the new rows into the copies and attends.

    sdpa_with_kv_cache(q, k, v, dequantize(key cache), dequantize(value cache), start, ...)

The copies hold the exact k and v at [start, start+S), so the fused operator takes k and v as its recent rows.
"""

from __future__ import annotations

from graphrewrite.graph import Graph
from graphrewrite.patterns._caches import read_caches
from graphrewrite.patterns._sites import build_site
from graphrewrite.report import Mismatch
from graphrewrite.site import SdpaSite
from graphrewrite.vocabulary import Attention, V

NAME = "joint-sdpa"


def match(attention: Attention[V], graph: Graph[V]) -> SdpaSite[V] | Mismatch | None:
    if attention.new_key is None or attention.new_value is None or attention.start is None:
        return None
    reads = read_caches(graph, attention, attention.key, attention.value)
    if reads is None or isinstance(reads, Mismatch):
        return reads
    return build_site(graph, attention, NAME, *reads, attention.start, (attention.new_key, attention.new_value))
