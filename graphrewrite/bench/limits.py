"""What bounds a step on this machine, measured with the same number of threads.

* Reading: a decode step reads every key and value once, so it cannot take less than memory takes to deliver them.
* Multiplying: the float32 multiply-add rate of a large matrix product, in onnxruntime or, where it is faster, in torch.
  Both are close to what the processor can do; neither is a proof that it cannot do more.

Kernels that multiply integers can beat the second limit: on AVX2 and AVX-512 int16 pairs are multiplied and added at
twice the float32 rate.
"""

from __future__ import annotations

import ctypes
import itertools
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import onnx
from onnx import TensorProto, helper

from graphrewrite.bench.data import Array
from graphrewrite.bench.machine import last_level_cache

_LEAST_READ = 256 << 20  # bytes to go around
_PIECE = 64 << 20  # bytes read at once; sharing them out to threads takes a few percent of the time to read them
_MATRIX = 1024
_CHUNK = 1 << 18
_TRIES = 4  # a limit is the fastest of so many: what holds one up is no property of the machine


class ReadLimit:
    """Seconds to read a number of bytes from memory: the share of a piece of 64 MiB that is in no processor's cache."""

    def __init__(self, threads: int, least: int | None = None) -> None:
        least = max(_LEAST_READ, 4 * last_level_cache()) if least is None else least
        self._piece = min(least, _PIECE) // (threads * _CHUNK) * threads * _CHUNK
        count = max(1, least // self._piece)
        memory = np.ones((count, threads, self._piece // threads), dtype=np.uint8)
        self._following = itertools.cycle(memory)
        self._pool = ThreadPoolExecutor(threads)
        # Which of the two is faster depends on how the libraries were built; both read and do next to nothing else.
        readers = {"numpy max": _read_with_numpy, **_system_reader()}
        fastest = {name: self._seconds(reader) for name, reader in readers.items()}
        self.method = min(fastest, key=fastest.__getitem__)
        self._reader = readers[self.method]

    def measure(self, amount: int) -> float:
        return self._seconds(self._reader) * amount / self._piece

    def close(self) -> None:
        self._pool.shutdown()

    def _seconds(self, reader: Callable[[Array], None]) -> float:
        return _fastest(lambda: list(self._pool.map(reader, next(self._following))))


def _read_with_numpy(part: Array) -> None:
    words = part.view(np.int32)
    for first in range(0, words.size, _CHUNK):
        words[first : first + _CHUNK].max()


def _system_reader() -> dict[str, Callable[[Array], None]]:
    """memchr for a byte that is not there; without the interpreter lock, as all of ctypes."""
    if sys.platform == "win32":
        return {}
    memchr = ctypes.CDLL(None).memchr
    memchr.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]
    memchr.restype = ctypes.c_void_p
    return {"memchr": lambda part: memchr(part.ctypes.data, 0, part.size)}


class MultiplyLimit:
    """Seconds to do a number of float32 operations, a multiply-add counting as two."""

    def __init__(self, threads: int, size: int = _MATRIX) -> None:
        self._operations = 2 * size**3
        products = {"onnxruntime MatMul": _runtime_product(threads, size), **_torch_product(threads, size)}
        fastest = {name: _fastest(product) for name, product in products.items()}
        self.method = min(fastest, key=fastest.__getitem__)
        self._product = products[self.method]

    def measure(self, operations: int) -> float:
        return _fastest(self._product) * operations / self._operations


def _fastest(function: Callable[[], object]) -> float:
    """The least seconds of a few calls."""
    times = []
    for _ in range(_TRIES):
        started = time.perf_counter()
        function()
        times.append(time.perf_counter() - started)
    return min(times)


def _runtime_product(threads: int, size: int) -> Callable[[], object]:
    from graphrewrite.sessions import session

    infos = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [size, size]) for name in ("a", "b", "c")]
    graph = helper.make_graph([helper.make_node("MatMul", ["a", "b"], ["c"])], "product", infos[:2], infos[2:])
    model: onnx.ModelProto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    loaded = session(model, threads, use_library=False)
    feeds = {name: np.ones((size, size), dtype=np.float32) for name in ("a", "b")}
    return lambda: loaded.run(None, feeds)


def _torch_product(threads: int, size: int) -> dict[str, Callable[[], object]]:
    try:
        import torch
    except ImportError:
        return {}
    torch.set_num_threads(threads)
    matrix, out = torch.ones(size, size), torch.empty(size, size)
    return {"torch mm": lambda: torch.mm(matrix, matrix, out=out)}
