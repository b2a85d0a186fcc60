"""Rewriting and explaining models of every kind."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, cast

import onnx
import onnx_ir as ir

from graphrewrite.errors import InputError, RequirementNotMet
from graphrewrite.matcher import find_sites
from graphrewrite.models import LoadedModel, ModelLike, load
from graphrewrite.report import Report, RewriteResult

if TYPE_CHECKING:
    from torch.export import ExportedProgram

PASSES = ("fuse_quantized_sdpa",)
CurrentTokens = Literal["exact", "quantized"]


def rewrite(
    model: ModelLike,
    *,
    passes: Sequence[str] = PASSES,
    current_tokens: CurrentTokens = "exact",
    require: int | None = None,
    dry_run: bool = False,
) -> RewriteResult[LoadedModel]:
    """Replace attention over a dequantized KV cache by operators that read the cache in place.

    Args:
        model: an ExportedProgram, an ONNX model, or the path of one. It is not changed.
        passes: names of the passes to run, in order. "fuse_quantized_sdpa" is UpdateQuantizedCache + CustomSdpa.
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
    _check_options(passes, current_tokens, require)
    loaded = load(model)
    if isinstance(loaded, onnx.ModelProto):
        result = _rewrite_onnx(_deserialize(loaded), current_tokens, require, dry_run)
        changed = bool(result.report.sites) and not dry_run
        return RewriteResult(ir.to_proto(result.model) if changed else loaded, result.report)
    if isinstance(loaded, ir.Model):
        return cast("RewriteResult[LoadedModel]", _rewrite_onnx(loaded, current_tokens, require, dry_run))
    return cast("RewriteResult[LoadedModel]", _rewrite_fx(loaded, current_tokens, require, dry_run))


def explain(model: ModelLike) -> Report:
    """What `rewrite` would do to `model`, and for each attention it would leave alone, why."""
    return rewrite(model, dry_run=True).report


def _check_options(passes: Sequence[str], current_tokens: str, require: int | None) -> None:
    sequence = isinstance(passes, Sequence) and not isinstance(passes, str)
    if not sequence or not passes or any(name not in PASSES for name in passes):
        raise InputError(f"passes: {passes!r} is not a non-empty sequence of names out of {', '.join(PASSES)}")
    if current_tokens not in ("exact", "quantized"):
        raise InputError(f'current_tokens: {current_tokens!r} is neither "exact" nor "quantized"')
    if require is not None and (isinstance(require, bool) or not isinstance(require, int) or require < 0):
        raise InputError(f"require: {require!r} is not a number of sites")


def _check_requirement(report: Report, require: int | None) -> None:
    if require is None:
        return
    fused = len(report.sites) + report.already_fused
    if fused < require:
        raise RequirementNotMet(
            f"{require} fused attentions are required and {fused} found: {report.summary()}", report
        )


def _deserialize(model: onnx.ModelProto) -> ir.Model:
    try:
        return ir.from_proto(model)
    except Exception as error:  # onnx_ir raises many types for a proto that is not a sound model
        raise InputError(f"the ModelProto is not a sound model ({type(error).__name__}: {error})") from error


def _rewrite_onnx(
    model: ir.Model, current_tokens: CurrentTokens, require: int | None, dry_run: bool
) -> RewriteResult[ir.Model]:
    from graphrewrite.onnx.prepare import with_shapes
    from graphrewrite.onnx.reader import OnnxGraph

    copy = with_shapes(model)
    findings = find_sites(OnnxGraph(copy), current_tokens=current_tokens)
    _check_requirement(findings.report, require)
    if dry_run or not findings.sites:
        return RewriteResult(model, findings.report)
    from graphrewrite.onnx.emitter import emit

    emit(copy, findings.sites)
    return RewriteResult(copy, findings.report)


def _rewrite_fx(
    program: ExportedProgram, current_tokens: CurrentTokens, require: int | None, dry_run: bool
) -> RewriteResult[ExportedProgram]:
    from graphrewrite.fx.prepare import functional_copy
    from graphrewrite.fx.reader import FxGraph

    copy = functional_copy(program)
    findings = find_sites(FxGraph(copy), current_tokens=current_tokens)
    _check_requirement(findings.report, require)
    if dry_run or not findings.sites:
        return RewriteResult(program, findings.report)
    from graphrewrite.fx.emitter import emit

    emit(copy, findings.sites)
    return RewriteResult(copy, findings.report)
