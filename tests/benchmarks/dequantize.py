"""How close DequantizePerChannel and DequantizePerToken come to the machine's copy bandwidth.

    python -m tests.benchmarks.dequantize [--threads 2] [--elements 32]

Each case moves its bytes (codes read, floats written) and is held against memcpy, on as many threads, of as many bytes
(read and written together). The two take turns, and the best time of each counts. A ratio of 1.00 is copy speed.
"""

from __future__ import annotations

import argparse
import ctypes
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from graphrewrite.custom_ops import capi

Array = npt.NDArray[Any]
REPETITIONS = 9


@dataclass(frozen=True)
class Case:
    """Codes [rows, columns] with a channel for each row (axis 0) or column (axis 1), or a token for each row."""

    title: str
    columns: int | None  # None: 4096 rows
    axis: int | None
    scales: str = "float32"
    zero_points: str | None = None

    def call(self, elements: int, threads: int) -> tuple[Callable[[], None], int]:
        """What runs the operator, and how many bytes that moves."""
        random = np.random.default_rng(0)
        shape = (4096, elements // 4096) if self.columns is None else (elements // self.columns, self.columns)
        codes = random.integers(-128, 128, shape, np.int8)
        parameters = (shape[0], 1) if self.axis is None else (shape[self.axis],)
        inputs: list[Any] = [codes, random.uniform(0.01, 0.02, parameters).astype(self.scales)]
        if self.zero_points is not None:
            inputs.append(random.integers(-128, 128, parameters).astype(self.zero_points))
        values = aligned_ones(shape)
        op = "DequantizePerToken" if self.axis is None else "DequantizePerChannel"
        attributes = {} if self.axis is None else {"axis": self.axis}
        return lambda: capi.run(op, inputs, [values], attributes, threads=threads), codes.nbytes + values.nbytes


def aligned_ones(shape: tuple[int, ...]) -> Array:
    """Floats from the beginning of a cache line, as runtimes allocate them; written once, so that no page is new."""
    buffer = np.ones(int(np.prod(shape)) + 16, np.float32)
    begin = -buffer.ctypes.data % 64 // 4
    return buffer[begin : begin + buffer.size - 16].reshape(shape)


CASES = [
    Case("innermost axis", None, 1),
    Case("innermost axis, int8 zero points", None, 1, zero_points="int8"),
    Case("innermost axis, int64 zero points", None, 1, zero_points="int64"),
    Case("innermost axis, float64 scales", None, 1, "float64", "int64"),
    Case("innermost axis, 48 channels", 48, 1, zero_points="int8"),
    Case("outer axis", None, 0),
    Case("outer axis, int8 zero points", None, 0, zero_points="int8"),
    Case("outer axis, float64 scales", None, 0, "float64", "int64"),
    Case("outer axis, rows of 128", 128, 0, zero_points="int8"),
    Case("per token, float64 scales, rows of 128", 128, None, "float64", "int64"),
]


def copier(count: int, threads: int, pool: ThreadPoolExecutor) -> Callable[[], None]:
    """memcpy that reads and writes `count` bytes in all."""
    part = count // 2 // threads
    source, target = np.ones(part * threads, np.uint8), np.ones(part * threads, np.uint8)

    def copy(index: int) -> None:
        ctypes.memmove(target.ctypes.data + index * part, source.ctypes.data + index * part, part)

    def copy_all() -> None:
        for _ in pool.map(copy, range(threads)):
            pass

    return copy_all


def best_times(*calls: Callable[[], None]) -> list[float]:
    best = [float("inf")] * len(calls)
    for _ in range(REPETITIONS):
        for k, call in enumerate(calls):
            begin = time.perf_counter()
            call()
            best[k] = min(best[k], time.perf_counter() - begin)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--elements", type=int, default=32, help="millions of elements")
    options = parser.parse_args()
    elements = options.elements << 20
    print(f"{options.elements} Mi elements, {options.threads} threads, {capi.isa()}")
    print(f"{'':<42}{'ms':>8}{'GB/s':>8}{'memcpy':>8}{'ratio':>7}")
    with ThreadPoolExecutor(options.threads) as pool:
        for case in CASES:
            call, moved = case.call(elements, options.threads)
            taken, copied = best_times(call, copier(moved, options.threads, pool))
            print(f"{case.title:<42}{taken * 1e3:8.2f}{moved / taken / 1e9:8.2f}{moved / copied / 1e9:8.2f}", end="")
            print(f"{copied / taken:7.2f}")


if __name__ == "__main__":
    main()
