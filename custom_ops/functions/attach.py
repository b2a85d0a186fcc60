"""Gives a model the function bodies of the operators it uses.

Calls of one operator can differ in signature, and then need different bodies. ONNX has overloads for this (IR version
10), which onnxruntime honours from 1.28 on; up to 1.26 it silently gives every call the same body. So calls of an
operator with several signatures also carry the attribute `variant`, the number of their overload. Each body compares it
with its own number and fails when they differ: an old runtime without the kernel library refuses such a model instead
of computing something else. With the library the bodies are not used, and kernels ignore the attribute.
"""

from __future__ import annotations

from collections.abc import Iterator

import onnx_ir as ir

from graphrewrite.custom_ops.functions.bodies import MARK, attributes_of, body, has_body
from graphrewrite.custom_ops.functions.element_types import RETURNED_TYPES, label
from graphrewrite.custom_ops.functions.expression import VARIANT
from graphrewrite.custom_ops.functions.signature import DOMAIN, SOURCE_DOMAINS, Signature, signature_of
from graphrewrite.errors import InputError

__all__ = ["attach"]

_OVERLOADS_SINCE_IR_VERSION = 10


def attach(model: ir.Model) -> None:
    """Adds one function body per operator and signature that the model uses, in place.

    Covers the domain `graphrewrite` and the source domains `llama` and `quantized_decomposed`, in the main graph, its
    subgraphs and the model's functions. Bodies attached before are replaced; a function of a source operator that came
    with the model stays.

    Raises:
        InputError: an operator of the domain `graphrewrite` is unknown, the model's opset is too old, a signature
            cannot be read (see `signature_of`), or the inputs of a node do not go together. The model is unchanged.
    """
    calls = list(_calls(model))
    signatures = _read(model, calls)
    opset = model.opset_imports.get("", 0)
    functions: list[ir.Function] = []
    numbers: dict[ir.Node, int | None] = {}
    counts: dict[ir.Node, int] = {}
    for variants in signatures.values():
        for position, (signature, nodes) in enumerate(variants.items()):
            number = position if len(variants) > 1 else None
            functions.append(body(signature, opset, number))
            numbers.update((node, number) for node in nodes)
            counts.update((node, signature.outputs) for node in nodes if signature.outputs is not None)

    for identifier, function in list(model.functions.items()):
        if _is_ours(function):
            del model.functions[identifier]
    for function in functions:
        model.functions[function.identifier()] = function
    for node, chosen in numbers.items():
        _select(node, chosen)
        _drop_absent_inputs_at_the_end(node)
        _declare_returned_types(node)
    for node, count in counts.items():
        node.resize_outputs(count)
    if any(function.overload for function in functions):
        model.ir_version = max(model.ir_version, _OVERLOADS_SINCE_IR_VERSION)
    for graph_like, node in calls:
        graph_like.opset_imports.setdefault(node.domain, 1)


def _calls(model: ir.Model) -> Iterator[tuple[ir.Graph | ir.Function, ir.Node]]:
    """Every node of our and the source domains, with the graph or function whose opset imports apply to it."""
    owners: list[ir.Graph | ir.Function] = [model.graph, *model.functions.values()]
    for owner in owners:
        if isinstance(owner, ir.Function) and _is_ours(owner):
            continue
        for node in owner.all_nodes():
            if node.domain == DOMAIN or (node.domain in SOURCE_DOMAINS and has_body(node.domain, node.op_type)):
                yield owner, node


def _read(
    model: ir.Model, calls: list[tuple[ir.Graph | ir.Function, ir.Node]]
) -> dict[tuple[str, str], dict[Signature, list[ir.Node]]]:
    """The calls by operator and signature, both in order of first use."""
    kept = {(f.domain, f.name) for f in model.functions.values() if not _is_ours(f) and f.domain != DOMAIN}
    found: dict[tuple[str, str], dict[Signature, list[ir.Node]]] = {}
    for _, node in calls:
        operator = (node.domain, node.op_type)
        if operator in kept:
            continue
        if not has_body(*operator):
            raise InputError(f"there is no operator {node.domain}::{node.op_type}")
        # onnxruntime would not say so: it hands a kernel the attributes that the kernel asks for.
        unknown = sorted(set(node.attributes) - attributes_of(*operator) - {VARIANT})
        if unknown and node.domain == DOMAIN:
            raise InputError(f"{label(node)}: there is no attribute {', '.join(unknown)}")
        found.setdefault(operator, {}).setdefault(signature_of(node), []).append(node)
    return found


def _is_ours(function: ir.Function) -> bool:
    return MARK in function.metadata_props


def _declare_returned_types(node: ir.Node) -> None:
    returned = RETURNED_TYPES.get((node.domain, node.op_type))
    if returned is not None:
        for output in node.outputs:
            output.dtype = returned


def _drop_absent_inputs_at_the_end(node: ir.Node) -> None:
    """A body has no formal inputs for them."""
    while node.inputs and node.inputs[-1] is None:
        node.resize_inputs(len(node.inputs) - 1)


def _select(node: ir.Node, number: int | None) -> None:
    node.overload = str(number) if number else ""
    node.attributes.pop(VARIANT, None)
    if number is not None:
        node.attributes.add(ir.AttrInt64(VARIANT, number))
