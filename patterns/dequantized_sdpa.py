"""Dequantize both caches, then attend: the current tokens are read back from the codes like all others.

    attention(q, dequantize(key cache), dequantize(value cache), ...)

This is custom_sdpa without an overwrite, and ONNX Attention over DequantizeLinear or its Cast-Sub-Mul spelling.
"""

from __future__ import annotations

from graphrewrite.patterns._quantized_cache import build_site, read_caches
from graphrewrite.report import Mismatch
from graphrewrite.site import SdpaSite
from graphrewrite.vocabulary import Attention, Graph, Position, V

NAME = "dequantized-sdpa"


def match(attention: Attention[V], graph: Graph[V]) -> SdpaSite[V] | Mismatch | None:
    if attention.new_key is not None:
        return None
    reads = read_caches(graph, attention.key, attention.value, graph.name(attention.output))
    if reads is None or isinstance(reads, Mismatch):
        return reads
    # A start of None means that the mask alone decides; position 0 then bounds nothing.
    return build_site(graph, attention, NAME, *reads, attention.start or Position(None))
