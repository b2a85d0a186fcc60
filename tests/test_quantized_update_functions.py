"""UpdateQuantizedCache three ways: function body and kernel in onnxruntime, and torch operator."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.calls import INF, NAN, WAYS, Call, Feeds, layouts, rows_of, ways, ways_once
from tests.kernels import reference
from tests.kernels.reference import FLOATS, Array, to_layout, unpack

CAPACITY = 9


def quantized_call(
    value: Array,
    scheme: str,
    *,
    start: Any = 1,
    layout: str = "BSNH",
    zero_points: bool = True,
    codes: str = "int8",
    groups: int = 1,
    **attributes: Any,
) -> tuple[Call, list[Array]]:
    """The call on a random cache, and that cache's codes, scales and zero points."""
    random = np.random.default_rng(1)
    batch, _, heads, dim = value.shape
    width, dtype = (dim, np.int8) if codes == "int8" else (dim // 2, np.uint8)
    old_codes = random.integers(0, 256, (batch, CAPACITY, heads, width)).astype(np.uint8).view(dtype)
    scales = random.random((batch, CAPACITY, heads, groups), dtype=np.float32)
    points = random.integers(0, 16, scales.shape).astype(dtype)
    caches = [old_codes, scales, points]
    inputs: Feeds = {
        "value": to_layout(value, layout),
        "codes": to_layout(old_codes, layout),
        "scales": to_layout(scales, layout),
        "start_pos": np.asarray(start, np.int64),
    }
    if zero_points:
        inputs["zero_points"] = to_layout(points, layout)
    outputs = ("new_codes", "new_scales", "new_zero_points")[: 3 if zero_points else 2]
    return Call("UpdateQuantizedCache", inputs, outputs, {"scheme": scheme, "layout": layout, **attributes}), caches


schemes = pytest.mark.parametrize(
    ("scheme", "zero_points"), [("asymmetric", True), ("symmetric", True), ("symmetric", False)]
)


def assert_written(results: list[Array], caches: list[Array], rows: tuple[Array, ...], call: Call) -> None:
    """The caches with `rows` (codes, scales and zero points) written where the call says, bit for bit."""
    layout, mode = call.attributes["layout"], call.attributes.get("write_mode", "linear")
    for result, cache, row in zip(results, caches, rows, strict=False):
        expected = to_layout(reference.update_cache(row, cache, call.feeds["start_pos"], mode), layout)
        assert result.dtype == expected.dtype
        np.testing.assert_array_equal(result, expected)


@ways
@layouts
@schemes
@pytest.mark.parametrize("kind", ["random", "ties", "extremes", "offset"])
def test_update_quantized_cache_equals_the_reference_bit_for_bit(
    way: str, layout: str, scheme: str, zero_points: bool, kind: str
) -> None:
    value = rows_of(kind)
    call, caches = quantized_call(value, scheme, layout=layout, zero_points=zero_points)
    assert_written(WAYS[way](call), caches, reference.quantize(value, scheme), call)


QUANTIZED: dict[str, dict[str, Any]] = {
    "int8 in groups": {"groups": 4},
    "int8, rounded before": {"rounding": "before_zero_point"},
    "int8 in groups, rounded before, circular": {
        "groups": 2,
        "rounding": "before_zero_point",
        "write_mode": "circular",
        "start": 8,
    },
    "int4": {"codes": "int4"},
    "int4 in groups": {"codes": "int4", "groups": 2},
    "int4, rounded before": {"codes": "int4", "rounding": "before_zero_point", "start": (6, 0)},
    "int4 in groups, circular": {"codes": "int4", "groups": 4, "write_mode": "circular", "start": (100, 7)},
}


@ways
@schemes
@pytest.mark.parametrize("case", QUANTIZED)
def test_every_form_of_quantization_equals_the_reference_bit_for_bit(
    way: str, scheme: str, zero_points: bool, case: str
) -> None:
    options = QUANTIZED[case]
    turn = list(QUANTIZED).index(case)
    for kind, dtype in zip(
        ("random", "ties", "extremes", "offset"), ("float32", "float16", "bfloat16") * 2, strict=False
    ):
        layout = ("BSNH", "BNSH")[turn % 2]
        turn += 1
        value = np.clip(rows_of(kind), -6e4, 6e4).astype(FLOATS[dtype])
        call, caches = quantized_call(value, scheme, layout=layout, zero_points=zero_points, **options)
        chosen = {name: options[name] for name in ("codes", "groups", "rounding") if name in options}
        assert_written(WAYS[way](call), caches, reference.quantize(value, scheme, **chosen), call)


@ways_once
@schemes
@pytest.mark.parametrize("rounding", ["after_zero_point", "before_zero_point"])
def test_every_one_of_many_codes_is_rounded_as_the_reference_does(
    way: str, scheme: str, zero_points: bool, rounding: str
) -> None:
    # x * (1 / scale) and x / scale differ in about one code of 10^5, and runtimes replace one by the other.
    value = np.random.default_rng(0).standard_normal((64, 7, 8, 64), dtype=np.float32)
    call, caches = quantized_call(value, scheme, zero_points=zero_points, rounding=rounding)
    assert_written(WAYS[way](call)[:1], caches, reference.quantize(value, scheme, rounding=rounding), call)


@ways_once
def test_more_rows_than_a_circular_cache_of_codes_holds(way: str) -> None:
    value = np.random.default_rng(0).standard_normal((2, 2 * CAPACITY + 3, 2, 8), dtype=np.float32)
    call, caches = quantized_call(value, "asymmetric", codes="int4", write_mode="circular", start=(5, 0))
    assert_written(WAYS[way](call), caches, reference.quantize(value, codes="int4"), call)


@ways_once
@schemes
@pytest.mark.parametrize("special", [(NAN,), (INF,), (-INF,), (INF, -INF), (INF, NAN), (3e38, -3e38)], ids=str)
def test_rows_that_are_not_finite_become_what_torch_makes_of_them(
    way: str, scheme: str, zero_points: bool, special: tuple[float, ...]
) -> None:
    pytest.importorskip("torch")
    value = np.random.default_rng(3).standard_normal((1, 2, 1, 8), dtype=np.float32)
    value[0, 0, 0, 2 : 2 + len(special)] = special
    call, caches = quantized_call(value, scheme, zero_points=zero_points)
    assert_written(WAYS[way](call), caches, torch_quantize(value, scheme), call)


def torch_quantize(value: Array, scheme: str) -> tuple[Array, Array, Array]:
    """Codes, scales and zero points by torch's own operators."""
    import torch
    import torch.ao.quantization.fx._decomposed

    x = torch.from_numpy(value)
    ops = torch.ops.quantized_decomposed
    choose = ops.choose_qparams_per_token_asymmetric if scheme == "asymmetric" else ops.choose_qparams_per_token
    scales, points = choose(x, torch.int8)
    codes = ops.quantize_per_token(x, scales, points, -128, 127, torch.int8)
    return codes.numpy(), scales.to(torch.float32).numpy(), points.to(torch.int8).numpy()


@ways_once
@pytest.mark.parametrize(
    ("scheme", "special", "finite", "code", "zero_point"),
    [
        # As with int8: what is NaN becomes code 0, also the zero point, and finite x / scale are 0 beside an infinity.
        ("asymmetric", NAN, 0, 0, 0),
        ("asymmetric", INF, 0, 0, 0),
        ("asymmetric", -INF, 15, 0, 15),
        # Stored as code + 8.
        ("symmetric", NAN, 8, 8, 8),
        ("symmetric", INF, 8, 8, 8),
        ("symmetric", -INF, 8, 8, 8),
    ],
)
@pytest.mark.parametrize("rounding", ["after_zero_point", "before_zero_point"])
def test_int4_rows_that_are_not_finite(
    way: str, scheme: str, special: float, finite: int, code: int, zero_point: int, rounding: str
) -> None:
    value = np.random.default_rng(3).standard_normal((1, 1, 1, 8), dtype=np.float32)
    value[..., 5] = special
    call, _ = quantized_call(value, scheme, codes="int4", groups=2, rounding=rounding)
    codes, scales, points = (result[0, 1, 0] for result in WAYS[way](call))
    assert unpack(codes)[4:].tolist() == [finite, code, finite, finite]
    assert points[1] == zero_point
    np.testing.assert_array_equal(scales[1], np.float32(abs(special)))
    expected = reference.quantize(value[..., :4], scheme, codes="int4", rounding=rounding)
    for result, other_group in zip((codes[:2], scales[:1], points[:1]), expected, strict=True):
        np.testing.assert_array_equal(result, other_group[0, 0, 0])


@ways_once
@schemes
@pytest.mark.parametrize("codes", ["int8", "int4"])
@pytest.mark.parametrize(("batch", "rows", "mode"), [(2, 0, "linear"), (0, 2, "linear"), (0, 2, "circular")])
def test_nothing_to_quantize_changes_nothing(
    way: str, scheme: str, zero_points: bool, codes: str, batch: int, rows: int, mode: str
) -> None:
    value = np.zeros((batch, rows, 2, 8), np.float32)
    options: dict[str, Any] = {"codes": codes, "groups": 2, "write_mode": mode, "zero_points": zero_points}
    call, caches = quantized_call(value, scheme, **options)
    for result, cache in zip(WAYS[way](call), caches, strict=False):
        np.testing.assert_array_equal(result, cache)


@ways_once
@pytest.mark.parametrize(("rows", "start"), [(3, 7), (1, -1), (0, 10)])
def test_quantized_rows_outside_the_cache_are_an_error(way: str, rows: int, start: int) -> None:
    call, _ = quantized_call(np.ones((1, rows, 2, 8), np.float32), "asymmetric", start=start)
    with pytest.raises(Exception, match=r"UpdateQuantizedCache.*(start_pos|capacity)"):
        WAYS[way](call)


@ways_once
def test_the_asymmetric_scheme_without_zero_points_is_an_error(way: str) -> None:
    call, _ = quantized_call(np.ones((1, 1, 2, 8), np.float32), "asymmetric", zero_points=False)
    with pytest.raises(Exception, match=r"(UpdateQuantizedCache|update_quantized_cache).*zero_points"):
        WAYS[way](call)


# Static scales

HEADS, DIM = 2, 8


def static_call(
    value: Array, scales: Array, zero_points: Array | None, codes: str = "int8", layout: str = "BSNH", **attributes: Any
) -> tuple[Call, Array]:
    """The call on a random cache, and that cache's codes."""
    call, caches = quantized_call(value, "static", codes=codes, layout=layout, zero_points=False, **attributes)
    inputs = call.inputs | {"scales": scales} | ({} if zero_points is None else {"zero_points": zero_points})
    return Call(call.op_type, inputs, ("new_codes",), call.attributes), caches[0]


@ways
@pytest.mark.parametrize("shape", [(), (1,), (DIM,), (HEADS, 1), (HEADS, DIM)], ids=str)
@pytest.mark.parametrize("codes", ["int8", "int4"])
@pytest.mark.parametrize("points_shape", [None, (), (HEADS, 1), (HEADS, DIM)], ids=str)
def test_static_scales_divide_as_quantize_linear_does(
    way: str, shape: tuple[int, ...], codes: str, points_shape: tuple[int, ...] | None
) -> None:
    random = np.random.default_rng(len(shape))
    turn = len(shape) + 2 * (codes == "int4") + (points_shape is None)
    rounding = ("after_zero_point", "before_zero_point")[turn % 2]
    layout, mode = ("BSNH", "BNSH")[turn // 2 % 2], ("linear", "circular")[turn // 2 % 2]
    scale_type, dtype = ("float32", "float64")[turn // 2 % 2], ("float32", "float16", "bfloat16")[turn % 3]
    value = rows_of("ties" if turn % 2 else "random").astype(FLOATS[dtype])
    step = 0.5 if turn % 2 else 0.05 if codes == "int8" else 0.3
    scales = np.asarray(random.uniform(step / 2, step, shape)).astype(scale_type)
    kind = np.int8 if codes == "int8" else np.uint8
    points = None if points_shape is None else np.asarray(random.integers(0, 16, points_shape)).astype(kind)
    call, cache = static_call(
        value, scales, points, codes, layout, start=7 * (mode == "circular"), write_mode=mode, rounding=rounding
    )
    rows = reference.quantize_static(value, scales, points, codes=codes, rounding=rounding)
    assert_written(WAYS[way](call), [cache], (rows,), call)


@ways_once
@pytest.mark.parametrize("scale_type", ["float32", "float64"])
def test_static_scales_divide_and_do_not_multiply(way: str, scale_type: str) -> None:
    # Values between two codes, where x / scale and x * (1 / scale) are often on different sides.
    random = np.random.default_rng(6)
    scales = random.uniform(0.01, 0.02, (HEADS, DIM)).astype(scale_type)
    value = ((random.integers(-100, 100, (2, 7, HEADS, DIM)) + 0.5) * scales).astype(np.float32)
    call, cache = static_call(value, scales, None)
    assert_written(WAYS[way](call), [cache], (reference.quantize_static(value, scales),), call)


@ways_once
@pytest.mark.parametrize("codes", ["int8", "int4"])
def test_static_codes_of_what_is_not_finite(way: str, codes: str) -> None:
    value = np.zeros((1, 1, HEADS, DIM), np.float32)
    value[..., :3] = NAN, INF, -INF
    call, _ = static_call(value, np.asarray(0.5, np.float32), None, codes)
    (result,) = WAYS[way](call)
    row = (unpack(result) if codes == "int4" else result)[0, 1, 0, :4]
    assert row.tolist() == ([0, 127, -128, 0] if codes == "int8" else [0, 15, 0, 8])


@ways_once
@pytest.mark.parametrize("wrong", [NAN, INF, 0.0, -0.25])
@pytest.mark.parametrize("shape", [(), (HEADS, DIM)], ids=str)
def test_a_static_scale_that_is_no_scale_is_an_error(way: str, wrong: float, shape: tuple[int, ...]) -> None:
    scales = np.full(shape, 0.5, np.float32)
    scales[(-1,) * len(shape)] = wrong
    call, _ = static_call(rows_of("random"), scales, None)
    with pytest.raises(Exception, match=r"UpdateQuantizedCache.*scale"):
        WAYS[way](call)
