"""What takes part in a comparison, and a step of it that is ready to run."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from graphrewrite.bench.data import Array, Data
from graphrewrite.bench.machine import last_level_cache

_MOST_BUFFERS = 256


class Unavailable(Exception):
    """A contender cannot take part: what it needs is not installed, or it does not do what the case asks for."""


@dataclass(frozen=True)
class Step:
    """A layer's step over caches that lie in several buffers.

    Attributes:
        runs: one function for each buffer; all do the same, so that the caches can be kept out of the processor's.
        output: what the last run of the first buffer computed, float32 [B,S,Hq,D].
        held: the caches of the first buffer as the attention reads them, [B,C,Hkv,D]; None when it hides them.
        bytes_read: what a step has to read of its caches.
    """

    runs: Sequence[Callable[[], object]]
    output: Callable[[], Array]
    held: Callable[[], tuple[Array, Array]] | None
    bytes_read: int


@dataclass(frozen=True)
class Contender:
    """Something that computes a case.

    Attributes:
        name: for tables.
        ours: whether it is what the peers are compared with.
        prepare: (data, threads) -> Step. Raises Unavailable.
        tolerance: the largest error to be called right, relative to the largest output. Peers that round the query or
            the weights to 8 bits err by a percent.
    """

    name: str
    ours: bool
    prepare: Callable[[Data, int], Step]
    tolerance: float = 0.05


def buffers_for(bytes_read: int) -> int:
    """How many buffers of a cache keep a step's from still being in the processor's last-level cache."""
    return min(_MOST_BUFFERS, max(1, math.ceil(2 * last_level_cache() / max(1, bytes_read))))
