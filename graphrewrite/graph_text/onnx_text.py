"""The text of ONNX models."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from graphrewrite.graph_text.names import Names, stable

# Constants of so many elements are shown, as axes and shapes have; of larger ones the type.
_MOST_ELEMENTS = 16
# The bodies of our own operators come with the library; they are no part of a model that its author wrote.
_LIBRARY_DOMAIN = "graphrewrite"


def proto_text(model: onnx.ModelProto) -> str:
    """As `model_text`."""
    return model_text(ir.from_proto(model))


def model_text(model: ir.Model) -> str:
    """The model's graph and functions, without the values of weights, metadata and the types of inner values."""
    opsets = ", ".join(f"{domain or 'ai.onnx'} {version}" for domain, version in sorted(model.opset_imports.items()))
    lines = [f"opsets: {opsets}", *_graph_lines(model.graph.name or "graph", model.graph, {}, Names())]
    for function in model.functions.values():
        if function.domain != _LIBRARY_DOMAIN:
            title = f"{function.domain}.{function.name}{f'.{function.overload}' if function.overload else ''}"
            lines += ["", *_graph_lines(title, function, {}, Names())]
    return stable(lines)


def _graph_lines(
    title: str, graph: ir.Graph | ir.Function, outer: Mapping[ir.Value, str], names: Names
) -> Iterator[str]:
    known = dict(outer)
    weights = list(graph.initializers.values()) if isinstance(graph, ir.Graph) else []
    for value in (*graph.inputs, *graph.outputs, *weights):
        # A name of an inner graph may be that of another value outside.
        known.setdefault(value, names.new(value.name or "value"))
    yield f"{title}("
    for value in graph.inputs:
        yield f"    {known[value]}{_type(value)}"
    yield ") -> ("
    for value in graph.outputs:
        yield f"    {known[value]}{_type(value)}"
    yield "):"
    for value in weights:
        tensor = value.const_value
        yield f"    weight {known[value]}" + (_type(value) if tensor is None else f": {_tensor(tensor)}")
    for node in graph:
        for value in node.outputs:
            if value not in known:
                known[value] = names.new(node.op_type)
        yield from _node_lines(node, known, names)


def _node_lines(node: ir.Node, known: Mapping[ir.Value, str], names: Names) -> Iterator[str]:
    inputs = ["" if value is None else known.get(value, value.name or "?") for value in node.inputs]
    outputs = ", ".join(known[value] if value.uses() or value.is_graph_output() else "_" for value in node.outputs)
    attributes = sorted(node.attributes.values(), key=lambda attribute: attribute.name)
    shown = ", ".join(f"{attribute.name}={_attribute(attribute)}" for attribute in attributes)
    operator = f"{node.domain}.{node.op_type}".lstrip(".") + (f".{node.overload}" if node.overload else "")
    yield f"    {outputs} = {operator}{f'<{shown}>' if shown else ''}({', '.join(inputs)})"
    for attribute in attributes:
        graphs: list[ir.Graph] = []
        if not attribute.is_ref() and attribute.type is ir.AttributeType.GRAPH:
            graphs = [attribute.as_graph()]
        elif not attribute.is_ref() and attribute.type is ir.AttributeType.GRAPHS:
            graphs = list(attribute.as_graphs())
        for graph in graphs:
            yield from (f"        {line}" for line in _graph_lines(attribute.name, graph, known, names))


def _attribute(attribute: ir.Attr) -> str:
    if attribute.is_ref():
        return f"@{attribute.ref_attr_name}"
    value: Any = attribute.value
    kinds = ir.AttributeType
    if attribute.type in (kinds.GRAPH, kinds.GRAPHS):
        return "..."
    if attribute.type is kinds.TENSOR:
        return _tensor(value)
    if attribute.type is kinds.FLOAT:
        return str(np.float32(value))
    if attribute.type is kinds.FLOATS:
        return f"[{', '.join(str(np.float32(item)) for item in value)}]"
    return repr(list(value)) if isinstance(value, (list, tuple)) else repr(value)


def _tensor(tensor: ir.TensorProtocol) -> str:
    shape = ", ".join(map(str, tensor.shape))
    text = f"{_dtype(tensor.dtype)}[{shape}]"
    if isinstance(tensor, ir.ExternalTensor) or tensor.size > _MOST_ELEMENTS:
        return text
    return f"{text}{{{', '.join(str(item) for item in tensor.numpy().flatten().tolist())}}}"


def _type(value: ir.Value) -> str:
    if value.dtype is None and value.shape is None:
        return ""
    dtype = "?" if value.dtype is None else _dtype(value.dtype)
    sizes = "?" if value.shape is None else ", ".join("?" if _open(size) else str(size) for size in value.shape)
    return f": {dtype}[{sizes}]"


def _open(size: int | ir.SymbolicDim) -> bool:
    return not isinstance(size, int) and size.value is None


def _dtype(dtype: ir.DataType) -> str:
    return {"FLOAT": "float32", "DOUBLE": "float64"}.get(dtype.name, dtype.name.lower())
