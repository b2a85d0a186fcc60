"""The attention operators of ONNX (Attention-23 and later) and of onnxruntime (com.microsoft)."""

from __future__ import annotations

import onnx_ir as ir

from graphrewrite.graph import Graph
from graphrewrite.onnx.concepts import attribute, operand
from graphrewrite.positions import every_slot
from graphrewrite.report import Mismatch
from graphrewrite.vocabulary import Attention, Layout, Mask, Operand, Position, Reshape
from graphrewrite.walk import skip

_OnnxGraph = Graph[ir.Value]

# What an Attention node may say and still be what CustomSdpa computes; newer opsets may add more.
_ATTENTION_ATTRIBUTES = {
    "is_causal",
    "kv_num_heads",
    "left_window_size",
    "q_num_heads",
    "qk_matmul_output_mode",
    "right_window_size",
    "scale",
    "softcap",
    "softmax_precision",
}
_QUANTIZE = "quantize_kv_cache makes quantized caches of float ones"
_MICROSOFT = {
    "com.microsoft.Attention": "Attention projects its input itself",
    "com.microsoft.GroupQueryAttention": "GroupQueryAttention writes new rows into a past of its own",
}


def attention_of_node(graph: _OnnxGraph, node: ir.Node) -> Attention[ir.Value] | Mismatch | None:
    """The attention that a node computes; None when it is no attention operator."""
    qualified = f"{node.domain}.{node.op_type}"
    if qualified == ".Attention":
        return _standard(graph, node)
    if qualified == "com.microsoft.MultiHeadAttention":
        return _multi_head(graph, node)
    if qualified in _MICROSOFT:
        name = graph.name(node.outputs[0])
        return Mismatch("attention-form", f"{_MICROSOFT[qualified]}, which is not read", (name,), remedy=_QUANTIZE)
    return None


def _standard(graph: _OnnxGraph, node: ir.Node) -> Attention[ir.Value] | Mismatch:
    """Attention-23 and later, in the subset that CustomSdpa computes."""
    name = graph.name(node.outputs[0])
    refusal = _refused(node, name)
    if refusal is not None:
        return refusal
    heads, key_heads = attribute(node, "q_num_heads", None), attribute(node, "kv_num_heads", None)
    operands = (_operand(graph, node.inputs[0], heads), *(_rows(graph, x, key_heads) for x in node.inputs[1:3]))
    query, key, value = operands
    if query is None or key is None or value is None:
        return Mismatch(
            "attention-rank",
            "query, keys and values are not known to have 4 dimensions, or 3 of which 4 are made",
            (name,),
        )
    right = attribute(node, "right_window_size", -1)
    if right > 0:
        return Mismatch("attention-attribute", f"right_window_size is {right}; the fused operator looks left", (name,))
    is_causal = bool(attribute(node, "is_causal", 0)) or right == 0
    window = attribute(node, "left_window_size", -1) + 1
    mask, valid = operand(node, 3), operand(node, 6)
    start: Position[ir.Value] | None
    if valid is not None and mask is not None and not is_causal:
        return Mismatch(
            "mask-with-valid-length",
            "Attention has a mask and nonpad_kv_seqlen and is not causal; the fused operator takes one",
            (name,),
            remedy="fold the valid length into the mask, or set is_causal",
        )
    if valid is not None:
        start = Position(valid, minus_new=True)  # bottom-right alignment
    elif is_causal or window:
        start = Position(None)  # top-left alignment
    else:
        start = None if mask is not None else every_slot(graph, key)
    return Attention(
        output=_result(graph, node, heads),
        query=query,
        key=key,
        value=value,
        start=start,
        is_causal=is_causal,
        mask=None if mask is None else Mask(mask),
        scale=attribute(node, "scale", None),
        softcap=attribute(node, "softcap", 0.0),
        window=window,
    )


def _refused(node: ir.Node, name: str) -> Mismatch | None:
    if operand(node, 4) is not None or operand(node, 5) is not None:
        return Mismatch(
            "attention-past",
            "Attention concatenates a past of its own; the cache is not dequantized here",
            (name,),
            remedy=_QUANTIZE,
        )
    if _reads_others(node):
        return Mismatch("attention-outputs", f"more of {node.op_type} than its first output is used", (name,))
    unknown = sorted(set(node.attributes) - _ATTENTION_ATTRIBUTES)
    if unknown:
        return Mismatch("attention-attribute", f"{node.op_type} has {', '.join(unknown)}, which is not read", (name,))
    return None


def _reads_others(node: ir.Node) -> bool:
    return any(output.uses() or output.is_graph_output() for output in node.outputs[1:])


def _multi_head(graph: _OnnxGraph, node: ir.Node) -> Attention[ir.Value] | Mismatch:
    """com.microsoft.MultiHeadAttention over keys and values [B,kv,H*D] or [B,H,kv,D], without a past of its own."""
    name = graph.name(node.outputs[0])
    heads = attribute(node, "num_heads", None)
    if operand(node, 6) is not None or operand(node, 7) is not None:
        return Mismatch(
            "attention-past", "MultiHeadAttention concatenates a past of its own", (name,), remedy=_QUANTIZE
        )
    if _reads_others(node):
        return Mismatch("attention-outputs", f"more of {node.op_type} than its first output is used", (name,))
    if any(operand(node, index) is not None for index in (3, 4, 8, 9)) or attribute(node, "unidirectional", 0):
        message = (
            "MultiHeadAttention has a bias, a padding mask, a shared buffer or is unidirectional, which is not read"
        )
        return Mismatch("attention-attribute", message, (name,))
    query = _operand(graph, operand(node, 0), heads)
    key, value = (_rows(graph, operand(node, index), heads) for index in (1, 2))
    if query is None or key is None or value is None:
        return Mismatch("attention-rank", "query, keys and values are not known to have 3 or 4 dimensions", (name,))
    mask = operand(node, 5)
    return Attention(
        output=_result(graph, node, heads),
        query=query,
        key=key,
        value=value,
        start=None if mask is not None else every_slot(graph, key),
        is_causal=False,
        mask=None if mask is None else Mask(mask),
        scale=attribute(node, "scale", None) or None,  # 0 is its default, which is 1/sqrt(D)
    )


def _operand(graph: _OnnxGraph, value: ir.Value | None, heads: int | None) -> Operand[ir.Value] | None:
    """[B,H,S,D], or the packed [B,S,H*D], unpacked where the graph packs it."""
    if value is None:
        return None
    rank = len(graph.shape(value) or ())
    if rank == 4:
        return Operand(value, Layout.BNSH)
    if rank != 3 or heads is None:
        return None
    packing = graph.concept(skip(graph, value))
    shape = graph.shape(packing.input) if isinstance(packing, Reshape) else None
    if isinstance(packing, Reshape) and shape is not None and len(shape) == 4:
        after = graph.shape(value) or ()
        if shape[2] == heads and shape[:2] == after[:2]:
            return Operand(packing.input, Layout.BSNH)
    return Operand(value, Layout.BSNH, heads)


def _result(graph: _OnnxGraph, node: ir.Node, heads: int | None) -> Operand[ir.Value]:
    """The first output, packed as the first input is."""
    query, output = node.inputs[0], node.outputs[0]
    assert query is not None
    is_packed = len(graph.shape(query) or ()) == 3
    return Operand(output, Layout.BSNH, heads) if is_packed else Operand(output, Layout.BNSH)


def _rows(graph: _OnnxGraph, value: ir.Value | None, heads: int | None) -> Operand[ir.Value] | None:
    """Keys or values, which must be 4-D where the cache is."""
    found = _operand(graph, value, heads)
    return None if found is None or found.heads is not None else found
