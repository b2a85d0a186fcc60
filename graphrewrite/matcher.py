"""Finding sites: every attention core of a graph against every pattern, before anything is touched."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Generic

from graphrewrite.graph import Graph
from graphrewrite.patterns import DEFAULT_PASS, Pattern, load_patterns
from graphrewrite.patterns._sites import holds_floats, with_current_tokens
from graphrewrite.report import Mismatch, Report, SiteSummary
from graphrewrite.site import SdpaSite
from graphrewrite.vocabulary import Attention, Dim, V


@dataclass(frozen=True)
class Findings(Generic[V]):
    """sites: what to rewrite. report: the same for people, with a refusal for every core left alone."""

    sites: tuple[SdpaSite[V], ...]
    report: Report


def find_sites(
    graph: Graph[V],
    *,
    current_tokens: str = "exact",
    passes: Sequence[str] = (DEFAULT_PASS,),
    patterns: Sequence[Pattern] | None = None,
) -> Findings[V]:
    """Match every attention core of `graph`.

    current_tokens: "exact" or "quantized", see `graphrewrite.rewrite`. passes: those whose patterns are tried, unless
    `patterns` are given.
    """
    chosen = load_patterns(tuple(passes)) if patterns is None else tuple(patterns)
    sites: list[SdpaSite[V]] = []
    summaries: list[SiteSummary] = []
    refusals: list[Mismatch] = []
    for core in graph.attentions():
        found = core if isinstance(core, Mismatch) else _match(core, graph, chosen)
        if isinstance(found, SdpaSite):
            found = with_current_tokens(graph, found, current_tokens)
        if isinstance(found, Mismatch):
            refusals.append(found)
        else:
            sites.append(found)
            summaries.append(_summary(graph, found))
    return Findings(tuple(sites), Report(tuple(summaries), tuple(refusals), graph.already_fused()))


def _match(attention: Attention[V], graph: Graph[V], patterns: Sequence[Pattern]) -> SdpaSite[V] | Mismatch:
    """The site of the first pattern that matches, else the refusal of the pattern that came nearest.

    A pattern that refuses has recognised its form; one that returns None has not. Of two that refuse, the one that
    names more nodes has followed the graph further back from the attention.
    """
    nearest: Mismatch | None = None
    for pattern in patterns:
        found = pattern.match(attention, graph)
        if isinstance(found, SdpaSite):
            return found
        if found is not None and (nearest is None or len(found.nodes) > len(nearest.nodes)):
            nearest = replace(found, pattern=pattern.NAME)
    return nearest or _unmatched(attention, graph)


def _unmatched(attention: Attention[V], graph: Graph[V]) -> Mismatch:
    name, key = graph.name(attention.output.value), graph.name(attention.key.value)
    if holds_floats(graph, attention):
        return Mismatch(
            "cache-not-quantized",
            "the caches hold floats, so there is no dequantization to remove",
            (name, key, graph.name(attention.value.value)),
            remedy="quantize the caches with the pass quantize_kv_cache, or keep them float and write them with "
            "operators of their own with the pass separate_cache_update",
        )
    return Mismatch("no-pattern", f"the keys come from {key}, which no pattern reads as a quantized cache", (name, key))


def _summary(graph: Graph[V], site: SdpaSite[V]) -> SiteSummary:
    codes = _dims(graph, site.key.data)
    updates = [
        name for name, update in (("key", site.key_update), ("value", site.value_update)) if update in site.updates
    ]
    return SiteSummary(
        name=site.name,
        pattern=site.pattern,
        layout=site.layout.value,
        query_heads=_dims(graph, site.query.value)[site.query.layout.heads_axis],
        kv_heads=codes[site.layout.heads_axis],
        head_size=codes[3],
        capacity=codes[site.layout.sequence_axis],
        current_tokens="exact" if site.key.scales is None or site.recent_key is not None else "quantized",
        updates="+".join(updates) or "none",
        notes=site.notes,
    )


def _dims(graph: Graph[V], value: V) -> tuple[Dim, ...]:
    return graph.shape(value) or ("?", "?", "?", "?")
