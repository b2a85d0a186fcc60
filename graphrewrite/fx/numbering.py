"""Which values of an exported graph are one computation."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph, Node

from graphrewrite.fx.calls import call_of

# Operators that give back the only element of their input, or pass it on in another shape or type.
_ONLY_ELEMENT = {
    "aten._local_scalar_dense",
    "aten._to_copy",
    "aten.item",
    "aten.select",
    "aten.slice",
    "aten.squeeze",
    "aten.to",
    "aten.unsqueeze",
    "aten.view",
}


def number_values(graph: Graph) -> dict[Node, int]:
    """Number the values so that equal computations of equal inputs share a number, in one pass.

    Operators are functional here, so equal operators on equal arguments give equal values, unless they are random. The
    only element of an integer tensor has the number of the tensor, whichever way it was taken out.
    """
    numbers: dict[Node, int] = {}
    known: dict[Any, int] = {}
    for node in graph.nodes:
        inner = only_element(node)
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


def only_element(node: Node) -> Node | None:
    """The integer tensor of one element that `node` takes the element out of, or passes on in another shape or type."""
    call = call_of(node)
    if call is None or call.op not in _ONLY_ELEMENT:
        return None
    source = call.arguments.get("self")
    if not isinstance(source, Node) or not _is_one_integer(source.meta.get("val")):
        return None
    after = node.meta.get("val")
    return source if isinstance(after, (int, torch.SymInt)) or _is_one_integer(after) else None


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


def _is_one_integer(value: object) -> bool:
    if not isinstance(value, torch.Tensor) or value.dtype not in (torch.int64, torch.int32):
        return False
    return all(isinstance(size, int) and size == 1 for size in value.shape)


def _is_random(node: Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded in node.target.tags
