"""Attention over a dequantized KV cache, fused: the passes for torch.

torch has a base class for passes over graph modules, `torch.fx.passes.infra.pass_base.PassBase`, and none for passes
over exported programs. There the convention is executorch's (and litert's): a callable that takes a program and returns
an object with `exported_program` and `modified`. `FuseQuantizedSdpaInProgram` follows it and needs neither; where
executorch is in use, it counts as one of its own `ExportedProgramPassBase`.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any, cast

from torch.export import ExportedProgram
from torch.fx import Graph, GraphModule, Node
from torch.fx.passes.infra.pass_base import PassBase, PassResult

from graphrewrite.fx.prepare import functional_copy
from graphrewrite.fx.reader import FxGraph
from graphrewrite.garbage import collection_paused
from graphrewrite.matcher import Findings, find_sites
from graphrewrite.passes.reporting import CurrentTokens, ReportingPass
from graphrewrite.report import Report

# Where executorch has its base class, by version.
_EXECUTORCH_BASES = ("executorch.exir.pass_base", "executorch.exir.edge_program_manager_pass_base")


@dataclass(frozen=True)
class ExportedProgramPassResult:
    """The program after a pass, and whether it is another one than before."""

    exported_program: ExportedProgram
    modified: bool


class FuseQuantizedSdpaInProgram(ReportingPass):
    """Fuses attention over a dequantized KV cache in an ExportedProgram, decomposed or not.

    The program is not changed: the result holds a functionalized copy, or the program itself where nothing is fused.
    Parameters are shared, the buffers that the program writes are copied. Arguments and reports as in `ReportingPass`.

    Raises (when run):
        RequirementNotMet: fewer than `require` fused attentions.
    """

    def __init__(self, *, current_tokens: CurrentTokens = "exact", require: int | None = None) -> None:
        super().__init__(current_tokens=current_tokens, require=require)
        for name in _EXECUTORCH_BASES:
            base: Any = getattr(sys.modules.get(name), "ExportedProgramPassBase", None)
            if base is not None:
                base.register(type(self))

    def __call__(self, exported_program: ExportedProgram) -> ExportedProgramPassResult:
        """Runs the pass."""
        return self.call(exported_program)

    def call(self, exported_program: ExportedProgram) -> ExportedProgramPassResult:
        """Runs the pass."""
        with collection_paused():
            copy, findings = self._find(exported_program)
            self._record(findings.report)
            if not findings.sites:
                return ExportedProgramPassResult(exported_program, modified=False)
            from graphrewrite.fx.emitter import emit

            emit(copy, findings.sites)
            return ExportedProgramPassResult(copy, modified=True)

    def explain(self, exported_program: ExportedProgram) -> Report:
        """What a run would do."""
        with collection_paused():
            return self._find(exported_program)[1].report

    def _find(self, program: ExportedProgram) -> tuple[ExportedProgram, Findings[Node]]:
        copy = functional_copy(program)
        return copy, find_sites(FxGraph(copy), current_tokens=self.current_tokens, passes=(self.PASS,))


class SeparateCacheUpdateInProgram(FuseQuantizedSdpaInProgram):
    """Gives attention over float caches that the program writes operators of their own; see
    `graphrewrite.passes.SeparateCacheUpdate`."""

    PASS = "separate_cache_update"


class FuseQuantizedSdpaInGraphModule(ReportingPass, PassBase):
    """Fuses attention over a dequantized KV cache in a functional graph module, in place.

    The module must be functional with `val` in its nodes' meta, as are the graph modules of `run_decompositions` and of
    AOTAutograd. Of an ExportedProgram the signature has to be updated afterwards, as executorch's `transform` does:
    outputs keep their order and not their names. Arguments and reports as in `ReportingPass`.

    Raises (when run):
        RequirementNotMet: fewer than `require` fused attentions; the module is as it was.
    """

    def call(self, graph_module: GraphModule) -> PassResult:
        """Runs the pass."""
        program = cast("ExportedProgram", _GraphModuleAsProgram(graph_module))
        with collection_paused():
            findings = find_sites(FxGraph(program), current_tokens=self.current_tokens, passes=(self.PASS,))
            self._record(findings.report)
            if findings.sites:
                from graphrewrite.fx.emitter import emit

                emit(program, findings.sites)
        return PassResult(graph_module, bool(findings.sites))


class _GraphModuleAsProgram:
    """As much of an ExportedProgram as the reader and the emitter look at. It has no signature to keep."""

    def __init__(self, graph_module: GraphModule) -> None:
        self.graph_module = graph_module
        self.graph_signature = self
        self.input_specs: tuple[Any, ...] = ()
        self.constants: dict[str, Any] = {}

    @property
    def graph(self) -> Graph:
        return self.graph_module.graph

    def get_replace_hook(self) -> Any:
        return lambda old, new, user: None

    def validate(self) -> None:
        pass
