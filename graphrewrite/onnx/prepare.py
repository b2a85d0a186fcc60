"""The copy of an ONNX model that is matched and rewritten."""

from __future__ import annotations

import onnx_ir as ir
import onnx_ir.passes.common as common_passes


def with_shapes(model: ir.Model) -> ir.Model:
    """A copy whose values have types and shapes, inferred where the model does not say them. Weights are shared."""
    copy = model.clone()
    nodes = ir.traversal.RecursiveGraphIterator(copy.graph)
    if any(value.dtype is None or value.shape is None for node in nodes for value in node.outputs):
        # Inference reports on what it cannot infer and leaves that unknown, which the matcher then refuses by name.
        common_passes.ShapeInferencePass()(copy)
    return copy
