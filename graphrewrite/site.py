"""What a pattern found: one attention over a quantized cache, in no graph format's terms.

Patterns build sites, emitters turn them into nodes, and neither knows the other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic

from graphrewrite.vocabulary import Layout, Operand, Position, Scheme, V


@dataclass(frozen=True)
class QuantizedCache(Generic[V]):
    """The cache as attention reads it: int8 codes [B,C,Hkv,D], float32 scales [B,C,Hkv,1], int8 zero points or None."""

    codes: V
    scales: V
    zero_points: V | None

    @property
    def parts(self) -> tuple[V, ...]:
        """Codes, scales and, where there are any, zero points."""
        return (self.codes, self.scales) if self.zero_points is None else (self.codes, self.scales, self.zero_points)


@dataclass(frozen=True)
class CacheUpdate(Generic[V]):
    """The writes that made `QuantizedCache` out of an older one: quantize `value`, store it from `start` on."""

    value: Operand[V]
    before: QuantizedCache[V]
    after: QuantizedCache[V]
    start: Position[V]
    scheme: Scheme


@dataclass(frozen=True)
class SdpaSite(Generic[V]):
    """One attention to be fused.

    layout: of both caches, and so of the fused operator. query and output keep their own layouts; the emitter
    transposes where they differ. start: the position of the first new token. recent_key/recent_value: exact rows of the
    current tokens, None when they are read back from the cache. key_update/value_update: None when the writes are not
    one quantization that UpdateQuantizedCache does; they are then left as they are.
    """

    pattern: str
    name: str
    layout: Layout
    query: Operand[V]
    key: QuantizedCache[V]
    value: QuantizedCache[V]
    start: Position[V]
    is_causal: bool
    mask: V | None
    scale: float | None
    output: Operand[V]
    recent_key: Operand[V] | None = None
    recent_value: Operand[V] | None = None
    key_update: CacheUpdate[V] | None = None
    value_update: CacheUpdate[V] | None = None
    notes: tuple[str, ...] = ()
