"""The kernels through ctypes, without onnxruntime or torch.

`run` takes the tensors of any operator as numpy arrays, or as descriptors of memory that lives at least as long as the
call; the caller allocates the outputs:

    cache = np.zeros((1, 16, 2, 64), np.float32)
    run("UpdateCache", [value, cache, np.array(3)], [cache], threads=2)

`graphrewrite/kernels.h` has the rules, `graphrewrite.custom_ops.schema` the operators. Calls release the interpreter
lock.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from graphrewrite.custom_ops import library_path
from graphrewrite.errors import KernelError, LibraryError

__all__ = ["DTYPES", "Tensor", "from_numpy", "isa", "operators_json", "run", "set_isa", "tensor", "version"]

_ERROR_SIZE = 1024
_INT, _FLOAT, _TEXT = 1, 2, 3  # GrAttributeKind

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


_Pointer = ctypes.POINTER(Tensor)


class _Attribute(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_char_p),
        ("kind", ctypes.c_int32),
        ("number", ctypes.c_float),
        ("integer", ctypes.c_int64),
        ("text", ctypes.c_char_p),
    )


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
    """Describes an array and keeps it alive.

    Raises:
        KernelError: its dtype is none of `DTYPES` (numpy has bfloat16 from ml_dtypes), its bytes are in another order
            than the processor's, or its strides are no multiples of an element.
    """
    dtype = DTYPES.get(array.dtype.name)
    if dtype is None or not array.dtype.isnative:
        raise KernelError(f"element type {array.dtype} is not supported, expected one of {', '.join(DTYPES)}")
    if any(stride % array.itemsize for stride in array.strides):
        raise KernelError(f"strides {array.strides} are no multiples of the {array.itemsize} bytes of an element")
    strides = None if array.flags.c_contiguous else [stride // array.itemsize for stride in array.strides]
    descriptor = tensor(array.ctypes.data, dtype, array.shape, strides)
    descriptor.owner = array
    return descriptor


@functools.cache
def _library() -> ctypes.CDLL:
    path = library_path()
    try:
        library = ctypes.CDLL(str(path))
        library.gr_version.restype = ctypes.c_char_p
        library.gr_isa.restype = ctypes.c_char_p
        library.gr_operators.restype = ctypes.c_char_p
        library.gr_set_isa.argtypes = [ctypes.c_char_p, ctypes.c_char_p, ctypes.c_size_t]
        tensors: list[Any] = [ctypes.POINTER(_Pointer), ctypes.c_size_t]
        library.gr_run.argtypes = [
            *(ctypes.c_char_p, *tensors, *tensors, ctypes.POINTER(_Attribute), ctypes.c_size_t),
            *(ctypes.POINTER(_Threads), ctypes.c_char_p, ctypes.c_size_t),
        ]
    except (OSError, AttributeError) as failure:
        raise LibraryError(f"cannot load the kernel library {path}: {failure}") from failure
    if library.gr_isa() is None:
        error = ctypes.create_string_buffer(_ERROR_SIZE)
        library.gr_set_isa(None, error, _ERROR_SIZE)
        raise LibraryError(f"cannot use the kernel library {path}: {error.value.decode()}")
    return library


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


def operators_json() -> str:
    """The declarations of all operators, as `gr_operators` in `graphrewrite/kernels.h` describes them."""
    return str(_library().gr_operators().decode())


def run(
    op: str,
    inputs: Sequence[Tensor | npt.NDArray[Any] | None],
    outputs: Sequence[Tensor | npt.NDArray[Any] | None],
    attributes: Mapping[str, Any] | None = None,
    *,
    threads: int = 1,
) -> None:
    """Runs an operator.

    Args:
        op: its name, as in ONNX.
        inputs: in the order of its declaration; None where absent, and those left out at the end are absent.
        outputs: memory for its outputs, likewise. An output on the memory of the input it replaces is written in place.
        attributes: by name; those left out or None have their defaults.
        threads: how many threads may be used.

    Raises:
        KernelError: an argument does not fit; nothing was written.
    """
    for output in outputs:
        if isinstance(output, np.ndarray) and not output.flags.writeable:
            raise KernelError(f"{op}: an output is an array that may not be written")
    given = [_attribute(op, name, value) for name, value in (attributes or {}).items() if value is not None]
    error = ctypes.create_string_buffer(_ERROR_SIZE)
    status = _library().gr_run(
        *(op.encode(), *_tensors(inputs), *_tensors(outputs), (_Attribute * len(given))(*given), len(given)),
        *(ctypes.byref(_Threads(threads, None, None)), error, _ERROR_SIZE),
    )
    if status != 0:
        raise KernelError(error.value.decode(errors="replace"))


def _tensors(tensors: Sequence[Tensor | npt.NDArray[Any] | None]) -> tuple[Any, int]:
    """An array of pointers, and its length. The array keeps alive what it points to."""
    described = [item if item is None or isinstance(item, Tensor) else from_numpy(item) for item in tensors]
    # Without an argument a pointer is NULL.
    pointers = [_Pointer() if item is None else _Pointer(item) for item in described]
    return (_Pointer * len(pointers))(*pointers), len(pointers)


def _attribute(op: str, name: str, value: object) -> _Attribute:
    if isinstance(value, str) and "\0" not in value:
        return _Attribute(name.encode(), _TEXT, 0, 0, value.encode())
    if isinstance(value, int) and -(2**63) <= value < 2**63:
        return _Attribute(name.encode(), _INT, 0, value, None)
    if isinstance(value, float):
        return _Attribute(name.encode(), _FLOAT, value, 0, None)
    raise KernelError(f"{op}: attribute {name} is {value!r}, expected a string, an integer of 64 bits or a float")
