"""Writing fused operators into an ONNX model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import onnx_ir as ir
import onnx_ir.passes.common as common_passes

from graphrewrite import operators
from graphrewrite.custom_ops.functions import attach
from graphrewrite.onnx.cleanup import OutputSlots, remove_unused, sort
from graphrewrite.onnx.reader import DOMAIN
from graphrewrite.site import CacheUpdate, SdpaSite
from graphrewrite.vocabulary import Layout, Mask, Operand, Position

DOMAIN_VERSION = 1


def emit(model: ir.Model, sites: Iterable[SdpaSite[ir.Value]]) -> None:
    """Replace every site in `model`, in which the sites were found, and attach the bodies of the new operators."""
    emitter = _Emitter()
    for site in sites:
        emitter.replace(site)
    if not emitter.replaced_nodes:
        return
    model.opset_imports[DOMAIN] = DOMAIN_VERSION
    sort(model)
    remove_unused(emitter.replaced_nodes)
    common_passes.RemoveUnusedFunctionsPass()(model)
    attach(model)
    common_passes.RemoveUnusedOpsetsPass()(model)
    common_passes.NameFixPass()(model)


class _Emitter:
    def __init__(self) -> None:
        self._replaced: dict[ir.Value, ir.Value] = {}
        self._anchor: ir.Node | None = None
        self._outputs = OutputSlots()

    @property
    def replaced_nodes(self) -> list[ir.Node]:
        """The nodes whose results were replaced."""
        return [node for value in self._replaced if (node := value.producer()) is not None]

    def replace(self, site: SdpaSite[ir.Value]) -> None:
        for update in site.updates:
            # Layers that share a cache share its update, which is then replaced once.
            if update.after.data not in self._replaced:
                # In the graph of the writes, which may be an outer one of the attention's.
                self._anchor = update.after.data.producer()
                self._update(update, site.layout)
        self._anchor = site.output.value.producer()
        (fused,) = self._fused(self._anchor, operators.attention(site, self))
        fused = self._transposed(fused, site.layout, site.output.layout)
        if site.output.heads is not None:
            (fused,) = self._node("", "Reshape", (fused, self._integers([0, 0, -1])), {})
        self._replace(site.output.value, fused)

    def _update(self, update: CacheUpdate[ir.Value], layout: Layout) -> None:
        call, written = operators.update(update, layout, self), update.written
        outputs = self._fused(written[0].producer(), call, len(written))
        for old, new in zip(written, outputs, strict=True):
            self._replace(old, new)

    def now(self, value: ir.Value) -> ir.Value:
        return self._replaced.get(value, value)

    def in_layout(self, operand: Operand[ir.Value], layout: Layout) -> ir.Value:
        value = self.now(operand.value)
        if operand.heads is not None:
            (value,) = self._node("", "Reshape", (value, self._integers([0, 0, operand.heads, -1])), {})
        return self._transposed(value, operand.layout, layout)

    def _transposed(self, value: ir.Value, layout: Layout, wanted: Layout) -> ir.Value:
        return value if layout is wanted else self._node("", "Transpose", (value,), {"perm": [0, 2, 1, 3]})[0]

    def reshaped(self, value: ir.Value, shape: tuple[int, ...]) -> ir.Value:
        (result,) = self._node("", "Reshape", (value, self._integers(list(shape))), {})
        result.type, result.shape = value.type, ir.Shape(shape)
        return result

    def visible(self, mask: Mask[ir.Value]) -> ir.Value:
        value = self.now(mask.value)
        if not mask.hides:
            return value
        (result,) = self._node("", "Not", (value,), {})
        result.type, result.shape = value.type, value.shape
        return result

    def start_pos(self, position: Position[ir.Value], query: Operand[ir.Value]) -> ir.Value:
        """start_pos as an int64 scalar or [B]."""
        start = None if position.value is None else self.now(position.value)
        if start is not None and start.dtype not in (None, ir.DataType.INT64):
            (start,) = self._node("", "Cast", (start,), {"to": ir.DataType.INT64.value})
        if position.slots_of is not None:
            start = self._sum("Add", start, self._size(position.slots_of))
        if start is None or position.offset:
            start = self._sum("Add", start, self._integers(position.offset))
        return self._sum("Sub", start, self._size(query)) if position.minus_new else start

    def _sum(self, op_type: str, left: ir.Value | None, right: ir.Value) -> ir.Value:
        """The sum or difference of integers, a scalar where both are."""
        return right if left is None else self._node("", op_type, (left, right), {})[0]

    def _size(self, operand: Operand[ir.Value]) -> ir.Value:
        """The extent along the sequence axis, a scalar."""
        axis = operand.layout.sequence_axis
        (size,) = self._node("", "Shape", (self.now(operand.value),), {"start": axis, "end": axis + 1})
        return self._node("", "Squeeze", (size,), {})[0]

    def _integers(self, value: int | list[int]) -> ir.Value:
        return self._node("", "Constant", (), {"value": ir.tensor(value, dtype=ir.DataType.INT64)})[0]

    def _fused(self, origin: ir.Node | None, call: operators.OperatorCall, outputs: int = 1) -> Sequence[ir.Value]:
        """One of our operators, named after the node that it stands for and with its metadata."""
        inputs = call.operands
        while inputs[-1] is None:
            inputs = inputs[:-1]
        given = {name: int(value) if isinstance(value, bool) else value for name, value in call.attributes.items()}
        given = {name: value for name, value in given.items() if value is not None}
        made = self._node(DOMAIN, call.name, inputs, given, outputs)
        node = made[0].producer()
        assert node is not None
        if origin is not None and origin.name:
            node.name = f"{origin.name.removesuffix(f'.{origin.op_type}')}.{call.name}"
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
        self._outputs.replace(old, new)
        old.replace_all_uses_with(new)
        old.name = None
        new.name = name
        self._replaced[old] = new
