"""The programs that the demo compares: exported and rewritten, in torch and as ONNX files."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import cast

import onnx
from torch.export import ExportedProgram

import graphrewrite as gr
from examples.smollm2.model import Decoder, export
from graphrewrite.cache_metadata import METADATA_KEY, read_caches
from graphrewrite.report import Report


@dataclass(frozen=True)
class TorchPrograms:
    """The exported program and the rewritten one, with caches of the same capacity."""

    before: ExportedProgram
    after: ExportedProgram
    report: Report


def build(model: Decoder, capacity: int) -> TorchPrograms:
    """Export the model with caches of a capacity and rewrite it.

    Raises RequirementNotMet when the attention of any layer is not recognised.
    """
    model.allocate(capacity)
    before = export(model).run_decompositions({})  # once, for the rewrite and for both exports
    result = gr.rewrite(before, require=model.config.layers)
    return TorchPrograms(before, cast(ExportedProgram, result.model), result.report)


def write_onnx(program: ExportedProgram, path: Path) -> Path:
    """Write a program as an ONNX file whose first output is ``logits``."""
    gr.export_onnx(program, path, output_names=["logits"])
    return path


def with_capacity(path: Path, capacity: int) -> Path:
    """Write, beside an exported model, the same model with caches of another capacity. It shares the weights' file.

    Only the declared sizes of the caches depend on the capacity: the graph itself reads it from their shapes.
    """
    model = onnx.load(str(path), load_external_data=False)
    entries = read_caches({prop.key: prop.value for prop in model.metadata_props})
    axes = {entry.input: entry.axis for entry in entries} | {entry.output: entry.axis for entry in entries}
    for value in [*model.graph.input, *model.graph.output]:
        if value.name in axes:
            value.type.tensor_type.shape.dim[axes[value.name]].dim_value = capacity
    # The shapes noted for intermediate values speak of the old capacity.
    del model.graph.value_info[:]
    for prop in model.metadata_props:
        if prop.key == METADATA_KEY:
            prop.value = json.dumps([asdict(replace(entry, capacity=capacity)) for entry in entries])
    target = path.with_name(f"{path.stem}-{capacity}.onnx")
    onnx.save(model, str(target))
    return target
