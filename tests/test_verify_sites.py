"""Which attention is the first to diverge."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch
from fx_forms import HEAD_SIZE, QUERY_HEADS, Layer, inputs
from onnx_forms import build, steps
from torch import Tensor, nn

import graphrewrite as gr
from graphrewrite.errors import InputError
from graphrewrite.verification.sites import comparable

LAYERS = 3


class Stack(nn.Module):
    """Attention layers, each with the output of the one before as its query; `scaled` layers multiply it."""

    def __init__(self, form: str = "overlaid", **scaled: float) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(form) for _ in range(LAYERS))
        self.scales = [scaled.get(f"layer{index}", 1.0) for index in range(LAYERS)]

    def forward(self, query: Tensor, key: Tensor, value: Tensor, position: Tensor) -> Tensor:
        for layer, scale in zip(self.layers, self.scales, strict=True):
            query = layer(query * scale if scale != 1 else query, key, value, position)
        return query


def program(**scaled: float) -> torch.export.ExportedProgram:
    rows = {1: torch.export.Dim("S", min=1, max=31)}
    return torch.export.export(Stack(**scaled), inputs(3, 2), dynamic_shapes=(rows, rows, rows, None))


def torch_steps() -> list[tuple[Tensor, ...]]:
    return [inputs(5, 0), inputs(1, 5)]


def off_in_layer(index: int) -> torch.export.ExportedProgram:
    return program(**{f"layer{index}": 1.01})


@pytest.mark.parametrize("layer", range(LAYERS))
@pytest.mark.parametrize("rewritten", [False, True])
def test_torch_programs_part_at_the_layer_that_is_wrong(layer: int, rewritten: bool) -> None:
    after: Any = off_in_layer(layer)
    if rewritten:
        after = gr.rewrite(after, require=LAYERS).model
    result = gr.verify(program(), after, torch_steps())
    assert not result.ok and result.first_site is not None
    assert (result.first_site.name, result.first_site.step) == (f"layers.{layer}.custom_sdpa", 0)
    assert f"the first attention to diverge is 'layers.{layer}.custom_sdpa', at step 0" in result.summary()
    assert [site.ok for site in result.sites[:LAYERS]] == [index < layer for index in range(LAYERS)]


def test_equal_programs_have_their_attentions_compared_on_demand() -> None:
    before = program()
    after = gr.rewrite(before).model
    assert gr.verify(before, after, torch_steps()).sites == ()
    result = gr.verify(before, after, torch_steps(), sites=True)
    assert result.ok and len(result.sites) == 2 * LAYERS and result.first_site is None
    assert all(0 <= site.max_abs <= site.allowed for site in result.sites)


def test_torch_before_and_onnx_after() -> None:
    names = ["query", "key", "value", "position"]
    feeds = [dict(zip(names, step, strict=True)) for step in torch_steps()]
    after = gr.export_onnx(gr.rewrite(off_in_layer(1)).model, output_names=["output"])
    result = gr.verify(program(), after, feeds)
    assert result.first_site is not None and result.first_site.name == "layers.1.custom_sdpa"


def two_layers(*, wrong: int | None = None) -> ir.Model:
    """Two attentions over the caches of one layer, the second of the first's output."""
    first = 'between = Attention<is_causal=1>(query, key_float, value_float, "", "", "", valid)'
    second = 'output = Attention<is_causal=1>(between, key_float, value_float, "", "", "", valid)'
    lines = [first, second]
    if wrong is not None:
        lines[wrong] = lines[wrong].replace("is_causal=1", "is_causal=1, scale=0.251")
    return build(attention="\n".join(lines))


@pytest.mark.parametrize("wrong", [0, 1])
@pytest.mark.parametrize("kind", ["model", "proto", "file", "file with its weights beside it"])
def test_onnx_models_part_at_the_attention_that_is_wrong(wrong: int, kind: str, tmp_path: Path) -> None:
    before, after = two_layers(), gr.rewrite(two_layers(wrong=wrong), require=2).model
    assert isinstance(after, ir.Model)
    forms: dict[str, Callable[[ir.Model], Any]] = {
        "model": lambda model: model,
        "proto": ir.to_proto,
        "file": lambda model: (gr.save(model, tmp_path / "m.onnx"), tmp_path / "m.onnx")[1],
        "file with its weights beside it": lambda model: weighted_file(model, tmp_path / "w.onnx"),
    }
    result = gr.verify(before, forms[kind](after), steps())
    assert not result.ok and result.first_site is not None
    assert result.first_site.name == ("between", "output")[wrong]
    # The second attention reads what the first one yields.
    assert [site.ok for site in result.sites[:2]] == [wrong == 1, False]


def weighted_file(model: ir.Model, path: Path) -> Path:
    """The model with a weight that its output is multiplied by, in a file of its own. The attention keeps its name."""
    value = ir.Value(name="one", const_value=ir.tensor(np.ones((1, 4, 1, 16), np.float32), name="one"))
    model.graph.register_initializer(value)
    output = model.graph.outputs[0]
    node = output.producer()
    assert node is not None
    product = ir.node("Mul", [output, value])
    product.outputs[0].name, product.outputs[0].type, product.outputs[0].shape = "product", output.type, output.shape
    model.graph.insert_after(node, product)
    model.graph.outputs[0] = product.outputs[0]
    ir.save(model, path, external_data=f"{path.name}.data", size_threshold_bytes=0)
    assert Path(f"{path}.data").stat().st_size
    return path


def test_models_with_other_numbers_of_attentions_are_noted() -> None:
    one = build(attention='output = Attention<is_causal=1>(query, key_float, value_float, "", "", "", valid)')
    part = build(
        replace=(
            (
                'output = Attention<is_causal=1>(query, key_float, value_float, "", "", "", valid)',
                "output = Identity(query)",
            ),
        )
    )
    result = gr.verify(one, part, steps())
    assert not result.ok and result.sites == ()
    assert "attentions are not compared one by one: 1 before, 0 after" in result.notes


def test_a_difference_outside_of_the_attentions_is_said_to_be_there() -> None:
    text = 'output = Attention<is_causal=1>(query, key_float, value_float, "", "", "", valid)'
    changed = build(
        attention='inner = Attention<is_causal=1>(query, key_float, value_float, "", "", "", valid)\n'
        "more = Constant<value_float=1.01>()\noutput = Mul(inner, more)"
    )
    result = gr.verify(build(attention=text), changed, steps())
    assert not result.ok and result.first_site is None and len(result.sites) == len(steps())
    assert result.summary().endswith("no attention diverges, so the programs part outside of them")


def test_results_in_different_layouts_are_compared_as_rows() -> None:
    rows = np.arange(2 * 3 * QUERY_HEADS * HEAD_SIZE, dtype=np.float32).reshape(2, 3, QUERY_HEADS, HEAD_SIZE)
    expected = rows.reshape(2, 3, -1)
    for array, layout in ((rows, "BSNH"), (rows.transpose(0, 2, 1, 3), "BNSH"), (expected, "BNSH"), (expected, None)):
        np.testing.assert_array_equal(comparable(array, layout), expected)


def test_the_models_are_left_as_they_were() -> None:
    before, after = two_layers(), two_layers(wrong=1)
    texts = [ir.to_proto(model).SerializeToString(deterministic=True) for model in (before, after)]
    assert not gr.verify(before, after, steps()).ok
    assert [ir.to_proto(model).SerializeToString(deterministic=True) for model in (before, after)] == texts


def test_bad_argument() -> None:
    with pytest.raises(InputError, match="sites is 'all'; give True, False or None"):
        gr.verify(two_layers(), two_layers(), sites="all")  # type: ignore[arg-type]
