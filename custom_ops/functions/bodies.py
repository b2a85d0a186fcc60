"""The function body of every operator, by domain and name."""

from __future__ import annotations

from collections.abc import Callable

import onnx_ir as ir

from graphrewrite.custom_ops.functions import cache, per_token, sdpa
from graphrewrite.custom_ops.functions.expression import VARIANT, Body
from graphrewrite.custom_ops.functions.signature import DOMAIN, Signature
from graphrewrite.errors import InputError

__all__ = ["MARK", "MINIMUM_OPSET", "body", "has_body"]

MINIMUM_OPSET = 14
"""The oldest default operator set the bodies can be written in (Reshape with allowzero)."""

MARK = "graphrewrite.signature"
"""Metadata key of the functions made here."""

# Attributes a node may carry, with the default of the operator; None: the node gives it or does without.
_Attributes = dict[str, "str | int | float | None"]
_LAYOUT: _Attributes = {"layout": "BSNH"}
_SDPA: _Attributes = {"is_causal": 0, "scale": None}
_SOURCE_SDPA: _Attributes = {"drpout_p": 0.0, **_SDPA}
_CHOOSE: _Attributes = {"dtype": ir.DataType.INT8.value}
_QUANTIZE: _Attributes = {"quant_min": -128, "quant_max": 127, **_CHOOSE}

_BODIES: dict[tuple[str, str], tuple[Callable[[Signature, Body], None], _Attributes]] = {
    (DOMAIN, "UpdateCache"): (cache.update_cache, _LAYOUT),
    (DOMAIN, "UpdateQuantizedCache"): (cache.update_quantized_cache, {**_LAYOUT, "scheme": "asymmetric"}),
    (DOMAIN, "CustomSdpa"): (sdpa.custom_sdpa, {**_LAYOUT, **_SDPA}),
    (DOMAIN, "SdpaWithKvCache"): (sdpa.sdpa_with_kv_cache, {**_LAYOUT, **_SDPA}),
    ("llama", "update_cache"): (cache.update_cache, {}),
    ("llama", "update_cache_with_indices"): (cache.update_cache_with_indices, {}),
    ("llama", "custom_sdpa"): (sdpa.source_custom_sdpa, _SOURCE_SDPA),
    ("llama", "sdpa_with_kv_cache"): (sdpa.source_sdpa_with_kv_cache, _SOURCE_SDPA),
    ("quantized_decomposed", "choose_qparams_per_token"): (per_token.choose_qparams_per_token, _CHOOSE),
    ("quantized_decomposed", "choose_qparams_per_token_asymmetric"): (
        per_token.choose_qparams_per_token_asymmetric,
        _CHOOSE,
    ),
    ("quantized_decomposed", "quantize_per_token"): (per_token.quantize_per_token, _QUANTIZE),
    ("quantized_decomposed", "dequantize_per_token"): (
        per_token.dequantize_per_token,
        {**_QUANTIZE, "output_dtype": ir.DataType.FLOAT.value},
    ),
}


def has_body(domain: str, op_type: str) -> bool:
    return (domain, op_type) in _BODIES


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
