"""The function body of every operator, by domain and name."""

from __future__ import annotations

from collections.abc import Callable

import onnx_ir as ir

from graphrewrite.custom_ops.functions import cache, per_channel, per_token, quantized_cache, sdpa
from graphrewrite.custom_ops.functions.expression import VARIANT, Body
from graphrewrite.custom_ops.functions.signature import DOMAIN, Signature
from graphrewrite.errors import InputError

__all__ = ["MARK", "MINIMUM_OPSET", "attributes_of", "body", "has_body"]

MINIMUM_OPSET = 14
"""The oldest default operator set the bodies can be written in (Reshape with allowzero)."""

MARK = "graphrewrite.signature"
"""Metadata key of the functions made here."""

# Attributes a node may carry, with the default of the operator; None: the node gives it or does without.
_Attributes = dict[str, "str | int | float | None"]
_LAYOUT: _Attributes = {"layout": "BSNH"}
_WRITE: _Attributes = {**_LAYOUT, "write_mode": "linear"}
_SDPA: _Attributes = {"is_causal": 0, "scale": None}
_OUR_SDPA: _Attributes = {**_LAYOUT, **_SDPA, "softcap": 0.0, "window": 0, "sink_tokens": 0}
_SOURCE_SDPA: _Attributes = {"drpout_p": 0.0, **_SDPA}
_CHOOSE: _Attributes = {"dtype": ir.DataType.INT8.value}
_RANGE: _Attributes = {"quant_min": -128, "quant_max": 127}
_QUANTIZE: _Attributes = {**_RANGE, **_CHOOSE}
_AFTER: _Attributes = {"rounding": "after_zero_point"}
_BEFORE: _Attributes = {"rounding": "before_zero_point"}
_AXIS: _Attributes = {"axis": -1}

_Build = Callable[[Signature, Body], None]
_OURS: dict[str, tuple[_Build, _Attributes]] = {
    "UpdateCache": (cache.update_cache, _WRITE),
    "UpdateCacheWithIndices": (cache.update_cache_with_indices, _LAYOUT),
    "UpdateQuantizedCache": (
        quantized_cache.update_quantized_cache,
        {**_WRITE, **_AFTER, "scheme": "asymmetric"},
    ),
    "CustomSdpa": (sdpa.custom_sdpa, _OUR_SDPA),
    "CustomQuantizedSdpa": (sdpa.custom_quantized_sdpa, _OUR_SDPA),
    "SdpaWithKvCache": (sdpa.sdpa_with_kv_cache, _OUR_SDPA),
    "ChooseQParamsPerToken": (per_token.choose_qparams_per_token, {"scheme": "asymmetric"}),
    "QuantizePerToken": (per_token.quantize_per_token, {**_RANGE, **_AFTER}),
    "DequantizePerToken": (per_token.dequantize_per_token, {}),
    "QuantizePerChannel": (per_channel.quantize_per_channel, {**_RANGE, **_BEFORE, **_AXIS}),
    "DequantizePerChannel": (per_channel.dequantize_per_channel, _AXIS),
}
_LLAMA: dict[str, tuple[_Build, _Attributes]] = {
    "update_cache": (cache.update_cache, {}),
    "update_cache_with_indices": (cache.update_cache_with_source_indices, {}),
    "custom_sdpa": (sdpa.source_custom_sdpa, _SOURCE_SDPA),
    "custom_quantized_sdpa": (sdpa.source_custom_quantized_sdpa, {**_SOURCE_SDPA, "is_seq_at_dim_2": 0}),
    "sdpa_with_kv_cache": (sdpa.source_sdpa_with_kv_cache, _SOURCE_SDPA),
}
_QUANTIZED_DECOMPOSED: dict[str, tuple[_Build, _Attributes]] = {
    "choose_qparams_per_token": (per_token.source_choose_qparams_per_token, _CHOOSE),
    "choose_qparams_per_token_asymmetric": (per_token.source_choose_qparams_per_token_asymmetric, _CHOOSE),
    "quantize_per_token": (per_token.source_quantize_per_token, _QUANTIZE),
    "dequantize_per_token": (
        per_token.source_dequantize_per_token,
        {**_QUANTIZE, "output_dtype": ir.DataType.FLOAT.value},
    ),
    "quantize_per_channel": (per_channel.source_quantize_per_channel, {**_QUANTIZE, **_AXIS}),
    "dequantize_per_channel": (
        per_channel.source_dequantize_per_channel,
        {**_QUANTIZE, **_AXIS, "out_dtype": ir.DataType.FLOAT.value},
    ),
}
_BODIES = {
    (domain, name): entry
    for domain, entries in ((DOMAIN, _OURS), ("llama", _LLAMA), ("quantized_decomposed", _QUANTIZED_DECOMPOSED))
    for name, entry in entries.items()
}


def has_body(domain: str, op_type: str) -> bool:
    return (domain, op_type) in _BODIES


def attributes_of(domain: str, op_type: str) -> frozenset[str]:
    """The names of the attributes that a node of this operator may carry."""
    return frozenset(_BODIES[domain, op_type][1])


def body(signature: Signature, opset: int = 17, variant: int | None = None) -> ir.Function:
    """Builds the function body for calls of one signature.

    Args:
        signature: the structural facts of the calls.
        opset: version of the default operator set the body is written in. onnxruntime reads a body in the version the
            model imports, whatever the function says, so it should be the model's.
        variant: number the calling nodes carry in the attribute `variant`. The body then fails on any other; it also
            becomes the function's overload, 0 being the empty one.

    Raises:
        InputError: the operator is unknown, or `opset` is below `MINIMUM_OPSET`.
    """
    if not has_body(signature.domain, signature.op_type):
        raise InputError(f"there is no function body for the operator {signature.domain}::{signature.op_type}")
    if opset < MINIMUM_OPSET:
        raise InputError(
            f"the function body of {signature.domain}::{signature.op_type} needs opset {MINIMUM_OPSET} or newer "
            f"and the model imports opset {opset}; convert the model first"
        )
    build, attributes = _BODIES[signature.domain, signature.op_type]
    text = Body(opset, variant)
    build(signature, text)
    declared = {key: value for key, value in attributes.items() if key != "scale" or signature.has_scale}
    if variant is not None:
        declared[VARIANT] = None
    function = text.function(signature.domain, signature.op_type, declared, overload=str(variant) if variant else "")
    function.doc_string = f"{signature.op_type} in standard ONNX operators: {' '.join((build.__doc__ or '').split())}"
    function.metadata_props[MARK] = repr(signature)
    return function
