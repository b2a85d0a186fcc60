"""The stand-alone operators that quantize and dequantize: code for code those of torch, on every instruction set."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from graphrewrite.custom_ops import capi
from tests.kernels.calls import instruction_set, instruction_sets
from tests.kernels.memory import guarded
from tests.kernels.reference import FLOATS, Array

torch = pytest.importorskip("torch")
pytest.importorskip("torch.ao.quantization.fx._decomposed")
torch_ops = torch.ops.quantized_decomposed

LIMITS = (-128, 127, torch.int8)
SCHEMES = {"asymmetric": "choose_qparams_per_token_asymmetric", "symmetric": "choose_qparams_per_token"}
LARGE = 10_000_000


@pytest.fixture(params=instruction_sets(), autouse=True)
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    with instruction_set(request.param):
        yield request.param


def run(op: str, inputs: list[Array | None], outputs: list[Array], **attributes: Any) -> list[Array]:
    """Fills `outputs` from inputs that end at inaccessible memory, as the outputs do; in two threads."""
    placed = [None if array is None else guarded(array) for array in inputs]
    results = [guarded(array) for array in outputs]
    capi.run(op, placed, results, attributes, threads=2)
    return results


def choose(value: Array, scheme: str) -> list[Array]:
    rows = (*value.shape[:-1], 1)
    return run("ChooseQParamsPerToken", [value], [np.zeros(rows), np.zeros(rows, np.int64)], scheme=scheme)


def quantize(op: str, value: Array, scales: Array, zero_points: Array | None, **attributes: Any) -> Array:
    return run(op, [value, scales, zero_points], [np.full(value.shape, 99, np.int8)], **attributes)[0]


def dequantize(op: str, codes: Array, scales: Array, zero_points: Array | None, **attributes: Any) -> Array:
    return run(op, [codes, scales, zero_points], [np.full(codes.shape, np.nan, np.float32)], **attributes)[0]


def to_torch(array: Array | None) -> Any:
    if array is None:
        return None
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def rows_of(kind: str, dtype: str) -> Array:
    """Rows that tell implementations of quantization apart."""
    random = np.random.default_rng(0)
    rows: Array = random.standard_normal((400, 70)).astype(np.float32)
    if kind == "ties":
        # With extremes at +-127.5 the scale is 1, halves are ties, and the zero point is odd or even.
        rows = random.integers(-255, 256, rows.shape).astype(np.float32) / 2
        rows[:, 0], rows[:, 1] = 127.5, -127.5
        rows[::2] += 1
    elif kind == "magnitudes":
        rows *= 10.0 ** random.uniform(-45, 38, (400, 1))
    elif kind == "zeros":
        rows[::2], rows[1::2] = 0, rows[1::2, :1]
    elif kind == "not finite":
        rows[np.arange(400), random.integers(0, 70, 400)] = random.choice([np.nan, np.inf, -np.inf], 400)
    elif kind == "one element":
        rows = rows[:, :1]
    with np.errstate(over="ignore"):
        typed: Array = rows.astype(FLOATS[dtype])
    return typed


KINDS = ["normal", "ties", "magnitudes", "zeros", "not finite", "one element"]


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("kind", KINDS)
def test_choose_qparams_per_token(scheme: str, dtype: str, kind: str) -> None:
    value = rows_of(kind, dtype)
    expected = getattr(torch_ops, SCHEMES[scheme])(to_torch(value), torch.int8)
    for actual, wanted in zip(choose(value, scheme), expected, strict=True):
        np.testing.assert_array_equal(actual, wanted.to(torch.from_numpy(actual).dtype).numpy())


def test_choose_qparams_of_every_float16() -> None:
    """Each of the 63488 finite numbers alone in a row: every exponent, and every step rounded."""
    value: Array = np.arange(2**16, dtype=np.uint16).view(np.float16)
    value = value[np.isfinite(value)].reshape(-1, 1)
    expected = torch_ops.choose_qparams_per_token_asymmetric(to_torch(value), torch.int8)
    for actual, wanted in zip(choose(value, "asymmetric"), expected, strict=True):
        np.testing.assert_array_equal(actual, wanted.numpy())


def parameters_for(shape: tuple[int, ...], scales: str, zero_points: str | None) -> tuple[Array, Array | None]:
    random = np.random.default_rng(1)
    points = None if zero_points is None else random.integers(-128, 128, shape).astype(zero_points)
    return random.uniform(0.005, 0.03, shape).astype(scales), points


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("scales_type", ["float32", "float64"])
@pytest.mark.parametrize("points_type", ["int8", "int32", "int64"])
def test_quantize_per_token(kind: str, dtype: str, scales_type: str, points_type: str) -> None:
    value = rows_of(kind, dtype)
    scales, points = parameters_for((len(value), 1), scales_type, points_type)
    if kind == "ties":
        scales[:] = 1
    for low, high in [(-128, 127), (-8, 7)]:
        expected = torch_ops.quantize_per_token(
            to_torch(value), *map(to_torch, (scales, points)), low, high, torch.int8
        )
        actual = quantize("QuantizePerToken", value, scales, points, quant_min=low, quant_max=high)
        np.testing.assert_array_equal(actual, expected.numpy())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("scales_type", ["float32", "float64"])
@pytest.mark.parametrize("axis", [0, 1, -1])
def test_quantize_per_channel(kind: str, dtype: str, scales_type: str, axis: int) -> None:
    value = rows_of(kind, dtype)
    scales, points = parameters_for((value.shape[axis],), scales_type, "int32")
    if kind == "ties":
        scales[:] = 1
    expected = torch_ops.quantize_per_channel(to_torch(value), *map(to_torch, (scales, points)), axis, *LIMITS)
    actual = quantize("QuantizePerChannel", value, scales, points, axis=axis)
    np.testing.assert_array_equal(actual, expected.numpy())


@pytest.mark.parametrize("op", ["QuantizePerToken", "QuantizePerChannel"])
@pytest.mark.parametrize(("rounding", "expected"), [("after_zero_point", [4, 4]), ("before_zero_point", [3, 5])])
def test_orders_of_rounding(op: str, rounding: str, expected: list[int]) -> None:
    """2.5 and 1.5 with the odd zero point 1 and an even one: a tie goes to the even code, or to the even quotient."""
    value, points = np.array([[0.5], [1.5]], np.float32) + 2, np.array([[1], [1]])
    shape = (2, 1) if op == "QuantizePerToken" else (2,)
    attributes: dict[str, Any] = {"rounding": rounding} | ({} if op == "QuantizePerToken" else {"axis": 0})
    codes = quantize(op, value, np.ones(shape, np.float32), points.reshape(shape), **attributes)
    assert codes.ravel().tolist() == expected


@pytest.mark.parametrize("shape", [(6, 5), (3, 4, 5, 7), (2, 300, 3), (3, 2500), (700, 70), (1, 9), (40,)])
@pytest.mark.parametrize("codes_type", ["int8", "uint8"])
@pytest.mark.parametrize("scales_type", ["float32", "float64"])
@pytest.mark.parametrize("points_type", [None, "int32", "int64"])
def test_dequantize_per_channel(
    shape: tuple[int, ...], codes_type: str, scales_type: str, points_type: str | None
) -> None:
    codes = np.random.default_rng(2).integers(0, 256, shape).astype(np.uint8).view(codes_type)
    for axis in range(-len(shape), len(shape)):
        scales, points = parameters_for((shape[axis],), scales_type, points_type)
        given = [to_torch(array) for array in (codes, scales, points)]
        dtype = given[0].dtype
        expected = torch_ops.dequantize_per_channel(*given, axis, 0 if codes_type == "uint8" else -128, 127, dtype)
        actual = dequantize("DequantizePerChannel", codes, scales, points, axis=axis)
        np.testing.assert_array_equal(actual, expected.numpy())


@pytest.mark.parametrize("rows", [(3,), (2, 90), (9000,)])
@pytest.mark.parametrize("dim", [1, 9, 64, 200])
@pytest.mark.parametrize(("scales_type", "points_type"), [("float64", "int64"), ("float32", "int32")])
def test_dequantize_per_token(rows: tuple[int, ...], dim: int, scales_type: str, points_type: str) -> None:
    codes = np.random.default_rng(3).integers(-128, 128, (*rows, dim)).astype(np.int8)
    scales, points = parameters_for((*rows, 1), scales_type, points_type)
    given = map(to_torch, (codes, scales, points))
    expected = torch_ops.dequantize_per_token(*given, *LIMITS, torch.float32)
    np.testing.assert_array_equal(dequantize("DequantizePerToken", codes, scales, points), expected.numpy())


ENDS = {name: [np.iinfo(name).min, np.iinfo(name).max] for name in ("int8", "int32", "int64")}
POINTS = [(name, point) for name, points in ENDS.items() for point in points]
POINTS += [("int32", sign * (2**k + 1)) for sign in (-1, 1) for k in (23, 24, 30)]
POINTS += [("int64", sign * (2**k + 1)) for sign in (-1, 1) for k in (31, 53, 62)]


@pytest.mark.parametrize(("points_type", "point"), POINTS)
@pytest.mark.parametrize("scales_type", ["float32", "float64"])
@pytest.mark.parametrize("codes_type", ["int8", "uint8"])
def test_zero_points_of_any_size(points_type: str, point: int, scales_type: str, codes_type: str) -> None:
    """Against exact integers: the difference never wraps around, where torch's does. A second channel has zero point 1,
    so that the ways for small and for large ones meet."""
    scale = np.dtype(scales_type).type(0.3)
    codes = np.arange(256, dtype=np.uint8).view(codes_type)
    points = np.array([point, 1]).astype(points_type)
    expected = [
        np.float32(np.dtype(scales_type).type(exact(int(code) - int(zero), scales_type)) * scale)
        for zero in points
        for code in codes
    ]
    by_row = dequantize(
        "DequantizePerChannel", np.stack([codes, codes]), np.full(2, scale, scales_type), points, axis=0
    )
    np.testing.assert_array_equal(by_row.ravel(), expected)
    by_column = dequantize(
        "DequantizePerChannel", np.stack([codes, codes], 1), np.full(2, scale, scales_type), points, axis=1
    )
    np.testing.assert_array_equal(by_column.T.ravel(), expected)


def exact(difference: int, dtype: str) -> Any:
    """An integer of any size, rounded once to `dtype`, half to even."""
    bits = {"float32": 24, "float64": 53}[dtype]
    shift = max(abs(difference).bit_length() - bits, 0)
    quotient, rest = divmod(abs(difference), 2**shift)
    half = 2**shift // 2
    quotient += shift > 0 and (rest > half or (rest == half and quotient % 2 == 1))
    return float(quotient * 2**shift) * (1 if difference >= 0 else -1)


@pytest.mark.parametrize("points_type", ["int32", "int64"])
@pytest.mark.parametrize("scales_type", ["float32", "float64"])
def test_large_zero_points_when_quantizing(points_type: str, scales_type: str) -> None:
    value = np.tile(np.array([[-1e30, -3, 0, 5, 1e30, np.nan]], np.float32), (4, 1))
    points = np.array([*ENDS[points_type], 2**24 + 1, -(2**30)]).astype(points_type)
    scales = np.ones(4, scales_type)
    expected = torch_ops.quantize_per_channel(*map(to_torch, (value, scales, points)), 0, *LIMITS)
    actual = quantize("QuantizePerChannel", value, scales, points, axis=0)
    np.testing.assert_array_equal(actual, expected.numpy())


def test_ten_million_elements() -> None:
    """Large enough for streaming stores, many jobs and, along the last axis, a table that wraps at odd places."""
    random = np.random.default_rng(4)
    value = random.standard_normal(LARGE, dtype=np.float32).reshape(-1, 1250)
    scales, points = torch_ops.choose_qparams_per_token_asymmetric(to_torch(value), torch.int8)
    for actual, wanted in zip(choose(value, "asymmetric"), (scales, points), strict=True):
        np.testing.assert_array_equal(actual, wanted.numpy())
    expected = torch_ops.quantize_per_token(to_torch(value), scales, points, *LIMITS)
    codes = quantize("QuantizePerToken", value, scales.numpy(), points.numpy())
    np.testing.assert_array_equal(codes, expected.numpy())
    values = torch_ops.dequantize_per_token(expected, scales, points, *LIMITS, torch.float32)
    actual = dequantize("DequantizePerToken", codes, scales.numpy(), points.numpy())
    np.testing.assert_array_equal(actual, values.numpy())
    for axis in (0, 1):
        factors, zeros = parameters_for((value.shape[axis],), "float32", "int32")
        given = [to_torch(array) for array in (factors, zeros)]
        expected = torch_ops.quantize_per_channel(to_torch(value), *given, axis, *LIMITS)
        codes = quantize("QuantizePerChannel", value, factors, zeros, axis=axis)
        np.testing.assert_array_equal(codes, expected.numpy())
        values = torch_ops.dequantize_per_channel(expected, *given, axis, *LIMITS)
        actual = dequantize("DequantizePerChannel", codes, factors, zeros, axis=axis)
        np.testing.assert_array_equal(actual, values.numpy())


@pytest.mark.parametrize("op", ["Token", "Channel"])
@pytest.mark.parametrize("shape", [(3, 5, 24), (2, 700, 24)])
def test_strides(op: str, shape: tuple[int, ...]) -> None:
    """Every tensor is part of a larger one whose other elements stay, or is broadcast."""
    random = np.random.default_rng(5)
    value = random.standard_normal((shape[0] * 2, *shape[1:])).astype(np.float32)[::2].transpose(1, 0, 2)
    count = (*value.shape[:-1], 1) if op == "Token" else value.shape[1:2]
    scales = np.broadcast_to(np.float64(0.02), count)
    points = np.repeat(random.integers(-9, 9, count), 2, axis=0)[::2]
    attributes: dict[str, Any] = {} if op == "Token" else {"axis": 1}
    wide = np.full((*value.shape[:-1], 2 * value.shape[-1]), 99, np.int8)
    codes = wide[..., ::2]
    capi.run(f"QuantizePer{op}", [value, scales, points], [codes], attributes, threads=2)
    dense = [np.ascontiguousarray(array) for array in (value, scales, points)]
    np.testing.assert_array_equal(codes, quantize(f"QuantizePer{op}", *dense, **attributes))
    assert (wide[..., 1::2] == 99).all()
    values = np.full(wide.shape, np.nan, np.float32)
    capi.run(f"DequantizePer{op}", [codes, scales, points], [values[..., 1::2]], attributes, threads=2)
    expected = dequantize(f"DequantizePer{op}", np.ascontiguousarray(codes), *dense[1:], **attributes)
    np.testing.assert_array_equal(values[..., 1::2], expected)
    assert np.isnan(values[..., ::2]).all()


@pytest.mark.parametrize(("axis", "columns"), [(1, 71), (0, 71), (0, 80), (0, 600)])
def test_large_results_anywhere_within_a_cache_line(axis: int, columns: int) -> None:
    """With streaming stores: straight from the kernels, or by way of a block where short rows end within lines."""
    random = np.random.default_rng(6)
    codes = random.integers(-128, 128, (5_000_000 // columns, columns)).astype(np.int8)
    scales: Array = random.uniform(0.1, 1, codes.shape[axis : axis + 1]).astype(np.float32)
    expected = codes.astype(np.float32) * (scales if axis == 1 else scales[:, None])
    buffer = np.zeros(codes.size + 32, np.float32)
    line = -buffer.ctypes.data % 64 // 4
    for offset in (line, line + 5, line + 15):
        values = buffer[offset : offset + codes.size].reshape(codes.shape)
        capi.run("DequantizePerChannel", [codes, scales], [values], {"axis": axis}, threads=2)
        np.testing.assert_array_equal(values, expected)
        assert not buffer[:offset].any() and not buffer[offset + codes.size :].any()
        buffer[:] = 0


@pytest.mark.parametrize("threads", [1, 3, 8])
def test_results_do_not_depend_on_the_threads(threads: int) -> None:
    value = np.random.default_rng(7).standard_normal((3000, 130)).astype(np.float32)
    scales, points = parameters_for((3000, 1), "float64", "int64")
    one, many = np.zeros((2, *value.shape), np.int8)
    capi.run("QuantizePerToken", [value, scales, points], [one])
    capi.run("QuantizePerToken", [value, scales, points], [many], threads=threads)
    np.testing.assert_array_equal(one, many)


@pytest.mark.parametrize("shape", [(0, 8), (3, 0), (0,)])
def test_nothing_to_do(shape: tuple[int, ...]) -> None:
    value, codes = np.zeros(shape, np.float32), np.zeros(shape, np.int8)
    scales = np.ones((*shape[:-1], 1), np.float32)
    quantize("QuantizePerToken", value, scales, None)
    dequantize("DequantizePerToken", codes, scales, None)
    quantize("QuantizePerChannel", value, np.ones(shape[-1:], np.float32), None)
    dequantize("DequantizePerChannel", codes, np.ones(shape[-1:], np.float32), None)


@pytest.mark.parametrize("shape", [(37, 5000), (3, 1025), (100, 2048), (1, 3000)], ids=str)
@pytest.mark.parametrize("zero_points", [None, np.int8, np.int64])
def test_many_channels_are_taken_a_part_of_them_at_a_time(shape: tuple[int, int], zero_points: Any) -> None:
    random = np.random.default_rng(11)
    codes, scales = random.integers(-128, 128, shape).astype(np.int8), random.random(shape[1])
    points = None if zero_points is None else random.integers(-9, 9, shape[1]).astype(zero_points)
    difference = codes.astype(np.int64) - (0 if points is None else points.astype(np.int64))
    (values,) = run("DequantizePerChannel", [codes, scales, points], [np.full(shape, np.nan, np.float32)], axis=1)
    np.testing.assert_array_equal(values, (difference * scales).astype(np.float32))
