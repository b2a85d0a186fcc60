"""What calls of ATen operators, and the arithmetic of sizes, mean."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch.fx import Node

from graphrewrite.fx.calls import Call, call_of
from graphrewrite.fx.numbering import only_element
from graphrewrite.graph import Graph
from graphrewrite.positions import same_position, slots
from graphrewrite.source_calls import position
from graphrewrite.vocabulary import (
    AllHidden,
    Binary,
    CacheWrite,
    Cast,
    Clamp,
    Concept,
    Dim,
    Expand,
    Forward,
    Leading,
    MatMul,
    Permute,
    Range,
    Repeat,
    Reshape,
    Select,
    Size,
    Slots,
    Softmax,
    Unary,
)

_FxGraph = Graph[Node]
_FxConcept = Concept[Node]
_Reader = Callable[[_FxGraph, Node, dict[str, Any]], "_FxConcept | None"]

_PASS_ON = {"clone", "alias", "detach", "contiguous", "lift_fresh_copy"}
_RESHAPES = {"view", "reshape", "_unsafe_view", "squeeze", "unsqueeze", "flatten", "unflatten"}
_UNARY = {"tanh": "tanh", "logical_not": "not", "bitwise_not": "not", "isnan": "isnan", "round": "round"}
_BINARY = {"add": "+", "sub": "-", "mul": "*", "div": "/", "remainder": "%"}
_OF_SIZES: dict[Callable[..., Any], Any] = {operator.add: "+", operator.sub: "-"}


def concept_of_size(node: Node) -> _FxConcept | None:
    """The arithmetic of symbolic integers, which are calls of Python's operators."""
    sign = None if isinstance(node.target, str) else _OF_SIZES.get(node.target)
    if sign is None or len(node.args) != 2 or not all(isinstance(x, (Node, int)) for x in node.args):
        return None
    return Binary(sign, node.args[0], node.args[1], "int64")  # type: ignore[arg-type]


def concept_of_aten(graph: _FxGraph, value: Node, call: Call) -> _FxConcept | None:
    """What an ATen operator's result means; None where it has no meaning here."""
    namespace, _, name = call.op.partition(".")
    if namespace != "aten":
        return None
    inner = only_element(value)
    if inner is not None:
        return Forward(inner)
    args = call.arguments
    if name == "arange":
        return _range(args)
    if name == "where":
        return _select(args)
    if not isinstance(args.get("self", args.get("input")), Node):
        return None
    if name in _PASS_ON or name in _RESHAPES or name == "expand":
        return _in_another_shape(graph, value, name, args)
    if name in _UNARY:
        return _all_hidden(args["self"]) or Unary(_UNARY[name], args["self"])
    if name in _BINARY:
        return _binary(graph, value, _BINARY[name], args)
    read = _READERS.get(name)
    return None if read is None else read(graph, value, args)


def constant_of(node: Node) -> float | None:
    """The value of every element of a tensor that a call fills."""
    call = call_of(node)
    if call is None:
        return None
    match call.op:
        case "aten.full" | "aten.full_like":
            value = call.arguments["fill_value"]
        case "aten.scalar_tensor":
            value = call.arguments["s"]
        case "aten.zeros" | "aten.zeros_like":
            value = 0
        case "aten.ones" | "aten.ones_like":
            value = 1
        case _:
            return None
    return value if isinstance(value, (int, float)) else None


def _alike(graph: _FxGraph, left: Node, right: Node) -> bool:
    return graph.shape(left) == graph.shape(right) and graph.dtype(left) == graph.dtype(right)


def _in_another_shape(graph: _FxGraph, value: Node, name: str, args: dict[str, Any]) -> _FxConcept | None:
    source = args["self"]
    if graph.dtype(value) != graph.dtype(source):  # `view` may also reinterpret the bits
        return None
    if graph.shape(value) == graph.shape(source):
        return Forward(source)
    if name == "expand" and not _only_in_front(graph.shape(source), graph.shape(value)):
        return Expand(source)
    if name in _PASS_ON:
        return None
    return _batched_product(graph, value, source) or Reshape(source)


def _only_in_front(before: tuple[Dim, ...] | None, after: tuple[Dim, ...] | None) -> bool:
    """Whether axes of size 1 are added in front and nothing else."""
    return before is not None and after is not None and after == (*(1,) * (len(after) - len(before)), *before)


def _batched_product(graph: _FxGraph, value: Node, source: Node) -> MatMul[Node] | None:
    """[B,H,S,T] = view(bmm(view of [B,H,S,K], view of [B,H,K,T])), which `matmul` becomes when it is decomposed."""
    call = call_of(source)
    if call is None or call.op != "aten.bmm":
        return None
    operands = [_unmerged(graph, call.arguments[name]) for name in ("self", "mat2")]
    left, right = operands
    shapes = [graph.shape(each) if each is not None else None for each in (value, left, right)]
    if left is None or right is None or any(shape is None or len(shape) != 4 for shape in shapes):
        return None
    return MatMul(left, right) if len({shape[:2] for shape in shapes if shape is not None}) == 1 else None


def _unmerged(graph: _FxGraph, node: Node) -> Node | None:
    """The 4-D value of which `node` merges the first two axes."""
    concept = graph.concept(node)
    if not isinstance(concept, Reshape):
        return None
    before, after = graph.shape(concept.input), graph.shape(node)
    merges = before is not None and after is not None and len(before) == 4 and before[2:] == after[1:]
    return concept.input if merges else None


def _binary(graph: _FxGraph, value: Node, sign: Any, args: dict[str, Any]) -> _FxConcept | None:
    other = args["other"]
    if not isinstance(other, (Node, int, float)) or args.get("alpha", 1) != 1 or args.get("rounding_mode") is not None:
        return None
    return Binary(sign, args["self"], other, graph.dtype(value) or "")


def _all_hidden(node: Any) -> AllHidden[Node] | None:
    """`node` of not(any(not(scores == -inf))), over the last axis: torch's guard against rows that see nothing."""
    any_call = call_of(node)
    if any_call is None or any_call.op != "aten.any" or not any_call.arguments.get("keepdim"):
        return None
    inner = call_of(any_call.arguments["self"])
    if inner is None or inner.op != "aten.logical_not" or any_call.arguments.get("dim") not in (-1, 3):
        return None
    equal = call_of(inner.arguments["self"])
    if equal is None or equal.op != "aten.eq" or equal.arguments["other"] != -math.inf:
        return None
    return AllHidden(equal.arguments["self"])


def _range(args: dict[str, Any]) -> Range[Node] | None:
    start = args.get("start", 0)
    return Range(start) if args.get("step", 1) == 1 and isinstance(start, (Node, int)) else None


def _cast(graph: _FxGraph, value: Node, args: dict[str, Any]) -> _FxConcept | None:
    source = args["self"]
    before, after = graph.dtype(source), graph.dtype(value)
    if before is None or after is None or graph.shape(source) != graph.shape(value):
        return None
    return Forward(source) if before == after else Cast(source, before, after)


def _permute(graph: _FxGraph, value: Node, args: dict[str, Any]) -> Permute[Node]:
    return Permute(args["self"], tuple(dim % len(args["dims"]) for dim in args["dims"]))


def _transpose(graph: _FxGraph, value: Node, args: dict[str, Any]) -> Permute[Node] | None:
    shape = graph.shape(args["self"])
    if shape is None:
        return None
    perm = list(range(len(shape)))
    first, second = args["dim0"], args["dim1"]
    perm[first], perm[second] = perm[second], perm[first]
    return Permute(args["self"], tuple(perm))


def _repeat(graph: _FxGraph, value: Node, args: dict[str, Any]) -> Repeat[Node] | None:
    dim, shape = args.get("dim"), graph.shape(value)
    if not isinstance(args.get("repeats"), int) or dim is None or shape is None:
        return None
    return Repeat(args["self"], dim % len(shape))


def _slice(graph: _FxGraph, value: Node, args: dict[str, Any]) -> _FxConcept | None:
    source, end = args["self"], args["end"]
    before, after = graph.shape(source), graph.shape(value)
    if before is None or after is None or args["start"] not in (None, 0) or args["step"] != 1:
        return None
    if before == after:
        return Forward(source)
    axis = args["dim"] % len(before)
    # An end beyond the last slot is moved there, and then the extent is not the end.
    extent = str(end.meta["val"]) if isinstance(end, Node) else str(end)
    return Leading(source, axis, position(end)) if str(after[axis]) == extent else None


def _copy(graph: _FxGraph, value: Node, args: dict[str, Any]) -> Forward[Node] | None:
    return Forward(args["src"]) if _alike(graph, value, args["src"]) else None


def _slice_scatter(graph: _FxGraph, value: Node, args: dict[str, Any]) -> CacheWrite[Node] | None:
    """self[:, :, start:end] = src"""
    cache, start, end = args["self"], args["start"] or 0, args["end"]
    shape = graph.shape(cache)
    if shape is None or args["step"] != 1 or (isinstance(start, int) and start < 0):
        return None
    axis = args["dim"] % len(shape)
    rows = _rows_behind(graph, args["src"], shape, axis, lambda size: _ends(graph, start, end, size))
    return CacheWrite(cache, args["src"] if rows is None else rows, Slots(position(start)), axis)


def _ends(graph: _FxGraph, start: Node | int, end: Any, size: Dim) -> bool:
    """Whether end = start + size. torch moves an end beyond the last slot there; our operators report an error."""
    if not isinstance(end, (Node, int)):
        return False
    return same_position(graph, replace(position(end), minus_new=True), position(start), (size, size))


def _rows_behind(
    graph: _FxGraph, rows: Node, cache: tuple[Dim, ...], axis: int, is_size: Callable[[Dim], bool]
) -> Node | None:
    """The rows of a cache behind changes of shape: torch drops axes of size 1, because they are broadcast again."""
    while True:
        shape = graph.shape(rows)
        if shape is None:
            return None
        if len(shape) == len(cache) and is_size(shape[axis]) and _alike_beside(shape, cache, axis):
            return rows
        concept = graph.concept(rows)
        if not isinstance(concept, (Forward, Reshape, Expand)):
            return None
        rows = concept.input


def _alike_beside(left: tuple[Dim, ...], right: tuple[Dim, ...], axis: int) -> bool:
    return left[:axis] == right[:axis] and left[axis + 1 :] == right[axis + 1 :]


def _index_copy(graph: _FxGraph, value: Node, args: dict[str, Any]) -> CacheWrite[Node] | None:
    shape = graph.shape(args["self"])
    return None if shape is None else _by_indices(graph, args["self"], args["source"], args["dim"], args["index"])


def _index_put(graph: _FxGraph, value: Node, args: dict[str, Any]) -> CacheWrite[Node] | None:
    """self[:, :, indices] = values, with one vector of indices."""
    given = [(axis, index) for axis, index in enumerate(args["indices"]) if index is not None]
    if len(given) != 1 or args["accumulate"]:
        return None
    axis, index = given[0]
    return _by_indices(graph, args["self"], args["values"], axis, index)


def _by_indices(graph: _FxGraph, cache: Node, rows: Node, axis: int, index: Node) -> CacheWrite[Node] | None:
    shape, indices = graph.shape(cache), graph.shape(index)
    if shape is None or indices is None or len(indices) != 1 or graph.dtype(index) not in ("int64", "int32"):
        return None
    axis %= len(shape)
    found = _rows_behind(graph, rows, shape, axis, lambda size: size == indices[0])
    return None if found is None else CacheWrite(cache, found, slots(graph, index, shape[axis]), axis)


def _softmax(graph: _FxGraph, value: Node, args: dict[str, Any]) -> Softmax[Node] | None:
    rank = len(graph.shape(value) or ())
    return Softmax(args["self"]) if args["dim"] in (-1, rank - 1) else None


def _select(args: dict[str, Any]) -> Select[Node] | None:
    then, otherwise = args.get("self"), args.get("other")  # which `where` with a condition alone does not have
    if not isinstance(then, (Node, float, int)) or not isinstance(otherwise, (Node, float, int)):
        return None
    return Select(args["condition"], then, otherwise)


def _clamp(graph: _FxGraph, value: Node, args: dict[str, Any]) -> Clamp[Node] | None:
    low, high = args.get("min"), args.get("max")
    if not isinstance(low, (int, float)) or not isinstance(high, (int, float)):
        return None
    return Clamp(args["self"], low, high)


_READERS: dict[str, _Reader] = {
    "_softmax": _softmax,
    "_to_copy": _cast,
    "clamp": _clamp,
    "copy": _copy,
    "index_copy": _index_copy,
    "index_put": _index_put,
    "masked_fill": lambda graph, value, args: Select(args["mask"], args["value"], args["self"]),
    "matmul": lambda graph, value, args: MatMul(args["self"], args["other"]),
    "permute": _permute,
    "reciprocal": lambda graph, value, args: Binary("/", 1.0, args["self"], graph.dtype(value) or ""),
    "repeat_interleave": _repeat,
    "slice": _slice,
    "slice_scatter": _slice_scatter,
    "softmax": _softmax,
    "sym_size": lambda graph, value, args: Size(args["self"], args["dim"]),
    "to": _cast,
    "transpose": _transpose,
}
