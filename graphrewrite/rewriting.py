"""Rewriting and explaining models of every kind, with the passes of `graphrewrite.passes`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import onnx
import onnx_ir as ir

from graphrewrite.errors import InputError
from graphrewrite.garbage import collection_paused
from graphrewrite.models import LoadedModel, ModelLike, load
from graphrewrite.passes import FuseQuantizedSdpa, SeparateCacheUpdate
from graphrewrite.passes.reporting import CurrentTokens, check_requirement, checked_names, joined
from graphrewrite.report import Report, RewriteResult

if TYPE_CHECKING:
    from torch.export import ExportedProgram

PASSES = ("fuse_quantized_sdpa", "separate_cache_update")
DEFAULT_PASSES = PASSES[:1]


def rewrite(
    model: ModelLike,
    *,
    passes: Sequence[str] = DEFAULT_PASSES,
    current_tokens: CurrentTokens = "exact",
    require: int | None = None,
    dry_run: bool = False,
) -> RewriteResult[LoadedModel]:
    """Replace attention over a dequantized KV cache by operators that read the cache in place.

    Args:
        model: an ExportedProgram, an ONNX model, or the path of one. It is not changed.
        passes: names of the passes to run, in order. "fuse_quantized_sdpa" is UpdateQuantizedCache + CustomSdpa, for
            attention over a dequantized cache; "separate_cache_update" is UpdateCache + CustomSdpa, for attention over
            a float cache that the graph writes.
        current_tokens: how the keys and values of the current tokens are read where the source reads them exactly:
            "exact" keeps that (the result equals the source), "quantized" reads them back from the cache (lossy).
        require: the least number of attentions that must be fused in the result.
        dry_run: decide and report everything, change nothing.

    Returns:
        the rewritten model, of the kind given (for a path, of the kind the file holds), and the report. Where nothing
        was rewritten the model is the one given.

    Raises:
        InputError: not a model, or an argument out of range.
        RequirementNotMet: fewer than `require` sites; carries the report.
    """
    names = checked_names(passes, PASSES)
    FuseQuantizedSdpa(current_tokens=current_tokens, require=require)  # the same bounds, before anything is read
    loaded = load(model)
    if isinstance(loaded, (onnx.ModelProto, ir.Model)):
        rewritten, report = _rewrite_onnx(loaded, names, current_tokens, dry_run, owned=loaded is not model)
    else:
        rewritten, report = _rewrite_fx(loaded, names, current_tokens, dry_run)
    check_requirement(report, require)
    return RewriteResult(rewritten, report)


def explain(model: ModelLike) -> Report:
    """What `rewrite` would do to `model`, and for each attention it would leave alone, why."""
    return rewrite(model, dry_run=True).report


def _rewrite_onnx(
    model: onnx.ModelProto | ir.Model, names: Sequence[str], current_tokens: CurrentTokens, dry_run: bool, owned: bool
) -> tuple[LoadedModel, Report]:
    """Rewrites in place what is not the caller's: what was read from a file or made of a proto. Of a model, a copy."""
    from graphrewrite.onnx.inline import holds_attention, inline_attention

    with collection_paused():
        classes = {one.PASS: one for one in (FuseQuantizedSdpa, SeparateCacheUpdate)}
        passes = [classes[name](current_tokens=current_tokens) for name in names]
        graph = _deserialize(model) if isinstance(model, onnx.ModelProto) else model
        opens_functions = any(map(holds_attention, graph.functions.values()))
        if graph is model and (opens_functions or not (owned or dry_run)):
            graph = _clone(graph)
        if opens_functions:
            inline_attention(graph)
        if dry_run:
            return model, joined([one.explain(graph) for one in passes])
        modified = [one(graph).modified for one in passes]
        report = joined([one.report for one in passes])
        if not any(modified):
            return model, report
        return ir.to_proto(graph) if isinstance(model, onnx.ModelProto) else graph, report


def _rewrite_fx(
    program: ExportedProgram, names: Sequence[str], current_tokens: CurrentTokens, dry_run: bool
) -> tuple[LoadedModel, Report]:
    from graphrewrite.passes import FuseQuantizedSdpaInProgram, SeparateCacheUpdateInProgram

    classes = {one.PASS: one for one in (FuseQuantizedSdpaInProgram, SeparateCacheUpdateInProgram)}
    passes = [classes[name](current_tokens=current_tokens) for name in names]
    if dry_run:
        return program, joined([one.explain(program) for one in passes])
    for one in passes:
        program = one(program).exported_program
    return program, joined([one.report for one in passes])


def _deserialize(model: onnx.ModelProto) -> ir.Model:
    try:
        return ir.from_proto(model)
    except Exception as error:  # onnx_ir raises many types for a proto that is not a sound model
        raise InputError(f"the ModelProto is not a sound model ({type(error).__name__}: {error})") from error


def _clone(model: ir.Model) -> ir.Model:
    from graphrewrite.onnx.prepare import check_sound

    check_sound(model)  # a copy is made in the order of the nodes
    return model.clone()
