"""Custom operators of an exported program as ONNX nodes of their own domain.

torch.onnx translates the operators it knows. For the others, torch offers a symbolic operator that stands for one ONNX
node; every call of our own operators and of the recognised source operators is replaced by it here, in functional form:
operands become inputs in schema order, a SymInt an int64 scalar, constants attributes, mutated operands outputs.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from onnx_ir.tensor_adapters import from_torch_dtype
from torch.export import ExportedProgram
from torch.fx import Graph, Node
from torch.onnx.ops import _symbolic_impl

from graphrewrite.custom_ops.functions.signature import SOURCE_DOMAINS
from graphrewrite.custom_ops.schema import operators
from graphrewrite.errors import InputError
from graphrewrite.fx.calls import Call, call_of
from graphrewrite.fx.reader import FxGraph
from graphrewrite.source_calls import SOURCE_OPS
from graphrewrite.walk import narrow

_OWN = "graphrewrite."


@dataclass(frozen=True)
class _OnnxNode:
    """results: for each output of the ONNX node, which result of the FX node it is."""

    domain: str
    op_type: str
    operands: tuple[Any, ...]
    attributes: dict[str, Any]
    results: tuple[int, ...]


def symbolize(program: ExportedProgram) -> None:
    """Replace the custom operators of `program`, which must be functional, in place."""
    module = program.graph_module
    reader = FxGraph(program)
    with module._set_replace_hook(program.graph_signature.get_replace_hook()):
        for node in list(module.graph.nodes):
            onnx_node = _onnx_node(node, reader)
            if onnx_node is not None:
                with module.graph.inserting_before(node):
                    _replace(module.graph, node, onnx_node)
    module.graph.eliminate_dead_code()
    module.recompile()


def _onnx_node(node: Node, reader: FxGraph) -> _OnnxNode | None:
    call = call_of(node)
    if call is None:
        return None
    domain, _, op = call.op.partition(".")
    if call.op.startswith(_OWN):
        return _own_node(call, op)
    if call.op not in SOURCE_OPS or domain not in SOURCE_DOMAINS:
        return None
    if call.writes_view:
        name = reader.name(node)
        raise InputError(f"{name}: {call.op} writes into a view of a buffer; let the cache be a whole buffer")
    source = SOURCE_OPS[call.op]
    operands = [call.arguments[name] for name in source.operands]
    if op in ("dequantize_per_channel", "dequantize_per_token"):
        if operands[2] is not None and reader.dtype(operands[0]) == "int8" == reader.dtype(operands[2]):
            raise InputError(
                f"{reader.name(node)}: the zero points are subtracted in int8, where 127 - (-128) is -1; "
                "cast codes and zero points to a wider type before subtracting"
            )
        # Casts that lose nothing are left out: the node's meaning is (codes - zero_points) * scales in a type that
        # holds the difference, and the product of an integer of 9 bits and a float32 rounds alike from either width.
        operands = [operand if operand is None else narrow(reader, operand) for operand in operands]
    attributes = {name: call.arguments[name] for name in source.attributes}
    positions = {name: call.returns + index for index, name in enumerate(call.mutated)}
    own = iter(range(call.returns))
    results = tuple(positions[name] if name in positions else next(own) for name in source.results)
    return _OnnxNode(domain, op, tuple(operands), attributes, results)


def _own_node(call: Call, op: str) -> _OnnxNode:
    (schema,) = (schema for schema in operators().values() if schema.torch_name == op.removesuffix("_"))
    attributes = {attribute.name: call.arguments[attribute.name] for attribute in schema.attributes}
    # What is written follows the operator's own results, and one that has none returns None.
    written = {name: max(call.returns, 1) + index for index, name in enumerate(call.mutated)}
    own = iter(range(call.returns))
    results = []
    for output in schema.outputs:
        replaced = schema.inputs[output.like].name
        result = written.get(replaced) if op.endswith("_") and output.in_place else next(own)
        # torch has an empty tensor where an output is absent.
        is_absent = call.arguments[replaced] is None or (output.optional and attributes.get("scheme") == "static")
        if result is not None and not is_absent:
            results.append(result)
    operands = tuple(call.arguments[tensor.name] for tensor in schema.inputs)
    return _OnnxNode(_OWN.rstrip("."), schema.name, operands, attributes, tuple(results))


def _replace(graph: Graph, node: Node, onnx_node: _OnnxNode) -> None:
    values = node.meta["val"]
    values = tuple(values) if isinstance(values, (tuple, list)) else (values,)
    outputs = [values[index] for index in onnx_node.results]
    attributes = _symbolic_impl.EncodedAttrs.from_dict(
        {name: _attribute(value) for name, value in onnx_node.attributes.items() if value is not None}
    )
    symbolic = graph.call_function(
        torch.ops.onnx_symbolic._symbolic_multi_out.default,
        (
            [_as_tensor(graph, operand) for operand in onnx_node.operands],
            onnx_node.op_type,
            [from_torch_dtype(output.dtype).value for output in outputs],
        ),
        {
            "shapes": [_shape(graph, output, onnx_node.operands) for output in outputs],
            "attr_keys": attributes.attr_keys,
            "attr_types": attributes.attr_types,
            "attr_pos": attributes.attr_pos,
            "attr_ints": attributes.attr_ints,
            "attr_floats": attributes.attr_floats,
            "attr_strs": attributes.attr_strs,
            "metadata_props_keys": [],
            "metadata_props_values": [],
            "domain": onnx_node.domain,
            "version": 1,
        },
    )
    symbolic.meta = {**node.meta, "val": outputs}
    _take_over(graph, node, symbolic, onnx_node.results)


def _take_over(graph: Graph, node: Node, symbolic: Node, results: tuple[int, ...]) -> None:
    """Let the results of `symbolic` stand for those of `node`."""

    def output(result: int) -> Node:
        position = results.index(result)
        item = graph.call_function(operator.getitem, (symbolic, position))
        item.meta = {**node.meta, "val": symbolic.meta["val"][position]}
        return item

    if isinstance(node.meta["val"], (tuple, list)):
        for user in list(node.users):
            index = user.args[1]
            if user.target is operator.getitem and isinstance(index, int) and index in results:
                user.replace_all_uses_with(output(index))
    else:
        node.replace_all_uses_with(output(0))


def _as_tensor(graph: Graph, operand: Any) -> Any:
    is_symbol = isinstance(operand, Node) and isinstance(operand.meta["val"], torch.SymInt)
    if not (is_symbol or isinstance(operand, int)):
        return operand
    tensor = graph.call_function(torch.ops.aten.scalar_tensor.default, (operand,), {"dtype": torch.int64})
    tensor.meta["val"] = torch.empty((), dtype=torch.int64, device="meta")
    return tensor


def _shape(graph: Graph, output: torch.Tensor, operands: tuple[Any, ...]) -> list[Any]:
    """The sizes of an output, a symbolic one taken from an operand that has it."""
    tensors = [operand for operand in operands if isinstance(operand, Node)]
    tensors = [tensor for tensor in tensors if isinstance(tensor.meta["val"], torch.Tensor)]
    return [size if isinstance(size, int) else _symbolic_size(graph, size, tensors) for size in output.shape]


def _symbolic_size(graph: Graph, size: torch.SymInt, tensors: list[Node]) -> Node:
    for tensor in tensors:
        for axis, candidate in enumerate(tensor.meta["val"].shape):
            if str(candidate) == str(size):
                node = graph.call_function(torch.ops.aten.sym_size.int, (tensor, axis))
                node.meta["val"] = size
                return node
    raise AssertionError(f"no operand has the size {size}")


def _attribute(value: Any) -> Any:
    """The ONNX form of a constant argument: element types as ONNX numbers, truth values as integers."""
    if isinstance(value, str) and isinstance(getattr(torch, value, None), torch.dtype):
        return from_torch_dtype(getattr(torch, value)).value
    return int(value) if isinstance(value, bool) else value
