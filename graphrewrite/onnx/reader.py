"""Reading an ONNX graph into the vocabulary. Values are `onnx_ir.Value`."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Any

import onnx_ir as ir

from graphrewrite.onnx.soundness import fault
from graphrewrite.report import Mismatch
from graphrewrite.source_calls import (
    ATTENTION_OPS,
    SOURCE_OPS,
    UNREAD_ATTENTION,
    SourceCall,
    attention_of_call,
    concept_of_call,
)
from graphrewrite.vocabulary import (
    Attention,
    CacheWrite,
    Cast,
    Concept,
    Dequantize,
    Dim,
    Forward,
    Layout,
    Multiply,
    Operand,
    Permute,
    Position,
    Subtract,
)

DOMAIN = "graphrewrite"
_OWN_BODIES = {DOMAIN, *(name.partition(".")[0] for name in SOURCE_OPS)}
# Operators that give back the only element of their input, or its value in another integer type.
_ONLY_ELEMENT = {"Squeeze", "Unsqueeze", "Reshape", "Gather", "Slice", "Identity", "Cast", "Flatten"}
# What an Attention node may say and still be what CustomSdpa computes; newer opsets add more.
_ATTENTION_ATTRIBUTES = {
    "is_causal",
    "kv_num_heads",
    "q_num_heads",
    "qk_matmul_output_mode",
    "scale",
    "softcap",
    "softmax_precision",
}
_RESHAPES = {"Reshape", "Expand", "Squeeze", "Unsqueeze"}
_RANDOM = {"RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike", "Multinomial", "Bernoulli"}


class OnnxGraph:
    """The `Graph` of a model's main graph and of the bodies of its If and Loop nodes."""

    def __init__(self, model: ir.Model) -> None:
        self._functions = [f for f in model.functions.values() if f.domain not in _OWN_BODIES]
        self._nodes = tuple(ir.traversal.RecursiveGraphIterator(model.graph))
        self._numbers = _number_values(self._nodes)

    def attentions(self) -> Iterator[Attention[ir.Value] | Mismatch]:
        for node in self._nodes:
            qualified = f"{node.domain}.{node.op_type}"
            if qualified in UNREAD_ATTENTION:
                reason = UNREAD_ATTENTION[qualified]
                yield Mismatch("attention-form", f"{node.op_type} is not read: {reason}", (self._label(node),))
            elif qualified in (".Attention", *ATTENTION_OPS) and (wrong := fault(node)) is not None:
                yield Mismatch("malformed-node", wrong, (self._label(node),))
            elif qualified == ".Attention":
                yield self._onnx_attention(node)
            elif qualified in ATTENTION_OPS:
                call = _source_call(node.outputs[0])
                attention = None if call is None else attention_of_call(call, node.outputs[0], self._label(node))
                if attention is not None:
                    yield attention
        yield from self._in_functions()

    def _in_functions(self) -> Iterator[Mismatch]:
        """The cores in bodies of functions, which are not entered: what a body is given is not known there."""
        for function in self._functions:
            for node in ir.traversal.RecursiveGraphIterator(function):
                name = f"{node.domain}.{node.op_type}".lstrip(".")
                if name in ("Attention", *ATTENTION_OPS, *UNREAD_ATTENTION):
                    where = f"{function.domain}.{function.name}/{self._label(node)}"
                    yield Mismatch(
                        "attention-in-function",
                        f"{node.op_type} stands in the body of the function {function.name}, which is not entered",
                        (where,),
                        remedy="inline the functions of the model first (onnx.inliner)",
                    )

    def already_fused(self) -> int:
        return sum(node.domain == DOMAIN and node.op_type == "CustomSdpa" for node in self._nodes)

    def _onnx_attention(self, node: ir.Node) -> Attention[ir.Value] | Mismatch:
        """Attention-23 and later, in the subset that CustomSdpa computes."""
        inputs = [*node.inputs, *[None] * (7 - len(node.inputs))]
        query, key, value, mask, past_key, past_value, valid = inputs[:7]
        assert query is not None and key is not None and value is not None
        name = self._label(node)
        refusal = self._refuse_attention(node, query, key, value, past_key, past_value, name)
        if refusal is not None:
            return refusal
        is_causal = bool(_attribute(node, "is_causal", 0))
        capacity = (self.shape(key) or (None,) * 4)[2]
        if valid is not None:
            if mask is not None and not is_causal:
                return Mismatch(
                    "mask-with-valid-length",
                    "Attention has a mask and nonpad_kv_seqlen and is not causal; the fused operator takes one",
                    (name,),
                    remedy="fold the valid length into the mask, or set is_causal",
                )
            start: Position[ir.Value] | None = Position(valid, minus_new=True)  # bottom-right alignment
        elif is_causal:
            start = Position(None)  # top-left alignment
        elif mask is not None:
            start = None  # the mask alone decides
        elif isinstance(capacity, int):
            start = Position(None, capacity, minus_new=True)  # every slot is seen
        else:
            return Mismatch(
                "capacity-unknown", "Attention sees every slot of a cache whose capacity is not a known number", (name,)
            )
        return Attention(
            output=node.outputs[0],
            query=Operand(query, Layout.BNSH),
            key=Operand(key, Layout.BNSH),
            value=Operand(value, Layout.BNSH),
            start=start,
            is_causal=is_causal,
            mask=mask,
            scale=_attribute(node, "scale", None),
        )

    def _refuse_attention(
        self,
        node: ir.Node,
        query: ir.Value,
        key: ir.Value,
        value: ir.Value,
        past_key: ir.Value | None,
        past_value: ir.Value | None,
        name: str,
    ) -> Mismatch | None:
        if past_key is not None or past_value is not None:
            return Mismatch(
                "attention-past", "Attention concatenates a past of its own; the cache is not dequantized here", (name,)
            )
        if any(output.uses() or output.is_graph_output() for output in node.outputs[1:]):
            return Mismatch("attention-outputs", "more of Attention than its first output is used", (name,))
        unknown = sorted(set(node.attributes) - _ATTENTION_ATTRIBUTES)
        if unknown:
            return Mismatch(
                "attention-attribute", f"Attention has {', '.join(unknown)}, which the fused operator lacks", (name,)
            )
        if _attribute(node, "softcap", 0.0) != 0.0:
            return Mismatch("softcap", "Attention has a softcap, which the fused operator lacks", (name,))
        for operand in (query, key, value):
            shape = self.shape(operand)
            if shape is None or len(shape) != 4:
                found = "unknown rank" if shape is None else f"rank {len(shape)}"
                return Mismatch("attention-rank", f"{operand.name} has {found}; 4-D inputs [B,N,S,D] are read", (name,))
        return None

    def concept(self, value: ir.Value) -> Concept[ir.Value] | None:
        node = value.producer()
        if node is None:
            return None
        if fault(node) is not None:
            return None
        call = _source_call(value)
        if call is not None:
            return concept_of_call(call)
        return self._standard(node, value) if node.domain == "" else None

    def _standard(self, node: ir.Node, value: ir.Value) -> Concept[ir.Value] | None:
        source = node.inputs[0] if node.inputs else None
        if source is None:
            return None
        shape = self.shape(value)
        if node.op_type == "Identity" or (
            node.op_type in _RESHAPES and shape is not None and shape == self.shape(source)
        ):
            return Forward(source)
        match node.op_type:
            case "Cast":
                before, after = self.dtype(source), self.dtype(value)
                if before is None or after is None:
                    return None
                return Forward(source) if before == after else Cast(source, before, after)
            case "Transpose":
                perm = _attribute(node, "perm", None)
                if perm is None:
                    perm = tuple(reversed(range(len(shape)))) if shape is not None else ()
                return Permute(source, tuple(perm))
            case "Sub" | "Mul":
                other = node.inputs[1]
                dtype = self.dtype(value) or self.dtype(source) or ""
                assert other is not None
                return Subtract(source, other, dtype) if node.op_type == "Sub" else Multiply(source, other, dtype)
            case "DequantizeLinear":
                return self._dequantize_linear(node, source)
            case "TensorScatter":
                return self._tensor_scatter(node, source)
        return None

    def _dequantize_linear(self, node: ir.Node, codes: ir.Value) -> Dequantize[ir.Value] | None:
        scales = node.inputs[1]
        zero_points = node.inputs[2] if len(node.inputs) > 2 else None
        shape = self.shape(codes)
        block = _attribute(node, "block_size", 0)
        axis = _attribute(node, "axis", 1)
        if shape is None or axis not in (-1, len(shape) - 1):
            block = -1  # scales along another axis, which no pattern takes for one scale per token and head
        assert scales is not None
        given = _attribute(node, "output_dtype", 0)
        dtype = dtype_name(ir.DataType(given)) if given else self.dtype(scales) or ""
        return Dequantize(codes, scales, zero_points, block, dtype)

    def _tensor_scatter(self, node: ir.Node, cache: ir.Value) -> CacheWrite[ir.Value] | None:
        rows = node.inputs[1]
        indices = node.inputs[2] if len(node.inputs) > 2 else None
        shape = self.shape(cache)
        if rows is None or shape is None or _attribute(node, "mode", "linear") != "linear":
            return None
        axis = _attribute(node, "axis", -2)
        return CacheWrite(cache, rows, Position(indices), axis if axis >= 0 else axis + len(shape))

    def shape(self, value: ir.Value) -> tuple[Dim, ...] | None:
        if value.shape is None:
            return None
        # A dimension without a name is unlike every other: it gets a name that no other value uses.
        return tuple(
            dim if isinstance(dim, int) else (dim.value or f"{value.name}.{index}")
            for index, dim in enumerate(value.shape)
        )

    def dtype(self, value: ir.Value) -> str | None:
        return None if value.dtype is None else dtype_name(value.dtype)

    def scope(self, value: ir.Value) -> Hashable:
        node = value.producer()
        return None if node is None else node.graph

    def same(self, left: ir.Value, right: ir.Value) -> bool:
        return bool(self._number(left) == self._number(right))

    def _number(self, value: ir.Value) -> Any:
        return self._numbers.get(value, value)

    def name(self, value: ir.Value) -> str:
        node = value.producer()
        return value.name or "?" if node is None else self._label(node)

    def _label(self, node: ir.Node) -> str:
        return node.name or f"{node.op_type}({', '.join(output.name or '' for output in node.outputs[:1])})"


def dtype_name(dtype: ir.DataType) -> str:
    """The element type as numpy names it."""
    return {"FLOAT": "float32", "DOUBLE": "float64"}.get(dtype.name, dtype.name.lower())


def _attribute(node: ir.Node, name: str, default: Any) -> Any:
    attribute = node.attributes.get(name)
    return default if attribute is None else attribute.value


def _source_call(value: ir.Value) -> SourceCall | None:
    """The recognised source operator, kept as a node of its own domain, of which `value` is a result."""
    node = value.producer()
    if node is None or (op := SOURCE_OPS.get(f"{node.domain}.{node.op_type}")) is None:
        return None
    index = value.index()
    if index is None or index >= len(op.results):
        return None
    inputs = [*node.inputs, *[None] * (len(op.operands) - len(node.inputs))]
    arguments: dict[str, Any] = dict(zip(op.operands, inputs, strict=False))
    for name, default in op.attributes.items():
        given = _attribute(node, name, default)
        is_dtype = name.endswith("dtype") and isinstance(given, int)
        arguments[name] = dtype_name(ir.DataType(given)) if is_dtype else given
    return SourceCall(f"{node.domain}.{node.op_type}", arguments, op.results[index])


def _number_values(nodes: tuple[ir.Node, ...]) -> dict[ir.Value, Any]:
    """Number the values so that equal computations of equal inputs share a number, in one pass.

    The only element of an integer tensor has the number of the tensor, whichever way it was taken out. A value without
    a number (an input) stands for itself.
    """
    numbers: dict[ir.Value, Any] = {}
    known: dict[Any, int] = {}
    for node in nodes:
        if _gives_only_element(node):
            source = node.inputs[0]
            assert source is not None
            numbers[node.outputs[0]] = numbers.get(source, source)
            continue
        if node.op_type in _RANDOM or any(a.type in _GRAPHS for a in node.attributes.values()):
            continue
        inputs = tuple(None if value is None else numbers.get(value, value) for value in node.inputs)
        attributes = tuple(sorted((name, _attribute_key(a)) for name, a in node.attributes.items()))
        for index, output in enumerate(node.outputs):
            # The shape too: that of an only element and of its tensor differ, and with them what is made of either.
            shape = str(output.shape)
            key = (node.domain, node.op_type, node.overload, inputs, attributes, index, shape)
            numbers[output] = known.setdefault(key, len(known))
    return numbers


_GRAPHS = (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS)


def _attribute_key(attribute: ir.Attr) -> str:
    if attribute.type is ir.AttributeType.TENSOR:
        tensor = attribute.as_tensor()
        return (
            f"{tensor.dtype}{list(tensor.shape)}{tensor.tobytes()!r}" if tensor.size <= 16 else f"tensor {id(tensor)}"
        )
    return f"{attribute.type} {attribute.value!r}"


def _gives_only_element(node: ir.Node) -> bool:
    if node.domain != "" or node.op_type not in _ONLY_ELEMENT or not node.inputs or node.inputs[0] is None:
        return False
    return _is_one_integer(node.inputs[0]) and _is_one_integer(node.outputs[0])


def _is_one_integer(value: ir.Value) -> bool:
    if value.shape is None or value.dtype not in (ir.DataType.INT64, ir.DataType.INT32):
        return False
    return all(dim == 1 for dim in value.shape)
