"""The operators of other projects that we recognise, and what a call of one means.

Both graph formats meet them: FX as calls of `torch.ops.<namespace>.<name>`, ONNX as nodes of the domain `<namespace>`
that an export kept as they were. This table is the single description of their signatures (executorch's `llama`,
torch's `quantized_decomposed`) and needs neither project installed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from graphrewrite.report import Mismatch
from graphrewrite.vocabulary import (
    Attention,
    CacheWrite,
    ChooseQParams,
    Concept,
    Dequantize,
    Layout,
    Operand,
    Position,
    Quantize,
    Scheme,
    V,
)


@dataclass(frozen=True)
class SourceOp:
    """operands: Tensor and SymInt arguments in schema order (the inputs of an ONNX node). attributes: the other
    arguments with their defaults. results: what a functional call yields, returned values first, then mutated operands.
    """

    operands: tuple[str, ...]
    attributes: Mapping[str, Any] = field(default_factory=dict)
    results: tuple[str, ...] = ("output",)


_SDPA_ATTRIBUTES = {"drpout_p": 0.0, "is_causal": False, "scale": None}
_WRITE = SourceOp(("value", "cache", "start_pos"), results=("cache",))
_RANGE = {"quant_min": None, "quant_max": None, "dtype": None}

SOURCE_OPS: dict[str, SourceOp] = {
    "llama.sdpa_with_kv_cache": SourceOp(
        ("query", "key", "value", "key_cache", "value_cache", "start_pos", "seq_len", "attn_mask"),
        _SDPA_ATTRIBUTES,
        ("output", "key_cache", "value_cache"),
    ),
    "llama.custom_sdpa": SourceOp(("query", "key", "value", "start_pos", "attn_mask"), _SDPA_ATTRIBUTES),
    "llama.update_cache": _WRITE,
    "llama.update_quantized_cache": _WRITE,
    "llama.update_cache_with_indices": SourceOp(("value", "cache", "start_pos", "indices"), results=("cache",)),
    "quantized_decomposed.choose_qparams_per_token": SourceOp(("input",), {"dtype": None}, ("scales", "zero_points")),
    "quantized_decomposed.choose_qparams_per_token_asymmetric": SourceOp(
        ("input",), {"dtype": None}, ("scales", "zero_points")
    ),
    "quantized_decomposed.quantize_per_token": SourceOp(("input", "scales", "zero_points"), _RANGE),
    "quantized_decomposed.dequantize_per_token": SourceOp(
        ("input", "scales", "zero_points"), {**_RANGE, "output_dtype": "float32"}
    ),
}

ATTENTION_OPS = ("llama.sdpa_with_kv_cache", "llama.custom_sdpa")
# Attention cores that no concept expresses yet, and what to tell the user.
UNREAD_ATTENTION: dict[str, str] = {
    "llama.custom_quantized_sdpa": "it multiplies an int8 query, so the caches are read in place already",
    "com.microsoft.GroupQueryAttention": "it keeps its own cache, which is not dequantized in the graph",
    "com.microsoft.MultiHeadAttention": "it keeps its own cache, which is not dequantized in the graph",
    "com.microsoft.Attention": "it projects and attends in one operator",
    "aten.scaled_dot_product_attention": "no pattern reads this core yet",
    "aten._scaled_dot_product_flash_attention_for_cpu": "no pattern reads this core yet",
}


@dataclass(frozen=True)
class SourceCall:
    """One call in functional form. arguments: by schema name, defaults filled in; a value of the graph where the
    argument is an operand, else a constant, element types as numpy names. result: which of `SourceOp.results`."""

    name: str
    arguments: Mapping[str, Any]
    result: str


def position(start: Any) -> Position[Any]:
    return Position(None, start) if isinstance(start, int) else Position(start)


def concept_of_call(call: SourceCall) -> Concept[V] | None:
    """What a call's result means; None for a result with no concept (an attention is read by `attention_of_call`)."""
    args = call.arguments
    concept: Concept[Any] | None = None
    match call.name.partition(".")[2]:
        case "update_cache" | "update_quantized_cache":
            concept = CacheWrite(args["cache"], args["value"], position(args["start_pos"]), axis=1)
        case "sdpa_with_kv_cache" if call.result == "key_cache":
            concept = CacheWrite(args["key_cache"], args["key"], position(args["start_pos"]), axis=1)
        case "sdpa_with_kv_cache" if call.result == "value_cache":
            concept = CacheWrite(args["value_cache"], args["value"], position(args["start_pos"]), axis=1)
        case "choose_qparams_per_token":
            concept = ChooseQParams(args["input"], Scheme.SYMMETRIC, int(call.result == "zero_points"))
        case "choose_qparams_per_token_asymmetric":
            concept = ChooseQParams(args["input"], Scheme.ASYMMETRIC, int(call.result == "zero_points"))
        case "quantize_per_token" if (args["quant_min"], args["quant_max"], args["dtype"]) == (-128, 127, "int8"):
            concept = Quantize(args["input"], args["scales"], args["zero_points"], "int8")
        case "dequantize_per_token":
            concept = Dequantize(args["input"], args["scales"], args["zero_points"], None, args["output_dtype"])
    return cast("Concept[V] | None", concept)


def attention_of_call(call: SourceCall, output: V, name: str) -> Attention[V] | Mismatch | None:
    """The attention core whose output is `output`, when the call is one."""
    args = call.arguments
    if call.name not in ATTENTION_OPS or call.result != "output":
        return None
    mask, is_causal = args["attn_mask"], bool(args["is_causal"])
    if mask is not None and is_causal:
        return Mismatch(
            "causal-with-mask",
            f"{call.name} is given a mask and is_causal, for which its meaning is not defined",
            (name,),
            remedy="fold the causal part into the mask, or drop one of the two",
        )
    joint = call.name == "llama.sdpa_with_kv_cache"
    start = position(args["start_pos"])
    return Attention(
        output=output,
        query=Operand(args["query"], Layout.BSNH),
        key=Operand(args["key_cache" if joint else "key"], Layout.BSNH),
        value=Operand(args["value_cache" if joint else "value"], Layout.BSNH),
        # A mask makes custom_sdpa ignore start_pos; the joint operator still writes the new rows there.
        start=None if mask is not None and not joint else start,
        is_causal=is_causal,
        mask=mask,
        scale=args["scale"],
        new_key=Operand(args["key"], Layout.BSNH) if joint else None,
        new_value=Operand(args["value"], Layout.BSNH) if joint else None,
    )
