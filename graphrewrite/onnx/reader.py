"""Reading an ONNX graph into the vocabulary. Values are `onnx_ir.Value`."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import onnx_ir as ir

from graphrewrite.cores import attention_of_softmax
from graphrewrite.onnx.attention import attention_of_node
from graphrewrite.onnx.concepts import attribute, concept_of_node, dtype_name
from graphrewrite.onnx.constants import number_of
from graphrewrite.onnx.numbering import number_values
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
from graphrewrite.vocabulary import Attention, Concept, Dim, Softmax

DOMAIN = "graphrewrite"
OWN_BODIES = {DOMAIN, *(name.partition(".")[0] for name in SOURCE_OPS)}
"""Domains whose functions are bodies of operators that are read as they are."""

CORES = (
    ".Attention",
    "com.microsoft.Attention",
    "com.microsoft.GroupQueryAttention",
    "com.microsoft.MultiHeadAttention",
    *ATTENTION_OPS,
    *UNREAD_ATTENTION,
)
"""The operators that attend."""

_OURS = ("CustomSdpa", "CustomQuantizedSdpa")


class OnnxGraph:
    """The `Graph` of a model's main graph and of the bodies of its If and Loop nodes."""

    def __init__(self, model: ir.Model) -> None:
        self._functions = [f for f in model.functions.values() if f.domain not in OWN_BODIES]
        self._nodes = tuple(ir.traversal.RecursiveGraphIterator(model.graph))
        self._numbers = number_values(self._nodes)

    def attentions(self) -> Iterator[Attention[ir.Value] | Mismatch]:
        for node in self._nodes:
            attention = self._attention(node)
            if attention is not None:
                yield attention
        yield from self._in_functions()

    def _in_functions(self) -> Iterator[Mismatch]:
        """The cores in bodies of functions, which are not entered: what a body is given is not known there."""
        for function in self._functions:
            for node in ir.traversal.RecursiveGraphIterator(function):
                if f"{node.domain}.{node.op_type}" in CORES:
                    where = f"{function.domain}.{function.name}/{_label(node)}"
                    yield Mismatch(
                        "attention-in-function",
                        f"{node.op_type} stands in the body of the function {function.name}, which is not entered",
                        (where,),
                        remedy="inline it first: graphrewrite.onnx.inline.inline_attention(model)",
                    )

    def _attention(self, node: ir.Node) -> Attention[ir.Value] | Mismatch | None:
        qualified = f"{node.domain}.{node.op_type}"
        if qualified == ".Softmax" and isinstance(self.concept(node.outputs[0]), Softmax):
            return attention_of_softmax(self, node.outputs[0])
        if qualified not in CORES:
            return None
        label = _label(node)
        if qualified in UNREAD_ATTENTION:
            message = f"{node.op_type} is not read: {UNREAD_ATTENTION[qualified]}"
            return Mismatch("attention-form", message, (label,))
        wrong = fault(node)
        if wrong is not None:
            return Mismatch("malformed-node", wrong, (label,))
        if qualified not in ATTENTION_OPS:
            return attention_of_node(self, node)
        call = _source_call(node.outputs[0])
        attention = None if call is None else attention_of_call(call, node.outputs[0], label)
        if not isinstance(attention, Attention) or attention.new_key is None or len(node.outputs) < 3:
            return attention
        return replace(attention, new_key_cache=node.outputs[1], new_value_cache=node.outputs[2])

    def already_fused(self) -> int:
        return sum(node.domain == DOMAIN and node.op_type in _OURS for node in self._nodes)

    def concept(self, value: ir.Value) -> Concept[ir.Value] | None:
        node = value.producer()
        if node is None or fault(node) is not None:
            return None
        call = _source_call(value)
        if call is not None:
            return concept_of_call(call, self)
        return concept_of_node(self, node, value) if node.domain == "" else None

    def number(self, value: ir.Value) -> float | None:
        return number_of(value)

    def users(self, value: ir.Value) -> Iterable[ir.Value]:
        return [output for node, _ in value.uses() for output in node.outputs]

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

    def key(self, value: ir.Value) -> Hashable:
        key: Hashable = self._numbers.get(value, value)
        return key

    def name(self, value: ir.Value) -> str:
        node = value.producer()
        return value.name or "?" if node is None else _label(node)


def _label(node: ir.Node) -> str:
    return node.name or f"{node.op_type}({', '.join(output.name or '' for output in node.outputs[:1])})"


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
        given = attribute(node, name, default)
        is_dtype = name.endswith("dtype") and isinstance(given, int)
        arguments[name] = dtype_name(ir.DataType(given)) if is_dtype else given
    return SourceCall(f"{node.domain}.{node.op_type}", arguments, op.results[index])
