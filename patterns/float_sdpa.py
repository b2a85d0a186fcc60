"""Attention over float caches whose writes become operators of their own.

    sdpa_with_kv_cache(q, k, v, key cache, value cache, start, ...)
    attention(q, write(key cache, k, start), write(value cache, v, start), ...)

Both become UpdateCache for each cache, in place, and CustomSdpa over what is written.
"""

from __future__ import annotations

from graphrewrite.graph import Graph
from graphrewrite.patterns._caches import CacheRead, unsliced
from graphrewrite.patterns._sites import FLOATS, build_site
from graphrewrite.report import Mismatch
from graphrewrite.site import Cache, SdpaSite
from graphrewrite.vocabulary import Attention, Operand, V
from graphrewrite.walk import written

NAME = "float-sdpa"
PASS = "separate_cache_update"


def match(attention: Attention[V], graph: Graph[V]) -> SdpaSite[V] | Mismatch | None:
    if attention.codes is not None:
        return None
    if attention.new_key is None:
        reads = [_read(graph, attention, operand) for operand in (attention.key, attention.value)]
    else:
        caches = (attention.new_key_cache, attention.new_value_cache)
        reads = [None if cache is None else CacheRead(Cache(cache), attention.key.layout) for cache in caches]
    key, value = reads
    if key is None or value is None:
        return None
    for read in (key, value):
        dtype = graph.dtype(read.cache.data)
        if dtype not in FLOATS:
            core = graph.name(attention.output.value)
            message = f"the cache holds {dtype}; the kernel reads {', '.join(FLOATS)}"
            return Mismatch("cache-dtype", message, (core, graph.name(read.cache.data)))
    return build_site(graph, attention, NAME, key, value, attention.start)


def _read(graph: Graph[V], attention: Attention[V], operand: Operand[V]) -> CacheRead[V] | None:
    """The cache, when rows are written into it."""
    found, end = unsliced(graph, operand, graph.dtype(attention.query.value) or "")
    return None if written(graph, found) is None else CacheRead(Cache(found.value), found.layout, end)
