"""The operators that quantize and dequantize by token and channel, three ways, against torch's own operators."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tests.calls import INF, NAN, WAYS, Call, Feeds, rows_of, ways, ways_once
from tests.kernels.reference import FLOATS, Array

torch = pytest.importorskip("torch")
pytest.importorskip("torch.ao.quantization.fx._decomposed")
ops = torch.ops.quantized_decomposed

LIMITS = (-128, 127, torch.int8)
KINDS = ["random", "ties", "extremes", "offset", "not finite"]


def to_torch(array: Array) -> Any:
    is_bfloat16 = array.dtype == ml_dtypes.bfloat16
    return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16) if is_bfloat16 else torch.from_numpy(array)


def hard_rows(kind: str, dtype: str) -> Array:
    """Rows [2,3,2,8]; those of "extremes" overflow float16."""
    value = rows_of(kind)
    if kind == "not finite":
        value[0, 0, 0, 1], value[0, 1, 0, 2], value[1, 0, 0, 3] = NAN, INF, -INF
    with np.errstate(over="ignore"):
        converted: Array = value.astype(FLOATS[dtype])
    return converted


def assert_same(result: Array, expected: Any) -> None:
    array = expected.numpy()
    assert result.dtype == array.dtype
    np.testing.assert_array_equal(result, array)


# Tokens


@ways
@pytest.mark.parametrize("scheme", ["asymmetric", "symmetric"])
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("kind", KINDS)
def test_choose_qparams_per_token(way: str, scheme: str, dtype: str, kind: str) -> None:
    value = hard_rows(kind, dtype)
    name = "choose_qparams_per_token" + ("_asymmetric" if scheme == "asymmetric" else "")
    scales, zero_points = getattr(ops, name)(to_torch(value), torch.int8)
    call = Call("ChooseQParamsPerToken", {"input": value}, ("scales", "zero_points"), {"scheme": scheme})
    results = WAYS[way](call)
    assert_same(results[0], scales.to(torch.float64))
    assert_same(results[1], zero_points.to(torch.int64))


@ways_once
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_every_step_of_many_choices_is_rounded_as_torch_does(way: str, dtype: str) -> None:
    random = np.random.default_rng(0)
    value = random.standard_normal((20000, 8))
    # A range about as far below zero as above, where a rounding decides from which end the zero point is measured.
    value[::2, 0] = 4
    value[::2, 1] = -random.uniform(3.9, 4.1, 10000)
    value = value.astype(FLOATS[dtype])
    scales, zero_points = ops.choose_qparams_per_token_asymmetric(to_torch(value), torch.int8)
    results = WAYS[way](Call("ChooseQParamsPerToken", {"input": value}, ("scales", "zero_points"), {}))
    assert_same(results[0], scales)
    assert_same(results[1], zero_points)


def quantize_call(op_type: str, value: Array, scales: Array, points: Array | None, **attributes: Any) -> Call:
    inputs: Feeds = {"input": value, "scales": scales} | ({} if points is None else {"zero_points": points})
    return Call(op_type, inputs, ("codes",), attributes)


@ways
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("dtype", "scales_type", "points_type"),
    [
        ("float32", "float64", "int64"),
        ("float32", "float32", "int8"),
        ("float16", "float32", "int32"),
        ("bfloat16", "float64", "int8"),
        ("bfloat16", "float32", None),
    ],
)
def test_quantize_per_token(way: str, kind: str, dtype: str, scales_type: str, points_type: str | None) -> None:
    value = hard_rows(kind, dtype)
    scales, zero_points = ops.choose_qparams_per_token_asymmetric(to_torch(value), torch.int8)
    scales = scales.to(getattr(torch, scales_type))
    zero_points = torch.zeros_like(zero_points) if points_type is None else zero_points.to(getattr(torch, points_type))
    expected = ops.quantize_per_token(to_torch(value), scales, zero_points, *LIMITS)
    points = None if points_type is None else zero_points.numpy()
    call = quantize_call("QuantizePerToken", value, scales.numpy(), points)
    assert_same(WAYS[way](call)[0], expected)


@ways_once
@pytest.mark.parametrize("op_type", ["QuantizePerToken", "QuantizePerChannel"])
def test_the_two_orders_of_rounding_differ_on_ties(way: str, op_type: str) -> None:
    value = np.array([[0.5, 1.5, 2.5, -0.5, 200, -200]], np.float32)
    scales, points = np.ones((1,), np.float32), np.full((1,), 3, np.int8)
    if op_type == "QuantizePerToken":
        scales, points = scales[:, None], points[:, None]
    limits = {"quant_min": -100, "quant_max": 90, "axis": 0} if op_type == "QuantizePerChannel" else {"quant_min": -100}
    for rounding, expected in [
        ("after_zero_point", [4, 4, 6, 2]),  # round(3.5), round(4.5), round(5.5), round(2.5)
        ("before_zero_point", [3, 5, 5, 3]),  # round(0.5) + 3, ..
    ]:
        call = quantize_call(op_type, value, scales, points, rounding=rounding, **limits)
        assert WAYS[way](call)[0].tolist() == [[*expected, limits.get("quant_max", 127), -100]]


def dequantize_call(op_type: str, codes: Array, scales: Array, points: Array | None, **attributes: Any) -> Call:
    inputs: Feeds = {"codes": codes, "scales": scales} | ({} if points is None else {"zero_points": points})
    return Call(op_type, inputs, ("values",), attributes)


def random_codes(random: np.random.Generator, dtype: str, shape: tuple[int, ...]) -> Array:
    info = np.iinfo(dtype)
    codes: Array = random.integers(info.min, info.max + 1, shape).astype(dtype)
    codes.flat[0] = info.max
    return codes


def random_points(random: np.random.Generator, dtype: str, shape: tuple[int, ...]) -> Array:
    """Zero points of which each type's wider ones have numbers that a narrower type, or float32, lacks."""
    reach, lowest = {"int8": (128, -128), "int32": (2**27, -(2**31) + 255), "int64": (2**27, -(2**40))}[dtype]
    points: Array = random.integers(-reach, reach, shape).astype(dtype)
    points.flat[0] = lowest  # the difference to the largest code has no int8
    return points


@ways
@pytest.mark.parametrize("codes_type", ["int8", "uint8"])
@pytest.mark.parametrize("scales_type", ["float32", "float64"])
@pytest.mark.parametrize("points_type", [None, "int8", "int32", "int64"])
def test_dequantize_per_token(way: str, codes_type: str, scales_type: str, points_type: str | None) -> None:
    random = np.random.default_rng(1)
    codes = random_codes(random, codes_type, (2, 5, 8))
    scales = random.random((2, 5, 1)).astype(scales_type)
    points = None if points_type is None else random_points(random, points_type, scales.shape)
    # torch takes the difference in the wider of the two types, so both are widened for it.
    wide = torch.zeros(scales.shape, dtype=torch.int64) if points is None else torch.from_numpy(points).to(torch.int64)
    args = (torch.from_numpy(scales), wide, *LIMITS, torch.float32)
    expected = ops.dequantize_per_token(torch.from_numpy(codes).to(torch.int64), *args)
    assert_same(WAYS[way](dequantize_call("DequantizePerToken", codes, scales, points))[0], expected)


# Channels

SHAPE = (3, 4, 5)
AXES = [-3, -2, -1, 0, 1, 2]


@ways
@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("kind", ["random", "ties", "not finite"])
def test_quantize_per_channel(way: str, axis: int, dtype: str, kind: str) -> None:
    random = np.random.default_rng(2)
    turn = AXES.index(axis) + list(FLOATS).index(dtype)
    scales = random.uniform(0.005, 0.02, SHAPE[axis]).astype(("float32", "float64")[turn % 2])
    points = random.integers(-128, 128, SHAPE[axis]).astype(("int8", "int32", "int64")[turn // 2 % 3])
    value = random.standard_normal(SHAPE)
    if kind == "ties":
        scales[:], value = 0.25, random.integers(-80, 80, SHAPE) / 8
    elif kind == "not finite":
        value[0, 0, :3] = NAN, INF, -INF
    value = value.astype(FLOATS[dtype])
    expected = ops.quantize_per_channel(to_torch(value), *map(torch.from_numpy, (scales, points)), axis, *LIMITS)
    # -1 is the default.
    attributes = {} if axis == -1 else {"axis": axis}
    assert_same(WAYS[way](quantize_call("QuantizePerChannel", value, scales, points, **attributes))[0], expected)


@ways
@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("points_type", [None, "int8", "int32", "int64"])
def test_dequantize_per_channel(way: str, axis: int, points_type: str | None) -> None:
    random = np.random.default_rng(3)
    turn = AXES.index(axis) + (points_type in (None, "int32"))
    codes = random_codes(random, ("int8", "uint8")[turn // 2 % 2], SHAPE)
    scales = random.random(SHAPE[axis]).astype(("float32", "float64")[turn % 2])
    points = None if points_type is None else random_points(random, points_type, scales.shape)
    wide = None if points is None else torch.from_numpy(points).to(torch.int64)
    # torch's limits are those of the type, which is widened for it: it takes the difference in that type.
    args = (torch.from_numpy(scales), wide, axis, -(2**31), 2**31 - 1, torch.int32)
    expected = ops.dequantize_per_channel(torch.from_numpy(codes).to(torch.int32), *args)
    attributes = {} if axis == -1 else {"axis": axis}
    assert_same(WAYS[way](dequantize_call("DequantizePerChannel", codes, scales, points, **attributes))[0], expected)


@ways_once
def test_many_codes_are_those_of_torch(way: str) -> None:
    # x * (1 / scale) and x / scale differ in about one code of 10^5.
    random = np.random.default_rng(4)
    value = random.standard_normal((400, 1024), dtype=np.float32)
    scales, points = random.uniform(0.005, 0.02, 1024).astype(np.float32), random.integers(-128, 128, 1024)
    expected = ops.quantize_per_channel(*map(torch.from_numpy, (value, scales, points)), 1, *LIMITS)
    assert_same(WAYS[way](quantize_call("QuantizePerChannel", value, scales, points))[0], expected)


@ways_once
@pytest.mark.parametrize("op_type", ["QuantizePerChannel", "DequantizePerChannel"])
@pytest.mark.parametrize(("axis", "count"), [(1, 3), (3, 4), (-4, 3)])
def test_channels_that_are_not_there_are_an_error(way: str, op_type: str, axis: int, count: int) -> None:
    scales = np.ones(count, np.float32)
    if op_type == "QuantizePerChannel":
        call = quantize_call(op_type, np.ones(SHAPE, np.float32), scales, None, axis=axis)
    else:
        call = dequantize_call(op_type, np.ones(SHAPE, np.int8), scales, None, axis=axis)
    with pytest.raises(Exception, match=r"(?i)reshape|per_?channel"):
        WAYS[way](call)


@ways_once
def test_empty_tensors(way: str) -> None:
    empty, none = np.zeros((0, 3, 8), np.float32), np.zeros((0, 3, 1), np.float32)
    scales, points = WAYS[way](Call("ChooseQParamsPerToken", {"input": empty}, ("scales", "zero_points"), {}))
    assert scales.shape == points.shape == none.shape
    assert WAYS[way](quantize_call("QuantizePerToken", empty, none, None))[0].shape == empty.shape
    assert WAYS[way](quantize_call("QuantizePerChannel", empty, np.ones(3, np.float32), None, axis=1))[0].shape == (
        empty.shape
    )
    codes = empty.astype(np.int8)
    assert WAYS[way](dequantize_call("DequantizePerToken", codes, none, None))[0].shape == empty.shape
    assert (
        WAYS[way](dequantize_call("DequantizePerChannel", codes, none[:, 0, 0], None, axis=0))[0].shape == empty.shape
    )
