"""A backend for `torch.compile` that fuses attention over a quantized KV cache and runs the result.

    compiled = torch.compile(model, backend=CompileBackend())       # or backend="graphrewrite"

AOTAutograd makes the traced graph functional, as `run_decompositions` does for an exported program, and the pass for
graph modules rewrites it. Buffers come in as inputs of that graph; AOTAutograd copies the new caches back into them
after each call, so that a call also costs a copy of the caches' bytes. Where that matters, export instead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch._dynamo.backends.common import aot_autograd
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch.fx import GraphModule

from graphrewrite.fx.passes import FuseQuantizedSdpaInGraphModule
from graphrewrite.passes.reporting import CurrentTokens
from graphrewrite.report import Report

Compiled = Callable[..., Any]


class CompileBackend:
    """A callable for `torch.compile(backend=...)`.

    Only graphs for inference are rewritten, those traced under `torch.no_grad` or `torch.inference_mode` or of tensors
    that need no gradient; the fused operators have none.

    Args:
        current_tokens, require: as in `FuseQuantizedSdpaInGraphModule`; `require` is of each graph that is compiled, so
            it goes with `fullgraph=True`.
        inner: compiles the rewritten graph, given it and its inputs; None runs it as it is, operator by operator.

    Attributes:
        reports: one of each graph that was compiled, in order. A model with graph breaks, or called with other shapes,
            has several.

    Raises (when a graph is compiled):
        RequirementNotMet: as the cause of torch's BackendCompilerFailed.
    """

    def __init__(
        self,
        *,
        current_tokens: CurrentTokens = "exact",
        require: int | None = None,
        inner: Callable[[GraphModule, Sequence[Any]], Compiled] | None = None,
    ) -> None:
        self._fuse = FuseQuantizedSdpaInGraphModule(current_tokens=current_tokens, require=require)
        self._inner = inner
        self._aot: Any = aot_autograd(fw_compiler=_as_it_is, inference_compiler=self._rewritten, decompositions={})

    @property
    def reports(self) -> list[Report]:
        return self._fuse.reports

    def __call__(self, graph_module: GraphModule, example_inputs: Sequence[Any]) -> Compiled:
        """Compiles a graph that torch.compile traced."""
        compiled: Compiled = self._aot(graph_module, example_inputs)
        return compiled

    def _rewritten(self, graph_module: GraphModule, example_inputs: Sequence[Any]) -> Compiled:
        self._fuse(graph_module)
        if self._inner is not None:
            return self._inner(graph_module, example_inputs)
        return _as_it_is(graph_module, example_inputs)


def backend(graph_module: GraphModule, example_inputs: Sequence[Any]) -> Compiled:
    """The backend that `torch.compile(model, backend="graphrewrite")` finds, with the defaults of `CompileBackend`."""
    return CompileBackend()(graph_module, example_inputs)


def _as_it_is(graph_module: GraphModule, example_inputs: Sequence[Any]) -> Compiled:
    boxed: Compiled = make_boxed_func(graph_module.forward)
    return boxed
