"""Reading an exported program's graph into the vocabulary.

The graph must be functional, that is, come from `run_decompositions`: before that, an in-place operator is a node
without users and no value says what the cache holds.
"""

from __future__ import annotations

import operator
from collections.abc import Hashable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.fx import Node

from graphrewrite.fx.calls import Call, call_of, dtype_name, result_of, source_call_of
from graphrewrite.report import Mismatch
from graphrewrite.source_calls import ATTENTION_OPS, UNREAD_ATTENTION, attention_of_call, concept_of_call
from graphrewrite.vocabulary import Attention, Cast, Concept, Dequantize, Dim, Forward, Multiply, Permute, Subtract

_PASS_ON = {"aten.clone", "aten.alias", "aten.detach", "aten.contiguous", "aten.lift_fresh_copy"}
_RESHAPES = {"aten.view", "aten.reshape", "aten._unsafe_view", "aten.expand", "aten.slice"}
_CASTS = {"aten._to_copy", "aten.to"}
# Operators that give back the only element of their input.
_ONLY_ELEMENT = {"aten.select", "aten.item", "aten._local_scalar_dense", "aten.view", "aten.squeeze", "aten.unsqueeze"}


class FxGraph:
    """The `Graph` of an ExportedProgram; values are `torch.fx.Node`."""

    def __init__(self, program: ExportedProgram) -> None:
        self._graph = program.graph
        self._branches = [
            (name, module)
            for name, module in program.graph_module.named_modules()
            if name and isinstance(module, torch.fx.GraphModule)
        ]
        self._numbers = _number_values(self._graph)

    def attentions(self) -> Iterator[Attention[Node] | Mismatch]:
        for node in self._graph.nodes:
            call = call_of(node)
            if call is None:
                continue
            if call.op in UNREAD_ATTENTION:
                message = f"{call.op} is not read: {UNREAD_ATTENTION[call.op]}"
                yield Mismatch("attention-form", message, (self.name(node),))
                continue
            if call.writes_view and call.op in ATTENTION_OPS:
                message = f"{call.op} writes into a view of a buffer, of which its result is another part"
                yield Mismatch("writes-a-view", message, (self.name(node),), remedy="let the cache be a whole buffer")
                continue
            output = _first_result(node, call)
            source = source_call_of(output) if output is not None else None
            if output is None or source is None:
                continue
            attention = attention_of_call(source, output, self.name(node))
            if attention is not None:
                yield attention
        yield from self._in_branches()

    def _in_branches(self) -> Iterator[Mismatch]:
        """The cores in the branches and loop bodies of control flow, which are not entered."""
        for name, module in self._branches:
            for node in module.graph.nodes:
                call = call_of(node)
                if call is not None and call.op in (*ATTENTION_OPS, *UNREAD_ATTENTION):
                    message = f"{call.op} stands in {name}, a branch or loop body, which is not entered"
                    yield Mismatch("attention-in-branch", message, (f"{name}/{node.name}",))

    def already_fused(self) -> int:
        calls = (call_of(node) for node in self._graph.nodes)
        return sum(call is not None and call.op == "graphrewrite.custom_sdpa" for call in calls)

    def concept(self, value: Node) -> Concept[Node] | None:
        source = source_call_of(value)
        if source is not None:
            concept: Concept[Node] | None = concept_of_call(source)
            if isinstance(concept, Dequantize) and concept.zero_points is not None:
                # torch subtracts in the wider of the two types, which for int8 and int8 is int8.
                return replace(concept, wraps=self.dtype(concept.zero_points) == "int8")
            return concept
        call = call_of(value)
        return None if call is None else self._aten(value, call)

    def _aten(self, value: Node, call: Call) -> Concept[Node] | None:
        args = call.arguments
        source = args.get("self", args.get("input"))
        if not isinstance(source, Node):
            return None
        alike = self.shape(value) == self.shape(source) and self.dtype(value) == self.dtype(source)
        if alike and (call.op in _PASS_ON or call.op in _RESHAPES):  # `view` may also reinterpret the bits
            return Forward(source)
        if call.op in _CASTS:
            before, after = self.dtype(source), self.dtype(value)
            if before is None or after is None or self.shape(source) != self.shape(value):
                return None
            return Forward(source) if before == after else Cast(source, before, after)
        if call.op == "aten.permute":
            rank = len(args["dims"])
            return Permute(source, tuple(dim % rank for dim in args["dims"]))
        if call.op == "aten.transpose":
            return self._transpose(source, args["dim0"], args["dim1"])
        other = args.get("other")
        if isinstance(other, Node) and call.op in ("aten.sub", "aten.mul"):
            dtype = self.dtype(value) or ""
            if call.op == "aten.mul":
                return Multiply(source, other, dtype)
            return Subtract(source, other, dtype) if args["alpha"] == 1 else None
        return None

    def _transpose(self, source: Node, dim0: int, dim1: int) -> Permute[Node] | None:
        shape = self.shape(source)
        if shape is None:
            return None
        perm = list(range(len(shape)))
        perm[dim0], perm[dim1] = perm[dim1], perm[dim0]
        return Permute(source, tuple(axis % len(shape) for axis in perm))

    def shape(self, value: Node) -> tuple[Dim, ...] | None:
        tensor = value.meta.get("val")
        if not isinstance(tensor, torch.Tensor):
            return None
        return tuple(dim if isinstance(dim, int) else str(dim) for dim in tensor.shape)

    def dtype(self, value: Node) -> str | None:
        tensor = value.meta.get("val")
        return dtype_name(tensor.dtype) if isinstance(tensor, torch.Tensor) else None

    def scope(self, value: Node) -> Hashable:
        return None  # the bodies of branches are other graphs, which are not entered

    def same(self, left: Node, right: Node) -> bool:
        return self._numbers[left] == self._numbers[right]

    def name(self, value: Node) -> str:
        """The node's own name; for a functionalized operator, whose nodes are all named alike, module and operator."""
        node = result_of(value)[0]
        call = call_of(node)
        modules = list(node.meta.get("nn_module_stack", {}).values())
        if call is None or not call.mutated or not modules:
            return node.name
        return f"{modules[-1][0]}.{call.op.rpartition('.')[2]}".lstrip(".")


def _first_result(node: Node, call: Call) -> Node | None:
    """The value of the call's first result: the node itself, or the getitem that takes it out of several."""
    if not call.mutated and call.returns == 1:
        return node
    for user in node.users:
        if user.target is operator.getitem and user.args[1] == 0:
            return user
    return None


def _number_values(graph: torch.fx.Graph) -> dict[Node, int]:
    """Number the values so that equal computations of equal inputs share a number, in one pass.

    Operators are functional here, so equal operators on equal arguments give equal values, unless they are random. The
    only element of an integer tensor has the number of the tensor, whichever way it was taken out.
    """
    numbers: dict[Node, int] = {}
    known: dict[Any, int] = {}
    for node in graph.nodes:
        inner = _only_element(node)
        if inner is not None:
            numbers[node] = numbers[inner]
            continue
        if node.op != "call_function" or _is_random(node):
            key: Any = (node.op, node.name)
        else:
            # The shape too: that of an only element and of its tensor differ, and with them what is made of either.
            shape = tuple(map(str, getattr(node.meta.get("val"), "shape", ())))
            key = (node.target, _key(node.args, numbers), _key(node.kwargs, numbers), shape)
        numbers[node] = known.setdefault(key, len(known))
    return numbers


def _key(argument: Any, numbers: dict[Node, int]) -> Any:
    """A hashable form of an argument in which nodes stand as their numbers."""
    if isinstance(argument, Node):
        return ("value", numbers[argument])
    if isinstance(argument, (list, tuple)):
        return tuple(_key(item, numbers) for item in argument)
    if isinstance(argument, dict):
        return tuple(sorted((name, _key(item, numbers)) for name, item in argument.items()))
    # 1 == 1.0 == True in Python, and they are not the same argument.
    return (type(argument).__name__, repr(argument))


def _only_element(node: Node) -> Node | None:
    """The integer tensor of one element that `node` takes the element out of, or passes on in another shape or type."""
    call = call_of(node)
    if call is None or call.op not in _ONLY_ELEMENT | _CASTS:
        return None
    source = call.arguments.get("self")
    if not isinstance(source, Node) or not _is_one_integer(source.meta.get("val")):
        return None
    after = node.meta.get("val")
    return source if isinstance(after, (int, torch.SymInt)) or _is_one_integer(after) else None


def _is_one_integer(value: object) -> bool:
    if not isinstance(value, torch.Tensor) or value.dtype not in (torch.int64, torch.int32):
        return False
    return all(isinstance(size, int) and size == 1 for size in value.shape)


def _is_random(node: Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded in node.target.tags
