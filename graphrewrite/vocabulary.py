"""What operations mean, in no graph format's terms.

Every graph format has a reader (`Graph`) that says which of these concepts produced a value. Patterns are written over
the concepts alone, so one pattern serves FX, ONNX and any format added later.

Shape letters, used throughout the project:
    B batch, S new tokens, C cache capacity, Hq query heads, Hkv key/value heads, D head size,
    kv number of key positions a mask covers.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Generic, Protocol, TypeVar

from graphrewrite.report import Mismatch

V = TypeVar("V", bound=Hashable)  # a format's own handle for a value: torch.fx.Node, onnx_ir.Value, ...

Dim = int | str  # a known size, or the name of a symbolic one


class Layout(Enum):
    """Order of the axes of a 4-D attention tensor: batch, sequence, heads (N) and head size (H)."""

    BSNH = "BSNH"
    BNSH = "BNSH"

    @property
    def sequence_axis(self) -> int:
        return 1 if self is Layout.BSNH else 2

    @property
    def heads_axis(self) -> int:
        return 3 - self.sequence_axis

    def permuted(self, perm: Sequence[int]) -> Layout | None:
        """The layout of x where transpose(x, perm) has this layout; None when it is neither of the two."""
        if tuple(perm) == (0, 1, 2, 3):
            return self
        if tuple(perm) == (0, 2, 1, 3):
            return Layout.BNSH if self is Layout.BSNH else Layout.BSNH
        return None


class Scheme(Enum):
    """How scales and zero points are chosen for each row of D elements.

    ASYMMETRIC: quantized_decomposed.choose_qparams_per_token_asymmetric, codes rounded after the zero point is added.
    SYMMETRIC: quantized_decomposed.choose_qparams_per_token, scale = max(amax|x|, 1e-5) / 127, no zero point.
    """

    ASYMMETRIC = "asymmetric"
    SYMMETRIC = "symmetric"


@dataclass(frozen=True)
class Operand(Generic[V]):
    """A 4-D value together with the layout in which it lies."""

    value: V
    layout: Layout


@dataclass(frozen=True)
class Position(Generic[V]):
    """A number of cache slots: `value` (an int64 scalar or [B]; None is 0) + `offset` - (S if `minus_new` else 0)."""

    value: V | None
    offset: int = 0
    minus_new: bool = False


@dataclass(frozen=True)
class Forward(Generic[V]):
    """The input, unchanged: identity, contiguous, an assertion's pass-through, a view or cast that does nothing."""

    input: V


@dataclass(frozen=True)
class Permute(Generic[V]):
    input: V
    perm: tuple[int, ...]


@dataclass(frozen=True)
class Cast(Generic[V]):
    """Conversion between element types, named as numpy names them ("float32", "int8", "bfloat16", ...)."""

    input: V
    from_dtype: str
    to_dtype: str

    @property
    def widens(self) -> bool:
        """Every value of the source type is a value of the target type."""
        return self.to_dtype in _WIDER.get(self.from_dtype, ())


_FLOATS_OF_8_BITS = ("float16", "bfloat16", "float32", "float64")  # each holds every integer of 8 bits
_WIDER: dict[str, tuple[str, ...]] = {
    "int8": ("int16", "int32", "int64", *_FLOATS_OF_8_BITS),
    "uint8": ("int16", "int32", "int64", *_FLOATS_OF_8_BITS),
    "int16": ("int32", "int64", "float32", "float64"),
    "int32": ("int64", "float64"),
    "float16": ("float32", "float64"),
    "bfloat16": ("float32", "float64"),
    "float32": ("float64",),
}


@dataclass(frozen=True)
class Subtract(Generic[V]):
    left: V
    right: V
    dtype: str  # the type in which it is computed


@dataclass(frozen=True)
class Multiply(Generic[V]):
    left: V
    right: V
    dtype: str


@dataclass(frozen=True)
class Dequantize(Generic[V]):
    """(codes - zero_points) * scales. `block` is the number of elements along the last axis that share one scale.

    `wraps` is true when the subtraction is done in 8 bits, where 127 - (-128) is -1: such a graph does not mean what
    it says, and no fused operator computes it.
    """

    codes: V
    scales: V
    zero_points: V | None
    block: int | None  # None: scales follow the shape of the codes with last dimension 1
    dtype: str  # of the result
    wraps: bool = False


@dataclass(frozen=True)
class ChooseQParams(Generic[V]):
    """The scales (`output` 0) or zero points (`output` 1) chosen for `input`, one per row of its last axis."""

    input: V
    scheme: Scheme
    output: int


@dataclass(frozen=True)
class Quantize(Generic[V]):
    """clamp(round(input / scales + zero_points)), the zero point added before rounding."""

    input: V
    scales: V
    zero_points: V
    dtype: str


@dataclass(frozen=True)
class CacheWrite(Generic[V]):
    """The cache with the rows of `value` written from `start` on along `axis`."""

    cache: V
    value: V
    start: Position[V]
    axis: int


@dataclass(frozen=True)
class Attention(Generic[V]):
    """softmax(scale * query keyT, masked) value.

    Row i sees key j when the mask allows it, and, if `is_causal`, j <= start + i. Without a mask and not causal it sees
    j < start + S. `new_key`/`new_value` are given by the joint operator that first writes them into `key`/`value` at
    `start`. A `start` of None means that the operator itself ignores positions (a mask decides).
    """

    output: V
    query: Operand[V]
    key: Operand[V]
    value: Operand[V]
    start: Position[V] | None
    is_causal: bool
    mask: V | None
    scale: float | None
    new_key: Operand[V] | None = None
    new_value: Operand[V] | None = None


Concept = (
    Forward[V]
    | Permute[V]
    | Cast[V]
    | Subtract[V]
    | Multiply[V]
    | Dequantize[V]
    | ChooseQParams[V]
    | Quantize[V]
    | CacheWrite[V]
)


class Graph(Protocol[V]):
    """What a reader offers. Values are handles of the format's own; a value read twice is the same handle."""

    def attentions(self) -> Iterable[Attention[V] | Mismatch]:
        """Every attention core, in graph order; a `Mismatch` for one that the vocabulary cannot express."""

    def already_fused(self) -> int:
        """How many attentions are this project's own operator."""

    def concept(self, value: V) -> Concept[V] | None:
        """What produced `value`; None when it is an input, a constant, or an operation with no meaning here."""

    def shape(self, value: V) -> tuple[Dim, ...] | None:
        """The sizes of `value`, None when its rank is unknown."""

    def dtype(self, value: V) -> str | None:
        """The element type as numpy names it, None when unknown."""

    def scope(self, value: V) -> Hashable:
        """The graph, main or of a branch, in which `value` is made; None for an input."""

    def same(self, left: V, right: V) -> bool:
        """Whether both are the same computation of the same inputs, wherever it is written down."""

    def name(self, value: V) -> str:
        """The name by which a user finds the node that produced `value`."""
