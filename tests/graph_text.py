"""Graphs as text that a reviewer can read in a diff: one line a node, the same every time."""

from __future__ import annotations

import onnx
import onnx_ir as ir
from torch.export import ExportedProgram


def fx_text(program: ExportedProgram) -> str:
    """The program's nodes, then which buffer takes which value."""
    mutations = program.graph_signature.buffers_to_mutate.items()
    return "\n".join([str(program.graph), *(f"{buffer} <- {value}" for value, buffer in mutations)])


def onnx_text(model: ir.Model) -> str:
    """The model's main graph, without weights, metadata and the bodies of functions."""
    proto = ir.to_proto(model)
    del proto.functions[:], proto.metadata_props[:], proto.graph.metadata_props[:], proto.graph.value_info[:]
    for part in (*proto.graph.node, *proto.graph.input, *proto.graph.output):
        del part.metadata_props[:]
    for tensor in proto.graph.initializer:
        del tensor.metadata_props[:]
    return onnx.printer.to_text(proto)
