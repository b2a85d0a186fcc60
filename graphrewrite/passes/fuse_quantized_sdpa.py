"""Attention over a KV cache, fused: the passes for ONNX models.

quantize(k), quantize(v) -> write both -> dequantize the whole caches -> attention
                                 becomes
UpdateQuantizedCache(k), UpdateQuantizedCache(v) -> CustomSdpa(q, caches, ...)
"""

from __future__ import annotations

import onnx_ir as ir

from graphrewrite.garbage import collection_paused
from graphrewrite.matcher import Findings, find_sites
from graphrewrite.onnx.prepare import with_shapes
from graphrewrite.passes.reporting import ReportingPass
from graphrewrite.report import Report


class FuseQuantizedSdpa(ReportingPass, ir.passes.InPlacePass):
    """Fuses attention over a dequantized KV cache in an `onnx_ir.Model`.

    Everything is decided before the model is touched: one in which nothing is fused stays as it was. Arguments and
    reports as in `ReportingPass`.

    Raises (when run):
        InputError: the graph is not sound: a cycle, a value that nothing makes, or no topological order.
        RequirementNotMet: fewer than `require` fused attentions; the model is as it was. In a `Sequential`, the cause
            of its `PassError`.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        with collection_paused(), with_shapes(model) as shapes:
            findings = self._find(model)
            self._record(findings.report)
            if not findings.sites:
                return ir.passes.PassResult(model, modified=False)
            from graphrewrite.onnx.emitter import emit

            shapes.keep()
            emit(model, findings.sites)
            return ir.passes.PassResult(model, modified=True)

    def explain(self, model: ir.Model) -> Report:
        """What a run would do. The model is left as it was."""
        with collection_paused(), with_shapes(model):
            return self._find(model).report

    def _find(self, model: ir.Model) -> Findings[ir.Value]:
        from graphrewrite.onnx.reader import OnnxGraph

        return find_sites(OnnxGraph(model), current_tokens=self.current_tokens, passes=(self.PASS,))


class SeparateCacheUpdate(FuseQuantizedSdpa):
    """Gives attention over float caches that are written in the graph operators of their own: UpdateCache for each
    cache, which writes in place, and CustomSdpa, which reads what is filled of it. Otherwise as `FuseQuantizedSdpa`."""

    PASS = "separate_cache_update"
