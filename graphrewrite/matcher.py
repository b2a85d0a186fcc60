"""Finding sites: every attention core of a graph against every pattern, before anything is touched."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Generic

from graphrewrite.patterns import Pattern, load_patterns
from graphrewrite.patterns._quantized_cache import quantized_current_tokens
from graphrewrite.report import Mismatch, Report, SiteSummary
from graphrewrite.site import SdpaSite
from graphrewrite.vocabulary import Attention, Dim, Graph, V


@dataclass(frozen=True)
class Findings(Generic[V]):
    """sites: what to rewrite. report: the same for people, with a refusal for every core left alone."""

    sites: tuple[SdpaSite[V], ...]
    report: Report


def find_sites(
    graph: Graph[V], *, current_tokens: str = "exact", patterns: Sequence[Pattern] | None = None
) -> Findings[V]:
    """Match every attention core of `graph`. current_tokens: "exact" or "quantized", see `graphrewrite.rewrite`."""
    chosen = load_patterns() if patterns is None else tuple(patterns)
    sites: list[SdpaSite[V]] = []
    summaries: list[SiteSummary] = []
    refusals: list[Mismatch] = []
    for core in graph.attentions():
        found = core if isinstance(core, Mismatch) else _match(core, graph, chosen)
        if isinstance(found, SdpaSite) and current_tokens == "quantized":
            found = quantized_current_tokens(graph, found)
        if isinstance(found, Mismatch):
            refusals.append(found)
        else:
            sites.append(found)
            summaries.append(_summary(graph, found))
    return Findings(tuple(sites), Report(tuple(summaries), tuple(refusals), graph.already_fused()))


def _match(attention: Attention[V], graph: Graph[V], patterns: Sequence[Pattern]) -> SdpaSite[V] | Mismatch:
    refusal: Mismatch | None = None
    for pattern in patterns:
        found = pattern.match(attention, graph)
        if isinstance(found, SdpaSite):
            return found
        if found is not None and refusal is None:
            refusal = replace(found, pattern=pattern.NAME)
    if refusal is not None:
        return refusal
    name, key = graph.name(attention.output), graph.name(attention.key.value)
    return Mismatch("no-pattern", f"the keys come from {key}, which no pattern reads as a quantized cache", (name, key))


def _summary(graph: Graph[V], site: SdpaSite[V]) -> SiteSummary:
    codes = _dims(graph, site.key.codes)
    updates = [name for name, update in (("key", site.key_update), ("value", site.value_update)) if update is not None]
    return SiteSummary(
        name=site.name,
        pattern=site.pattern,
        layout=site.layout.value,
        query_heads=_dims(graph, site.query.value)[site.query.layout.heads_axis],
        kv_heads=codes[site.layout.heads_axis],
        head_size=codes[3],
        capacity=codes[site.layout.sequence_axis],
        current_tokens="quantized" if site.recent_key is None else "exact",
        updates="+".join(updates) or "none",
        notes=site.notes,
    )


def _dims(graph: Graph[V], value: V) -> tuple[Dim, ...]:
    return graph.shape(value) or ("?", "?", "?", "?")
