"""Calls of torch operators in an exported graph, with their arguments by name.

After `run_decompositions`, an operator that mutates its arguments appears as

    auto_functionalized_v2(op, value=..., start_pos=..., _cache_base_index=0, _all_bases=[buffer])

whose results are the operator's own returns followed by the bases in their new state.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from graphrewrite.source_calls import SOURCE_OPS, SourceCall

_BASES = "_all_bases"


@dataclass(frozen=True)
class Call:
    """op: qualified name ("llama.update_cache"). arguments: by schema name with defaults. mutated: names of the
    arguments that come back changed, in the order in which they follow the operator's `returns` own results.
    writes_view: an argument is a part of what comes back (a slice, other strides), so the results are not its own."""

    op: str
    arguments: dict[str, Any]
    mutated: tuple[str, ...]
    returns: int
    writes_view: bool = False


def call_of(node: Node) -> Call | None:
    """The operator call that `node` is; None for anything else."""
    if node.op != "call_function":
        return None
    if isinstance(node.target, torch._ops.OpOverload):
        schema = node.target._schema
        return Call(_qualified(node.target), _bind(schema, node.args, node.kwargs), (), len(schema.returns))
    if getattr(node.target, "__name__", "") == "auto_functionalized_v2":
        return _functionalized(node)
    return None


def _functionalized(node: Node) -> Call | None:
    op = node.args[0]
    if not isinstance(op, torch._ops.OpOverload):
        return None
    bases = node.kwargs[_BASES]
    assert isinstance(bases, (list, tuple))
    given = {key: value for key, value in node.kwargs.items() if not key.startswith("_")}
    mutated: list[str] = [""] * len(bases)
    writes_view = False
    for argument in op._schema.arguments:
        name = argument.name
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        index = node.kwargs.get(f"_{name}_base_index")
        if not isinstance(index, int):
            given[name] = None  # an optional argument left out
            continue
        given[name] = bases[index]
        mutated[index] = name
        writes_view |= any(f"_{name}{view}" in node.kwargs for view in ("_size", "_slice_dim"))
    call = _bind(op._schema, (), given)
    return Call(_qualified(op), call, tuple(mutated), len(op._schema.returns), writes_view)


def _bind(schema: torch.FunctionSchema, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    # The default of an element type is a number of torch's own.
    bound = {
        argument.name: None if str(argument.real_type) == "ScalarType" else argument.default_value
        for argument in schema.arguments
    }
    bound.update(zip((argument.name for argument in schema.arguments), args, strict=False))
    bound.update(kwargs)
    return {name: _constant(value) for name, value in bound.items()}


def _constant(value: Any) -> Any:
    return dtype_name(value) if isinstance(value, torch.dtype) else value


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _qualified(op: torch._ops.OpOverload) -> str:
    return op._schema.name.replace("::", ".")


def result_of(node: Node) -> tuple[Node, int]:
    """The node that computes `node`, and which of its results `node` is."""
    if node.op == "call_function" and node.target is operator.getitem:
        source, index = node.args
        if isinstance(source, Node) and isinstance(index, int):
            return source, index
    return node, 0


def source_call_of(node: Node) -> SourceCall | None:
    """The recognised source operator of which `node` is a result."""
    producer, index = result_of(node)
    call = call_of(producer)
    if call is None or call.op not in SOURCE_OPS or call.writes_view:
        return None
    named = SOURCE_OPS[call.op].results
    if call.mutated:  # what such an operator returns is its output, or a placeholder that means nothing
        returned = tuple(name for name in named if name not in call.mutated) or ("",)
        named = (*returned, *call.mutated)
    if index >= len(named) or not named[index]:
        return None
    defaults = SOURCE_OPS[call.op].attributes
    arguments = {name: defaults.get(name) if value is None else value for name, value in call.arguments.items()}
    return SourceCall(call.op, arguments, named[index])
