"""Every near miss of a source form: refused, with its code, and left as it was."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import onnx
import onnx_ir as ir
import pytest
from fx_forms import Layer, export
from graph_text import onnx_text
from onnx_forms import MASKED, MULTI_HEAD, SPELLED, build
from test_fx_forms import REFUSALS as STANDARD_REFUSALS

import graphrewrite as gr
from graphrewrite.refusals import REFUSALS

FX_REFUSALS = {
    "scale-dtype": ("joint", {}),
    "scale-granularity": ("joint", {}),
    "zero-point-wraps": ("overlaid", {}),
    "half-quantized": ("joint", {}),
    "cache-not-quantized": ("overlaid", {}),
    "causal-with-mask": ("joint", {"masked": True}),
    "position-differs": ("overlaid", {}),
    "zero-point-dtype": ("joint", {}),
    "writes-a-view": ("joint", {}),
    "recent-rows": ("overlaid", {}),
    "cache-shapes": ("dequantized", {}),
    "dequantized-dtype": ("joint", {}),
    "query-dtype": ("dequantized", {}),
    "attention-in-branch": ("dequantized", {"masked": True}),
}


@pytest.mark.parametrize("code", FX_REFUSALS)
def test_fx_near_miss_is_refused(code: str) -> None:
    form, options = FX_REFUSALS[code]
    program = export(Layer(form, flaw=code, **options))
    result = gr.rewrite(program)
    assert result.model is program and not result.report.sites
    assert {refusal.code for refusal in result.report.refusals} == {code}
    assert all(refusal.nodes and refusal.message for refusal in result.report.refusals)


ATTENTION = 'Attention<is_causal=1>(query, key_float, value_float, "", "", "", valid)'
GROUP_QUERY = """
    output = com.microsoft.GroupQueryAttention<num_heads=4, kv_num_heads=2>(query, key, value, "", "", lengths, total)
"""
SOURCE_CORE = """
    <ir_version: 10, opset_import: ["" : 21, "llama" : 1]>
    layer (float[1,S,4,16] query, float[1,32,4,16] key, int64 start) => (float[1,S,4,16] output)
    { output = llama.custom_sdpa<is_causal=1>(query, key, key, start) }
"""
FUNCTION = """
    <ir_version: 10, opset_import: ["" : 24, "local" : 1]>
    layer (float[1,4,S,16] query, float[1,4,S,16] key) => (float[1,4,S,16] output) { output = local.attend(query, key) }
    <domain: "local", opset_import: ["" : 24]>
    attend (q, k) => (out) { out = Attention<is_causal=1>(q, k, k) }
"""
# The cache of keys by another way: reshaped to [1,32,2,16] first, which means nothing and is no transpose.
RESHAPED = """
    shape_b = Constant<value_ints=[1,32,2,16]>() key_b = Reshape(key_codes_out, shape_b)
    shape_p = Constant<value_ints=[1,32,2,1]>()
    scales_b = Reshape(key_scales_out, shape_p) zeros_b = Reshape(key_zeros_out, shape_p)
"""
DEQUANTIZED = "key_d = DequantizeLinear<axis=-1, block_size=16>(key_b, scales_b, zeros_b)"
SWAPPED = "Transpose<perm=[0,2,1,3]>"
WRITTEN = """
    key_over = TensorScatter<axis=2>(key_float, key, position)
    value_over = TensorScatter<axis=2>(value_float, value, position)
"""
ATTENTION_WRITTEN = 'output = Attention<is_causal=1>(query, key_over, value_over, "", "", "", valid)'


def keys_through(text: str, name: str) -> tuple[tuple[str, str], ...]:
    """Changes that let the attention read its keys from `name`, which `text` computes."""
    return ((f"output = {ATTENTION}", f"{text} output = {ATTENTION.replace('key_float', name)}"),)


# code: how the graph differs from one that is rewritten
ONNX_REFUSALS: dict[str, Callable[[], ir.Model]] = {
    "attention-past": lambda: build(
        replace=((ATTENTION, "Attention<is_causal=1>(query, key, value, , key_float, value_float)"),)
    ),
    "attention-rank": lambda: build(
        replace=(
            (ATTENTION, "Attention<is_causal=1, q_num_heads=1, kv_num_heads=1>(q3, k3, v3)"),
            (
                "output = ",
                "shape3 = Constant<value_ints=[0, -1, 16]>() q3 = Reshape(query, shape3) "
                "k3 = Reshape(key_float, shape3) v3 = Reshape(value_float, shape3) output = ",
            ),
        )
    ),
    "mask-with-valid-length": lambda: build(
        attention=MASKED, replace=(("value_float, mask)", 'value_float, mask, "", "", valid)'),)
    ),
    "no-pattern": lambda: build(replace=((ATTENTION, "Attention<is_causal=1>(query, key, value)"),)),
    "half-quantized": lambda: build(replace=((ATTENTION, "Attention<is_causal=1>(query, key_float, value)"),)),
    "zero-point-wraps": lambda: build(
        dequantize=SPELLED,
        replace=(
            (
                "key_difference = Sub(key_wide, key_zeros_wide)",
                "key_narrow = Sub(key_codes_out, key_zeros_out) key_difference = Cast<to=1>(key_narrow)",
            ),
        ),
    ),
    "scale-granularity": lambda: build(
        replace=(
            (
                "key_float = DequantizeLinear<axis=-1, block_size=16>",
                "key_float = DequantizeLinear<axis=-2, block_size=1>",
            ),
        )
    ),
    "attention-form": lambda: ir.from_proto(
        onnx.parser.parse_model(
            '<ir_version: 10, opset_import: ["" : 21, "com.microsoft" : 1]>'
            "layer (float[1,S,64] query, float[1,S,32] key, float[1,S,32] value, int32[1] lengths, int32[1] total)"
            f" => (float[1,S,64] output) {{ {GROUP_QUERY} }}"
        )
    ),
}


ONNX_REFUSALS |= {
    "attention-attribute": lambda: build(
        opset=25, replace=(("Attention<is_causal=1>", "Attention<is_causal=1, right_window_size=1>"),)
    ),
    "attention-outputs": lambda: build(
        replace=(
            ("output = Attention", "output, pk, pv, scores = Attention"),
            ('"", "", "", valid)', '"", "", "", valid) used = Identity(scores)'),
        )
    ),
    "cache-layout": lambda: build(replace=keys_through(f"{RESHAPED} {DEQUANTIZED} key_t = {SWAPPED}(key_d)", "key_t")),
    "codes-dtype": lambda: build(
        replace=keys_through(
            "key_c = Cast<to=2>(key_codes_out) key_z = Cast<to=2>(key_zeros_out) "
            "key_d = DequantizeLinear<axis=-1, block_size=16>(key_c, key_scales_out, key_z)",
            "key_d",
        )
    ),
    "mask-type": lambda: build(
        attention=MASKED,
        replace=(
            (
                "output = Attention(query, key_float, value_float, mask)",
                "wide = Cast<to=11>(mask) output = Attention(query, key_float, value_float, wide)",
            ),
        ),
    ),
    "scale-layout": lambda: build(
        replace=keys_through(
            f"{RESHAPED} key_t = {SWAPPED}(key_b) "
            "key_d = DequantizeLinear<axis=-1, block_size=16>(key_t, key_scales_out, key_zeros_out)",
            "key_d",
        )
    ),
    "slices-differ": lambda: build(
        attention=MASKED,
        replace=(
            (
                "output = Attention(query, key_float, value_float, mask)",
                "from = Constant<value_ints=[0]>() along = Constant<value_ints=[2]>() "
                "key_cut = Slice(key_float, from, position, along) value_cut = Slice(value_float, from, valid, along) "
                "output = Attention(query, key_cut, value_cut, mask)",
            ),
        ),
    ),
    "write-axis": lambda: build(
        attention=f"{WRITTEN} {ATTENTION_WRITTEN}",
        replace=(("TensorScatter<axis=2>(key_float,", "TensorScatter<axis=1>(key_float,"),),
    ),
}


MICROSOFT = ', "com.microsoft" : 1'
# More ways to the codes above: how the graph differs from one that is rewritten.
MORE_REFUSALS: dict[str, tuple[str, Callable[[], ir.Model]]] = {
    "MultiHeadAttention with a bias": (
        "attention-attribute",
        lambda: build(
            attention=MULTI_HEAD,
            domains=MICROSOFT,
            replace=(('keys, values, "", "", bias)', 'keys, values, hidden_bias, "", bias)'),),
        ),
    ),
    "MultiHeadAttention with a past": (
        "attention-past",
        lambda: build(
            attention=MULTI_HEAD,
            domains=MICROSOFT,
            replace=(('keys, values, "", "", bias)', 'keys, values, "", "", bias, keys, values)'),),
        ),
    ),
    "key heads repeated in turn": (
        "half-quantized",
        lambda: build(
            attention=MULTI_HEAD.replace(
                "keys_axis = Constant<value_ints=[2]>", "keys_axis = Constant<value_ints=[1]>"
            ),
            domains=MICROSOFT,
        ),
    ),
}


def test_every_code_is_listed_and_produced() -> None:
    """A code in the source that the list lacks, or one in the list that no test produces, fails."""
    sources = [path for folder in ("graphrewrite", "patterns") for path in Path(folder).rglob("*.py")]
    used = {code for path in sources for code in re.findall(r'Mismatch\(\s*"([a-z-]+)"', path.read_text("utf-8"))}
    assert used == set(REFUSALS)
    tested = {code for _, code in STANDARD_REFUSALS.values()} | set(FX_REFUSALS) | set(ONNX_REFUSALS)
    elsewhere = {"attention-in-function", "malformed-node", "current-tokens-not-cached", "cache-dtype"}
    assert set(REFUSALS) == tested | elsewhere


def without_input(index: int) -> Callable[[ir.Node], None]:
    return lambda node: node.replace_input_with(index, None)


def with_attribute(name: str, value: object) -> Callable[[ir.Node], None]:
    def change(node: ir.Node) -> None:
        node.attributes[name] = ir.convenience.convert_attribute(name, value)  # type: ignore[arg-type]

    return change


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (without_input(0), "lacks input 0"),
        (without_input(2), "lacks input 2"),
        (with_attribute("is_causal", 7), "is_causal is 7"),
        (with_attribute("is_causal", 1.0), "is_causal is FLOAT, not INT"),
        (with_attribute("scale", float("nan")), "scale is nan"),
        (with_attribute("scale", "x"), "scale is STRING, not FLOAT"),
    ],
)
@pytest.mark.parametrize("domain", ["", "llama"])
def test_malformed_core_is_refused(domain: str, change: Callable[[ir.Node], None], says: str) -> None:
    model = build() if domain == "" else ir.from_proto(onnx.parser.parse_model(SOURCE_CORE))
    change(next(node for node in model.graph if node.op_type in ("Attention", "custom_sdpa")))
    (refusal,) = gr.explain(model).refusals
    assert refusal.code == "malformed-node" and says in refusal.message


@pytest.mark.parametrize("count", range(4))
def test_source_core_with_too_few_inputs_is_refused(count: int) -> None:
    text = SOURCE_CORE.replace("(query, key, key, start)", f"({', '.join(['query', 'key', 'key', 'start'][:count])})")
    assert [refusal.code for refusal in gr.explain(onnx.parser.parse_model(text)).refusals] == ["malformed-node"]


def core_first(core: ir.Node) -> None:
    graph = core.graph
    assert isinstance(graph, ir.Graph)
    graph.remove(core)
    graph.insert_before(graph[0], core)


def core_of_nothing(core: ir.Node) -> None:
    core.replace_input_with(1, ir.Value(name="nowhere"))


@pytest.mark.parametrize("change", [core_first, core_of_nothing])
def test_unsound_graph_is_an_input_error(change: Callable[[ir.Node], None]) -> None:
    model = build()
    change(next(node for node in model.graph if node.op_type == "Attention"))
    with pytest.raises(gr.InputError, match="the graph is not sound"):
        gr.rewrite(model)


@pytest.mark.parametrize("code", ONNX_REFUSALS)
def test_onnx_near_miss_is_refused(code: str) -> None:
    model = ONNX_REFUSALS[code]()
    text = onnx_text(model)
    result = gr.rewrite(model)
    assert result.model is model and onnx_text(model) == text
    (refusal,) = result.report.refusals
    assert refusal.code == code and refusal.nodes and refusal.message


@pytest.mark.parametrize("name", MORE_REFUSALS)
def test_onnx_near_miss_of_another_kind_is_refused(name: str) -> None:
    code, make = MORE_REFUSALS[name]
    model = make()
    result = gr.rewrite(model)
    assert result.model is model
    assert [refusal.code for refusal in result.report.refusals] == [code]
