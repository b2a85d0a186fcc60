"""Calls the kernels with numpy arrays in B, S, H, D order, whatever the layout."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt

from graphrewrite.custom_ops import capi
from graphrewrite.errors import KernelError
from tests.kernels.reference import Sdpa, to_layout

Array = npt.NDArray[Any]


def instruction_sets() -> list[str]:
    """Those this processor can run."""
    available = []
    for name in ("scalar", "avx2", "avx512"):
        try:
            capi.set_isa(name)
        except KernelError:
            continue
        available.append(name)
    capi.set_isa(None)
    return available


@contextmanager
def instruction_set(name: str) -> Iterator[None]:
    """Uses an instruction set for a while."""
    capi.set_isa(name)
    try:
        yield
    finally:
        capi.set_isa(None)


def describe(array: Array | None) -> capi.Tensor | None:
    return None if array is None else capi.from_numpy(array)


def sdpa_arrays(arguments: Sdpa, layout: str) -> list[Array | None]:
    """The inputs of CustomSdpa in order, in `layout`."""
    a = arguments
    before = [a.query, a.key_cache, a.value_cache]
    after = [a.key_scales, a.key_zero_points, a.value_scales, a.value_zero_points, a.recent_key, a.recent_value]

    def convert(array: Array | None) -> Array | None:
        return None if array is None else to_layout(array, layout)

    return [*map(convert, before), a.start_pos, *map(convert, after), a.attn_mask]


def custom_sdpa(
    arguments: Sdpa,
    *,
    layout: str = "BSNH",
    threads: int = 1,
    place: Callable[[Array], Array] = lambda array: array,
) -> Array:
    """CustomSdpa on arrays that `place` puts somewhere. The output starts as NaN."""
    arrays = [None if array is None else place(array) for array in sdpa_arrays(arguments, layout)]
    query = arrays[0]
    assert query is not None
    output = place(np.full_like(query, np.nan))
    tensors: list[Any] = [describe(array) for array in [*arrays, output]]
    capi.custom_sdpa(
        *tensors,
        is_causal=arguments.is_causal,
        scale=arguments.scale,
        layout=layout,
        threads=threads,
    )
    return to_layout(output, layout)
