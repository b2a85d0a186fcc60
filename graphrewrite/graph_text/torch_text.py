"""The text of torch graphs. Nothing of torch is imported: the graph brings it along."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from graphrewrite.graph_text.names import Names, stable

if TYPE_CHECKING:
    from torch.export import ExportedProgram
    from torch.fx import GraphModule, Node

# In messages of assertions; the name is one that the node had while it was traced.
_NODE = re.compile(r" on node '\w+'")


def program_text(program: ExportedProgram) -> str:
    """The program's nodes, with the parameter or buffer behind an input, and which buffer takes which value."""
    signature = program.graph_signature
    sources = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
    sources |= signature.inputs_to_lifted_tensor_constants
    written = {**signature.buffers_to_mutate, **signature.user_inputs_to_mutate}
    return stable(_lines("program", program.graph_module, sources, written))


def module_text(module: GraphModule) -> str:
    """The module's nodes, and those of the modules that are the bodies of its control flow."""
    return stable(_lines("module", module, {}, {}))


def _lines(title: str, module: GraphModule, sources: Mapping[str, str], written: Mapping[str, str]) -> Iterator[str]:
    """sources: by input, what it holds. written: by value, the buffer or input that takes it after the run."""
    inputs = [node for node in module.graph.nodes if node.op == "placeholder"]
    yield f"{title}("
    for node in inputs:
        yield f"    {node.name}{_type(node)}" + (f" = {sources[node.name]}" if node.name in sources else "")
    yield "):"
    known = {node.name: node.name for node in inputs}
    names = Names(known)
    bodies: dict[str, Any] = {}
    for node in module.graph.nodes:
        if node.op == "placeholder":
            continue
        given = [_argument(value, known) for value in node.args]
        given += [f"{key}={_argument(value, known)}" for key, value in node.kwargs.items()]
        if node.op == "output":
            yield f"    return {given[0]}"
            continue
        operator, base = _operator(node.target)
        known[node.name] = names.new(base.replace(".", "_"))
        call = operator if node.op == "get_attr" else f"{operator}({', '.join(given)})"
        yield f"    {known[node.name]}{_type(node)} = {call}"
        target = getattr(module, str(node.target), None) if node.op in ("get_attr", "call_module") else None
        if hasattr(target, "graph"):
            bodies[str(node.target)] = target
    for value, name in written.items():
        yield f"    {name} <- {known.get(value, value)}"
    for name, body in bodies.items():
        yield ""
        yield from _lines(name, body, {}, {})


def _operator(target: Any) -> tuple[str, str]:
    """What is called, and its name alone."""
    schema = getattr(target, "_schema", None)
    if schema is not None:
        qualified = schema.name.replace("::", ".")
        overload = f".{schema.overload_name}" if schema.overload_name else ""
        return qualified + overload, qualified.rpartition(".")[2]
    name = target if isinstance(target, str) else getattr(target, "__name__", type(target).__name__)
    return name, name


def _argument(value: Any, known: Mapping[str, str]) -> str:
    if hasattr(value, "meta") and hasattr(value, "op"):
        node: Node = value
        return known.get(node.name, node.name)
    if isinstance(value, (list, tuple)):
        items = ", ".join(_argument(item, known) for item in value)
        return f"[{items}]" if isinstance(value, list) else f"({items}{',' * (len(value) == 1)})"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_argument(item, known)}" for key, item in value.items()) + "}"
    if isinstance(value, str):
        return repr(_NODE.sub("", value))
    return _operator(value)[0] if hasattr(value, "_schema") else repr(value)


def _type(node: Node) -> str:
    value: Any = node.meta.get("val")
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f": {str(value.dtype).removeprefix('torch.')}[{', '.join(map(str, value.shape))}]"
    return ""
