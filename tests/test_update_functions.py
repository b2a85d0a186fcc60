"""UpdateCache and UpdateCacheWithIndices three ways: function body and kernel in onnxruntime, and torch operator."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.calls import WAYS, Call, Feeds, layouts, update_call, ways, ways_once
from tests.kernels import reference
from tests.kernels.reference import FLOATS, Array, to_layout

# UpdateCache

ELEMENTS = ["float32", "uint8", "int8", "int32", "int64", "bool", "float16", "float64", "bfloat16"]


def numbers(random: np.random.Generator, shape: tuple[int, ...], dtype: str) -> Array:
    return random.integers(0, 9, shape).astype(FLOATS.get(dtype, dtype))


@ways
@layouts
@pytest.mark.parametrize("dtype", ["float32", "int8"])
@pytest.mark.parametrize(
    ("rows", "start"),
    [(1, 0), (1, 6), (3, 4), (7, 0), (0, 3), (0, 7), (2, (5, 1)), (2, (5,))],
    ids=lambda value: str(value),
)
def test_update_cache_writes_the_rows(way: str, layout: str, dtype: str, rows: int, start: Any) -> None:
    random = np.random.default_rng(0)
    value, cache = (numbers(random, (2, extent, 3, 4), dtype) for extent in (rows, 7))
    call = update_call(value, cache, start, layout)
    expected = reference.update_cache(value, cache, call.feeds["start_pos"])
    np.testing.assert_array_equal(WAYS[way](call)[0], to_layout(expected, layout))


@ways
@pytest.mark.parametrize("dtype", ELEMENTS)
@pytest.mark.parametrize("mode", ["linear", "circular"])
def test_update_cache_moves_any_element(way: str, dtype: str, mode: str) -> None:
    random = np.random.default_rng(0)
    value, cache = (numbers(random, (2, extent, 3, 4), dtype) for extent in (2, 7))
    call = update_call(value, cache, (5, 1), "BNSH", write_mode=mode)
    (result,) = WAYS[way](call)
    assert result.dtype == cache.dtype
    expected = reference.update_cache(value, cache, call.feeds["start_pos"], mode)
    np.testing.assert_array_equal(result, to_layout(expected, "BNSH"))


@ways
@layouts
@pytest.mark.parametrize(
    ("rows", "start", "capacity"),
    [
        (1, 0, 7),
        (3, 6, 7),  # wraps
        (3, 700, 7),
        (7, 3, 7),
        (9, 0, 7),  # the first two rows are lost
        (23, 5, 7),
        (9, (6, 20), 7),
        (2, 2**63 - 1, 7),  # the next position has no int64
        (0, 9, 7),
        (0, 3, 0),
    ],
    ids=str,
)
def test_a_circular_write_wraps(way: str, layout: str, rows: int, start: Any, capacity: int) -> None:
    random = np.random.default_rng(0)
    value, cache = (random.standard_normal((2, extent, 3, 4), dtype=np.float32) for extent in (rows, capacity))
    call = update_call(value, cache, start, layout, write_mode="circular")
    expected = reference.update_cache(value, cache, call.feeds["start_pos"], "circular")
    np.testing.assert_array_equal(WAYS[way](call)[0], to_layout(expected, layout))


@ways_once
@layouts
@pytest.mark.parametrize(
    ("rows", "start"),
    [(1, 7), (3, 5), (8, 0), (1, -1), (0, 8), (0, -1), (2, (0, 6)), (2, (-2, 0)), (1, 2**63 - 1)],
    ids=str,
)
def test_a_write_outside_the_cache_is_an_error(way: str, layout: str, rows: int, start: Any) -> None:
    call = update_call(np.ones((2, rows, 3, 4), np.float32), np.zeros((2, 7, 3, 4), np.float32), start, layout)
    with pytest.raises(Exception, match=r"UpdateCache.*(start_pos|capacity)"):
        WAYS[way](call)


@ways_once
@pytest.mark.parametrize(("start", "capacity"), [(-1, 7), ((0, -3), 7), (0, 0)], ids=str)
def test_a_circular_write_that_has_no_slot_is_an_error(way: str, start: Any, capacity: int) -> None:
    value, cache = np.ones((2, 1, 3, 4), np.float32), np.zeros((2, capacity, 3, 4), np.float32)
    with pytest.raises(Exception, match=r"UpdateCache.*(start_pos|capacity)"):
        WAYS[way](update_call(value, cache, start, write_mode="circular"))


# UpdateCacheWithIndices


def indexed_call(value: Array, cache: Array, indices: Any, layout: str = "BSNH") -> Call:
    inputs: Feeds = {"value": to_layout(value, layout), "cache": to_layout(cache, layout)}
    inputs["indices"] = np.asarray(indices, np.int64)
    return Call("UpdateCacheWithIndices", inputs, ("new_cache",), {"layout": layout})


@ways
@layouts
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "indices",
    [
        [[3, 0, 6], [1, 2, 5]],
        [[3, 0, 6]],
        [3, 0, 6],
        [[2, 2, 2], [5, 1, 5]],  # the last row of an index stays
        [4, 4, 0],
        np.zeros((2, 0)),
        np.zeros(0),
    ],
    ids=lambda value: str(np.asarray(value).tolist()),
)
def test_update_cache_with_indices_writes_the_rows(way: str, layout: str, dtype: str, indices: Any) -> None:
    random = np.random.default_rng(0)
    rows = np.shape(indices)[-1]
    value, cache = (random.standard_normal((2, extent, 3, 4)).astype(FLOATS[dtype]) for extent in (rows, 7))
    call = indexed_call(value, cache, indices, layout)
    expected = reference.update_cache_with_indices(value, cache, call.feeds["indices"])
    (result,) = WAYS[way](call)
    assert result.dtype == cache.dtype
    np.testing.assert_array_equal(result, to_layout(expected, layout))


@ways_once
def test_of_many_rows_with_one_index_the_last_one_stays(way: str) -> None:
    # Enough of them for a runtime to write them from several threads.
    random = np.random.default_rng(0)
    value, cache = (random.standard_normal((2, extent, 3, 40), dtype=np.float32) for extent in (700, 50))
    indices = random.integers(0, 50, (2, 700))
    expected = reference.update_cache_with_indices(value, cache, indices)
    np.testing.assert_array_equal(WAYS[way](indexed_call(value, cache, indices))[0], expected)


@ways_once
@pytest.mark.parametrize("indices", [[[0, 7], [1, 2]], [[0, 1], [-1, 2]], [-8, 0], [0, 2**40]], ids=str)
def test_an_index_outside_the_cache_is_an_error(way: str, indices: Any) -> None:
    call = indexed_call(np.ones((2, 2, 3, 4), np.float32), np.zeros((2, 7, 3, 4), np.float32), indices)
    with pytest.raises(Exception, match=r"UpdateCacheWithIndices.*ind(ex|ic)"):
        WAYS[way](call)
