"""Writing fused operators into an exported program.

New nodes carry the fake value their operator computes for the fake values of their inputs, so that the program passes
torch.export's own verifier, can be saved, decomposed, compiled and exported further.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
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
from graphrewrite.vocabulary import Layout, Operand, Position


def emit(program: ExportedProgram, sites: Iterable[SdpaSite[Node]]) -> None:
    """Replace every site in `program`, whose graph the sites were found in, and validate the result."""
    module = program.graph_module
    emitter = _Emitter(module)
    with module._set_replace_hook(program.graph_signature.get_replace_hook()):
        for site in sites:
            emitter.replace(site)
    _remove_dead(module)
    stable_topological_sort(module)
    module.graph.lint()
    module.recompile()
    program.validate()


class _Emitter:
    def __init__(self, module: GraphModule) -> None:
        self._graph = module.graph
        self._fake_mode = fake_mode_of(module.graph)
        self._replaced: dict[Node, Node] = {}

    def replace(self, site: SdpaSite[Node]) -> None:
        output = site.output.value
        with self._graph.inserting_before(output):
            for update in (site.key_update, site.value_update):
                # Layers that share a cache share its update, which is then replaced once.
                if update is not None and update.after.codes not in self._replaced:
                    self._update(update, site.layout)
            operands, attributes = operators.custom_sdpa(site, self)
            fused = self._call(torch.ops.graphrewrite.custom_sdpa.default, operands, attributes)
            self._replace(output, self._transposed(fused, site.layout, site.output.layout))

    def _update(self, update: CacheUpdate[Node], layout: Layout) -> None:
        operands, attributes = operators.update_quantized_cache(update, layout, self)
        node = self._call(torch.ops.graphrewrite.update_quantized_cache.default, operands, attributes)
        for index, old in enumerate(update.after.parts):
            self._replace(old, self._call(operator.getitem, (node, index), {}))

    def now(self, value: Node) -> Node:
        return self._replaced.get(value, value)

    def in_layout(self, operand: Operand[Node], layout: Layout) -> Node:
        return self._transposed(self.now(operand.value), operand.layout, layout)

    def _transposed(self, value: Node, layout: Layout, wanted: Layout) -> Node:
        return value if layout is wanted else self._call(torch.ops.aten.permute.default, (value, [0, 2, 1, 3]), {})

    def start_pos(self, position: Position[Node], query: Operand[Node]) -> Node | int:
        """start_pos as a SymInt or an int."""
        start: Node | int = position.offset if position.value is None else self.now(position.value)
        if position.value is not None and position.offset:
            start = self._call(operator.add, (start, position.offset), {})
        if position.minus_new:
            new = self._call(torch.ops.aten.sym_size.int, (self.now(query.value), query.layout.sequence_axis), {})
            start = self._call(operator.sub, (start, new), {})
        return start

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


def _remove_dead(module: GraphModule) -> None:
    """Remove what nothing uses any more, and the dtype assertions that alone kept it or speak of our own results."""
    for node in reversed(module.graph.nodes):
        if _is_assertion(node):
            asserted = node.args[0]
            assert isinstance(asserted, Node)
            if all(map(_is_assertion, asserted.users)) or _is_ours(asserted):
                module.graph.erase_node(node)
        elif not node.users and not node.is_impure():
            module.graph.erase_node(node)


def _is_ours(node: Node) -> bool:
    call = call_of(result_of(node)[0])
    return call is not None and call.op.startswith("graphrewrite.")


def _is_assertion(node: Node) -> bool:
    return node.target is torch.ops.aten._assert_tensor_metadata.default
