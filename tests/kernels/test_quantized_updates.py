"""UpdateQuantizedCache: codes, scales and zero points of every scheme, on every instruction set."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest

from graphrewrite.custom_ops import capi
from tests.kernels import reference
from tests.kernels.calls import instruction_set, instruction_sets
from tests.kernels.memory import guarded
from tests.kernels.quantization import CODE_TYPES, RANGES, quantize_static
from tests.kernels.reference import FLOATS, Array, to_layout

SCHEMES = ["asymmetric", "symmetric"]
isas = pytest.mark.parametrize("isa", instruction_sets())
layouts = pytest.mark.parametrize("layout", ["BSNH", "BNSH"])
in_place_or_not = pytest.mark.parametrize("in_place", [False, True])


def quantized_state(
    random: np.random.Generator, batch: int, capacity: int, heads: int, dim: int, codes: str = "int8", groups: int = 1
) -> list[Array]:
    """Codes, scales and zero points of a cache that is in use."""
    low, high = RANGES[codes]
    rows = (batch, capacity, heads)
    filled = random.integers(low, high + 1, (*rows, dim)).astype(CODE_TYPES[codes])
    return [
        filled if codes == "int8" else reference.pack(filled),
        random.random((*rows, groups)).astype(np.float32),
        random.integers(low, high + 1, (*rows, groups)).astype(CODE_TYPES[codes]),
    ]


def update_quantized(
    value: Array, state: list[Array], start: Any, *, in_place: bool = False, threads: int = 2, **attributes: Any
) -> list[Array]:
    """The new state; without zero points when `state` has none."""
    new = state if in_place else [np.zeros_like(array) for array in state]
    inputs = [value, *state[:2], np.asarray(start, np.int64), *state[2:]]
    capi.run("UpdateQuantizedCache", inputs, new, attributes, threads=threads)
    return new


@isas
@layouts
@in_place_or_not
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("rounding", ["after_zero_point", "before_zero_point"])
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(
    ("codes", "dim", "groups", "rows"),
    [
        *(("int8", 1, 1, 3), ("int8", 7, 1, 1), ("int8", 64, 1, 130), ("int8", 80, 5, 2), ("int8", 6, 6, 2)),
        *(("int4", 2, 1, 3), ("int4", 64, 2, 130), ("int4", 256, 2, 1), ("int4", 90, 3, 2), ("int4", 128, 64, 2)),
    ],
)
def test_update_quantized_cache(
    isa: str,
    layout: str,
    in_place: bool,
    scheme: str,
    rounding: str,
    dtype: str,
    codes: str,
    dim: int,
    groups: int,
    rows: int,
) -> None:
    random = np.random.default_rng(3)
    value = random.standard_normal((2, rows, 3, dim)).astype(FLOATS[dtype])
    before = quantized_state(random, 2, rows + 9, 3, dim, codes, groups)
    parts = reference.quantize(value, scheme, codes=codes, groups=groups, rounding=rounding)
    expected = [reference.update_cache(part, old, np.array([4, 9])) for part, old in zip(parts, before, strict=True)]
    placed = [guarded(to_layout(array, layout)) for array in before]
    attributes: dict[str, Any] = {"scheme": scheme, "rounding": rounding, "layout": layout}
    with instruction_set(isa):
        after = update_quantized(guarded(to_layout(value, layout)), placed, [4, 9], in_place=in_place, **attributes)
    for actual, wanted in zip(after, expected, strict=True):
        np.testing.assert_array_equal(to_layout(actual, layout), wanted)


RINGS = [
    # rows, capacity, start
    (3, 8, 0),
    (3, 8, 6),
    (3, 8, [7, 23]),
    (29, 8, [4, 1]),
    (3, 1, 5),
    (20, 7, 2**63 - 1),
]


@layouts
@pytest.mark.parametrize("codes", CODE_TYPES)
@pytest.mark.parametrize(("rows", "capacity", "start"), RINGS)
def test_rings_of_codes(layout: str, codes: str, rows: int, capacity: int, start: Any) -> None:
    random = np.random.default_rng(6)
    value = random.standard_normal((2, rows, 3, 32), dtype=np.float32)
    before = quantized_state(random, 2, capacity, 3, 32, codes, 2)
    parts = reference.quantize(value, codes=codes, groups=2)
    after = update_quantized(
        to_layout(value, layout),
        [to_layout(array, layout) for array in before],
        start,
        layout=layout,
        write_mode="circular",
    )
    for actual, part, old in zip(after, parts, before, strict=True):
        wanted = reference.update_cache(part, old, np.asarray(start), "circular")
        np.testing.assert_array_equal(to_layout(actual, layout), wanted)


@pytest.mark.parametrize("codes", CODE_TYPES)
def test_symmetric_without_zero_points(codes: str) -> None:
    random = np.random.default_rng(4)
    value = random.standard_normal((1, 2, 1, 8), dtype=np.float32)
    after = update_quantized(value, quantized_state(random, 1, 4, 1, 8, codes)[:2], 1, scheme="symmetric")
    for actual, wanted in zip(after, reference.quantize(value, "symmetric", codes=codes), strict=False):
        np.testing.assert_array_equal(actual[:, 1:3], wanted)


@pytest.mark.parametrize("codes", CODE_TYPES)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_codes_with_strides(codes: str, scheme: str) -> None:
    """Values and all parts of the cache are every other element of larger tensors."""
    random = np.random.default_rng(7)
    value = random.standard_normal((2, 6, 3, 64)).astype(np.float32)[:, ::2, :, ::2]
    state = [np.repeat(array, 2, -1) for array in quantized_state(random, 2, 8, 3, 32, codes, 2)]
    before = [array.copy() for array in state]
    parts = reference.quantize(value, scheme, codes=codes, groups=2)
    update_quantized(value, [array[..., ::2] for array in state], 4, in_place=True, scheme=scheme)
    for actual, part, old in zip(state, parts, before, strict=True):
        np.testing.assert_array_equal(actual[..., ::2], reference.update_cache(part, old[..., ::2], np.array(4)))
        np.testing.assert_array_equal(actual[..., 1::2], old[..., 1::2])


@pytest.mark.parametrize("threads", [1, 3, 8])
@pytest.mark.parametrize("codes", CODE_TYPES)
def test_codes_do_not_depend_on_the_threads(threads: int, codes: str) -> None:
    random = np.random.default_rng(8)
    value = random.standard_normal((2, 150, 3, 128), dtype=np.float32)
    after = update_quantized(value, quantized_state(random, 2, 160, 3, 128, codes, 4), 5, threads=threads)
    for actual, wanted in zip(after, reference.quantize(value, codes=codes, groups=4), strict=True):
        np.testing.assert_array_equal(actual[:, 5:155], wanted)


def value_rows() -> dict[str, Array]:
    """Rows that tell implementations of quantization apart, [rows, D]."""
    random = np.random.default_rng(0)

    def normal(*shape: int) -> Array:
        return random.standard_normal(shape, dtype=np.float32)

    # With extremes at +-127.5 the scale is 1 and halves are ties, with an odd zero point or an even one; with 0 and 255
    # the zero point is -128.
    ties = random.integers(-255, 256, (8000, 64)).astype(np.float32) / 2
    ties[:, 0], ties[:, 1] = 127.5, -127.5
    shifted = random.integers(0, 511, (8000, 64)).astype(np.float32) / 2
    shifted[:, 0], shifted[:, 1] = 255, 0
    odd = ties + np.float32(1)
    extreme = {}
    for name, worst in {"nan": [np.nan], "infinite": [np.inf, -np.inf]}.items():
        rows = normal(300, 64)
        rows[np.arange(300), random.integers(0, 64, 300)] = random.choice(worst, 300)
        extreme[name] = rows
    overflowing = normal(300, 64)
    overflowing[:, 3], overflowing[:, 4] = 3.3e38, -3.3e38
    return {
        "normal": normal(40000, 64),
        "magnitudes": normal(4000, 64) * (10.0 ** random.uniform(-12, 12, (4000, 1))).astype(np.float32),
        "ties": ties,
        "ties at odd zero points": odd,
        "ties at the least zero point": shifted,
        "constant": np.repeat(normal(1000, 1), 64, 1),
        "zero": np.zeros((4, 64), np.float32),
        "subnormal": normal(300, 64) * np.float32(1e-40),
        "range beyond float32": overflowing,
        **extreme,
        **{f"D={dim}": normal(500, dim) for dim in (1, 3, 7, 9, 40, 80, 130)},
    }


def quantize_after(rows: Any, scales: Any, points: Any) -> Any:
    """torch's own operator."""
    import torch

    return torch.ops.quantized_decomposed.quantize_per_token(rows, scales, points, -128, 127, torch.int8)


def quantize_before(rows: Any, scales: Any, points: Any) -> Any:
    """torchao's quantize_affine: float32, the zero point added to what was rounded."""
    import torch

    rounded = torch.round(rows * (1.0 / scales.float())) + points.float()
    return rounded.clamp(-128, 127).to(torch.int8)


@isas
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize(
    ("rounding", "quantize"), [("after_zero_point", quantize_after), ("before_zero_point", quantize_before)]
)
def test_bit_for_bit_with_torch(isa: str, scheme: str, rounding: str, quantize: Any) -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("torch.ao.quantization.fx._decomposed")
    ops = torch.ops.quantized_decomposed
    choose = ops.choose_qparams_per_token_asymmetric if scheme == "asymmetric" else ops.choose_qparams_per_token
    for name, rows in value_rows().items():
        count, dim = rows.shape
        scales, points = choose(torch.from_numpy(rows), torch.int8)
        codes = quantize(torch.from_numpy(rows), scales, points)
        expected = [codes.numpy(), scales.float().numpy(), points.to(torch.int8).numpy()]
        with instruction_set(isa):
            state = quantized_state(np.random.default_rng(0), 1, count, 1, dim)
            actual = update_quantized(
                rows.reshape(1, count, 1, dim), state, 0, in_place=True, scheme=scheme, rounding=rounding
            )
        for part, wanted in zip(actual, expected, strict=True):
            np.testing.assert_array_equal(part.reshape(wanted.shape), wanted, err_msg=name)


@isas
@pytest.mark.parametrize("rounding", ["after_zero_point", "before_zero_point"])
def test_int4_rows_that_are_not_finite(isa: str, rounding: str) -> None:
    """NaN has code 0, which the symmetric scheme stores as 8; beside an infinity there are only zeros."""
    value = np.ones((1, 3, 1, 32), np.float32)
    value[0, 0, 0, 3], value[0, 1, 0, 3], value[0, 2, 0, :2] = np.nan, np.inf, [3.4e38, -3.4e38]
    expected = {
        # Per scheme: scales, zero points, and the codes of a row.
        "asymmetric": ([np.nan, np.inf, np.inf], [0, 0, 0], [[0] * 32] * 3),
        "symmetric": ([np.nan, np.inf, np.float32(3.4e38) / 7], [8, 8, 8], [[8] * 32, [8] * 32, [15, 1] + [8] * 30]),
    }
    for scheme, (scales, points, codes) in expected.items():
        with instruction_set(isa):
            state = quantized_state(np.random.default_rng(0), 1, 3, 1, 32, "int4")
            update_quantized(value, state, 0, in_place=True, scheme=scheme, rounding=rounding)
        np.testing.assert_array_equal(reference.unpack(state[0])[0, :, 0], codes)
        np.testing.assert_array_equal(state[1].ravel(), np.array(scales, np.float32))
        assert state[2].ravel().tolist() == points


@isas
@layouts
@in_place_or_not
@pytest.mark.parametrize("codes", CODE_TYPES)
@pytest.mark.parametrize("scales_type", ["float32", "float64"])
@pytest.mark.parametrize("rounding", ["after_zero_point", "before_zero_point"])
@pytest.mark.parametrize(
    ("shape", "points_shape"),
    [((), None), ((1,), (1,)), ((20,), ()), ((3, 1), (20,)), ((3, 20), (3, 20)), ((3, 20), (3, 1))],
    ids=str,
)
def test_static_scales(
    isa: str,
    layout: str,
    in_place: bool,
    codes: str,
    scales_type: str,
    rounding: str,
    shape: tuple[int, ...],
    points_shape: tuple[int, ...] | None,
) -> None:
    random = np.random.default_rng(9)
    value = random.integers(-40, 40, (2, 3, 3, 20)).astype(np.float32) / 8
    scales = random.choice([0.1, 0.25, 0.5, 1], shape).astype(scales_type)
    points = None if points_shape is None else random.integers(*RANGES[codes], points_shape).astype(CODE_TYPES[codes])
    before = quantized_state(random, 2, 8, 3, 20, codes)[0]
    expected = reference.update_cache(
        quantize_static(value, scales, points, codes=codes, rounding=rounding), before, np.array(2)
    )
    cache = guarded(to_layout(before, layout))
    new = cache if in_place else np.zeros_like(cache)
    inputs = [guarded(to_layout(value, layout)), cache, guarded(scales), np.array(2)]
    attributes = {"scheme": "static", "rounding": rounding, "layout": layout}
    with instruction_set(isa):
        capi.run(
            "UpdateQuantizedCache", [*inputs, None if points is None else guarded(points)], [new], attributes, threads=2
        )
    np.testing.assert_array_equal(to_layout(new, layout), expected)


@isas
@pytest.mark.parametrize(("zero_points", "nan_code"), [(None, 0), (np.uint8(5), 0)])
def test_static_scales_of_values_that_are_not_finite(isa: str, zero_points: Any, nan_code: int) -> None:
    value = np.array([np.nan, np.inf, -np.inf, 0], np.float32).reshape(1, 1, 1, 4)
    codes = np.zeros((1, 1, 1, 2), np.uint8)
    points = None if zero_points is None else np.array(zero_points)
    inputs: list[Any] = [value, codes, np.array(1, np.float32), np.array(0), points]
    with instruction_set(isa):
        capi.run("UpdateQuantizedCache", inputs, [codes], {"scheme": "static"})
    assert reference.unpack(codes).ravel().tolist() == [nan_code, 15, 0, 8 if zero_points is None else 5]


def test_update_in_place_costs_nothing_for_the_capacity() -> None:
    """A row into 16 MiB of codes takes no longer than a small part of copying them would."""
    random = np.random.default_rng(5)
    value = random.standard_normal((1, 1, 8, 128), dtype=np.float32)
    state = quantized_state(random, 1, 16384, 8, 128)

    def fastest(in_place: bool) -> float:
        times = []
        for _ in range(10):
            begin = time.perf_counter()
            update_quantized(value, state, 100, in_place=in_place, threads=1)
            times.append(time.perf_counter() - begin)
        return min(times)

    assert fastest(in_place=True) * 4 < fastest(in_place=False)
