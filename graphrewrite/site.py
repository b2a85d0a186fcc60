"""What a pattern found: one attention over KV caches, in no graph format's terms.

Patterns build sites, emitters turn them into nodes, and neither knows the other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic

from graphrewrite.vocabulary import Layout, Mask, Operand, Position, Rounding, Scheme, Slots, V


@dataclass(frozen=True)
class Shaped(Generic[V]):
    """A value and the shape in which an operator wants its elements; None: the shape it has."""

    value: V
    shape: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Cache(Generic[V]):
    """A cache as attention reads it.

    data: floats [B,C,Hkv,D], which have no parameters, or int8 codes.
    scales, zero_points: [B,C,Hkv,n] for n groups of D/n elements, or static: [], [D], [Hkv,1] or [Hkv,D].
    """

    data: V
    scales: Shaped[V] | None = None
    zero_points: Shaped[V] | None = None

    @property
    def parts(self) -> tuple[V, ...]:
        """Data, scales and zero points, of which there are any."""
        parameters = (self.scales, self.zero_points)
        return (self.data, *(parameter.value for parameter in parameters if parameter is not None))


@dataclass(frozen=True)
class CacheUpdate(Generic[V]):
    """The writes that made `after` out of `before`: the rows of `value`, quantized by `scheme`, stored at `slots`.

    A scheme of None: the rows are stored as they are. Of a static scheme only the data is written.
    """

    value: Operand[V]
    before: Cache[V]
    after: Cache[V]
    slots: Slots[V]
    scheme: Scheme | None
    rounding: Rounding = Rounding.AFTER_ZERO_POINT

    @property
    def written(self) -> tuple[V, ...]:
        """The values of `after` that the update makes."""
        return self.after.parts if self.scheme is not Scheme.STATIC else (self.after.data,)


@dataclass(frozen=True)
class SdpaSite(Generic[V]):
    """One attention to be fused.

    layout: of both caches, and so of the fused operator. query and output keep their own layouts; the emitter
    transposes where they differ. start: the position of the first new token. recent_key/recent_value: exact rows of the
    current tokens, None when they are read back from the cache; recent_slots: where the source puts them, when that is
    not the run of slots from `start` on. key_update/value_update: None when the writes are none that an update operator
    does; they are then left as they are. query_codes: scales and zero points of an int8 query, [B,S,Hq,1].
    """

    pattern: str
    name: str
    layout: Layout
    query: Operand[V]
    key: Cache[V]
    value: Cache[V]
    start: Position[V]
    is_causal: bool
    mask: Mask[V] | None
    scale: float | None
    output: Operand[V]
    softcap: float = 0.0
    window: int = 0
    sinks: V | None = None
    query_codes: tuple[Operand[V], Operand[V] | None] | None = None
    recent_key: Operand[V] | None = None
    recent_value: Operand[V] | None = None
    recent_slots: Slots[V] | None = None
    key_update: CacheUpdate[V] | None = None
    value_update: CacheUpdate[V] | None = None
    notes: tuple[str, ...] = ()

    @property
    def updates(self) -> tuple[CacheUpdate[V], ...]:
        """The updates that an operator does: those of a run of slots."""
        found = (self.key_update, self.value_update)
        return tuple(update for update in found if update is not None and update.slots.start is not None)
