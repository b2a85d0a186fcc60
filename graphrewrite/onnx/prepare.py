"""An ONNX model made ready to be matched: sound, and with the types and shapes that the model does not state."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import onnx
import onnx_ir as ir

from graphrewrite.errors import InputError

# Smaller ones go along to the inference, which computes shapes from them.
_LARGEST_CONSTANT = 1024

_GRAPHS = (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS)

_State = tuple[ir.Value, ir.TypeProtocol | None, ir.Shape | None]


class Shapes:
    """What was inferred about a model. It is taken out of the model again unless `keep` is called."""

    def __init__(self) -> None:
        self.before: list[_State] = []

    def keep(self) -> None:
        """Lets the model have the inferred types and shapes."""
        self.before.clear()


@contextmanager
def with_shapes(model: ir.Model) -> Iterator[Shapes]:
    """Within, the values of `model` have types and shapes, inferred where the model does not say them.

    What cannot be inferred stays unknown. Afterwards the model is as it was, unless `keep` was called. Weights are not
    read.

    Raises:
        InputError: a cycle, a value that nothing makes, or nodes in no topological order.
    """
    check_sound(model)
    shapes = Shapes()
    try:
        if any(map(_is_open, _results(model.graph))):
            _infer(model, shapes.before)
        yield shapes
    finally:
        for value, type_, shape in shapes.before:
            value.type, value.shape = type_, shape


def check_sound(model: ir.Model) -> None:
    """Raises InputError for a cycle, a value that nothing makes, or nodes in no topological order."""
    _check_order(model.graph, set())


def _results(graph: ir.Graph) -> Iterator[ir.Value]:
    for node in ir.traversal.RecursiveGraphIterator(graph):
        yield from node.outputs


def _is_open(value: ir.Value) -> bool:
    """Whether something is not known that inference may find: the type, the shape, or a size without a name."""
    if value.dtype is None or value.shape is None:
        return True
    return any(not isinstance(size, int) and size.value is None for size in value.shape)


def _check_order(graph: ir.Graph, made: set[ir.Value]) -> None:
    """Checks that every input of a node is in `made`, the values there are before it; adds the graph's own."""
    made.update(graph.inputs)
    made.update(graph.initializers.values())
    for node in graph:
        for value in node.inputs:
            if value is not None and value not in made:
                raise InputError(
                    f"the graph is not sound: {node.op_type} {node.name or ''} reads {value.name!r}, which is not made "
                    "before it; it has a cycle, reads a value that nothing makes, or its nodes are not in topological "
                    "order (onnx_ir's graph.sort() mends the last)"
                )
        for body in _bodies(node):
            _check_order(body, made)
        made.update(node.outputs)


def _bodies(node: ir.Node) -> Iterator[ir.Graph]:
    for attribute in node.attributes.values():
        if attribute.type not in _GRAPHS:
            continue
        if attribute.type is ir.AttributeType.GRAPH:
            yield attribute.as_graph()
        else:
            yield from attribute.as_graphs()


def _infer(model: ir.Model, before: list[_State]) -> None:
    """Gives open values what onnx infers of them, and notes in `before` what they had."""
    skeleton = _skeleton(model)
    try:
        inferred = onnx.shape_inference.infer_shapes(skeleton, check_type=True, data_prop=True)
    except Exception:  # onnx raises several types for a node it finds wrong; the matcher then refuses by name
        return
    _adopt(model.graph, inferred.graph, before)


def _skeleton(model: ir.Model) -> onnx.ModelProto:
    """The model with its large weights as inputs: onnx takes at most 2 GB, and needs none of them."""
    skeleton = onnx.ModelProto(ir_version=model.ir_version)
    for domain, version in model.opset_imports.items():
        skeleton.opset_import.add(domain=domain, version=version)
    for function in model.functions.values():
        ir.serde.serialize_function_into(skeleton.functions.add(), function)
    graph = skeleton.graph
    graph.name = model.graph.name or "graph"
    for value in model.graph.initializers.values():
        tensor = value.const_value
        if tensor is None:
            ir.serde.serialize_value_into(graph.input.add(), value)
        elif tensor.nbytes > _LARGEST_CONSTANT:
            type_, shape = ir.TensorType(tensor.dtype), ir.Shape(tensor.shape.numpy())
            ir.serde.serialize_value_into(graph.input.add(), ir.Value(name=value.name, type=type_, shape=shape))
        else:
            ir.serde.serialize_tensor_into(graph.initializer.add(), tensor)
            graph.initializer[-1].name = value.name or ""
    for value in model.graph.inputs:
        if value.name not in model.graph.initializers:
            ir.serde.serialize_value_into(graph.input.add(), value)
    for value in model.graph.outputs:
        ir.serde.serialize_value_into(graph.output.add(), value)
    for node in model.graph:
        ir.serde.serialize_node_into(graph.node.add(), node)
        for value in node.outputs:
            if value.name and value.type is not None and not value.is_graph_output():
                ir.serde.serialize_value_into(graph.value_info.add(), value)
    return skeleton


def _adopt(graph: ir.Graph, inferred: onnx.GraphProto, before: list[_State]) -> None:
    """Gives the open values of `graph` what the same graph has after inference, and those of its bodies."""
    infos = {info.name: info.type for info in (*inferred.value_info, *inferred.output)}
    has_bodies = any(attribute.type in _GRAPHS for node in graph for attribute in node.attributes.values())
    for node in graph:
        for value in node.outputs:
            info = infos.get(value.name or "")
            if info is not None and _is_open(value):
                before.append((value, value.type, value.shape))
                _set_type(value, info)
    if not has_bodies:
        return
    for node, proto in zip(graph, inferred.node, strict=True):
        graphs = [body for attribute in proto.attribute for body in _proto_bodies(attribute)]
        for body, its in zip(_bodies(node), graphs, strict=True):
            _adopt(body, its, before)


def _set_type(value: ir.Value, info: onnx.TypeProto) -> None:
    if info.WhichOneof("value") != "tensor_type":
        value.type = ir.serde.deserialize_type_proto_for_type(info) or value.type
        value.shape = ir.serde.deserialize_type_proto_for_shape(info) or value.shape
        return
    tensor = info.tensor_type
    if tensor.elem_type:
        value.type = ir.TensorType(ir.DataType(tensor.elem_type))
    if tensor.HasField("shape"):
        value.shape = ir.Shape(
            [dim.dim_value if dim.HasField("dim_value") else (dim.dim_param or None) for dim in tensor.shape.dim]
        )


def _proto_bodies(attribute: onnx.AttributeProto) -> list[onnx.GraphProto]:
    return [attribute.g] if attribute.type == onnx.AttributeProto.GRAPH else list(attribute.graphs)
