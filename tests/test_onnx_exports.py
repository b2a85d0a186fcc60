"""Forms that torch.onnx makes of torch's own operators: found and equal, at every opset that writes them otherwise.

Opsets below 23 take attention apart (O7), repeated heads too (O4); all write rows with ScatterND (O2).
"""

from __future__ import annotations

import onnx
import onnx_ir as ir
import pytest
from test_fx_forms import exported, steps_of
from test_patterns import TOLERANCE

import graphrewrite as gr

# form, opset: what becomes of the writes
EXPORTS = {
    ("F4", 21): "key+value",
    ("F6 indices of no order", 23): "none",
    ("F7 repeat_interleave", 18): "key+value",
    ("F7 bool mask", 21): "key+value",
    ("F7 exact rows", 18): "key+value",
    ("F7 exact rows", 23): "key+value",
    ("F8 scaled both", 18): "key+value",
    ("F8 capped", 21): "key+value",
    ("F8 filled, guarded", 21): "key+value",
    ("F9 codes times scales of heads and channels", 23): "key+value",
    ("F9 dequantize_per_channel, float64", 21): "none",
}


@pytest.mark.parametrize(("name", "opset"), EXPORTS)
def test_export_is_rewritten_and_equal(name: str, opset: int) -> None:
    before = gr.export_onnx(exported(name), output_names=["output"], opset_version=opset)
    result = gr.rewrite(before, require=1)
    (site,) = result.report.sites
    assert site.updates == EXPORTS[name, opset]
    assert site.current_tokens == ("exact" if "exact rows" in name else "quantized")
    left = {node.op_type for node in result.model.graph}
    assert not left & {"Attention", "Softmax", "MatMul"}
    assert ("ScatterND" in left) == (site.updates == "none")
    onnx.checker.check_model(ir.to_proto(result.model))
    names = [value.name for value in before.graph.inputs]
    feeds = [dict(zip(names, (t.numpy() for t in step), strict=False)) for step in steps_of(exported(name))]
    verification = gr.verify(before, result.model, feeds, **TOLERANCE)
    assert verification.ok, verification.summary()
