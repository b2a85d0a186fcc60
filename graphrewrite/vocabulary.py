"""What operations mean, in no graph format's terms.

Every graph format has a reader (`graphrewrite.graph.Graph`) that says which of these concepts produced a value.
Patterns are written over the concepts alone, so one pattern serves FX, ONNX and any format added later.

Shape letters, used throughout the project:
    B batch, S new tokens, C cache capacity, Hq query heads, Hkv key/value heads, D head size,
    kv number of key positions a mask covers.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from enum import Enum
from typing import Generic, Literal, TypeVar

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


class Scheme(Enum):
    """Where the scales and zero points of a cache come from.

    ASYMMETRIC: quantized_decomposed.choose_qparams_per_token_asymmetric, for each row of D elements.
    SYMMETRIC: quantized_decomposed.choose_qparams_per_token, scale = max(amax|x|, 1e-5) / 127, no zero point.
    STATIC: they are given, the same for every row.
    """

    ASYMMETRIC = "asymmetric"
    SYMMETRIC = "symmetric"
    STATIC = "static"


class Rounding(Enum):
    """Whether a code is round(x / scale + zero point) or round(x / scale) + zero point: ties differ."""

    AFTER_ZERO_POINT = "after_zero_point"
    BEFORE_ZERO_POINT = "before_zero_point"


@dataclass(frozen=True)
class Operand(Generic[V]):
    """A value together with the layout in which it lies: 4-D, or, where `heads` is given, packed [B,S,heads*D]."""

    value: V
    layout: Layout
    heads: int | None = None


@dataclass(frozen=True)
class Position(Generic[V]):
    """A number of cache slots, the sum of

    value: an integer scalar, [1] or [B]; None is 0
    slots_of: how many slots this cache has; None adds nothing
    offset, and, with `minus_new`, minus S.
    """

    value: V | None
    offset: int = 0
    minus_new: bool = False
    slots_of: Operand[V] | None = None


@dataclass(frozen=True)
class Slots(Generic[V]):
    """Where the S rows of a write go: to `start`, `start` + 1 ..., wrapping around at the capacity in a `ring`.

    A start of None: to the slots that the integers `indices` [S] or [B,S] name, about which nothing more is known.
    """

    start: Position[V] | None
    ring: bool = False
    indices: V | None = None


@dataclass(frozen=True)
class Mask(Generic[V]):
    """Which keys a row sees, 2-D [S,kv] to 4-D [B|1,Hq|1,S|1,kv].

    bool: true is a visible key, or, when `hides`, a hidden one. Floats are added to the scaled and capped scores.
    """

    value: V
    hides: bool = False


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
class Reshape(Generic[V]):
    """The same elements in the same order, in another shape."""

    input: V


@dataclass(frozen=True)
class Expand(Generic[V]):
    """The input repeated along axes of size 1 or new axes in front."""

    input: V


@dataclass(frozen=True)
class Repeat(Generic[V]):
    """Each slice along `axis` several times in a row."""

    input: V
    axis: int


@dataclass(frozen=True)
class Leading(Generic[V]):
    """The first `end` of the slices along `axis`."""

    input: V
    axis: int
    end: Position[V]


@dataclass(frozen=True)
class Size(Generic[V]):
    """The extent of `input` along `axis`, as an integer."""

    input: V
    axis: int


@dataclass(frozen=True)
class Range(Generic[V]):
    """The integers from `start` on, as many as the value has elements."""

    start: V | int


@dataclass(frozen=True)
class Binary(Generic[V]):
    """`left` operator `right`, element by element and broadcast, computed in `dtype`. A number is a constant."""

    operator: Literal["+", "-", "*", "/", "%"]
    left: V | float
    right: V | float
    dtype: str


@dataclass(frozen=True)
class Unary(Generic[V]):
    """A function of each element: "tanh", "not", "isnan", "round"."""

    function: str
    input: V


@dataclass(frozen=True)
class Clamp(Generic[V]):
    input: V
    low: float
    high: float


@dataclass(frozen=True)
class Select(Generic[V]):
    """`then` where `condition`, else `otherwise`."""

    condition: V
    then: V | float
    otherwise: V | float


@dataclass(frozen=True)
class AllHidden(Generic[V]):
    """Whether every score of a row of `input` is -inf, [..., 1]."""

    input: V


@dataclass(frozen=True)
class Softmax(Generic[V]):
    """Along the last axis."""

    input: V


@dataclass(frozen=True)
class MatMul(Generic[V]):
    """The product over the last axis of `left` and the last but one of `right`, the axes before them broadcast."""

    left: V
    right: V


@dataclass(frozen=True)
class Parameter(Generic[V]):
    """Scales or zero points, and the shape in which they apply to codes: of the rank of the codes, where each size is
    that of the codes, 1 (the same along this axis) or, in the last place, the number of groups of equal parameters."""

    value: V
    shape: tuple[Dim, ...]


@dataclass(frozen=True)
class Dequantize(Generic[V]):
    """(codes - zero_points) * scales, the result of type `dtype`.

    `wraps` is true when the subtraction is done in 8 bits, where 127 - (-128) is -1: such a graph does not mean what
    it says, and no fused operator computes it.
    """

    codes: V
    scales: Parameter[V]
    zero_points: Parameter[V] | None
    dtype: str
    wraps: bool = False


@dataclass(frozen=True)
class ChooseQParams(Generic[V]):
    """The scales (`output` 0) or zero points (`output` 1) chosen for `input`, one per row of its last axis."""

    input: V
    scheme: Scheme
    output: int


@dataclass(frozen=True)
class Quantize(Generic[V]):
    """int8 codes: input / scales, rounded, with zero points added before or after that, clamped to -128..127.

    divides: by true division in the type of the scales; otherwise multiplied by the reciprocal 1 / scales.
    """

    input: V
    scales: Parameter[V]
    zero_points: Parameter[V] | None
    rounding: Rounding
    divides: bool


@dataclass(frozen=True)
class CacheWrite(Generic[V]):
    """The cache with rows of its slots, along `axis`, replaced by those of `value`."""

    cache: V
    value: V
    slots: Slots[V]
    axis: int


@dataclass(frozen=True)
class Codes(Generic[V]):
    """Scales and zero points that an attention takes beside int8 operands, one per token and head: [B,S,H,1]."""

    scales: V
    zero_points: V | None


@dataclass(frozen=True)
class Attention(Generic[V]):
    """softmax(scale * query keyT, capped, masked) value.

    Row i sees key j when the mask allows it, and, if `is_causal`, j <= start + i. Without a mask and not causal it sees
    j < start + S. A `start` of None means that the operator itself ignores positions (a mask decides).

    softcap: scores become softcap * tanh(scores / softcap) before the mask; 0 leaves them.
    window: with w > 0 row i sees only keys j > start + i - w.
    sinks: [Hq], of which exp joins each denominator.
    new_key, new_value: given by the joint operator that first writes them into `key` and `value` at `start`;
        new_key_cache and new_value_cache are then its results, where the graph names them.
    codes: of an attention over int8 operands, the scales and zero points of query, key and value.
    """

    output: Operand[V]
    query: Operand[V]
    key: Operand[V]
    value: Operand[V]
    start: Position[V] | None
    is_causal: bool
    mask: Mask[V] | None
    scale: float | None
    softcap: float = 0.0
    window: int = 0
    sinks: V | None = None
    new_key: Operand[V] | None = None
    new_value: Operand[V] | None = None
    new_key_cache: V | None = None
    new_value_cache: V | None = None
    codes: tuple[Codes[V], Codes[V], Codes[V]] | None = None


Concept = (
    Forward[V]
    | Permute[V]
    | Cast[V]
    | Reshape[V]
    | Expand[V]
    | Repeat[V]
    | Leading[V]
    | Size[V]
    | Range[V]
    | Binary[V]
    | Unary[V]
    | Clamp[V]
    | Select[V]
    | AllHidden[V]
    | Softmax[V]
    | MatMul[V]
    | Dequantize[V]
    | ChooseQParams[V]
    | Quantize[V]
    | CacheWrite[V]
)
