"""Reading an exported program's graph into the vocabulary.

The graph must be functional, that is, come from `run_decompositions`: before that, an in-place operator is a node
without users and no value says what the cache holds.
"""

from __future__ import annotations

import operator
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import replace

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.fx import Node

from graphrewrite.cores import attention_of_softmax
from graphrewrite.fx.aten import concept_of_aten, concept_of_size, constant_of
from graphrewrite.fx.attention import SDPA, attention_of_sdpa
from graphrewrite.fx.calls import Call, call_of, dtype_name, result_of, source_call_of
from graphrewrite.fx.numbering import number_values
from graphrewrite.report import Mismatch
from graphrewrite.source_calls import ATTENTION_OPS, UNREAD_ATTENTION, attention_of_call, concept_of_call
from graphrewrite.vocabulary import Attention, Concept, Dequantize, Dim
from graphrewrite.walk import skip

_SOFTMAX = ("aten.softmax", "aten._softmax")
_OURS = ("graphrewrite.custom_sdpa", "graphrewrite.custom_quantized_sdpa")


class FxGraph:
    """The `Graph` of an ExportedProgram; values are `torch.fx.Node`."""

    def __init__(self, program: ExportedProgram) -> None:
        self._graph = program.graph
        self._branches = [
            (name, module)
            for name, module in program.graph_module.named_modules()
            if name and isinstance(module, torch.fx.GraphModule)
        ]
        self._constants = {
            spec.arg.name: program.constants[spec.target]
            for spec in program.graph_signature.input_specs
            if spec.kind is InputKind.CONSTANT_TENSOR and spec.target is not None
        }
        self._numbers = number_values(self._graph)

    def attentions(self) -> Iterator[Attention[Node] | Mismatch]:
        for node in self._graph.nodes:
            call = call_of(node)
            attention = None if call is None else self._attention(node, call)
            if attention is not None:
                yield attention
        yield from self._in_branches()

    def _attention(self, node: Node, call: Call) -> Attention[Node] | Mismatch | None:
        if call.op in UNREAD_ATTENTION:
            message = f"{call.op} is not read"
            return Mismatch("attention-form", message, (self.name(node),), remedy=UNREAD_ATTENTION[call.op])
        if call.op == SDPA:
            return attention_of_sdpa(self, node, call)
        if call.op in _SOFTMAX and self.concept(node) is not None:
            return attention_of_softmax(self, node)
        if call.op not in ATTENTION_OPS:
            return None
        if call.writes_view:
            message = f"{call.op} writes into a view of a buffer, of which its result is another part"
            return Mismatch("writes-a-view", message, (self.name(node),), remedy="let the cache be a whole buffer")
        output = _result(node, call, 0)
        source = None if output is None else source_call_of(output)
        if output is None or source is None:
            return None
        attention = attention_of_call(source, output, self.name(node))
        if not isinstance(attention, Attention) or attention.new_key is None:
            return attention
        written = {name: _result(node, call, call.returns + index) for index, name in enumerate(call.mutated)}
        return replace(attention, new_key_cache=written["key_cache"], new_value_cache=written["value_cache"])

    def _in_branches(self) -> Iterator[Mismatch]:
        """The cores in the branches and loop bodies of control flow, which are not entered."""
        for name, module in self._branches:
            for node in module.graph.nodes:
                call = call_of(node)
                if call is not None and call.op in (SDPA, *ATTENTION_OPS, *UNREAD_ATTENTION):
                    message = f"{call.op} stands in {name}, a branch or loop body, which is not entered"
                    yield Mismatch("attention-in-branch", message, (f"{name}/{node.name}",))

    def already_fused(self) -> int:
        calls = (call_of(node) for node in self._graph.nodes)
        return sum(call is not None and call.op in _OURS for call in calls)

    def concept(self, value: Node) -> Concept[Node] | None:
        source = source_call_of(value)
        if source is not None:
            concept: Concept[Node] | None = concept_of_call(source, self)
            if isinstance(concept, Dequantize) and concept.zero_points is not None and source.name.startswith("quant"):
                # torch subtracts in the wider of the two types, which for int8 and int8 is int8.
                return replace(concept, wraps=self.dtype(concept.zero_points.value) == "int8")
            return concept
        call = call_of(value)
        return concept_of_size(value) if call is None else concept_of_aten(self, value, call)

    def number(self, value: Node) -> float | None:
        value = skip(self, value)
        tensor = self._constants.get(value.name) if value.op == "placeholder" else None
        if not isinstance(tensor, torch.Tensor):
            return constant_of(value)
        number: float | None = tensor.item() if tensor.numel() == 1 else None
        return number

    def users(self, value: Node) -> Iterable[Node]:
        return tuple(value.users)

    def shape(self, value: Node) -> tuple[Dim, ...] | None:
        tensor = value.meta.get("val")
        if isinstance(tensor, (int, torch.SymInt)):
            return ()
        if not isinstance(tensor, torch.Tensor):
            return None
        return tuple(dim if isinstance(dim, int) else str(dim) for dim in tensor.shape)

    def dtype(self, value: Node) -> str | None:
        tensor = value.meta.get("val")
        return dtype_name(tensor.dtype) if isinstance(tensor, torch.Tensor) else None

    def scope(self, value: Node) -> Hashable:
        return None  # the bodies of branches are other graphs, which are not entered

    def key(self, value: Node) -> Hashable:
        return self._numbers[value]

    def name(self, value: Node) -> str:
        """The node's own name; for a functionalized operator, whose nodes are all named alike, module and operator."""
        node = result_of(value)[0]
        call = call_of(node)
        modules = list(node.meta.get("nn_module_stack", {}).values())
        if call is None or not call.mutated or not modules:
            return node.name
        return f"{modules[-1][0]}.{call.op.rpartition('.')[2]}".lstrip(".")


def _result(node: Node, call: Call, index: int) -> Node | None:
    """The value of one of the call's results: the node itself, or the getitem that takes it out of several."""
    if not call.mutated and call.returns == 1:
        return node
    for user in node.users:
        if user.target is operator.getitem and user.args[1] == index:
            return user
    return None
