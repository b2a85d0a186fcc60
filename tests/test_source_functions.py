"""Function bodies of the source operators against torch's operators and the reference."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from graphrewrite.custom_ops.functions import MINIMUM_OPSET, attach
from tests.calls import INF, NAN, Feeds, assert_attends, model_of, node_of, rows_of, run_body, session, source_call
from tests.kernels import reference
from tests.kernels.reference import Array, make_sdpa, to_layout


@pytest.mark.parametrize("opset", [MINIMUM_OPSET, 17, 18, 21, 23, 25])
@pytest.mark.parametrize("kind", ["random", "ties", "extremes", "offset", "not finite"])
@pytest.mark.parametrize("scheme", ["asymmetric", "symmetric"])
def test_the_per_token_source_operators_equal_torch_bit_for_bit(opset: int, kind: str, scheme: str) -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("torch.ao.quantization.fx._decomposed")
    ops = torch.ops.quantized_decomposed
    value = rows_of(kind)
    if kind == "not finite":
        value[0, 0, 0, 1], value[0, 1, 0, 2], value[1, 0, 0, 3] = NAN, INF, -INF
    name = "choose_qparams_per_token" + ("_asymmetric" if scheme == "asymmetric" else "")
    scales, points = getattr(ops, name)(torch.from_numpy(value), torch.int8)
    codes = ops.quantize_per_token(torch.from_numpy(value), scales, points, -128, 127, torch.int8)

    choose = source_call("quantized_decomposed", name, {"input": value}, "scales", "zero_points", dtype=3)
    results = run_body(choose, opset)
    for result, expected in zip(results, (scales, points), strict=True):
        assert result.dtype == expected.numpy().dtype
        np.testing.assert_array_equal(result, expected.numpy())
    limits = {"quant_min": -128, "quant_max": 127, "dtype": 3}
    inputs: Feeds = {"input": value, "scales": results[0], "zero_points": results[1]}
    quantize = source_call("quantized_decomposed", "quantize_per_token", inputs, "codes", **limits)
    np.testing.assert_array_equal(run_body(quantize, opset)[0], codes.numpy())


def test_symmetric_scales_are_float32_whatever_an_export_declares() -> None:
    # torch's shape function says float64 scales and int64 zero points, and its kernel returns float32 for both.
    value = rows_of("random")
    choose = node_of(
        source_call("quantized_decomposed", "choose_qparams_per_token", {"input": value}, "s", "z", dtype=3)
    )
    for output, dtype in zip(choose.outputs, (ir.DataType.DOUBLE, ir.DataType.INT64), strict=True):
        output.type = ir.TensorType(dtype)
    codes = ir.Value(name="codes", type=ir.TensorType(ir.DataType.INT8))
    limits = {"quant_min": -128, "quant_max": 127, "dtype": 3}
    attributes = [ir.AttrInt64(name, number) for name, number in limits.items()]
    inputs = [choose.inputs[0], *choose.outputs]
    quantize = ir.Node("quantized_decomposed", "quantize_per_token", inputs, attributes, outputs=[codes])
    model = model_of(choose, quantize)
    attach(model)
    scales, points, result = session(model).run(None, {"input": value})
    assert (scales.dtype, points.dtype) == (np.float32, np.float32)
    np.testing.assert_array_equal(result, reference.quantize(value, "symmetric")[0])


@pytest.mark.parametrize("opset", [MINIMUM_OPSET, 17, 21, 25])
@pytest.mark.parametrize("scales_type", ["float32", "float64", "float32 widened"])
@pytest.mark.parametrize("points_type", ["int64", "int8", "int8 widened", "float32"])
@pytest.mark.parametrize("output_dtype", ["float32", "float64"])
def test_dequantize_per_token_equals_torch_bit_for_bit(
    opset: int, scales_type: str, points_type: str, output_dtype: str
) -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("torch.ao.quantization.fx._decomposed")
    random = np.random.default_rng(11)
    codes = random.integers(-128, 128, (2, 5, 3, 8)).astype(np.int8)
    scales = random.random((2, 5, 3, 1)).astype(scales_type.split()[0])
    points = random.integers(-128, 128, scales.shape).astype(points_type.split()[0])
    codes[0, 0, 0, 0], points[0, 0, 0, 0] = 127, -128  # the difference does not fit int8

    def torch_value(array: Array, kind: str, wide: str) -> Any:
        # torch subtracts an int8 zero point in int8, which wraps; callers widen it first, as the body always does.
        return torch.from_numpy(array.astype(wide) if "widened" in kind or kind == "int8" else array)

    expected = torch.ops.quantized_decomposed.dequantize_per_token(
        torch.from_numpy(codes),
        torch_value(scales, scales_type, "float64"),
        torch_value(points, points_type, "int64"),
        -128, 127, torch.int8, getattr(torch, output_dtype),
    )  # fmt: skip
    onnx_type = ir.DataType.from_numpy(np.dtype(output_dtype))
    limits = {"quant_min": -128, "quant_max": 127, "dtype": 3, "output_dtype": onnx_type.value}
    inputs: Feeds = {"input": codes, "scales": scales, "zero_points": points}
    call = source_call("quantized_decomposed", "dequantize_per_token", inputs, "values", **limits)
    node = node_of(call)
    casts = []
    for position, (kind, wide) in enumerate([(scales_type, "float64"), (points_type, "int64")], start=1):
        if "widened" in kind:
            target = ir.DataType.from_numpy(np.dtype(wide))
            wider = ir.Value(name=f"wide_{position}", type=ir.TensorType(target))
            casts.append(ir.node("Cast", [node.inputs[position]], {"to": target.value}, outputs=[wider]))
            node.replace_input_with(position, wider)
    model = model_of(*casts, node, opset=opset)
    attach(model)
    (*_, result) = session(model).run(None, call.feeds)
    np.testing.assert_array_equal(result, expected.numpy())


@pytest.mark.parametrize("axis", [-1, 0, 1])
@pytest.mark.parametrize(("scales_type", "points_type"), [("float32", "int64"), ("float64", "int8")])
@pytest.mark.parametrize("opset", [MINIMUM_OPSET, 25])
def test_the_per_channel_source_operators_equal_torch_bit_for_bit(
    axis: int, scales_type: str, points_type: str, opset: int
) -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("torch.ao.quantization.fx._decomposed")
    ops = torch.ops.quantized_decomposed
    random = np.random.default_rng(11)
    value = random.standard_normal((3, 4, 5), dtype=np.float32)
    count = value.shape[axis]
    scales = random.uniform(0.005, 0.02, count).astype(scales_type)
    points = random.integers(-128, 128, count).astype(points_type)
    limits = {"axis": axis, "quant_min": -128, "quant_max": 127, "dtype": 3}
    args = (axis, -128, 127, torch.int8)
    codes = ops.quantize_per_channel(*map(torch.from_numpy, (value, scales, points)), *args)
    inputs: Feeds = {"input": value, "scales": scales, "zero_points": points}
    call = source_call("quantized_decomposed", "quantize_per_channel", inputs, "codes", **limits)
    np.testing.assert_array_equal(run_body(call, opset)[0], codes.numpy())

    # torch subtracts an int8 zero point in int8, which wraps; the body does not.
    wide = torch.from_numpy(points).to(torch.int64)
    for given, zero_points in ((points, wide), (None, None)):
        expected = ops.dequantize_per_channel(codes, torch.from_numpy(scales), zero_points, *args)
        inputs = {"input": codes.numpy(), "scales": scales} | ({} if given is None else {"zero_points": given})
        call = source_call("quantized_decomposed", "dequantize_per_channel", inputs, "values", **limits)
        np.testing.assert_array_equal(run_body(call, opset)[0], expected.numpy())


@pytest.mark.parametrize("with_caches", [False, True])
@pytest.mark.parametrize(
    "facts",
    [
        {"rows": 1, "start": 9, "is_causal": True},
        {"rows": 3, "start": 0, "is_causal": True},
        {"rows": 3, "start": 4, "scale": 0.3},
        {"rows": 3, "start": 4, "mask": "float"},
        {"rows": 0, "start": 4, "is_causal": True},
    ],
    ids=str,
)
def test_the_source_sdpa_with_kv_cache(facts: dict[str, Any], with_caches: bool) -> None:
    a = make_sdpa(np.random.default_rng(12), heads=(4, 2), cache="float", recent=True, **facts)
    inputs: Feeds = {
        "query": a.query,
        "key": a.recent_key,
        "value": a.recent_value,
        "key_cache": a.key_cache,
        "value_cache": a.value_cache,
        "start_pos": a.start_pos,
        "seq_len": np.array(a.query.shape[1]),
        "attn_mask": a.attn_mask,
    }
    attributes = {"drpout_p": 0.0, "is_causal": int(a.is_causal)} | ({} if a.scale is None else {"scale": a.scale})
    call = source_call("llama", "sdpa_with_kv_cache", inputs, "output", "new_keys", "new_values", **attributes)
    model = model_of(node_of(call))
    if not with_caches:
        del model.graph.outputs[1:]
    attach(model)
    output, *caches = session(model).run(None, {k: v for k, v in call.feeds.items() if k != "unused"})
    assert_attends(output, a)
    for result, which in zip(caches, ("key", "value"), strict=False):
        np.testing.assert_array_equal(result, a.rows(which))
    assert len(caches) == (2 if with_caches else 0)


@pytest.mark.parametrize(
    "facts",
    [
        {"rows": 1, "start": 9, "is_causal": True},
        {"rows": 3, "start": 4},
        {"rows": 3, "start": 0, "mask": "float"},
        {"rows": 3, "start": 99, "mask": "float"},  # ignored where there is a mask
    ],
    ids=str,
)
def test_the_source_custom_sdpa(facts: dict[str, Any]) -> None:
    a = make_sdpa(np.random.default_rng(13), heads=(4, 2), cache="float", **facts)
    inputs: Feeds = {
        "query": a.query,
        "key": a.key_cache,
        "value": a.value_cache,
        "start_pos": a.start_pos,
        "attn_mask": a.attn_mask,
    }
    call = source_call("llama", "custom_sdpa", inputs, "output", drpout_p=0.0, is_causal=int(a.is_causal))
    assert_attends(run_body(call)[0], a)


@pytest.mark.parametrize("is_seq_at_dim_2", [0, 1])
@pytest.mark.parametrize(
    "facts",
    [
        {"rows": 1, "start": 9, "is_causal": True},
        {"rows": 3, "start": 4, "scale": 0.3},
        {"rows": 3, "start": 99, "mask": "float"},  # ignored where there is a mask
    ],
    ids=str,
)
def test_the_source_custom_quantized_sdpa(facts: dict[str, Any], is_seq_at_dim_2: int) -> None:
    a = make_sdpa(np.random.default_rng(13), heads=(4, 2), dtype="int8", **facts)
    layout = ("BSNH", "BNSH")[is_seq_at_dim_2]
    tensors: Feeds = {"query": a.query, "key": a.key_cache, "value": a.value_cache}
    parameters: Feeds = {
        "q_zero_points": a.query_zero_points,
        "q_scales": a.query_scales,
        "k_zero_points": a.key_zero_points,
        "k_scales": a.key_scales,
        "v_zero_points": a.value_zero_points,
        "v_scales": a.value_scales,
    }
    tensors, parameters = (
        {name: None if array is None else to_layout(array, layout) for name, array in group.items()}
        for group in (tensors, parameters)
    )
    inputs = tensors | {"start_pos": a.start_pos, "attn_mask": a.attn_mask} | parameters
    attributes = {"is_causal": int(a.is_causal), "is_seq_at_dim_2": is_seq_at_dim_2}
    attributes |= {} if a.scale is None else {"scale": a.scale}
    call = source_call("llama", "custom_quantized_sdpa", inputs, "output", **attributes)
    assert_attends(run_body(call)[0], a, layout)


def test_the_source_update_cache() -> None:
    value, cache = np.ones((1, 2, 1, 3), np.int8), np.zeros((1, 5, 1, 3), np.int8)
    inputs: Feeds = {"value": value, "cache": cache, "start_pos": np.array(2)}
    (result,) = run_body(source_call("llama", "update_cache", inputs, "new_cache"))
    assert result[0, :, 0, 0].tolist() == [0, 0, 1, 1, 0]


@pytest.mark.parametrize(
    ("indices", "expected"),
    [
        ([[3, 0], [1, 2]], [[2, 0, 0, 1], [0, 1, 2, 0]]),
        ([[3, 3], [1, 2]], [[0, 0, 0, 2], [0, 1, 2, 0]]),
        ([[4, 0]] * 2, None),
        ([[0, -1]] * 2, None),
    ],
)
def test_the_source_update_cache_with_indices(indices: list[list[int]], expected: list[list[int]] | None) -> None:
    value = np.broadcast_to(np.array([1, 2], np.float32).reshape(1, 2, 1, 1), (2, 2, 1, 3))
    inputs: Feeds = {"value": np.ascontiguousarray(value), "cache": np.zeros((2, 4, 1, 3), np.float32)}
    inputs |= {"start_pos": np.array(0), "indices": np.array(indices)}
    call = source_call("llama", "update_cache_with_indices", inputs, "new_cache")
    if expected is None:
        with pytest.raises(Exception, match=r"ind(ex|ic)"):
            run_body(call)
    else:
        assert run_body(call)[0][:, :, 0, 0].tolist() == expected
