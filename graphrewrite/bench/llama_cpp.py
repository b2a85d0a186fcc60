"""llama.cpp's flash attention on its CPU backend, through the C interface of ggml.

The libraries are those of an installed llama-cpp-python, or in the folder that the environment variable GGML_DIR names.
The caches hold the new rows from the start: their conversion is not in the measured time. ggml itself rounds the query
to what it multiplies the cache's blocks with.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import os
import sys
import weakref
from ctypes import POINTER, byref, c_bool, c_char_p, c_float, c_int, c_int64, c_size_t, c_uint8, c_void_p
from pathlib import Path
from typing import Any

import numpy as np

from graphrewrite.bench.contender import Contender, Step, Unavailable, buffers_for
from graphrewrite.bench.data import Array, Data

# Number in enum ggml_type, elements of a block, bytes of a block.
CACHES = {"f16": (1, 1, 2), "q8_0": (8, 32, 34), "q4_0": (2, 32, 18)}
_F32, _F16 = 0, 1
_PAD = 256  # positions; llama.cpp's caches have multiples of this
_MASK_PAD = 64  # rows of a mask, the most that any version asks for
_CONTEXT_BYTES = 16 << 20  # of a graph and of the descriptions of its tensors

# Held against what the cache holds, what is left is the rounding of the query to 8 bits or float16.
_TOLERANCE = 0.05


def contender(kind: str) -> Contender:
    """Caches of a type in `CACHES`."""
    return Contender(f"llama.cpp {kind}", False, lambda data, threads: _step(data, threads, kind), _TOLERANCE)


class _InitParams(ctypes.Structure):
    _fields_ = (("size", c_size_t), ("buffer", c_void_p), ("no_alloc", c_bool))


class _Plan(ctypes.Structure):
    # Newer versions have more fields, for which the caller's memory must have room.
    _fields_ = (("size", c_size_t), ("work", c_void_p), ("rest", c_uint8 * 240))


def version() -> str | None:
    """The version of ggml; None when it is not installed, or too old to say."""
    try:
        function = getattr(_load(_folder(), "base"), "ggml_version", None)
    except Unavailable:
        return None
    if function is None:
        return None
    function.restype = c_char_p
    return str(function().decode())


@functools.cache
def _library() -> dict[str, Any]:
    """The functions used, by name without `ggml_`."""
    folder = _folder()
    base, cpu = _load(folder, "base"), _load(folder, "cpu")
    pointer, sizes = c_void_p, [c_int64] * 4
    declarations: dict[str, tuple[ctypes.CDLL, Any, list[Any]]] = {
        "init": (base, pointer, [_InitParams]),
        "free": (base, None, [pointer]),
        "new_tensor_4d": (base, pointer, [pointer, c_int, *sizes]),
        "get_data": (base, pointer, [pointer]),
        "nbytes": (base, c_size_t, [pointer]),
        "flash_attn_ext": (base, pointer, [*[pointer] * 5, c_float, c_float, c_float]),
        "new_graph": (base, pointer, [pointer]),
        "build_forward_expand": (base, None, [pointer, pointer]),
        "threadpool_params_init": (base, None, [pointer, c_int]),
        "threadpool_new": (cpu, pointer, [pointer]),
        "threadpool_free": (cpu, None, [pointer]),
        "graph_plan": (cpu, _Plan, [pointer, c_int, pointer]),
        "graph_compute": (cpu, c_int, [pointer, POINTER(_Plan)]),
    }
    functions = {}
    for name, (library, result, arguments) in declarations.items():
        function = getattr(library, f"ggml_{name}", None)
        if function is None:
            raise Unavailable(f"this llama.cpp has no function ggml_{name}")
        function.restype, function.argtypes = result, arguments
        functions[name] = function
    return functions


def _folder() -> Path:
    if folder := os.environ.get("GGML_DIR"):
        return Path(folder)
    package = importlib.util.find_spec("llama_cpp")
    if package is None or package.origin is None:
        raise Unavailable("not installed (llama-cpp-python, or ggml's libraries in the folder that GGML_DIR names)")
    return Path(package.origin).parent / "lib"


def _load(folder: Path, name: str) -> ctypes.CDLL:
    suffix = {"darwin": "dylib", "win32": "dll"}.get(sys.platform, "so")
    paths = sorted(folder.glob(f"*ggml-{name}*.{suffix}*"))
    if not paths:
        raise Unavailable(f"the folder of llama.cpp has no library ggml-{name}")
    try:
        return ctypes.CDLL(str(paths[0]), mode=ctypes.RTLD_GLOBAL)
    except OSError as error:
        raise Unavailable(f"llama.cpp does not load: {error}") from error


def _step(data: Data, threads: int, kind: str) -> Step:
    ggml, case, layer = _library(), data.case, data.case.layer
    _, block, block_bytes = CACHES[kind]
    if layer.head_size % block:
        raise Unavailable(f"{kind} needs heads of a multiple of {block} elements")
    caches = [encode(_padded(cache), kind) for cache in data.written()]
    mask = _mask(data)
    bytes_read = case.bytes_of(layer.head_size // block * block_bytes)
    pool = _Pool(ggml, threads)
    graphs = [_Graph(ggml, pool, kind, data.query, caches[0], caches[1], mask) for _ in range(buffers_for(bytes_read))]

    def held() -> tuple[Array, Array]:
        keys, values = (decode(cache, kind).transpose(0, 2, 1, 3) for cache in caches)
        return keys, values

    return Step(graphs, lambda: graphs[0].output, held, bytes_read)


class _Pool:
    """Threads that live as long as their owner, as those of llama.cpp do."""

    def __init__(self, ggml: dict[str, Any], threads: int) -> None:
        parameters = (c_uint8 * 4096)()
        ggml["threadpool_params_init"](parameters, threads)
        self.address, self.threads = ggml["threadpool_new"](parameters), threads
        weakref.finalize(self, ggml["threadpool_free"], self.address)


class _Graph:
    """One attention over tensors of its own."""

    def __init__(
        self, ggml: dict[str, Any], pool: _Pool, kind: str, query: Array, keys: Array, values: Array, mask: Array
    ) -> None:
        self._pool, self._compute = pool, ggml["graph_compute"]
        size = keys.nbytes + values.nbytes + mask.nbytes + 3 * query.nbytes + _CONTEXT_BYTES
        context = ggml["init"](_InitParams(size, None, False))
        if not context:
            raise Unavailable(f"ggml has no memory for {size} bytes")
        weakref.finalize(self, ggml["free"], context)

        def tensor(number: int, sizes: tuple[int, ...], content: Array) -> Any:
            made = ggml["new_tensor_4d"](context, number, *sizes)
            if ggml["nbytes"](made) != content.nbytes:
                raise Unavailable(f"ggml lays out a tensor of {sizes} in another way")
            ctypes.memmove(ggml["get_data"](made), content.ctypes.data, content.nbytes)
            return made

        batch, rows, query_heads, head_size = query.shape
        kv_heads, capacity = keys.shape[1:3]
        by_head = np.ascontiguousarray(query.transpose(0, 2, 1, 3))
        cache_sizes = (head_size, capacity, kv_heads, batch)
        output = ggml["flash_attn_ext"](
            context,
            tensor(_F32, (head_size, rows, query_heads, batch), by_head),
            tensor(CACHES[kind][0], cache_sizes, keys),
            tensor(CACHES[kind][0], cache_sizes, values),
            tensor(_F16, (capacity, mask.shape[1], 1, batch), mask),
            *(head_size**-0.5, 0.0, 0.0),
        )
        self._graph = ggml["new_graph"](context)
        ggml["build_forward_expand"](self._graph, output)
        self._plan = ggml["graph_plan"](self._graph, pool.threads, pool.address)
        self._work = (c_uint8 * max(1, self._plan.size))()
        self._plan.work = ctypes.cast(self._work, c_void_p)
        self._result = (c_float * query.size).from_address(ggml["get_data"](output))
        self._shape = query.shape

    @property
    def output(self) -> Array:
        return np.ctypeslib.as_array(self._result).reshape(self._shape)

    def __call__(self) -> None:
        if self._compute(self._graph, byref(self._plan)) != 0:
            raise Unavailable("ggml could not compute the graph")


def _padded(cache: Array) -> Array:
    """[B,C,H,D] as [B,H,C',D] with C' a multiple of 256."""
    more = -cache.shape[1] % _PAD
    return np.pad(cache.transpose(0, 2, 1, 3), ((0, 0), (0, 0), (0, more), (0, 0)))


def _mask(data: Data) -> Array:
    """What is added to the scores, float16 [B,S',C']: 0 or -inf."""
    case = data.case
    rows, columns = case.rows + -case.rows % _MASK_PAD, case.capacity + -case.capacity % _PAD
    mask = np.full((case.layer.batch, rows, columns), -np.inf, dtype=np.float16)
    for sequence, start in enumerate(case.starts):
        seen = np.arange(columns) <= start + np.arange(case.rows)[:, None]
        mask[sequence, : case.rows][seen] = 0
    return mask


def encode(rows: Array, kind: str) -> Array:
    """float32 [...,D] in blocks along D: a float16 scale, then the codes; bytes [...,D/block*bytes]."""
    if kind == "f16":
        return rows.astype(np.float16)
    blocks = rows.reshape(*rows.shape[:-1], -1, 32)
    largest = np.abs(blocks).max(-1, keepdims=True)
    steps = 127 if kind == "q8_0" else 7
    scales = (largest / steps).astype(np.float16)
    inverse = np.divide(1, scales, out=np.zeros_like(largest), where=scales > 0, dtype=np.float32)
    codes = np.clip(np.rint(blocks * inverse), -steps, steps).astype(np.int8)
    if kind == "q4_0":
        shifted = (codes + 8).astype(np.uint8)
        codes = shifted[..., :16] | (shifted[..., 16:] << 4)
    encoded = np.concatenate([scales.view(np.uint8), codes.view(np.uint8)], axis=-1)
    return encoded.reshape(*rows.shape[:-1], -1)


def decode(encoded: Array, kind: str) -> Array:
    """The inverse of `encode`, float32."""
    if kind == "f16":
        return encoded.astype(np.float32)
    blocks = encoded.reshape(*encoded.shape[:-1], -1, CACHES[kind][2])
    scales = np.ascontiguousarray(blocks[..., :2]).view(np.float16).astype(np.float32)
    codes = blocks[..., 2:]
    if kind == "q8_0":
        values = codes.view(np.int8).astype(np.float32)
    else:
        values = np.concatenate([codes & 15, codes >> 4], axis=-1).astype(np.float32) - 8
    return (values * scales).reshape(*encoded.shape[:-1], -1)
