"""The operators of other projects that we recognise, and what a call of one means.

Both graph formats meet them: FX as calls of `torch.ops.<namespace>.<name>`, ONNX as nodes of the domain `<namespace>`
that an export kept as they were. This table is the single description of their signatures (executorch's `llama`,
torch's `quantized_decomposed`, `torchao`) and needs none of these projects installed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from graphrewrite.graph import Graph
from graphrewrite.positions import slots
from graphrewrite.report import Mismatch
from graphrewrite.vocabulary import (
    Attention,
    CacheWrite,
    ChooseQParams,
    Codes,
    Concept,
    Dequantize,
    Layout,
    Mask,
    Operand,
    Parameter,
    Position,
    Quantize,
    Rounding,
    Scheme,
    Slots,
    V,
)
from graphrewrite.walk import broadcast


@dataclass(frozen=True)
class SourceOp:
    """operands: Tensor and SymInt arguments in schema order (the inputs of an ONNX node). attributes: the other
    arguments with their defaults. results: what a functional call yields, returned values first, then mutated operands.
    """

    operands: tuple[str, ...]
    attributes: Mapping[str, Any] = field(default_factory=dict)
    results: tuple[str, ...] = ("output",)


_SDPA_ATTRIBUTES = {"drpout_p": 0.0, "is_causal": False, "scale": None}
_CODES = ("q_zero_points", "q_scales", "k_zero_points", "k_scales", "v_zero_points", "v_scales")
_WRITE = SourceOp(("value", "cache", "start_pos"), results=("cache",))
_RANGE = {"quant_min": None, "quant_max": None, "dtype": None}

SOURCE_OPS: dict[str, SourceOp] = {
    "llama.sdpa_with_kv_cache": SourceOp(
        ("query", "key", "value", "key_cache", "value_cache", "start_pos", "seq_len", "attn_mask"),
        _SDPA_ATTRIBUTES,
        ("output", "key_cache", "value_cache"),
    ),
    "llama.custom_sdpa": SourceOp(("query", "key", "value", "start_pos", "attn_mask"), _SDPA_ATTRIBUTES),
    "llama.custom_quantized_sdpa": SourceOp(
        ("query", "key", "value", "start_pos", "attn_mask", *_CODES),
        {**_SDPA_ATTRIBUTES, "is_seq_at_dim_2": False},
    ),
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
    "quantized_decomposed.quantize_per_channel": SourceOp(("input", "scales", "zero_points"), {"axis": -1, **_RANGE}),
    "quantized_decomposed.dequantize_per_channel": SourceOp(
        ("input", "scales", "zero_points"), {"axis": -1, **_RANGE, "out_dtype": None}
    ),
    "torchao.dequantize_affine": SourceOp(
        ("input", "scale", "zero_point"),
        {"block_size": (), "input_dtype": None, "quant_min": None, "quant_max": None, "output_dtype": "float32"},
    ),
}

ATTENTION_OPS = ("llama.sdpa_with_kv_cache", "llama.custom_sdpa", "llama.custom_quantized_sdpa")
# Attention cores that no concept expresses, and why.
UNREAD_ATTENTION: dict[str, str] = {
    "com.microsoft.DecoderMaskedMultiHeadAttention": "it keeps its own cache, which is not dequantized in the graph",
    "aten._scaled_dot_product_flash_attention_for_cpu": "export without lowering attention to a backend",
    "aten._scaled_dot_product_efficient_attention": "export without lowering attention to a backend",
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


def concept_of_call(call: SourceCall, graph: Graph[V]) -> Concept[V] | None:
    """What a call's result means; None for a result with no concept (an attention is read by `attention_of_call`)."""
    args = call.arguments
    is_int8 = (args.get("quant_min"), args.get("quant_max"), args.get("dtype")) == (-128, 127, "int8")
    concept: Concept[Any] | None = None
    match call.name.partition(".")[2]:
        case "update_cache" | "update_quantized_cache":
            concept = CacheWrite(args["cache"], args["value"], Slots(position(args["start_pos"])), axis=1)
        case "update_cache_with_indices":
            capacity = (graph.shape(args["cache"]) or ("?", "?"))[1]
            concept = CacheWrite(args["cache"], args["value"], slots(graph, args["indices"], capacity), axis=1)
        case "sdpa_with_kv_cache" if call.result != "output":
            rows = args[call.result.removesuffix("_cache")]
            concept = CacheWrite(args[call.result], rows, Slots(position(args["start_pos"])), axis=1)
        case "choose_qparams_per_token":
            concept = ChooseQParams(args["input"], Scheme.SYMMETRIC, int(call.result == "zero_points"))
        case "choose_qparams_per_token_asymmetric":
            concept = ChooseQParams(args["input"], Scheme.ASYMMETRIC, int(call.result == "zero_points"))
        case "quantize_per_token" if is_int8:
            concept = _quantize(args["input"], _of_rows(graph, call), Rounding.AFTER_ZERO_POINT)
        case "quantize_per_channel" if is_int8:
            concept = _quantize(args["input"], _of_channels(graph, call), Rounding.BEFORE_ZERO_POINT)
        case "dequantize_per_token":
            concept = _dequantize(args["input"], _of_rows(graph, call), args["output_dtype"])
        case "dequantize_per_channel":
            concept = _dequantize(args["input"], _of_channels(graph, call), args["out_dtype"] or "float32")
        case "dequantize_affine":
            concept = _dequantize(args["input"], _of_blocks(graph, call), args["output_dtype"])
    return cast("Concept[V] | None", concept)


_Parameters = tuple[Parameter[V] | None, Parameter[V] | None]


def _quantize(rows: V, parameters: _Parameters[V], rounding: Rounding) -> Quantize[V] | None:
    scales, zero_points = parameters
    return None if scales is None else Quantize(rows, scales, zero_points, rounding, divides=False)


def _dequantize(codes: V, parameters: _Parameters[V], dtype: str) -> Dequantize[V] | None:
    scales, zero_points = parameters
    return None if scales is None else Dequantize(codes, scales, zero_points, dtype)


def _of_rows(graph: Graph[V], call: SourceCall) -> _Parameters[V]:
    """Scales and zero points that meet the rows as numpy broadcasts."""
    args = call.arguments
    rank = len(graph.shape(args["input"]) or ())
    scales = broadcast(graph, args["scales"], rank)
    if args["zero_points"] is None:
        return scales, None
    zero_points = broadcast(graph, args["zero_points"], rank)
    return (None, None) if zero_points is None else (scales, zero_points)


def _of_channels(graph: Graph[V], call: SourceCall) -> _Parameters[V]:
    """Scales and zero points [n], one for each index along an axis."""
    args = call.arguments
    shape = graph.shape(args["input"])
    if shape is None:
        return None, None
    axis = args["axis"] % len(shape)
    applied = tuple(size if index == axis else 1 for index, size in enumerate(shape))
    zero_points = args["zero_points"]
    return Parameter(args["scales"], applied), None if zero_points is None else Parameter(zero_points, applied)


def _of_blocks(graph: Graph[V], call: SourceCall) -> _Parameters[V]:
    """Scales and zero points of blocks of `block_size` elements, in the order of the blocks."""
    args = call.arguments
    shape, blocks = graph.shape(args["input"]), tuple(args["block_size"])
    if shape is None or len(shape) != len(blocks):
        return None, None
    applied: list[Any] = []
    for size, block in zip(shape, blocks, strict=True):
        if block == 1 or block == size:
            applied.append(size if block == 1 else 1)
        elif isinstance(size, int) and isinstance(block, int) and block > 0 and size % block == 0:
            applied.append(size // block)
        else:
            return None, None
    zero_point = args["zero_point"]
    zero_points = None if zero_point is None else Parameter(zero_point, tuple(applied))
    return Parameter(args["scale"], tuple(applied)), zero_points


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
    layout = Layout.BNSH if args.get("is_seq_at_dim_2") else Layout.BSNH
    return Attention(
        output=Operand(output, layout),
        query=Operand(args["query"], layout),
        key=Operand(args["key_cache" if joint else "key"], layout),
        value=Operand(args["value_cache" if joint else "value"], layout),
        # A mask makes custom_sdpa ignore start_pos; the joint operator still writes the new rows there.
        start=None if mask is not None and not joint else start,
        is_causal=is_causal,
        mask=None if mask is None else Mask(mask),
        scale=args["scale"],
        new_key=Operand(args["key"], layout) if joint else None,
        new_value=Operand(args["value"], layout) if joint else None,
        codes=_codes(args),
    )


def _codes(args: Mapping[str, Any]) -> tuple[Codes[Any], Codes[Any], Codes[Any]] | None:
    """The scales and zero points of query, key and value that custom_quantized_sdpa takes."""
    if args.get("q_scales") is None:
        return None
    query, key, value = (Codes(args[f"{which}_scales"], args[f"{which}_zero_points"]) for which in ("q", "k", "v"))
    return query, key, value
