"""onnxruntime's CPU tensors seen as numpy arrays, for every element type a cache may have.

`OrtValue.numpy()` refuses bfloat16; here the memory itself is viewed and the type comes from ml_dtypes.
"""

from __future__ import annotations

import ctypes
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import onnxruntime

Array = npt.NDArray[Any]

_DTYPES: dict[str, npt.DTypeLike] = {
    "tensor(float)": np.float32,
    "tensor(uint8)": np.uint8,
    "tensor(int8)": np.int8,
    "tensor(uint16)": np.uint16,
    "tensor(int16)": np.int16,
    "tensor(int32)": np.int32,
    "tensor(int64)": np.int64,
    "tensor(bool)": np.bool_,
    "tensor(float16)": np.float16,
    "tensor(double)": np.float64,
    "tensor(uint32)": np.uint32,
    "tensor(uint64)": np.uint64,
    "tensor(bfloat16)": ml_dtypes.bfloat16,
}
_BFLOAT16 = 16  # in onnx.TensorProto: onnxruntime takes this number for a type that numpy itself lacks


def numpy_dtype(ort_type: str) -> np.dtype[Any] | None:
    """Returns the numpy type of an onnxruntime type name such as ``tensor(float)``; None for one without a type."""
    return np.dtype(_DTYPES[ort_type]) if ort_type in _DTYPES else None


def empty(shape: tuple[int, ...], ort_type: str) -> onnxruntime.OrtValue:
    """Allocates an uninitialised CPU tensor. `ort_type` must be one that `numpy_dtype` knows."""
    element = _BFLOAT16 if ort_type == "tensor(bfloat16)" else _DTYPES[ort_type]
    return onnxruntime.OrtValue.ortvalue_from_shape_and_type(list(shape), element)


def from_array(array: Array, ort_type: str) -> onnxruntime.OrtValue:
    """Returns a new CPU tensor of `ort_type` with a copy of the array's values, converted."""
    value = empty(array.shape, ort_type)
    view(value)[...] = array
    return value


def view(value: onnxruntime.OrtValue) -> Array:
    """Returns an array over the memory of a CPU tensor, without a copy. It must not outlive `value`."""
    dtype: np.dtype[Any] = np.dtype(_DTYPES[value.data_type()])
    shape = tuple(value.shape())
    size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    if size == 0:
        return np.empty(shape, dtype)
    memory = memoryview((ctypes.c_uint8 * size).from_address(value.data_ptr())).cast("B")
    return np.frombuffer(memory, dtype=dtype).reshape(shape)
