"""The copy of an ONNX model that is matched and rewritten."""

from __future__ import annotations

import onnx_ir as ir
import onnx_ir.passes.common as common_passes

from graphrewrite.errors import InputError


def with_shapes(model: ir.Model) -> ir.Model:
    """A copy whose values have types and shapes, inferred where the model does not say them. Weights are shared.

    Raises InputError for a graph with a cycle, a value that nothing makes, or nodes in no topological order.
    """
    try:
        copy = model.clone()
    except (RuntimeError, ValueError, KeyError) as error:
        raise InputError(
            "the graph is not sound: it has a cycle, reads a value that nothing makes, or its nodes are not in "
            "topological order (onnx_ir's graph.sort() mends the last)"
        ) from error
    nodes = ir.traversal.RecursiveGraphIterator(copy.graph)
    if any(value.dtype is None or value.shape is None for node in nodes for value in node.outputs):
        # Inference reports on what it cannot infer and leaves that unknown, which the matcher then refuses by name.
        common_passes.ShapeInferencePass()(copy)
    return copy
