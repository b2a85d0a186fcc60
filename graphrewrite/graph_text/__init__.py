"""Graphs as text that a reviewer can read in a diff: one line a node, and the same wherever and whenever it is made.

Inputs, outputs and weights keep their names. Every other value is named after its operator and counted in the order of
the graph (`add`, `add_1`), and so are the symbols of torch's open sizes (`s0`, `u0`): the names that exporters give
depend on what else they did before. There are no memory addresses, no positions in source files and no weights' values.
"""

from __future__ import annotations

import importlib

from graphrewrite.errors import InputError

# Found by name, so that no library is imported that the graph does not come from.
_WRITERS = {
    ("torch", "ExportedProgram"): ("torch_text", "program_text"),
    ("torch", "GraphModule"): ("torch_text", "module_text"),
    ("onnx", "ModelProto"): ("onnx_text", "proto_text"),
    ("onnx_ir", "Model"): ("onnx_text", "model_text"),
    ("builtins", "str"): ("mlir_text", "mlir_text"),
}


def graph_text(graph: object) -> str:
    """Returns the text of a graph, ending in a line feed.

    Args:
        graph: a torch.export.ExportedProgram or torch.fx.GraphModule; an onnx.ModelProto or onnx_ir.Model; an MLIR
            module or operation, or the text of one.

    Raises:
        InputError: it is none of these.
    """
    kind = type(graph)
    bases = [(base.__module__.partition(".")[0], base.__qualname__.rpartition(".")[2]) for base in kind.__mro__]
    found = next((_WRITERS[base] for base in bases if base in _WRITERS), None)
    if found is None and hasattr(getattr(graph, "operation", graph), "get_asm"):
        found = ("mlir_text", "operation_text")
    if found is None:
        raise InputError(
            f"a {kind.__module__}.{kind.__qualname__} is not a graph: give a torch.export.ExportedProgram, a "
            "torch.fx.GraphModule, an onnx.ModelProto, an onnx_ir.Model, or an MLIR module or its text"
        )
    module, function = found
    text: str = getattr(importlib.import_module(f"{__name__}.{module}"), function)(graph)
    return text
