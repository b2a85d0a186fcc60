"""Every operator we ship, three ways: function body and kernel in onnxruntime, and torch operator."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.calls import (
    INF,
    NAN,
    SDPA_CASES,
    WAYS,
    Call,
    Feeds,
    layouts,
    rows_of,
    sdpa_call,
    tolerance,
    update_call,
    ways,
    ways_once,
)
from tests.kernels import reference
from tests.kernels.reference import Array, make_sdpa, to_layout

# UpdateCache


@ways
@layouts
@pytest.mark.parametrize("dtype", ["float32", "int8"])
@pytest.mark.parametrize(
    ("rows", "start"), [(1, 0), (1, 6), (3, 4), (7, 0), (0, 3), (0, 7), (2, (5, 1))], ids=lambda value: str(value)
)
def test_update_cache_writes_the_rows(way: str, layout: str, dtype: str, rows: int, start: Any) -> None:
    random = np.random.default_rng(0)
    value, cache = (random.integers(-9, 9, (2, extent, 3, 4)).astype(dtype) for extent in (rows, 7))
    call = update_call(value, cache, start, layout)
    expected = reference.update_cache(value, cache, call.feeds["start_pos"])
    np.testing.assert_array_equal(WAYS[way](call)[0], to_layout(expected, layout))


@ways_once
@layouts
@pytest.mark.parametrize(
    ("rows", "start"), [(1, 7), (3, 5), (8, 0), (1, -1), (0, 8), (0, -1), (2, (0, 6)), (2, (-2, 0))], ids=str
)
def test_a_write_outside_the_cache_is_an_error(way: str, layout: str, rows: int, start: Any) -> None:
    call = update_call(np.ones((2, rows, 3, 4), np.float32), np.zeros((2, 7, 3, 4), np.float32), start, layout)
    with pytest.raises(Exception, match=r"UpdateCache.*(start_pos|capacity)"):
        WAYS[way](call)


# UpdateQuantizedCache


def quantized_call(
    value: Array, scheme: str, *, start: Any = 1, layout: str = "BSNH", zero_points: bool = True
) -> tuple[Call, list[Array]]:
    """The call on a random cache, and that cache's codes, scales and zero points."""
    random = np.random.default_rng(1)
    batch, _, heads, dim = value.shape
    codes = random.integers(-128, 128, (batch, 9, heads, dim)).astype(np.int8)
    scales = random.random((batch, 9, heads, 1), dtype=np.float32)
    points = random.integers(-128, 128, scales.shape).astype(np.int8)
    caches = [codes, scales, points]
    inputs: Feeds = {
        "value": to_layout(value, layout),
        "codes": to_layout(codes, layout),
        "scales": to_layout(scales, layout),
        "start_pos": np.asarray(start, np.int64),
        "zero_points": to_layout(points, layout) if zero_points else None,
    }
    outputs = ("new_codes", "new_scales", "new_zero_points")[: 3 if zero_points else 2]
    return Call("UpdateQuantizedCache", inputs, outputs, {"scheme": scheme, "layout": layout}), caches


schemes = pytest.mark.parametrize(
    ("scheme", "zero_points"), [("asymmetric", True), ("symmetric", True), ("symmetric", False)]
)


@ways
@layouts
@schemes
@pytest.mark.parametrize("kind", ["random", "ties", "extremes", "offset"])
def test_update_quantized_cache_equals_the_reference_bit_for_bit(
    way: str, layout: str, scheme: str, zero_points: bool, kind: str
) -> None:
    value = rows_of(kind)
    call, caches = quantized_call(value, scheme, layout=layout, zero_points=zero_points)
    for result, cache, rows in zip(WAYS[way](call), caches, reference.quantize(value, scheme), strict=False):
        expected = reference.update_cache(rows, cache, call.feeds["start_pos"])
        np.testing.assert_array_equal(result, to_layout(expected, layout))


@ways_once
@schemes
def test_every_one_of_many_codes_is_rounded_as_the_reference_does(way: str, scheme: str, zero_points: bool) -> None:
    # x * (1 / scale) and x / scale differ in about one code of 10^5, and runtimes replace one by the other.
    value = np.random.default_rng(0).standard_normal((64, 7, 8, 64), dtype=np.float32)
    call, caches = quantized_call(value, scheme, zero_points=zero_points)
    expected = reference.update_cache(reference.quantize(value, scheme)[0], caches[0], np.asarray(1))
    np.testing.assert_array_equal(WAYS[way](call)[0], expected)


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
    for result, cache, rows in zip(WAYS[way](call), caches, torch_quantize(value, scheme), strict=False):
        np.testing.assert_array_equal(result, reference.update_cache(rows, cache, np.asarray(1)))


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
@pytest.mark.parametrize(("rows", "start"), [(3, 7), (1, -1), (0, 10)])
def test_quantized_rows_outside_the_cache_are_an_error(way: str, rows: int, start: int) -> None:
    call, _ = quantized_call(np.ones((1, rows, 2, 8), np.float32), "asymmetric", start=start)
    with pytest.raises(Exception, match=r"UpdateQuantizedCache.*(start_pos|capacity)"):
        WAYS[way](call)


# CustomSdpa


@ways
@layouts
@pytest.mark.parametrize("case", SDPA_CASES)
def test_custom_sdpa_equals_the_reference(way: str, layout: str, case: str) -> None:
    arguments = make_sdpa(np.random.default_rng(5), **SDPA_CASES[case])
    expected = reference.sdpa(arguments)
    (result,) = WAYS[way](sdpa_call(arguments, layout))
    assert result.dtype == np.float32
    np.testing.assert_allclose(result, to_layout(expected, layout), rtol=0, atol=tolerance(arguments))


@ways_once
@pytest.mark.parametrize("cache", ["float", "int8"])
@pytest.mark.parametrize("mask", ["bool", "float"])
@pytest.mark.parametrize("recent", [False, True])
def test_a_row_that_sees_nothing_yields_zeros(way: str, cache: str, mask: str, recent: bool) -> None:
    arguments = make_sdpa(
        np.random.default_rng(6), rows=3, start=4, heads=(2, 1), cache=cache, mask=mask, recent=recent
    )
    assert arguments.attn_mask is not None
    arguments.attn_mask[1] = False if mask == "bool" else -INF
    (result,) = WAYS[way](sdpa_call(arguments))
    np.testing.assert_array_equal(result[:, 1], 0)
    np.testing.assert_allclose(result, reference.sdpa(arguments), rtol=0, atol=tolerance(arguments))


@ways_once
@pytest.mark.parametrize("poison", [NAN, INF, -INF])
@pytest.mark.parametrize("which", ["key", "value"])
@pytest.mark.parametrize(
    ("slot", "facts"),
    {
        "beyond the valid length": (9, {"rows": 3, "start": 4}),
        "later than the first row": (6, {"rows": 3, "start": 4, "is_causal": True}),
        "hidden from one row by a mask": (2, {"rows": 3, "start": 4, "mask": "bool"}),
        "beyond one sequence": (8, {"batch": 2, "rows": 3, "start": (7, 1), "is_causal": True}),
        "replaced by a recent row": (5, {"rows": 3, "start": 4, "recent": True}),
        "beyond one sequence, recent": (5, {"batch": 2, "rows": 3, "start": (7, 1), "recent": True}),
    }.values(),
)
@pytest.mark.parametrize("cache", ["float", "int8"])
def test_what_a_row_does_not_see_never_reaches_its_output(
    way: str, poison: float, which: str, slot: int, facts: dict[str, Any], cache: str
) -> None:
    arguments = make_sdpa(np.random.default_rng(7), heads=(4, 2), cache=cache, **facts)
    if arguments.attn_mask is not None:
        arguments.attn_mask[:, slot] = [False, True, False]
    clean = reference.sdpa(arguments)
    poisoned = replace(arguments)
    name = f"{which}_cache" if cache == "float" else f"{which}_scales"
    setattr(poisoned, name, getattr(arguments, name).copy())
    getattr(poisoned, name)[:, slot] = poison
    (result,) = WAYS[way](sdpa_call(poisoned))
    visible = reference.visible_slots(arguments)[..., slot].transpose(0, 2, 1)
    hidden = ~visible | (arguments.recent_key is not None and facts["start"] == 4)
    np.testing.assert_allclose(result[hidden], clean[hidden], rtol=0, atol=tolerance(arguments))
    # A row that does see it is not finite, unless an infinite score takes all of the weight or none of it.
    if which == "value" or np.isnan(poison):
        assert not np.isfinite(result[~hidden]).any()


@ways_once
def test_a_visible_infinite_value_stays_infinite(way: str) -> None:
    arguments = make_sdpa(np.random.default_rng(8), rows=2, start=4, cache="float", is_causal=True)
    arguments.value_cache[0, 1, 0, :3] = INF, -INF, NAN
    arguments.value_cache[0, 5, 0, 4] = INF
    (result,) = WAYS[way](sdpa_call(arguments))
    np.testing.assert_allclose(result, reference.sdpa(arguments), rtol=0, atol=tolerance(arguments))


@ways_once
@pytest.mark.parametrize(
    ("facts", "start"), [({"rows": 3}, 14), ({"rows": 1}, -1), ({"rows": 0}, 17), ({"rows": 2, "batch": 2}, (0, 15))]
)
@pytest.mark.parametrize("mask", [None, "bool"])
def test_attention_outside_the_cache_is_an_error(way: str, facts: dict[str, Any], start: Any, mask: str | None) -> None:
    arguments = make_sdpa(np.random.default_rng(9), cache="float", mask=mask, **facts)
    arguments.start_pos = np.asarray(start, np.int64)
    with pytest.raises(Exception, match=r"CustomSdpa.*(start_pos|capacity)"):
        WAYS[way](sdpa_call(arguments))


@ways_once
def test_query_heads_that_the_key_heads_do_not_divide_are_an_error(way: str) -> None:
    arguments = make_sdpa(np.random.default_rng(9), cache="float", heads=(3, 2))
    with pytest.raises(Exception, match=r"CustomSdpa|custom_sdpa"):
        WAYS[way](sdpa_call(arguments))


# SdpaWithKvCache


@ways
@layouts
@pytest.mark.parametrize(
    "facts",
    [
        {"rows": 3, "start": 4, "is_causal": True},
        {"batch": 2, "rows": 2, "start": (0, 9)},
        {"rows": 3, "start": 4, "mask": "float", "is_causal": True, "scale": 0.3},
        {"rows": 0, "start": 16, "is_causal": True},
    ],
    ids=str,
)
def test_sdpa_with_kv_cache_writes_then_attends(way: str, layout: str, facts: dict[str, Any]) -> None:
    arguments = make_sdpa(np.random.default_rng(10), heads=(4, 2), cache="float", recent=True, **facts)
    sdpa = sdpa_call(arguments, layout)
    inputs: Feeds = {
        "query": sdpa.inputs["query"],
        "key": sdpa.inputs["recent_key"],
        "value": sdpa.inputs["recent_value"],
        **{name: sdpa.inputs[name] for name in ("key_cache", "value_cache", "start_pos")},
        "attn_mask": sdpa.inputs.get("attn_mask"),
    }
    call = Call("SdpaWithKvCache", inputs, ("output", "new_key_cache", "new_value_cache"), sdpa.attributes)
    output, *caches = WAYS[way](call)
    np.testing.assert_allclose(output, to_layout(reference.sdpa(arguments), layout), rtol=0, atol=tolerance(arguments))
    for result, which in zip(caches, ("key", "value"), strict=True):
        np.testing.assert_array_equal(result, to_layout(arguments.rows(which), layout))
