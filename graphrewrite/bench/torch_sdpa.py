"""torch's scaled_dot_product_attention over float32 caches [B,H,C,D], the new rows written in place before."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import numpy as np

from graphrewrite.bench.contender import Contender, Step, Unavailable, buffers_for
from graphrewrite.bench.data import Array, Data

if TYPE_CHECKING:
    from torch import Tensor


def contender() -> Contender:
    return Contender("torch SDPA float32", False, _step)


def _step(data: Data, threads: int) -> Step:
    try:
        import torch
    except ImportError:
        raise Unavailable("torch is not installed") from None
    case, layer = data.case, data.case.layer
    if case.ragged:
        raise Unavailable("one length for all sequences")
    torch.set_num_threads(threads)
    start, end = case.starts[0], case.context
    query, key, value = (_bnsh(array) for array in (data.query, data.key, data.value))
    mask = None
    if case.rows > 1 and start:
        mask = torch.arange(end) <= start + torch.arange(case.rows)[:, None]
    bytes_read = case.bytes_of(4 * layer.head_size)
    buffers = [(_bnsh(data.keys), _bnsh(data.values)) for _ in range(buffers_for(bytes_read))]
    result: list[Any] = [None]

    @torch.inference_mode()
    def run(keys: Tensor, values: Tensor) -> None:
        keys[:, :, start:end] = key
        values[:, :, start:end] = value
        result[0] = torch.nn.functional.scaled_dot_product_attention(
            *(query, keys[:, :, :end], values[:, :, :end]),
            attn_mask=mask,
            is_causal=case.rows > 1 and mask is None,
            enable_gqa=layer.group > 1,
        )

    return Step(
        runs=[functools.partial(run, *buffer) for buffer in buffers],
        output=lambda: result[0].transpose(1, 2).numpy(),
        held=lambda: (buffers[0][0].transpose(1, 2).numpy(), buffers[0][1].transpose(1, 2).numpy()),
        bytes_read=bytes_read,
    )


def _bnsh(array: Array) -> Tensor:
    import torch

    # A copy, also where one head makes the transposed array contiguous as it is.
    return torch.from_numpy(np.array(array.transpose(0, 2, 1, 3), order="C"))
