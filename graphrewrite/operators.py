"""The calls of the fused operators that stand for a site: operands in schema order, and attributes.

Every emitter writes the same calls; how a value, a transpose or a position is written is its own affair.
"""

from __future__ import annotations

from typing import Any, Protocol

from graphrewrite.site import CacheUpdate, SdpaSite
from graphrewrite.vocabulary import Layout, Operand, Position, V


class Writer(Protocol[V]):
    """What a call needs of an emitter. Values are those of the graph as it is after the replacements so far."""

    def now(self, value: V) -> V:
        """What stands for a value that the site names."""

    def in_layout(self, operand: Operand[V], layout: Layout) -> V:
        """The operand, transposed where it lies in another layout."""

    def start_pos(self, position: Position[V], query: Operand[V]) -> Any:
        """The position as the operators take it; `query` has the S new tokens."""


def custom_sdpa(site: SdpaSite[V], writer: Writer[V]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """CustomSdpa's operands and attributes; a scale of None is the default."""

    def now(value: V | None) -> V | None:
        return None if value is None else writer.now(value)

    def rows(operand: Operand[V] | None) -> V | None:
        return None if operand is None else writer.in_layout(operand, site.layout)

    operands = (
        rows(site.query),
        now(site.key.codes),
        now(site.value.codes),
        writer.start_pos(site.start, site.query),
        now(site.key.scales),
        now(site.key.zero_points),
        now(site.value.scales),
        now(site.value.zero_points),
        rows(site.recent_key),
        rows(site.recent_value),
        now(site.mask),
    )
    return operands, {"is_causal": site.is_causal, "scale": site.scale, "layout": site.layout.value}


def update_quantized_cache(
    update: CacheUpdate[V], layout: Layout, writer: Writer[V]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """UpdateQuantizedCache's operands and attributes. Its results are codes, scales and, where there are any, zero
    points."""
    before = update.before
    operands = (
        writer.in_layout(update.value, layout),
        writer.now(before.codes),
        writer.now(before.scales),
        writer.start_pos(update.start, update.value),
        None if before.zero_points is None else writer.now(before.zero_points),
    )
    return operands, {"scheme": update.scheme.value, "layout": layout.value}
