"""Putting a model in order after a rewrite, in time linear in what was changed.

onnx_ir's own pass for nodes without use asks every node of the model, removes one at a time, and looks at all outputs
of the graph for each: with two outputs for each cache of a deep model that is quadratic. It would also remove what was
unused before.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator

import onnx_ir as ir


def remove_unused(nodes: Iterable[ir.Node]) -> None:
    """Removes those of `nodes` that nothing uses, then the nodes and initializers that only they used."""
    dead: dict[ir.Node, None] = {}
    pending = list(nodes)
    while pending:
        node = pending.pop()
        if node in dead or not all(_is_unused(output, dead) for output in node.outputs):
            continue
        dead[node] = None
        # A producer with another user that is still alive is met again when that one is found dead.
        pending.extend(producer for value in node.inputs if value is not None and (producer := value.producer()))
    inputs = {value: None for node in dead for value in node.inputs if value is not None}
    graphs: dict[ir.Graph | ir.Function, list[ir.Node]] = defaultdict(list)
    for node in dead:
        for index in range(len(node.inputs)):
            node.replace_input_with(index, None)
        if node.graph is not None:
            graphs[node.graph].append(node)
    for graph, group in graphs.items():
        graph.remove(group)
    for value in inputs:
        if value.is_initializer() and not (value.uses() or value.is_graph_output() or value.is_graph_input()):
            assert value.graph is not None and value.name is not None
            del value.graph.initializers[value.name]


def sort(model: ir.Model) -> None:
    """Puts nodes in topological order where new ones have broken it; a look is a sixth of the work of sorting."""
    for graph in model.graphs():
        if not _is_sorted(graph):
            graph.sort()


def _is_sorted(graph: ir.Graph) -> bool:
    ahead = set(graph)
    for node in graph:
        ahead.remove(node)
        if any(value is not None and value.producer() in ahead for value in _reads(node)):
            return False
    return True


def _reads(node: ir.Node) -> Iterator[ir.Value | None]:
    """What a node reads, and what its bodies do."""
    yield from node.inputs
    for attribute in node.attributes.values():
        if attribute.type in (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS) and not attribute.is_ref():
            bodies = [attribute.as_graph()] if attribute.type is ir.AttributeType.GRAPH else attribute.as_graphs()
            for body in bodies:
                for inner in ir.traversal.RecursiveGraphIterator(body):
                    yield from inner.inputs


def _is_unused(value: ir.Value, dead: dict[ir.Node, None]) -> bool:
    return not value.is_graph_output() and all(use.node in dead for use in value.uses())


class OutputSlots:
    """Where a value stands among the outputs of its graph, found without a search for each."""

    def __init__(self) -> None:
        self._slots: dict[ir.Graph | ir.Function, dict[ir.Value, list[int]]] = {}

    def replace(self, old: ir.Value, new: ir.Value) -> None:
        """Lets `new` be an output of the graph wherever `old` is one."""
        graph = old.graph
        if not old.is_graph_output() or graph is None:
            return
        if graph not in self._slots:
            slots: dict[ir.Value, list[int]] = defaultdict(list)
            for index, output in enumerate(graph.outputs):
                slots[output].append(index)
            self._slots[graph] = slots
        for index in self._slots[graph].pop(old):
            graph.outputs[index] = new
            self._slots[graph][new].append(index)
