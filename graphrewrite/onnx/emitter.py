"""Writing fused operators into an ONNX model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import onnx_ir as ir
import onnx_ir.passes.common as common_passes

from graphrewrite import operators
from graphrewrite.custom_ops.functions import attach
from graphrewrite.onnx.reader import DOMAIN
from graphrewrite.site import CacheUpdate, SdpaSite
from graphrewrite.vocabulary import Layout, Operand, Position

DOMAIN_VERSION = 1


def emit(model: ir.Model, sites: Iterable[SdpaSite[ir.Value]]) -> None:
    """Replace every site in `model`, in which the sites were found, and attach the bodies of the new operators."""
    emitter = _Emitter()
    for site in sites:
        emitter.replace(site)
    if not emitter.replaced_any:
        return
    model.opset_imports[DOMAIN] = DOMAIN_VERSION
    for graph in model.graphs():
        graph.sort()
    common_passes.RemoveUnusedNodesPass()(model)
    common_passes.RemoveUnusedFunctionsPass()(model)
    attach(model)
    common_passes.RemoveUnusedOpsetsPass()(model)
    common_passes.NameFixPass()(model)


class _Emitter:
    def __init__(self) -> None:
        self._replaced: dict[ir.Value, ir.Value] = {}
        self._anchor: ir.Node | None = None

    @property
    def replaced_any(self) -> bool:
        return bool(self._replaced)

    def replace(self, site: SdpaSite[ir.Value]) -> None:
        for update in (site.key_update, site.value_update):
            # Layers that share a cache share its update, which is then replaced once.
            if update is not None and update.after.codes not in self._replaced:
                # In the graph of the writes, which may be an outer one of the attention's.
                self._anchor = update.after.codes.producer()
                self._update(update, site.layout)
        self._anchor = site.output.value.producer()
        operands, attributes = operators.custom_sdpa(site, self)
        (fused,) = self._fused(self._anchor, "CustomSdpa", operands, attributes)
        self._replace(site.output.value, self._transposed(fused, site.layout, site.output.layout))

    def _update(self, update: CacheUpdate[ir.Value], layout: Layout) -> None:
        operands, attributes = operators.update_quantized_cache(update, layout, self)
        after = update.after.parts
        outputs = self._fused(after[0].producer(), "UpdateQuantizedCache", operands, attributes, len(after))
        for old, new in zip(after, outputs, strict=True):
            self._replace(old, new)

    def now(self, value: ir.Value) -> ir.Value:
        return self._replaced.get(value, value)

    def in_layout(self, operand: Operand[ir.Value], layout: Layout) -> ir.Value:
        return self._transposed(self.now(operand.value), operand.layout, layout)

    def _transposed(self, value: ir.Value, layout: Layout, wanted: Layout) -> ir.Value:
        return value if layout is wanted else self._node("", "Transpose", (value,), {"perm": [0, 2, 1, 3]})[0]

    def start_pos(self, position: Position[ir.Value], query: Operand[ir.Value]) -> ir.Value:
        """start_pos as an int64 scalar or [B]."""
        start = None if position.value is None else self.now(position.value)
        if start is None or position.offset:
            offset = self._constant(position.offset)
            start = offset if start is None else self._node("", "Add", (start, offset), {})[0]
        elif start.dtype is not None and start.dtype != ir.DataType.INT64:
            (start,) = self._node("", "Cast", (start,), {"to": ir.DataType.INT64.value})
        if position.minus_new:
            axis = query.layout.sequence_axis
            (size,) = self._node("", "Shape", (self.now(query.value),), {"start": axis, "end": axis + 1})
            if position.value is None:  # a scalar less a scalar
                (size,) = self._node("", "Squeeze", (size,), {})
            (start,) = self._node("", "Sub", (start, size), {})
        return start

    def _constant(self, value: int) -> ir.Value:
        return self._node("", "Constant", (), {"value": ir.tensor(value, dtype=ir.DataType.INT64)})[0]

    def _fused(
        self,
        origin: ir.Node | None,
        op_type: str,
        inputs: Sequence[ir.Value | None],
        attributes: Mapping[str, Any],
        outputs: int = 1,
    ) -> Sequence[ir.Value]:
        """One of our operators, named after the node that it stands for and with its metadata."""
        while inputs[-1] is None:
            inputs = inputs[:-1]
        given = {name: int(value) if isinstance(value, bool) else value for name, value in attributes.items()}
        given = {name: value for name, value in given.items() if value is not None}
        made = self._node(DOMAIN, op_type, inputs, given, outputs)
        node = made[0].producer()
        assert node is not None
        if origin is not None and origin.name:
            node.name = f"{origin.name.removesuffix(f'.{origin.op_type}')}.{op_type}"
            node.metadata_props.update(origin.metadata_props)
        return made

    def _node(
        self,
        domain: str,
        op_type: str,
        inputs: Sequence[ir.Value | None],
        attributes: Mapping[str, Any],
        outputs: int = 1,
    ) -> Sequence[ir.Value]:
        assert self._anchor is not None and self._anchor.graph is not None
        node = ir.node(op_type, inputs, attributes, domain=domain, num_outputs=outputs)
        self._anchor.graph.insert_before(self._anchor, node)
        return node.outputs

    def _replace(self, old: ir.Value, new: ir.Value) -> None:
        """Let `new` take the place of `old`, under its name where the name is part of the model's interface."""
        new.type, new.shape = old.type, old.shape
        new.metadata_props.update(old.metadata_props)
        name = old.name
        ir.convenience.replace_all_uses_with(old, new, replace_graph_outputs=True)
        old.name = None
        new.name = name
        self._replaced[old] = new
