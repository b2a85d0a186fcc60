"""UpdateCache, UpdateQuantizedCache and SdpaWithKvCache: values, what is left alone, and in-place updates."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from graphrewrite.custom_ops import capi
from tests.kernels import reference
from tests.kernels.calls import custom_sdpa, describe, instruction_set, instruction_sets
from tests.kernels.memory import guarded
from tests.kernels.reference import make_sdpa, sdpa_with_bound, to_layout

Array = npt.NDArray[Any]
ISAS = instruction_sets()
LAYOUTS = ["BSNH", "BNSH"]
SCHEMES = ["asymmetric", "symmetric"]


def update(value: Array, cache: Array, start: Any, *, in_place: bool = False, **attributes: Any) -> Array:
    new_cache = cache if in_place else np.zeros_like(cache)
    capi.update_cache(*map(capi.from_numpy, (value, cache, np.asarray(start, np.int64), new_cache)), **attributes)
    return new_cache


@pytest.mark.parametrize("dtype", [name for name in capi.DTYPES if name != "bfloat16"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("start", [0, 3, 5, [5, 0]], ids=str)
@pytest.mark.parametrize("in_place", [False, True])
def test_update_cache(dtype: str, layout: str, start: Any, in_place: bool) -> None:
    random = np.random.default_rng(1)
    value, cache = (random.integers(0, 2, (2, size, 3, 4)).astype(dtype) for size in (3, 8))
    expected = reference.update_cache(value, cache, np.asarray(start))
    rows, before = (guarded(to_layout(array, layout)) for array in (value, cache))
    new_cache = update(rows, before, start, in_place=in_place, layout=layout, threads=2)
    np.testing.assert_array_equal(to_layout(new_cache, layout), expected)
    if not in_place:
        np.testing.assert_array_equal(to_layout(before, layout), cache)


def test_update_cache_moves_any_16_bits() -> None:
    """bfloat16, which numpy has not: the bytes are what counts."""
    value, cache = np.full((1, 1, 1, 4), 0x7FC1, np.uint16), np.zeros((1, 2, 1, 4), np.uint16)
    tensors = [capi.tensor(array.ctypes.data, capi.DTYPES["bfloat16"], array.shape) for array in (value, cache)]
    capi.update_cache(tensors[0], tensors[1], capi.from_numpy(np.array(1)), tensors[1])
    assert cache.ravel().tolist() == [0] * 4 + [0x7FC1] * 4


@pytest.mark.parametrize("in_place", [False, True])
def test_update_cache_with_strides(in_place: bool) -> None:
    random = np.random.default_rng(2)
    value = random.standard_normal((4, 3, 2, 2)).astype(np.float32).T  # [2,2,3,4] reversed in memory
    whole = random.standard_normal((2, 20, 3, 8)).astype(np.float32)
    before = whole.copy()
    cache = whole[:, ::2, :, ::2]
    expected = reference.update_cache(value, cache, np.array(4))
    if in_place:
        update(value, cache, 4, in_place=True)
        np.testing.assert_array_equal(whole[:, 1::2], before[:, 1::2])
        np.testing.assert_array_equal(whole[..., 1::2], before[..., 1::2])
        np.testing.assert_array_equal(cache, expected)
    else:
        np.testing.assert_array_equal(update(value, cache, 4), expected)


def quantized_state(random: np.random.Generator, batch: int, capacity: int, heads: int, dim: int) -> list[Array]:
    """Codes, scales and zero points of a cache that is in use."""
    return [
        random.integers(-128, 128, (batch, capacity, heads, dim)).astype(np.int8),
        random.random((batch, capacity, heads, 1)).astype(np.float32),
        random.integers(-128, 128, (batch, capacity, heads, 1)).astype(np.int8),
    ]


def update_quantized(
    value: Array, state: list[Array], start: Any, *, in_place: bool = False, **attributes: Any
) -> list[Array]:
    """The new state; without zero points when `state` has none."""
    new = state if in_place else [np.zeros_like(array) for array in state]
    before, after = ([*arrays, None][:3] for arrays in (state, new))
    arrays = [value, *before[:2], np.asarray(start, np.int64), before[2], *after]
    tensors: list[Any] = [describe(array) for array in arrays]
    capi.update_quantized_cache(*tensors, **attributes)
    return new


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize(("dim", "rows"), [(1, 3), (7, 1), (64, 130), (80, 2)])
def test_update_quantized_cache(isa: str, scheme: str, layout: str, in_place: bool, dim: int, rows: int) -> None:
    random = np.random.default_rng(3)
    value = random.standard_normal((2, rows, 3, dim), dtype=np.float32)
    before = quantized_state(random, 2, rows + 9, 3, dim)
    expected = [
        reference.update_cache(part, old, np.array([4, 9]))
        for part, old in zip(reference.quantize(value, scheme), before, strict=True)
    ]
    placed = [guarded(to_layout(array, layout)) for array in before]
    with instruction_set(isa):
        after = update_quantized(
            guarded(to_layout(value, layout)),
            placed,
            [4, 9],
            in_place=in_place,
            scheme=scheme,
            layout=layout,
            threads=2,
        )
    for actual, wanted in zip(after, expected, strict=True):
        np.testing.assert_array_equal(to_layout(actual, layout), wanted)


def test_symmetric_without_zero_points() -> None:
    random = np.random.default_rng(4)
    value = random.standard_normal((1, 2, 1, 8), dtype=np.float32)
    codes, scales = update_quantized(value, quantized_state(random, 1, 4, 1, 8)[:2], 1, scheme="symmetric")
    np.testing.assert_array_equal(codes[:, 1:3], reference.quantize(value, "symmetric")[0])
    np.testing.assert_array_equal(scales[:, 1:3], reference.quantize(value, "symmetric")[1])


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


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_bit_for_bit_with_torch(isa: str, scheme: str) -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("torch.ao.quantization.fx._decomposed")
    ops = torch.ops.quantized_decomposed
    choose = ops.choose_qparams_per_token_asymmetric if scheme == "asymmetric" else ops.choose_qparams_per_token
    for name, rows in value_rows().items():
        count, dim = rows.shape
        scales, points = choose(torch.from_numpy(rows), torch.int8)
        codes = ops.quantize_per_token(torch.from_numpy(rows), scales, points, -128, 127, torch.int8)
        expected = [codes.numpy(), scales.float().numpy(), points.to(torch.int8).numpy()]
        with instruction_set(isa):
            state = quantized_state(np.random.default_rng(0), 1, count, 1, dim)
            actual = update_quantized(rows.reshape(1, count, 1, dim), state, 0, in_place=True, scheme=scheme)
        for part, wanted in zip(actual, expected, strict=True):
            np.testing.assert_array_equal(part.reshape(wanted.shape), wanted, err_msg=name)


def test_update_in_place_costs_nothing_for_the_capacity() -> None:
    """A row into 16 MiB of codes takes no longer than a small part of copying them would."""
    random = np.random.default_rng(5)
    value = random.standard_normal((1, 1, 8, 128), dtype=np.float32)
    state = quantized_state(random, 1, 16384, 8, 128)

    def fastest(in_place: bool) -> float:
        times = []
        for _ in range(10):
            begin = time.perf_counter()
            update_quantized(value, state, 100, in_place=in_place)
            times.append(time.perf_counter() - begin)
        return min(times)

    assert fastest(in_place=True) * 4 < fastest(in_place=False)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("mask", [None, "bool", "float"])
@pytest.mark.parametrize("rows", [1, 50])
@pytest.mark.parametrize("in_place", [False, True])
def test_sdpa_with_kv_cache(isa: str, layout: str, mask: str | None, rows: int, in_place: bool) -> None:
    arguments = make_sdpa(
        np.random.default_rng(6),
        batch=2,
        rows=rows,
        capacity=rows + 20,
        start=[20, 3],
        heads=(6, 2),
        dim=24,
        cache="float",
        recent=True,
        mask=mask,
        is_causal=True,
    )
    expected, bound = sdpa_with_bound(arguments)
    assert arguments.recent_key is not None and arguments.recent_value is not None
    rows_of = {"key": arguments.recent_key, "value": arguments.recent_value}
    caches = {name: to_layout(getattr(arguments, f"{name}_cache"), layout) for name in rows_of}
    new = caches if in_place else {name: np.zeros_like(cache) for name, cache in caches.items()}
    query = to_layout(arguments.query, layout)
    output = np.full_like(query, np.nan)
    inputs = [query, *(to_layout(value, layout) for value in rows_of.values()), *caches.values(), arguments.start_pos]
    tensors: list[Any] = [describe(array) for array in [*inputs, arguments.attn_mask, output, *new.values()]]
    with instruction_set(isa):
        capi.sdpa_with_kv_cache(*tensors, is_causal=True, layout=layout, threads=2)
        # Reading the new rows back from a float cache, or as exact rows beside it, is the same thing.
        without = replace(arguments, recent_key=None, recent_value=None)
        for name, cache in new.items():
            setattr(without, f"{name}_cache", to_layout(cache, layout))
        separate = custom_sdpa(without, threads=1)
    assert np.all(np.abs(to_layout(output, layout) - expected) <= bound)
    np.testing.assert_array_equal(to_layout(output, layout), separate)
    for name, cache in new.items():
        wanted = reference.update_cache(rows_of[name], getattr(arguments, f"{name}_cache"), arguments.start_pos)
        np.testing.assert_array_equal(to_layout(cache, layout), wanted)
