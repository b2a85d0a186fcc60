"""The functional copy of an exported program that is matched and rewritten."""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Iterator

from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.export import ExportedProgram
from torch.fx import Graph

_TRAINING = "TRAINING"


def functional_copy(program: ExportedProgram) -> ExportedProgram:
    """A copy with its own graph and signature, functionalized. Parameters are shared; buffers that the program writes
    are copied, so that running one of the two leaves the caches of the other alone.

    A program straight from torch.export mutates its buffers in place; one from run_decompositions does not.
    """
    with _quiet():
        made = program.run_decompositions({}) if program.dialect == _TRAINING else _copy(program)
    for name in made.graph_signature.buffers_to_mutate.values():
        for tensors in (made.state_dict, made.constants):
            if name in tensors:
                tensors[name] = tensors[name].clone()
    return made


def _copy(program: ExportedProgram) -> ExportedProgram:
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


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without what torch warns of its own copying of tree specs."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*treespec", category=FutureWarning)
        yield


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
