"""What one new row costs in a cache that is updated in place, whatever its capacity.

    python -m tests.benchmarks.cache_writes

A row is one token of 8 heads of 128 elements, written by one thread at the end of the cache. Times are microseconds,
the best of many calls; the first line is a call that writes nothing, which is what ctypes costs. The last column says
how many times as long the largest cache takes as the smallest.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from graphrewrite.custom_ops import capi

CAPACITIES = [1 << 10, 1 << 14, 1 << 17]
HEADS, DIM = 8, 128
CALLS = 2000


def update_cache(capacity: int, dtype: str, rows: int = 1) -> Callable[[], None]:
    value, cache = (np.ones((1, size, HEADS, DIM), dtype) for size in (rows, capacity))
    inputs = [value, cache, np.array(capacity - 1)]
    return lambda: capi.run("UpdateCache", inputs, [cache])


def update_quantized_cache(capacity: int, codes: str, groups: int) -> Callable[[], None]:
    value = np.random.default_rng(0).standard_normal((1, 1, HEADS, DIM), np.float32)
    rows = (1, capacity, HEADS)
    dtype, size = {"int8": (np.int8, DIM), "int4": (np.uint8, DIM // 2)}[codes]
    state: list[Any] = [
        np.ones((*rows, size), dtype),
        np.ones((*rows, groups), np.float32),
        np.ones((*rows, groups), dtype),
    ]
    inputs = [value, *state[:2], np.array(capacity - 1), state[2]]
    return lambda: capi.run("UpdateQuantizedCache", inputs, state)


CASES: list[tuple[str, Callable[[int], Callable[[], None]]]] = [
    ("UpdateCache, no rows", lambda capacity: update_cache(capacity, "float32", 0)),
    ("UpdateCache float32", lambda capacity: update_cache(capacity, "float32")),
    ("UpdateCache int8", lambda capacity: update_cache(capacity, "int8")),
    ("UpdateQuantizedCache int8", lambda capacity: update_quantized_cache(capacity, "int8", 1)),
    ("UpdateQuantizedCache int4, groups of 32", lambda capacity: update_quantized_cache(capacity, "int4", DIM // 32)),
]


def microseconds(call: Callable[[], None]) -> float:
    best = float("inf")
    for _ in range(CALLS):
        begin = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - begin)
    return best * 1e6


def main() -> None:
    print(f"{capi.isa()}; capacity{'':<27}", *(f"{capacity:>9}" for capacity in CAPACITIES), f"{'ratio':>7}")
    for title, make in CASES:
        times = [microseconds(make(capacity)) for capacity in CAPACITIES]
        print(f"{title:<43}", *(f"{taken:9.2f}" for taken in times), f"{times[-1] / times[0]:7.2f}")


if __name__ == "__main__":
    main()
