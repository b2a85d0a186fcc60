"""The attentions of two programs and what each yields, for finding the first one where the programs part.

An attention is found by its operator. Where a fused operator stands for several nodes, as a softmax between two
products, its result has the name of the value that it replaced, and that is what it is compared with.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import onnx_ir as ir

from graphrewrite.ort_tensors import Array

if TYPE_CHECKING:
    from torch.fx import GraphModule

_ONNX_CORES = {"Attention", "GroupQueryAttention", "MultiHeadAttention"}
_TORCH_CORES = ("sdpa", "scaled_dot_product")
# What may follow a fused operator to bring its result into the form of what it replaced.
_FOLLOWERS = {"Transpose", "Reshape", "Cast"}


@dataclass(frozen=True)
class Site:
    """An attention.

    Attributes:
        name: for people.
        value: the value that holds the result: a name of the ONNX graph, or the name of a node in torch.
        layout: "BSNH" or "BNSH" for a result of rank 4 whose layout is known, else None.
    """

    name: str
    value: str
    layout: str | None


def onnx_sites(model: ir.Model) -> list[Site]:
    """The attentions in the main graph of a model, in graph order."""
    return [_onnx_site(node) for node in model.graph if _is_onnx_core(node)]


def _is_onnx_core(node: ir.Node) -> bool:
    return bool(node.outputs) and (node.op_type in _ONNX_CORES or "sdpa" in node.op_type.lower())


def _onnx_site(node: ir.Node) -> Site:
    layout = node.attributes.get("layout")
    if layout is not None and layout.type is ir.AttributeType.STRING:
        chosen = layout.as_string()
    else:
        chosen = "BSNH" if node.domain else "BNSH"
    value = node.outputs[0].name or ""
    return Site(node.name or value, value, chosen)


def torch_sites(module: GraphModule) -> list[Site]:
    """The attentions of a graph module, in graph order."""
    return list(_torch_sites(module))


def _torch_sites(module: GraphModule) -> Iterator[Site]:
    for node in module.graph.nodes:
        # A functionalized operator is the first argument of the call.
        target: Any = node.args[0] if "auto_functionalized" in getattr(node.target, "__name__", "") else node.target
        name = getattr(getattr(target, "_schema", None), "name", "")
        if node.op != "call_function" or not any(core in name for core in _TORCH_CORES):
            continue
        layout = "BNSH" if name.startswith("aten::") else node.kwargs.get("layout", "BSNH")
        modules = list(node.meta.get("nn_module_stack", {}).values())
        path = f"{modules[-1][0]}." if modules and modules[-1][0] else ""
        yield Site(f"{path}{name.rpartition('::')[2]}", node.name, str(layout))


def by_name(before: ir.Model, after: ir.Model) -> list[tuple[Site, Site]] | None:
    """Pairs each attention of `after` with the value of its name in `before`; None where one has none."""
    values = {value.name for node in before.graph for value in node.outputs}
    pairs = []
    for node in after.graph:
        if _is_onnx_core(node):
            name = next((name for name in _names_of(node.outputs[0]) if name in values), None)
            if name is None:
                return None
            pairs.append((Site(name, name, None), Site(node.name or name, name, None)))
    return pairs or None


def _names_of(value: ir.Value) -> Iterator[str]:
    """The names that an attention's result has, here and in the form of what it replaced."""
    while True:
        yield value.name or ""
        users = {use.node for use in value.uses()}
        if len(users) != 1 or (user := users.pop()).op_type not in _FOLLOWERS:
            return
        value = user.outputs[0]


def comparable(array: Array, layout: str | None) -> Array:
    """A result as [B, S, Hq * D], where its layout is known."""
    if layout is None or array.ndim != 4:
        return array
    rows: Array = array.transpose(0, 2, 1, 3) if layout == "BNSH" else array
    return rows.reshape(*rows.shape[:2], -1)
