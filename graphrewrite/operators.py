"""The calls of our operators that stand for a site: name, operands in schema order, and attributes.

Every emitter writes the same calls; how a value, a transpose or a position is written is its own affair.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Protocol

from graphrewrite.site import CacheUpdate, SdpaSite, Shaped
from graphrewrite.vocabulary import Layout, Mask, Operand, Position, V


class Writer(Protocol[V]):
    """What a call needs of an emitter. Values are those of the graph as it is after the replacements so far."""

    def now(self, value: V) -> V:
        """What stands for a value that the site names."""

    def in_layout(self, operand: Operand[V], layout: Layout) -> V:
        """The operand 4-D, transposed where it lies in another layout."""

    def start_pos(self, position: Position[V], query: Operand[V]) -> Any:
        """The position as the operators take it; `query` has the S new tokens."""

    def reshaped(self, value: V, shape: tuple[int, ...]) -> V:
        """The value in another shape."""

    def visible(self, mask: Mask[V]) -> V:
        """The mask as the operators take it, where true marks a visible key."""


@dataclass(frozen=True)
class OperatorCall:
    """An operator of the domain `graphrewrite`. An operand of None is absent; an attribute of None has its default."""

    name: str
    operands: tuple[Any, ...]
    attributes: dict[str, Any]

    @property
    def start_pos(self) -> Any:
        return self.operands[2 if self.name == "UpdateCache" else 3]


def torch_name(name: str) -> str:
    """The name of an operator in torch, `update_cache` for `UpdateCache`."""
    return re.sub("(?<=[a-z])(?=[A-Z])", "_", name).lower()


def attention(site: SdpaSite[V], writer: Writer[V]) -> OperatorCall:
    """CustomSdpa, or CustomQuantizedSdpa for an int8 query."""

    def now(value: V | None) -> V | None:
        return None if value is None else writer.now(value)

    def rows(operand: Operand[V] | None) -> V | None:
        return None if operand is None else writer.in_layout(operand, site.layout)

    codes = site.query_codes
    operands = (
        rows(site.query),
        now(site.key.data),
        now(site.value.data),
        writer.start_pos(site.start, site.query),
        *(() if codes is None else (rows(codes[0]), rows(codes[1]))),
        *(_parameter(p, writer) for cache in (site.key, site.value) for p in (cache.scales, cache.zero_points)),
        rows(site.recent_key),
        rows(site.recent_value),
        None if site.mask is None else writer.visible(site.mask),
        now(site.sinks),
    )
    attributes = {"is_causal": site.is_causal, "scale": site.scale, "layout": site.layout.value}
    attributes |= {name: value for name, value in (("softcap", site.softcap), ("window", site.window)) if value}
    return OperatorCall("CustomSdpa" if codes is None else "CustomQuantizedSdpa", operands, attributes)


def update(update: CacheUpdate[V], layout: Layout, writer: Writer[V]) -> OperatorCall:
    """UpdateQuantizedCache, or UpdateCache for rows stored as they are. Its results are `update.written`."""
    assert update.slots.start is not None
    rows = writer.in_layout(update.value, layout)
    data, start = writer.now(update.before.data), writer.start_pos(update.slots.start, update.value)
    attributes = {"layout": layout.value, **({"write_mode": "circular"} if update.slots.ring else {})}
    if update.scheme is None:
        return OperatorCall("UpdateCache", (rows, data, start), attributes)
    scales, zero_points = (_parameter(p, writer) for p in (update.before.scales, update.before.zero_points))
    attributes["scheme"] = update.scheme.value
    if update.rounding.value != "after_zero_point":
        attributes["rounding"] = update.rounding.value
    return OperatorCall("UpdateQuantizedCache", (rows, data, scales, start, zero_points), attributes)


def _parameter(parameter: Shaped[V] | None, writer: Writer[V]) -> V | None:
    if parameter is None:
        return None
    value = writer.now(parameter.value)
    return value if parameter.shape is None else writer.reshaped(value, parameter.shape)
