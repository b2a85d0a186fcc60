"""Arrays that end, or begin, exactly at memory nobody may touch: a kernel that reads past one dies at once."""

from __future__ import annotations

import ctypes
import mmap
import weakref
from typing import Any

import numpy as np
import numpy.typing as npt

_PROT_NONE = 0
_PROT_READ_WRITE = 3
_MAP_PRIVATE_ANONYMOUS = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


def guarded(array: npt.NDArray[Any], *, at_end: bool = True) -> npt.NDArray[Any]:
    """A contiguous copy of `array` between two inaccessible pages, flush with the second one, or with the first."""
    page = mmap.PAGESIZE
    middle = -(-max(array.nbytes, 1) // page) * page
    total = middle + 2 * page
    base = _libc.mmap(None, total, _PROT_READ_WRITE, _MAP_PRIVATE_ANONYMOUS, -1, 0)
    assert base not in (None, ctypes.c_void_p(-1).value), "mmap failed"
    assert _libc.mprotect(base, page, _PROT_NONE) == 0
    assert _libc.mprotect(base + page + middle, page, _PROT_NONE) == 0
    address = base + page + (middle - array.nbytes if at_end else 0)
    buffer = (ctypes.c_char * array.nbytes).from_address(address)
    weakref.finalize(buffer, _libc.munmap, base, total)
    copy: npt.NDArray[Any] = np.ndarray(array.shape, array.dtype, memoryview(buffer))
    copy[...] = array
    return copy


def forbid(array: npt.NDArray[Any], begin: int, end: int) -> None:
    """Makes bytes [begin, end) of a `guarded` array inaccessible, as far as whole pages lie within."""
    page = mmap.PAGESIZE
    first = -(-(array.ctypes.data + begin) // page) * page
    length = (array.ctypes.data + end) // page * page - first
    assert length > 0
    assert _libc.mprotect(first, length, _PROT_NONE) == 0
