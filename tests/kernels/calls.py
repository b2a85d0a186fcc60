"""Calls the kernels with numpy arrays in B, S, H, D order, whatever the layout."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt

from graphrewrite.custom_ops import capi
from graphrewrite.custom_ops.schema import operators
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


def sdpa_inputs(arguments: Sdpa, layout: str) -> dict[str, Array | None]:
    """The inputs of CustomSdpa, or with an int8 query of CustomQuantizedSdpa, in order, in `layout`."""
    a = arguments
    names = [tensor.name for tensor in operators()[sdpa_operator(a)].inputs]
    arrays = {name: getattr(a, name) for name in names}
    return {
        # Scales of a static granularity have no layout.
        name: to_layout(array, layout) if array is not None and array.ndim == 4 and name != "attn_mask" else array
        for name, array in arrays.items()
    }


def sdpa_operator(arguments: Sdpa) -> str:
    return "CustomSdpa" if arguments.query_scales is None else "CustomQuantizedSdpa"


def sdpa_attributes(arguments: Sdpa, layout: str) -> dict[str, Any]:
    names = ("is_causal", "scale", "softcap", "window", "sink_tokens")
    return {**{name: getattr(arguments, name) for name in names}, "layout": layout}


def custom_sdpa(
    arguments: Sdpa,
    *,
    layout: str = "BSNH",
    threads: int = 1,
    place: Callable[[Array], Array] = lambda array: array,
) -> Array:
    """CustomSdpa, or CustomQuantizedSdpa, on arrays that `place` puts somewhere. The output starts as NaN."""
    inputs = [None if array is None else place(array) for array in sdpa_inputs(arguments, layout).values()]
    query = inputs[0]
    assert query is not None
    dtype = query.dtype if arguments.query_scales is None else np.dtype(np.float32)
    output = place(np.full(query.shape, np.nan, dtype))
    capi.run(sdpa_operator(arguments), inputs, [output], sdpa_attributes(arguments, layout), threads=threads)
    return to_layout(output, layout)
