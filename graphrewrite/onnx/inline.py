"""Opening the functions of a model that hold attention, whose bodies do not say what they are given."""

from __future__ import annotations

import onnx_ir as ir
import onnx_ir.passes.common as common_passes

from graphrewrite.onnx.reader import CORES, OWN_BODIES

__all__ = ["holds_attention", "inline_attention"]


def inline_attention(model: ir.Model) -> bool:
    """Inline, in place, the functions in which attention stands, and those that call them. Whether there were any.

    Functions of the source operators and of ours stay: their calls are what is read.
    """
    opened: set[ir.OperatorIdentifier] = set()
    while found := {
        name
        for name, function in model.functions.items()
        if name not in opened and (holds_attention(function) or _calls(function, opened))
    }:
        opened |= found
    if opened:
        common_passes.InlinePass(lambda function: function.identifier() in opened)(model)
    return bool(opened)


def holds_attention(function: ir.Function) -> bool:
    """Whether an operator that attends, or a softmax between two products of matrices, stands in the function."""
    if function.domain in OWN_BODIES:
        return False
    operators = [f"{node.domain}.{node.op_type}" for node in ir.traversal.RecursiveGraphIterator(function)]
    return any(name in CORES for name in operators) or (".Softmax" in operators and operators.count(".MatMul") > 1)


def _calls(function: ir.Function, opened: set[ir.OperatorIdentifier]) -> bool:
    nodes = ir.traversal.RecursiveGraphIterator(function)
    return function.domain not in OWN_BODIES and any(node.op_identifier() in opened for node in nodes)
