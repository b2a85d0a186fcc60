"""What one measurement is of: the sizes of the layer, the rows of the step, how far each sequence is filled."""

from __future__ import annotations

from dataclasses import dataclass

from graphrewrite.arguments import whole_number
from graphrewrite.errors import InputError

LAYOUTS = ("BSNH", "BNSH")


@dataclass(frozen=True)
class Layer:
    """The sizes of an attention layer, and how its caches are laid out and read.

    Attributes:
        layout: of the tensors of our own operators. A peer has the layout it is made for.
        exact: our quantized operators read the new rows as they came; otherwise as the cache holds them.
    """

    query_heads: int = 32
    kv_heads: int = 8
    head_size: int = 128
    batch: int = 1
    layout: str = "BSNH"
    exact: bool = True

    def __post_init__(self) -> None:
        for name in ("query_heads", "kv_heads", "head_size", "batch"):
            whole_number(name, getattr(self, name), 1)
        if self.query_heads % self.kv_heads:
            raise InputError(f"{self.query_heads} query heads cannot share {self.kv_heads} KV heads evenly")
        if self.layout not in LAYOUTS:
            raise InputError(f"layout is {self.layout!r}; give {' or '.join(LAYOUTS)}")

    @property
    def group(self) -> int:
        """G, the query heads that share a KV head."""
        return self.query_heads // self.kv_heads


@dataclass(frozen=True)
class Case:
    """One step of a layer: `rows` new tokens after which sequence b has `lengths[b]` positions."""

    layer: Layer
    rows: int
    lengths: tuple[int, ...]
    capacity: int

    def __post_init__(self) -> None:
        whole_number("rows", self.rows, 1)
        if len(self.lengths) != self.layer.batch:
            raise InputError(f"{len(self.lengths)} lengths for a batch of {self.layer.batch}")
        if min(self.lengths) < self.rows:
            raise InputError(f"{self.rows} rows do not fit a context of {min(self.lengths)} positions")
        if self.capacity < self.context:
            raise InputError(f"a context of {self.context} positions exceeds the cache capacity {self.capacity}")

    @property
    def context(self) -> int:
        """The positions of the longest sequence, the new rows included."""
        return max(self.lengths)

    @property
    def starts(self) -> tuple[int, ...]:
        """The position of each sequence's first new row."""
        return tuple(length - self.rows for length in self.lengths)

    @property
    def ragged(self) -> bool:
        return len(set(self.lengths)) > 1

    @property
    def is_decode(self) -> bool:
        return self.rows == 1

    @property
    def name(self) -> str:
        if self.is_decode:
            return f"decode {self.context}"
        return f"prefill {self.rows}" + ("" if self.rows == self.context else f" at {self.context}")

    @property
    def operations(self) -> int:
        """Float operations of q k^T and p v over the visible pairs of rows and positions, a multiply-add being two."""
        layer = self.layer
        pairs = sum(self.rows * start + self.rows * (self.rows + 1) // 2 for start in self.starts)
        return 4 * pairs * layer.query_heads * layer.head_size

    def bytes_of(self, row_bytes: float) -> int:
        """The bytes of keys and values at all filled positions, a row of one head having `row_bytes`."""
        return int(2 * sum(self.lengths) * self.layer.kv_heads * row_bytes)


def decode_case(layer: Layer, context: int, capacity: int | None = None, *, ragged: bool = False) -> Case:
    """One token that completes a context of `context` positions."""
    return _case(layer, 1, context, capacity, ragged)


def prefill_case(
    layer: Layer, rows: int, context: int | None = None, capacity: int | None = None, *, ragged: bool = False
) -> Case:
    """`rows` tokens of a prompt, which by default are all of it."""
    return _case(layer, rows, rows if context is None else context, capacity, ragged)


def _case(layer: Layer, rows: int, context: int, capacity: int | None, ragged: bool) -> Case:
    # Ragged sequences fill the context in equal steps: 1/B, 2/B .. 1 of it, but all of them hold the rows.
    shares = range(1, layer.batch + 1) if ragged else [layer.batch] * layer.batch
    lengths = tuple(max(min(rows, context), context * share // layer.batch) for share in shares)
    return Case(layer, rows, lengths, context if capacity is None else capacity)
