"""Writing fused operators into an exported program.

New nodes carry the fake value their operator computes for the fake values of their inputs, so that the program passes
torch.export's own verifier, can be saved, decomposed, compiled and exported further.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.fx import GraphModule, Node
from torch.fx.passes.tools_common import stable_topological_sort

import graphrewrite.custom_ops.torch_ops  # noqa: F401  (defines torch.ops.graphrewrite)
from graphrewrite import operators
from graphrewrite.fx.calls import call_of, result_of
from graphrewrite.fx.prepare import fake_mode_of
from graphrewrite.site import CacheUpdate, SdpaSite
from graphrewrite.vocabulary import Layout, Mask, Operand, Position


def emit(program: ExportedProgram, sites: Iterable[SdpaSite[Node]]) -> None:
    """Replace every site in `program`, whose graph the sites were found in, and validate the result."""
    module = program.graph_module
    emitter = _Emitter(module)
    with module._set_replace_hook(program.graph_signature.get_replace_hook()):
        for site in sites:
            emitter.replace(site)
    _remove_dead(module, emitter.replaced)
    stable_topological_sort(module)
    module.graph.lint()
    module.recompile()
    program.validate()


class _Emitter:
    def __init__(self, module: GraphModule) -> None:
        self._graph = module.graph
        self._fake_mode = fake_mode_of(module.graph)
        self._replaced: dict[Node, Node] = {}

    @property
    def replaced(self) -> Collection[Node]:
        """The values for which others stand now."""
        return self._replaced.keys()

    def replace(self, site: SdpaSite[Node]) -> None:
        output = site.output.value
        with self._graph.inserting_before(output):
            for update in site.updates:
                # Layers that share a cache share its update, which is then replaced once.
                if update.after.data not in self._replaced:
                    self._update(update, site.layout)
            fused = self._fused(operators.attention(site, self))
            self._replace(output, self._transposed(fused, site.layout, site.output.layout))

    def _update(self, update: CacheUpdate[Node], layout: Layout) -> None:
        node = self._fused(operators.update(update, layout, self))
        is_one = isinstance(node.meta["val"], torch.Tensor)
        for index, old in enumerate(update.written):
            self._replace(old, node if is_one else self._call(operator.getitem, (node, index), {}))

    def _fused(self, call: operators.OperatorCall) -> Node:
        overloads = getattr(torch.ops.graphrewrite, operators.torch_name(call.name))
        start = call.start_pos
        is_tensor = isinstance(start, Node) and isinstance(start.meta["val"], torch.Tensor)
        return self._call(overloads.per_sequence if is_tensor else overloads.default, call.operands, call.attributes)

    def now(self, value: Node) -> Node:
        return self._replaced.get(value, value)

    def in_layout(self, operand: Operand[Node], layout: Layout) -> Node:
        return self._transposed(self.now(operand.value), operand.layout, layout)

    def _transposed(self, value: Node, layout: Layout, wanted: Layout) -> Node:
        return value if layout is wanted else self._call(torch.ops.aten.permute.default, (value, [0, 2, 1, 3]), {})

    def reshaped(self, value: Node, shape: tuple[int, ...]) -> Node:
        if tuple(value.meta["val"].shape) == shape:
            return value
        return self._call(torch.ops.aten.view.default, (value, list(shape)), {})

    def visible(self, mask: Mask[Node]) -> Node:
        value = self.now(mask.value)
        return self._call(torch.ops.aten.logical_not.default, (value,), {}) if mask.hides else value

    def start_pos(self, position: Position[Node], query: Operand[Node]) -> Node | int:
        """start_pos as a SymInt, an int, or an int64 tensor."""
        start: Node | int = position.offset if position.value is None else self.now(position.value)
        if isinstance(start, Node) and isinstance(start.meta["val"], torch.Tensor):
            start = self._integers(start)
        if isinstance(start, Node) and position.offset:
            start = self._sum(start, position.offset)
        if position.slots_of is not None:
            start = self._sum(start, self._size(position.slots_of))
        return self._sum(start, self._size(query), -1) if position.minus_new else start

    def _integers(self, start: Node) -> Node:
        """A position as an int64 vector."""
        tensor = start.meta["val"]
        if tensor.dtype != torch.int64:
            start = self._call(torch.ops.aten._to_copy.default, (start,), {"dtype": torch.int64})
        return start if tensor.dim() == 1 else self._call(torch.ops.aten.view.default, (start, [-1]), {})

    def _size(self, operand: Operand[Node]) -> Node | int:
        """The extent along the sequence axis."""
        value, axis = self.now(operand.value), operand.layout.sequence_axis
        size = value.meta["val"].shape[axis]
        return size if isinstance(size, int) else self._call(torch.ops.aten.sym_size.int, (value, axis), {})

    def _sum(self, left: Node | int, right: Node | int, sign: int = 1) -> Node | int:
        if isinstance(left, int) and isinstance(right, int):
            return left + sign * right
        is_tensor = isinstance(left, Node) and isinstance(left.meta["val"], torch.Tensor)
        target: Any = operator.add if sign == 1 else operator.sub
        if is_tensor:
            target = torch.ops.aten.add.Tensor if sign == 1 else torch.ops.aten.sub.Tensor
        return self._call(target, (left, right), {})

    def _call(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Node:
        node = self._graph.call_function(target, args, kwargs)
        fake_args = torch.fx.map_arg(args, lambda argument: argument.meta["val"])
        with self._fake_mode:
            node.meta["val"] = target(*fake_args, **kwargs)
        return node

    def _replace(self, old: Node, new: Node) -> None:
        for key in ("nn_module_stack", "stack_trace", "source_fn_stack"):
            if key in old.meta:
                new.meta[key] = old.meta[key]
        old.replace_all_uses_with(new)
        self._replaced[old] = new


def _remove_dead(module: GraphModule, replaced: Collection[Node]) -> None:
    """Remove what nothing uses any more, and the dtype assertions that alone kept it or speak of our own results.

    torch counts attention as impure, because it may drop out weights; what is replaced goes all the same.
    """
    nodes = [node for node in reversed(module.graph.nodes) if not _is_assertion(node)]
    for node in nodes:
        asserted = [user for user in node.users if _is_assertion(user)]
        if len(asserted) == len(node.users) or _is_ours(node):
            for assertion in asserted:
                module.graph.erase_node(assertion)
        if not node.users and (node in replaced or not node.is_impure()):
            module.graph.erase_node(node)


def _is_ours(node: Node) -> bool:
    call = call_of(result_of(node)[0])
    return call is not None and call.op.startswith("graphrewrite.")


def _is_assertion(node: Node) -> bool:
    return node.target is torch.ops.aten._assert_tensor_metadata.default
