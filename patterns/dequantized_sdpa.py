"""Dequantize both caches, then attend: the current tokens are read back from the codes like all others.

    attention(q, dequantize(key cache), dequantize(value cache), ...)

This is custom_sdpa without an overwrite, torch's scaled_dot_product_attention or ONNX Attention over a dequantized
cache, and attention written out over one.
"""

from __future__ import annotations

from graphrewrite.graph import Graph
from graphrewrite.patterns._caches import read_caches
from graphrewrite.patterns._sites import build_site
from graphrewrite.report import Mismatch
from graphrewrite.site import SdpaSite
from graphrewrite.vocabulary import Attention, V

NAME = "dequantized-sdpa"


def match(attention: Attention[V], graph: Graph[V]) -> SdpaSite[V] | Mismatch | None:
    if attention.new_key is not None or attention.codes is not None:
        return None
    reads = read_caches(graph, attention, attention.key, attention.value)
    if reads is None or isinstance(reads, Mismatch):
        return reads
    return build_site(graph, attention, NAME, *reads, attention.start)
