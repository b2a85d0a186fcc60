"""From a torch.export program to an ONNX model that a session can run step after step.

torch.onnx drops what a program writes to its buffers: a KV cache would become a constant. Here every buffer that the
program mutates becomes a graph input and a graph output, named after the buffer, and the model's metadata says which
belong together, so that `graphrewrite.Decoder`, or any other runtime, can allocate the caches and bind them.
"""

from __future__ import annotations

import ast
import json
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import onnx_ir as ir
import onnx_ir.passes.common as common_passes

from graphrewrite.cache_metadata import METADATA_KEY, CacheEntry
from graphrewrite.errors import InputError, reason
from graphrewrite.models import is_exported_program
from graphrewrite.onnx.reader import DOMAIN, OnnxGraph
from graphrewrite.vocabulary import CacheWrite, Layout

if TYPE_CHECKING:
    import torch
    from torch.export import ExportedProgram

OUTPUT_SUFFIX = ".out"
_SCOPES = "pkg.torch.onnx.name_scopes"
_TRACES = ("pkg.torch.onnx.stack_trace", "pkg.torch.onnx.fx_node")
_IR_VERSION = 10  # the newest that every supported onnxruntime reads


def export_onnx(
    exported_program: ExportedProgram,
    path: str | os.PathLike[str] | None = None,
    *,
    output_names: Sequence[str] | None = None,
    opset_version: int = 21,
) -> ir.Model:
    """Export a program, rewritten or not, with its caches as inputs and outputs.

    Our own operators become nodes of the domain `graphrewrite`; the recognised source operators (`llama`,
    `quantized_decomposed`) become nodes of their own domains. Both carry a function body in standard operators, so the
    model runs in an onnxruntime that has never heard of them.

    Args:
        exported_program: not changed.
        path: where to save the model as well, weights beside it when they are large.
        output_names: names of the program's own outputs, in order; by default those of its graph.
        opset_version: of the standard operators.

    Returns:
        the model. A mutated buffer `b` is the input `b` and the output `b.out`, and is listed in
        `metadata_props["graphrewrite.caches"]`.

    Raises:
        InputError: not an ExportedProgram; a mutated buffer does not start out filled with one value; or torch.onnx
            cannot translate an operator (named).
    """
    if not is_exported_program(exported_program):
        raise InputError(f"export_onnx takes an ExportedProgram, not a {type(exported_program).__qualname__}")
    model, buffers = _translate(exported_program, opset_version)
    _lift(model, buffers)
    _rename_outputs(model, output_names, len(buffers))
    _clean(model)
    caches = _entries(model, buffers, exported_program)
    model.metadata_props[METADATA_KEY] = json.dumps([asdict(cache) for cache in caches])
    if path is not None:
        from graphrewrite.files import save

        save(model, path)
    return model


def _translate(program: ExportedProgram, opset_version: int) -> tuple[ir.Model, dict[str, str]]:
    """The model as torch.onnx makes it, and which value each mutated buffer holds in the end: {buffer: value name}."""
    import torch

    from graphrewrite.fx.prepare import functional_copy, kept_shape_environment
    from graphrewrite.fx.symbolic import symbolize

    copy = functional_copy(program)
    symbolize(copy)
    try:
        # Unoptimized: optimization would remove the writes to the buffers, which nothing uses yet.
        with kept_shape_environment(copy.graph):
            exported = torch.onnx.export(copy, dynamo=True, optimize=False, opset_version=opset_version, verbose=False)
    except torch.onnx.OnnxExporterError as error:
        raise InputError(f"torch.onnx cannot export this program: {reason(error)}") from error
    assert exported is not None and exported.exported_program is not None
    signature = exported.exported_program.graph_signature
    if signature.user_inputs_to_mutate:
        names = ", ".join(sorted(signature.user_inputs_to_mutate.values()))
        raise InputError(f"the program writes to its inputs {names}; let them be buffers, which are lifted")
    return exported.model, {buffer: value for value, buffer in signature.buffers_to_mutate.items()}


def _lift(model: ir.Model, buffers: dict[str, str]) -> None:
    """Turn mutated buffers into graph inputs and, after the program's own, graph outputs."""
    graph = model.graph
    values = {value.name: value for node in graph for value in node.outputs}
    values.update({value.name: value for value in graph.inputs})
    for buffer, value_name in buffers.items():
        value = values[value_name]
        cache = graph.initializers.pop(buffer, None)
        if cache is None:  # written whole and never read, so it was no constant either
            cache = ir.Value(name=buffer, type=value.type, shape=value.shape)
        cache.const_value = None
        graph.inputs.append(cache)
        # An output of the program itself, or an input of it, needs a second name.
        if value.is_graph_output() or value.producer() is None:
            node = ir.node("Identity", [value])
            graph.append(node)
            value = node.outputs[0]
            value.type, value.shape = node.inputs[0].type, node.inputs[0].shape  # type: ignore[union-attr]
        value.name = f"{buffer}{OUTPUT_SUFFIX}"
        graph.outputs.append(value)


def _rename_outputs(model: ir.Model, names: Sequence[str] | None, caches: int) -> None:
    own = model.graph.outputs[: len(model.graph.outputs) - caches]
    if names is None:
        return
    if len(names) != len(own):
        raise InputError(f"output_names: {len(names)} names {list(names)} for {len(own)} outputs")
    for output, name in zip(own, names, strict=True):
        output.name = name


def _clean(model: ir.Model) -> None:
    """Fold and remove what the translation left behind, and attach the bodies of custom operators."""
    import onnxscript.optimizer

    from graphrewrite.custom_ops.functions import attach

    model.ir_version = _IR_VERSION
    # Folding alone: onnxscript's full optimizer tries its rewrite rules on every node, which for a model of 30 layers
    # takes ten times as long and leaves as many nodes.
    onnxscript.optimizer.fold_constants(model)
    common_passes.LiftConstantsToInitializersPass()(model)
    common_passes.CommonSubexpressionEliminationPass()(model)
    common_passes.IdentityEliminationPass()(model)
    common_passes.RemoveUnusedNodesPass()(model)
    _name_nodes(model)
    attach(model)
    common_passes.RemoveUnusedOpsetsPass()(model)


def _name_nodes(model: ir.Model) -> None:
    """Name the nodes of custom operators after the module they came from, and keep no path of this machine."""
    taken: Counter[str] = Counter()
    for node in model.graph:
        scopes = ast.literal_eval(node.metadata_props.get(_SCOPES, "[]"))
        for key in _TRACES:
            node.metadata_props.pop(key, None)
        if node.domain != "":
            module = scopes[-2] if len(scopes) > 1 else ""
            name = f"{module}.{node.op_type}".lstrip(".")
            taken[name] += 1
            node.name = name if taken[name] == 1 else f"{name}_{taken[name] - 1}"


def _entries(model: ir.Model, buffers: Iterable[str], program: ExportedProgram) -> list[CacheEntry]:
    graph = OnnxGraph(model)
    inputs = {value.name: value for value in model.graph.inputs}
    outputs = {value.name: value for value in model.graph.outputs}
    entries = []
    for name in buffers:
        cache, output = inputs[name], outputs[f"{name}{OUTPUT_SUFFIX}"]
        axis = _sequence_axis(graph, output)
        size = None if axis is None or cache.shape is None else cache.shape[axis]
        entries.append(
            CacheEntry(
                input=name,
                output=f"{name}{OUTPUT_SUFFIX}",
                fill=_fill(name, _buffer(program, name)),
                axis=axis,
                capacity=size if isinstance(size, int) else None,
                in_place=[node for node, _ in cache.uses()] == [output.producer()],
            )
        )
    return entries


def _sequence_axis(graph: OnnxGraph, value: ir.Value) -> int | None:
    """The axis along which the operator that makes `value` writes rows; None when it is not known to write any."""
    node = value.producer()
    if node is not None and node.domain == DOMAIN:
        layout = node.attributes.get("layout")
        return Layout(layout.as_string() if layout is not None else "BSNH").sequence_axis
    concept = graph.concept(value)
    return concept.axis if isinstance(concept, CacheWrite) else None


def _buffer(program: ExportedProgram, name: str) -> torch.Tensor:
    buffers: dict[str, torch.Tensor] = {**program.constants, **program.state_dict}
    return buffers[name]


def _fill(name: str, buffer: Any) -> float:
    if buffer.numel() == 0:
        return 0
    first = buffer.flatten()[0]
    if not bool((buffer == first).all()):
        raise InputError(
            f"the buffer {name} is written by the program and does not start out filled with one value; "
            "reset it before export"
        )
    number: float = first.item()
    return number
