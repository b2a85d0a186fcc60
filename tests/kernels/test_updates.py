"""UpdateCache, UpdateCacheWithIndices and SdpaWithKvCache: values, what is left alone, and in-place updates."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from graphrewrite.custom_ops import capi
from tests.kernels import reference
from tests.kernels.calls import custom_sdpa, instruction_set, instruction_sets
from tests.kernels.memory import guarded
from tests.kernels.reference import FLOATS, Array, make_sdpa, sdpa_with_bound, to_layout

ISAS = instruction_sets()
LAYOUTS = ["BSNH", "BNSH"]
isas = pytest.mark.parametrize("isa", ISAS)
layouts = pytest.mark.parametrize("layout", LAYOUTS)
in_place_or_not = pytest.mark.parametrize("in_place", [False, True])


def update(value: Array, cache: Array, start: Any, *, in_place: bool = False, **attributes: Any) -> Array:
    new_cache = cache if in_place else np.zeros_like(cache)
    capi.run("UpdateCache", [value, cache, np.asarray(start, np.int64)], [new_cache], attributes, threads=2)
    return new_cache


def update_with_indices(
    value: Array, cache: Array, indices: Any, *, in_place: bool = False, **attributes: Any
) -> Array:
    new_cache = cache if in_place else np.zeros_like(cache)
    inputs = [value, cache, np.asarray(indices, np.int64)]
    capi.run("UpdateCacheWithIndices", inputs, [new_cache], attributes, threads=2)
    return new_cache


# UpdateCache


@layouts
@in_place_or_not
@pytest.mark.parametrize("dtype", capi.DTYPES)
@pytest.mark.parametrize("start", [0, 3, 5, [5, 0]], ids=str)
def test_update_cache(dtype: str, layout: str, start: Any, in_place: bool) -> None:
    random = np.random.default_rng(1)
    value, cache = (random.integers(0, 2, (2, size, 3, 4)).astype(FLOATS.get(dtype, dtype)) for size in (3, 8))
    expected = reference.update_cache(value, cache, np.asarray(start))
    rows, before = (guarded(to_layout(array, layout)) for array in (value, cache))
    new_cache = update(rows, before, start, in_place=in_place, layout=layout)
    np.testing.assert_array_equal(to_layout(new_cache, layout), expected)
    if not in_place:
        np.testing.assert_array_equal(to_layout(before, layout), cache)


RINGS = [
    # rows, capacity, start
    (3, 8, 0),
    (3, 8, 5),
    (3, 8, 6),
    (3, 8, [7, 23]),
    (8, 8, 3),
    (9, 8, 0),
    (29, 8, [4, 1]),
    (3, 1, 5),
    (2, 8, 2**63 - 1),
    (20, 7, 2**63 - 1),
    (0, 8, 100),
    (0, 0, 100),
]


@layouts
@in_place_or_not
@pytest.mark.parametrize(("rows", "capacity", "start"), RINGS)
def test_rings(layout: str, in_place: bool, rows: int, capacity: int, start: Any) -> None:
    random = np.random.default_rng(2)
    value, cache = (random.standard_normal((2, size, 3, 5)).astype(np.float32) for size in (rows, capacity))
    expected = reference.update_cache(value, cache, np.asarray(start), "circular")
    rows_array, before = (guarded(to_layout(array, layout)) for array in (value, cache))
    new_cache = update(rows_array, before, start, in_place=in_place, layout=layout, write_mode="circular")
    np.testing.assert_array_equal(to_layout(new_cache, layout), expected)


@in_place_or_not
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


@layouts
def test_a_prefill_is_copied_in_parts(layout: str) -> None:
    """Rows and caches of several jobs: 200 rows of 2 KiB, in a cache of 1.2 MiB."""
    random = np.random.default_rng(3)
    value, cache = (random.standard_normal((2, size, 4, 128)).astype(np.float32) for size in (200, 300))
    expected = reference.update_cache(value, cache, np.array([100, 3]))
    new_cache = update(to_layout(value, layout), to_layout(cache, layout), [100, 3], layout=layout)
    np.testing.assert_array_equal(to_layout(new_cache, layout), expected)


# UpdateCacheWithIndices

INDICES = [[[6, 1, 3], [0, 0, 7]], [[2, 7, 2]], [5, 5, 5], [4, 3, 2]]


@layouts
@in_place_or_not
@pytest.mark.parametrize("dtype", ["float32", "int8", "bfloat16"])
@pytest.mark.parametrize("indices", INDICES, ids=str)
def test_update_cache_with_indices(layout: str, in_place: bool, dtype: str, indices: Any) -> None:
    random = np.random.default_rng(4)
    value, cache = (random.integers(0, 99, (2, size, 3, 5)).astype(FLOATS.get(dtype, dtype)) for size in (3, 8))
    expected = reference.update_cache_with_indices(value, cache, np.asarray(indices))
    rows, before = (guarded(to_layout(array, layout)) for array in (value, cache))
    new_cache = update_with_indices(rows, before, indices, in_place=in_place, layout=layout)
    np.testing.assert_array_equal(to_layout(new_cache, layout), expected)


@layouts
def test_of_many_rows_for_few_slots_the_last_ones_stay(layout: str) -> None:
    random = np.random.default_rng(5)
    value, cache = (random.standard_normal((2, size, 6, 64)).astype(np.float32) for size in (700, 9))
    indices = random.integers(0, 9, (2, 700))
    expected = reference.update_cache_with_indices(value, cache, indices)
    new_cache = update_with_indices(to_layout(value, layout), to_layout(cache, layout), indices, layout=layout)
    np.testing.assert_array_equal(to_layout(new_cache, layout), expected)


# SdpaWithKvCache


@isas
@layouts
@in_place_or_not
@pytest.mark.parametrize("mask", [None, "bool", "float"])
@pytest.mark.parametrize("rows", [1, 50])
def test_sdpa_with_kv_cache(isa: str, layout: str, mask: str | None, rows: int, in_place: bool) -> None:
    arguments = make_sdpa(
        np.random.default_rng(6),
        batch=2,
        rows=rows,
        capacity=rows + 20,
        start=[20, 3],
        heads=(6, 2),
        dim=24,
        cache="float32",
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
    attributes = {"is_causal": True, "layout": layout}
    with instruction_set(isa):
        outputs = [output, *new.values()]
        capi.run("SdpaWithKvCache", [*inputs, arguments.attn_mask], outputs, attributes, threads=2)
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
