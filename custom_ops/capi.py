"""The kernels through ctypes, without onnxruntime or torch.

Functions mirror `graphrewrite/kernels.h`, which says what each one computes: operator inputs in order, then outputs,
which the caller allocates, then attributes. Tensors are passed as descriptors of memory that lives at least as long as
the call:

    cache = np.zeros((1, 16, 2, 64), np.float32)
    update_cache(from_numpy(value), from_numpy(cache), from_numpy(np.array(3)), from_numpy(cache), threads=2)

The calls release the interpreter lock. An output that lies where the input it replaces lies is updated in place.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import Any

import numpy.typing as npt

from graphrewrite.custom_ops import library_path
from graphrewrite.errors import KernelError, LibraryError

__all__ = [
    "DTYPES",
    "Tensor",
    "custom_sdpa",
    "from_numpy",
    "isa",
    "sdpa_with_kv_cache",
    "set_isa",
    "tensor",
    "update_cache",
    "update_quantized_cache",
    "version",
]

_ERROR_SIZE = 1024

DTYPES = {
    "float32": 1,
    "uint8": 2,
    "int8": 3,
    "int32": 6,
    "int64": 7,
    "bool": 9,
    "float16": 10,
    "float64": 11,
    "bfloat16": 16,
}
"""Element types by name, numbered as ONNX's `TensorProto.DataType`."""


class Tensor(ctypes.Structure):
    """A descriptor of a tensor in memory: `GrTensor`. Make one with `tensor` or `from_numpy`."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("dtype", ctypes.c_int32),
        ("rank", ctypes.c_int32),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
    )

    owner: object = None
    """What keeps the memory alive, when that is known."""


class _Threads(ctypes.Structure):
    _fields_ = (("count", ctypes.c_int32), ("parallel_for", ctypes.c_void_p), ("context", ctypes.c_void_p))


def tensor(data: int, dtype: int, shape: Sequence[int], strides: Sequence[int] | None = None) -> Tensor:
    """Describes memory.

    Args:
        data: address of the first element.
        dtype: a value of `DTYPES`.
        shape: sizes.
        strides: distances between elements, counted in elements; None: contiguous, last dimension fastest.
    """
    sizes = (ctypes.c_int64 * len(shape))(*shape)
    steps = None if strides is None else (ctypes.c_int64 * len(shape))(*strides)
    # Assigning an array to a pointer field keeps the array alive with the structure.
    return Tensor(data, dtype, len(shape), sizes, steps)


def from_numpy(array: npt.NDArray[Any]) -> Tensor:
    """Describes an array and keeps it alive. Its dtype must be one of `DTYPES`."""
    dtype = DTYPES.get(array.dtype.name)
    if dtype is None:
        raise KernelError(f"element type {array.dtype.name} is not supported, expected one of {', '.join(DTYPES)}")
    strides = None if array.flags.c_contiguous else [stride // array.itemsize for stride in array.strides]
    descriptor = tensor(array.ctypes.data, dtype, array.shape, strides)
    descriptor.owner = array
    return descriptor


@functools.cache
def _library() -> ctypes.CDLL:
    path = library_path()
    try:
        library = ctypes.CDLL(str(path))
        pointer = ctypes.POINTER(Tensor)
        ending: list[Any] = [ctypes.POINTER(_Threads), ctypes.c_char_p, ctypes.c_size_t]
        attention: list[Any] = [ctypes.c_int32, ctypes.POINTER(ctypes.c_float), ctypes.c_char_p]
        library.gr_version.restype = ctypes.c_char_p
        library.gr_isa.restype = ctypes.c_char_p
        library.gr_set_isa.argtypes = [ctypes.c_char_p, ctypes.c_char_p, ctypes.c_size_t]
        library.gr_update_cache.argtypes = [pointer] * 4 + [ctypes.c_char_p, *ending]
        library.gr_update_quantized_cache.argtypes = [pointer] * 8 + [ctypes.c_char_p] * 2 + ending
        library.gr_custom_sdpa.argtypes = [pointer] * 12 + attention + ending
        library.gr_sdpa_with_kv_cache.argtypes = [pointer] * 10 + attention + ending
    except (OSError, AttributeError) as failure:
        raise LibraryError(f"cannot load the kernel library {path}: {failure}") from failure
    if library.gr_isa() is None:
        error = ctypes.create_string_buffer(_ERROR_SIZE)
        library.gr_set_isa(None, error, _ERROR_SIZE)
        raise LibraryError(f"cannot use the kernel library {path}: {error.value.decode()}")
    return library


def _call(function: Any, tensors: Sequence[Tensor | None], *arguments: Any, threads: int) -> None:
    error = ctypes.create_string_buffer(_ERROR_SIZE)
    references = [None if item is None else ctypes.byref(item) for item in tensors]
    if function(*references, *arguments, ctypes.byref(_Threads(threads, None, None)), error, _ERROR_SIZE) != 0:
        raise KernelError(error.value.decode(errors="replace"))


def version() -> str:
    """The version of the library."""
    return str(_library().gr_version().decode())


def isa() -> str:
    """The instruction set in use, "scalar", "avx2" or "avx512"."""
    return str(_library().gr_isa().decode())


def set_isa(name: str | None) -> None:
    """Selects the instruction set for the whole process.

    Args:
        name: "scalar", "avx2" or "avx512"; None: as at load, which the environment variable GRAPHREWRITE_ISA decides.

    Raises:
        KernelError: the name is unknown, or this processor has no such instructions. Nothing changes then.
    """
    error = ctypes.create_string_buffer(_ERROR_SIZE)
    if _library().gr_set_isa(None if name is None else name.encode(), error, _ERROR_SIZE) != 0:
        raise KernelError(error.value.decode(errors="replace"))


def update_cache(
    value: Tensor, cache: Tensor, start_pos: Tensor, new_cache: Tensor, *, layout: str = "BSNH", threads: int = 1
) -> None:
    """Writes value T[B,S,H,D] into rows [start_pos, start_pos + S) of cache T[B,C,H,D].

    Raises:
        KernelError: an argument does not fit; nothing was written.
    """
    _call(_library().gr_update_cache, [value, cache, start_pos, new_cache], layout.encode(), threads=threads)


def update_quantized_cache(
    value: Tensor,
    codes: Tensor,
    scales: Tensor,
    start_pos: Tensor,
    zero_points: Tensor | None,
    new_codes: Tensor,
    new_scales: Tensor,
    new_zero_points: Tensor | None,
    *,
    scheme: str = "asymmetric",
    layout: str = "BSNH",
    threads: int = 1,
) -> None:
    """Quantizes value float32[B,S,H,D] per token and head into codes int8[B,C,H,D], scales float32[B,C,H,1] and
    zero points int8[B,C,H,1].

    Raises:
        KernelError: an argument does not fit; nothing was written.
    """
    tensors = [value, codes, scales, start_pos, zero_points, new_codes, new_scales, new_zero_points]
    _call(_library().gr_update_quantized_cache, tensors, scheme.encode(), layout.encode(), threads=threads)


def custom_sdpa(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    start_pos: Tensor,
    key_scales: Tensor | None,
    key_zero_points: Tensor | None,
    value_scales: Tensor | None,
    value_zero_points: Tensor | None,
    recent_key: Tensor | None,
    recent_value: Tensor | None,
    attn_mask: Tensor | None,
    output: Tensor,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    layout: str = "BSNH",
    threads: int = 1,
) -> None:
    """Attention of query float32[B,S,Hq,D] over caches [B,C,Hkv,D] of float32 or int8, into output float32[B,S,Hq,D].

    Raises:
        KernelError: an argument does not fit; nothing was written.
    """
    tensors = [
        *(query, key_cache, value_cache, start_pos),
        *(key_scales, key_zero_points, value_scales, value_zero_points),
        *(recent_key, recent_value, attn_mask, output),
    ]
    _call(_library().gr_custom_sdpa, tensors, *_attributes(is_causal, scale, layout), threads=threads)


def sdpa_with_kv_cache(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    start_pos: Tensor,
    attn_mask: Tensor | None,
    output: Tensor,
    new_key_cache: Tensor,
    new_value_cache: Tensor,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    layout: str = "BSNH",
    threads: int = 1,
) -> None:
    """Writes key and value float32[B,S,Hkv,D] into caches float32[B,C,Hkv,D], then attends to them.

    Raises:
        KernelError: an argument does not fit; nothing was written.
    """
    tensors = [
        *(query, key, value, key_cache, value_cache, start_pos, attn_mask),
        *(output, new_key_cache, new_value_cache),
    ]
    _call(_library().gr_sdpa_with_kv_cache, tensors, *_attributes(is_causal, scale, layout), threads=threads)


def _attributes(is_causal: bool, scale: float | None, layout: str) -> tuple[int, Any, bytes]:
    return int(is_causal), None if scale is None else ctypes.byref(ctypes.c_float(scale)), layout.encode()
