"""What of a call changes the structure of a function body.

An ONNX function body is fixed text: it can refer to the caller's attribute values but cannot branch on which optional
inputs are there, on their element types or on a string attribute. So a body is specialised to a `Signature`, the facts
of a node that decide its structure. All else (extents, `scale`, ranks of masks and positions) is left to run time.
"""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from graphrewrite.errors import InputError

__all__ = ["DOMAIN", "RETURNED_TYPES", "SOURCE_DOMAINS", "Signature", "signature_of"]

DOMAIN = "graphrewrite"
SOURCE_DOMAINS = ("llama", "quantized_decomposed")

RETURNED_TYPES = {("quantized_decomposed", "choose_qparams_per_token"): ir.DataType.FLOAT}
"""Element type of all outputs of an operator that returns others than torch's shape function declares."""

# Position of the mask among the inputs of each operator that takes one.
_MASK_INPUT = {
    (DOMAIN, "CustomSdpa"): 10,
    (DOMAIN, "SdpaWithKvCache"): 6,
    ("llama", "custom_sdpa"): 4,
    ("llama", "sdpa_with_kv_cache"): 7,
}


@dataclass(frozen=True)
class Signature:
    """The structural facts of one call.

    Attributes:
        domain: operator domain: `graphrewrite`, or the torch namespace of a source operator.
        op_type: operator name.
        inputs: for each input whether it is present; absent trailing inputs are left out.
        layout: "BSNH" or "BNSH".
        scheme: "asymmetric" or "symmetric"; empty for operators that do not quantize a cache.
        is_causal: whether row i is limited to keys at or before start_pos + i.
        has_scale: whether the node gives the attribute `scale`.
        outputs: how many outputs are used, trailing unused ones left out; None: all. Read from a node of
            `sdpa_with_kv_cache` only, whose caches cost much and are mostly unused.
        mask: element type of the mask: BOOL, FLOAT, or None without a mask.
        scales: element type a per-token source operator computes in.
        zero_points: element type of the zero points it takes, before a cast that widened them.
        result: element type a per-token source operator returns, by its attribute.
    """

    op_type: str
    inputs: tuple[bool, ...]
    domain: str = DOMAIN
    layout: str = "BSNH"
    scheme: str = ""
    is_causal: bool = False
    has_scale: bool = False
    outputs: int | None = None
    mask: ir.DataType | None = None
    scales: ir.DataType | None = None
    zero_points: ir.DataType | None = None
    result: ir.DataType | None = None

    def has(self, position: int) -> bool:
        """Whether the input at `position` is present."""
        return position < len(self.inputs) and self.inputs[position]


def signature_of(node: ir.Node) -> Signature:
    """Reads the signature of a node of the domain `graphrewrite` or of a source operator.

    Raises:
        InputError: a layout or scheme is unknown, or the element type of an input that the body depends on is not
            known (run shape inference first).
    """
    present = [value is not None for value in node.inputs]
    while present and not present[-1]:
        present.pop()
    facts: dict[str, ir.DataType | None] = {}
    mask = _MASK_INPUT.get((node.domain, node.op_type))
    if mask is not None and mask < len(present) and present[mask]:
        facts["mask"] = _one_of(node, mask, _known_type(node, mask), (ir.DataType.BOOL, ir.DataType.FLOAT))
    if (node.domain, node.op_type) == ("quantized_decomposed", "quantize_per_token"):
        facts = _per_token_types(node, "dtype", ir.DataType.INT8)
    elif (node.domain, node.op_type) == ("quantized_decomposed", "dequantize_per_token"):
        facts = _per_token_types(node, "output_dtype", ir.DataType.FLOAT)
        facts["zero_points"] = _type_before_widening(node, 2)
        if facts["result"] == ir.DataType.FLOAT:
            # The product of a code, 9 bits with its zero point, and a float32 is exact in float64; it is rounded once
            # in either type.
            facts["scales"] = _type_before_widening(node, 1)
    return Signature(
        op_type=node.op_type,
        inputs=tuple(present),
        domain=node.domain,
        layout=_choice(node, "layout", ("BSNH", "BNSH")),
        scheme=_choice(node, "scheme", ("asymmetric", "symmetric")) if node.op_type == "UpdateQuantizedCache" else "",
        is_causal=bool(node.attributes.get_int("is_causal", 0)),
        has_scale="scale" in node.attributes,
        outputs=_used_outputs(node) if (node.domain, node.op_type) == ("llama", "sdpa_with_kv_cache") else None,
        **facts,
    )


def _used_outputs(node: ir.Node) -> int:
    used = [count for count, value in enumerate(node.outputs, start=1) if value.uses() or value.is_graph_output()]
    return used[-1] if used else 1


def _choice(node: ir.Node, attribute: str, known: tuple[str, ...]) -> str:
    value = node.attributes.get_string(attribute, known[0])
    if value not in known:
        raise InputError(f"{_label(node)}: attribute {attribute} is {value!r}; expected one of {', '.join(known)}")
    return value


def _label(node: ir.Node) -> str:
    return f"{node.domain}::{node.op_type} {node.name or ''}".rstrip()


def _known_type(node: ir.Node, position: int) -> ir.DataType:
    value = node.inputs[position]
    if value is None or value.dtype is None:
        name = None if value is None else value.name
        raise InputError(
            f"{_label(node)}: the element type of input {position} ({name}) is not known and its function body "
            "depends on it; run shape inference on the model first"
        )
    producer = value.producer()
    returned = None if producer is None else RETURNED_TYPES.get((producer.domain, producer.op_type))
    return returned or value.dtype


def _per_token_types(node: ir.Node, attribute: str, default: ir.DataType) -> dict[str, ir.DataType | None]:
    scales = _one_of(node, 1, _known_type(node, 1), (ir.DataType.FLOAT, ir.DataType.DOUBLE))
    return {"scales": scales, "result": ir.DataType(node.attributes.get_int(attribute, default.value))}


def _type_before_widening(node: ir.Node, position: int) -> ir.DataType:
    """The element type of an input before a cast that changes no value."""
    dtype = _known_type(node, position)
    value = node.inputs[position]
    producer = value.producer() if value is not None else None
    if producer is None or producer.op_type != "Cast" or producer.domain not in ("", "ai.onnx"):
        return dtype
    source = producer.inputs[0]
    exact = {(ir.DataType.FLOAT, ir.DataType.DOUBLE), (ir.DataType.INT8, dtype)}
    if source is not None and source.dtype is not None and (source.dtype, dtype) in exact:
        return source.dtype
    return dtype


def _one_of(node: ir.Node, position: int, dtype: ir.DataType, allowed: tuple[ir.DataType, ...]) -> ir.DataType:
    if dtype not in allowed:
        names = " or ".join(kind.name for kind in allowed)
        raise InputError(f"{_label(node)}: input {position} has element type {dtype.name}; expected {names}")
    return dtype
