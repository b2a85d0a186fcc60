"""What of a call changes the structure of a function body.

An ONNX function body is fixed text: it can refer to the caller's attribute values but cannot branch on which optional
inputs are there, on their element types or on a string attribute. So a body is specialised to a `Signature`, the facts
of a node that decide its structure. All else (extents, numbers of groups, `scale`, `window`, ranks of masks and
positions) is left to run time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir

from graphrewrite.custom_ops.functions.element_types import element_type, label, rank, type_before_widening
from graphrewrite.errors import InputError

__all__ = ["DOMAIN", "SOURCE_DOMAINS", "Signature", "signature_of"]

DOMAIN = "graphrewrite"
SOURCE_DOMAINS = ("llama", "quantized_decomposed")

DataType = ir.DataType

_FLOATS = (DataType.FLOAT, DataType.FLOAT16, DataType.BFLOAT16)
_CODES = (DataType.INT8, DataType.UINT8)
_CACHES = (*_FLOATS, *_CODES)
_SCALES = (DataType.FLOAT, DataType.DOUBLE)
_ZERO_POINTS = (DataType.INT8, DataType.INT32, DataType.INT64)
_MASKS = (DataType.BOOL, *_FLOATS)
_SOURCE_MASKS = (DataType.BOOL, DataType.FLOAT)

# The element types each input may have; None where the body is the same for all.
_OF_CACHES = (_CACHES, _CACHES, None)
_OF_QUANTIZED_CACHES = (_SCALES, _CODES, _SCALES, _CODES, _FLOATS, _FLOATS, _MASKS, _FLOATS)
_ELEMENT_TYPES: dict[tuple[str, str], tuple[tuple[DataType, ...] | None, ...]] = {
    (DOMAIN, "UpdateQuantizedCache"): (_FLOATS, _CODES, _SCALES, None, _CODES),
    (DOMAIN, "CustomSdpa"): (_FLOATS, *_OF_CACHES, *_OF_QUANTIZED_CACHES),
    (DOMAIN, "CustomQuantizedSdpa"): (None, *_OF_CACHES, None, None, *_OF_QUANTIZED_CACHES),
    (DOMAIN, "SdpaWithKvCache"): (_FLOATS, _FLOATS, _FLOATS, _FLOATS, _FLOATS, None, _MASKS, _FLOATS),
    (DOMAIN, "ChooseQParamsPerToken"): (_FLOATS,),
    (DOMAIN, "QuantizePerToken"): (_FLOATS, _SCALES, _ZERO_POINTS),
    (DOMAIN, "QuantizePerChannel"): (_FLOATS, _SCALES, _ZERO_POINTS),
    (DOMAIN, "DequantizePerToken"): (_CODES, _SCALES, _ZERO_POINTS),
    (DOMAIN, "DequantizePerChannel"): (_CODES, _SCALES, _ZERO_POINTS),
    ("llama", "custom_sdpa"): (None, None, None, None, _SOURCE_MASKS),
    ("llama", "custom_quantized_sdpa"): (None, None, None, None, _SOURCE_MASKS),
    ("llama", "sdpa_with_kv_cache"): (None, None, None, None, None, None, None, _SOURCE_MASKS),
    ("quantized_decomposed", "quantize_per_token"): (None, _SCALES),
    ("quantized_decomposed", "quantize_per_channel"): (None, _SCALES),
    ("quantized_decomposed", "dequantize_per_channel"): (None, _SCALES, _ZERO_POINTS),
}

# Where the scales and zero points of the two caches are, of which each may be static.
_CACHE_PARAMETERS = {(DOMAIN, "CustomSdpa"): range(4, 8), (DOMAIN, "CustomQuantizedSdpa"): range(6, 10)}
_RANK_OF_ROWS = 4

# The attribute that says what a source operator returns, and the type without it.
_RESULT_ATTRIBUTE = {
    "quantize_per_token": ("dtype", DataType.INT8),
    "quantize_per_channel": ("dtype", DataType.INT8),
    "dequantize_per_token": ("output_dtype", DataType.FLOAT),
    "dequantize_per_channel": ("out_dtype", DataType.FLOAT),
}

# The values of string attributes, the default first, and of the operators for which they are others.
_CHOICES = {
    "layout": ("BSNH", "BNSH"),
    "write_mode": ("linear", "circular"),
    "scheme": ("asymmetric", "symmetric", "static"),
    "rounding": ("after_zero_point", "before_zero_point"),
}
_CHOICES_OF_ONE = {
    ("QuantizePerChannel", "rounding"): ("before_zero_point", "after_zero_point"),
    ("ChooseQParamsPerToken", "scheme"): ("asymmetric", "symmetric"),
}


@dataclass(frozen=True)
class Signature:
    """The structural facts of one call.

    Attributes:
        domain: operator domain: `graphrewrite`, or the torch namespace of a source operator.
        op_type: operator name.
        inputs: for each input whether it is present; absent trailing inputs are left out.
        types: for each input its element type, None where it is absent or the body is the same for all; trailing Nones
            are left out. Of a source operator the type before a cast that widened it.
        static: positions of the scales and zero points of caches that belong to channels, not to rows.
        layout: "BSNH" or "BNSH".
        write_mode: "linear" or "circular".
        scheme: "asymmetric", "symmetric" or "static".
        rounding: "after_zero_point" (is added) or "before_zero_point".
        is_causal: whether row i is limited to keys at or before start_pos + i.
        has_scale: whether the node gives the attribute `scale`.
        has_softcap, has_window, has_sink_tokens: whether the attribute is not zero.
        outputs: how many outputs are used, trailing unused ones left out; None: all. Read from a node of
            `sdpa_with_kv_cache` only, whose caches cost much and are mostly unused.
        result: element type a source operator returns, by its attribute.
    """

    op_type: str
    inputs: tuple[bool, ...]
    domain: str = DOMAIN
    types: tuple[DataType | None, ...] = ()
    static: tuple[int, ...] = ()
    layout: str = "BSNH"
    write_mode: str = "linear"
    scheme: str = "asymmetric"
    rounding: str = "after_zero_point"
    is_causal: bool = False
    has_scale: bool = False
    has_softcap: bool = False
    has_window: bool = False
    has_sink_tokens: bool = False
    outputs: int | None = None
    result: DataType | None = None

    def has(self, position: int) -> bool:
        """Whether the input at `position` is present."""
        return position < len(self.inputs) and self.inputs[position]

    def type(self, position: int) -> DataType:
        """The element type of a present input; float32 where it is not among the facts."""
        dtype = self.types[position] if position < len(self.types) else None
        return DataType.FLOAT if dtype is None else dtype


def signature_of(node: ir.Node) -> Signature:
    """Reads the signature of a node of the domain `graphrewrite` or of a source operator.

    Raises:
        InputError: an attribute has a value that it cannot have, or the element type or rank of an input that the body
            depends on is wrong or not known (run shape inference first).
    """
    present = [value is not None for value in node.inputs]
    while present and not present[-1]:
        present.pop()
    operator = (node.domain, node.op_type)
    _check_range(node)
    parameters = _CACHE_PARAMETERS.get(operator, range(0))
    return Signature(
        op_type=node.op_type,
        inputs=tuple(present),
        domain=node.domain,
        types=_types(node, len(present)),
        static=tuple(at for at in parameters if at < len(present) and present[at] and rank(node, at) != _RANK_OF_ROWS),
        is_causal=_is_causal(node),
        has_scale=_has_scale(node),
        has_softcap=_is_positive(node, "softcap", node.attributes.get_float("softcap", 0.0)),
        has_window=_is_positive(node, "window", node.attributes.get_int("window", 0)),
        has_sink_tokens=_is_positive(node, "sink_tokens", node.attributes.get_int("sink_tokens", 0)),
        outputs=_used_outputs(node) if operator == ("llama", "sdpa_with_kv_cache") else None,
        result=_result(node),
        **_choices(node),
    )


def _types(node: ir.Node, count: int) -> tuple[DataType | None, ...]:
    types: list[DataType | None] = []
    for position, allowed in enumerate(_ELEMENT_TYPES.get((node.domain, node.op_type), ())[:count]):
        is_fact = allowed is not None and node.inputs[position] is not None
        types.append(element_type(node, position, allowed) if is_fact else None)
    if (node.domain, node.op_type) == ("quantized_decomposed", "dequantize_per_token"):
        scales = element_type(node, 1, _SCALES)
        if _result(node) == DataType.FLOAT:
            # The product of a code, 9 bits with its zero point, and a float32 is exact in float64; it is rounded once
            # in either type.
            scales = type_before_widening(node, 1)
        types = [None, scales, type_before_widening(node, 2)]
    while types and types[-1] is None:
        types.pop()
    return tuple(types)


def _result(node: ir.Node) -> DataType | None:
    if node.domain != "quantized_decomposed" or node.op_type not in _RESULT_ATTRIBUTE:
        return None
    attribute, default = _RESULT_ATTRIBUTE[node.op_type]
    return DataType(node.attributes.get_int(attribute, default.value))


def _used_outputs(node: ir.Node) -> int:
    used = [count for count, value in enumerate(node.outputs, start=1) if value.uses() or value.is_graph_output()]
    return used[-1] if used else 1


def _choices(node: ir.Node) -> dict[str, Any]:
    chosen = {}
    for attribute, common in _CHOICES.items():
        known = _CHOICES_OF_ONE.get((node.op_type, attribute), common)
        value = node.attributes.get_string(attribute, known[0])
        if value not in known:
            expected = ", ".join(known)
            raise InputError(f"{label(node)}: attribute {attribute} is {value!r}; expected one of {expected}")
        chosen[attribute] = value
    if node.attributes.get_int("is_seq_at_dim_2", 0):  # what llama::custom_quantized_sdpa calls it
        chosen["layout"] = "BNSH"
    return chosen


def _is_causal(node: ir.Node) -> bool:
    value = node.attributes.get_int("is_causal", 0)
    if value not in (0, 1):
        raise InputError(f"{label(node)}: attribute is_causal is {value}; expected 0 or 1")
    return bool(value)


def _has_scale(node: ir.Node) -> bool:
    if "scale" not in node.attributes:
        return False
    value = node.attributes.get_float("scale", 0.0)
    if not math.isfinite(value):
        raise InputError(f"{label(node)}: attribute scale is {value}; expected a finite number")
    return True


def _check_range(node: ir.Node) -> None:
    lowest, highest = node.attributes.get_int("quant_min", -128), node.attributes.get_int("quant_max", 127)
    if node.domain == DOMAIN and not -128 <= lowest <= highest <= 127:
        raise InputError(f"{label(node)}: quant_min is {lowest} and quant_max {highest}; expected a range of int8")


def _is_positive(node: ir.Node, attribute: str, value: float) -> bool:
    if not 0 <= value < math.inf:
        raise InputError(f"{label(node)}: attribute {attribute} is {value}; expected 0 or more")
    return value > 0
