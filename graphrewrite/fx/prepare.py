"""The functional copy of an exported program that is matched and rewritten."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator

from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.export import ExportedProgram
from torch.fx import Graph

_TRAINING = "TRAINING"


def functional_copy(program: ExportedProgram) -> ExportedProgram:
    """A copy with its own graph and signature, functionalized; parameters and buffers are shared.

    A program straight from torch.export mutates its buffers in place; one from run_decompositions does not.
    """
    if program.dialect == _TRAINING:
        functional: ExportedProgram = program.run_decompositions({})
        return functional
    return ExportedProgram(
        root=program.graph_module,
        graph=copy.deepcopy(program.graph),
        graph_signature=copy.deepcopy(program.graph_signature),
        state_dict=dict(program.state_dict),
        range_constraints=dict(program.range_constraints),
        module_call_graph=copy.deepcopy(program.module_call_graph),
        example_inputs=program.example_inputs,
        constants=dict(program.constants),
        verifiers=program.verifiers,
    )


def fake_mode_of(graph: Graph) -> FakeTensorMode:
    """The mode of the fake values that the graph carries; a new one when it carries none."""
    for node in graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, FakeTensor):
            return value.fake_mode
    return FakeTensorMode()


@contextlib.contextmanager
def kept_shape_environment(graph: Graph) -> Iterator[None]:
    """Leaves no unbound symbols behind in the shape environment, which a program shares with all its copies.

    torch.onnx's type promotion pass creates symbols for values such as `position.item()` and never binds them; the next
    trace of any copy, a second export for one, then fails on them.
    """
    environment = fake_mode_of(graph).shape_env
    pending = None if environment is None else list(environment.pending_fresh_unbacked_symbols)
    try:
        yield
    finally:
        if environment is not None and pending is not None:
            environment.pending_fresh_unbacked_symbols[:] = pending
