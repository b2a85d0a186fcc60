"""An attention that takes int8 queries, keys and values with their scales and zero points.

    custom_quantized_sdpa(q, key cache, value cache, ..., scales and zero points of each)

Nothing is dequantized in the graph: the operator becomes CustomQuantizedSdpa, and the writes of the caches
UpdateQuantizedCache.
"""

from __future__ import annotations

from graphrewrite.graph import Graph
from graphrewrite.patterns._caches import CacheRead, read_codes
from graphrewrite.patterns._sites import build_site
from graphrewrite.report import Mismatch
from graphrewrite.site import SdpaSite
from graphrewrite.vocabulary import Attention, Codes, Dequantize, Operand, V
from graphrewrite.walk import broadcast

NAME = "quantized-sdpa"


def match(attention: Attention[V], graph: Graph[V]) -> SdpaSite[V] | Mismatch | None:
    if attention.codes is None:
        return None
    query, key, value = attention.codes
    core = graph.name(attention.output.value)
    shape = graph.shape(attention.query.value)
    for parameter in (query.scales, query.zero_points):
        given = None if parameter is None else graph.shape(parameter)
        if parameter is not None and (shape is None or given != (*shape[:3], 1)):
            message = f"the query has scales or zero points of shape {given}; one per token and head is fused"
            return Mismatch("scale-granularity", message, (core, graph.name(parameter)))
    reads = []
    for operand, codes in ((attention.key, key), (attention.value, value)):
        read = _read(graph, operand, codes, core)
        if isinstance(read, Mismatch):
            return read
        reads.append(read)
    return build_site(graph, attention, NAME, reads[0], reads[1], attention.start)


def _read(graph: Graph[V], operand: Operand[V], codes: Codes[V], core: str) -> CacheRead[V] | Mismatch:
    scales = broadcast(graph, codes.scales, 4)
    zero_points = None if codes.zero_points is None else broadcast(graph, codes.zero_points, 4)
    if scales is None or (codes.zero_points is not None and zero_points is None):
        return Mismatch("scale-granularity", "scales or zero points of unknown rank", (core, graph.name(operand.value)))
    found = Dequantize(operand.value, scales, zero_points, "float32")
    return read_codes(graph, found, operand, None, core, "float32")
