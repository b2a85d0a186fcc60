"""Which rows of the query see which keys.

With p = start_pos + i, row i sees key j where j < valid, and (is_causal) j <= p, and (window) j > p - window or
j < sink_tokens, and the mask is true or above minus infinity. Here valid is kv, the key positions the mask covers, or
without a mask start_pos + S.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property, reduce

import onnx_ir as ir

from graphrewrite.custom_ops.functions.expression import Body, Term
from graphrewrite.custom_ops.functions.signature import Signature

__all__ = ["Positions", "all_of"]


@dataclass(frozen=True)
class Positions:
    """The positions of the new rows: `start` is int64 [1|B, 1], `rows` is S as int64 [1]."""

    signature: Signature
    body: Body
    start: Term
    rows: Term

    @cached_property
    def first(self) -> Term:
        """start_pos as [1|B,1,1,1]."""
        return self.start.reshape([-1, 1, 1, 1])

    @cached_property
    def largest_start(self) -> Term:
        """int64 [1]; 0 for an empty batch."""
        padded = self.body.Concat(self.start.reshape([-1]), self.body.constant([0]), axis=0)
        return self.body.reduce("ReduceMax", padded).reshape([1])

    @cached_property
    def first_in_window(self) -> Term:
        """The first key that any row sees in its window, int64 [1]."""
        starts = self.body.Concat(self.start.reshape([-1]), self.largest_start, axis=0)
        smallest = self.body.reduce("ReduceMin", starts).reshape([1])
        return self.body.Max(smallest - (self._attribute("window") - 1), 0)

    @cached_property
    def sink_tokens(self) -> Term:
        """int64 [1]"""
        return self._attribute("sink_tokens").reshape([1])

    def near(self, key: Term, *, causal: bool) -> list[Term]:
        """What the positions alone say of keys at `key`: conditions that broadcast to [B,1,S,n]."""
        own = self.first + self.body.count(self.rows).reshape([-1, 1])
        conditions = []
        if causal:
            conditions.append(key <= own)
        if self.signature.has_window:
            in_window = key > own - self._attribute("window")
            conditions.append(in_window | (key < self.sink_tokens) if self.signature.has_sink_tokens else in_window)
        return conditions

    def _attribute(self, name: str) -> Term:
        return self.body.attribute(name, ir.AttributeType.INT)


def all_of(conditions: Iterable[Term]) -> Term | None:
    """Their conjunction; None where there is none, and every row sees every key."""
    terms = list(conditions)
    return reduce(lambda left, right: left & right, terms) if terms else None
