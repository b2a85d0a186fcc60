"""executorch's operators as torch runs them: dequantize the int8 cache, then attention over float32 rows.

Caches [B,C,Hkv,D] with a scale and a zero point per token and head. The writes of the new rows' codes are not in the
measured time; the operator writes their float rows over the dequantized cache.
"""

from __future__ import annotations

import functools
import importlib.util
from typing import Any

from graphrewrite.bench.contender import Contender, Step, Unavailable, buffers_for
from graphrewrite.bench.data import Data, Quantization
from graphrewrite.errors import reason

_PER_TOKEN = Quantization(8, 1, symmetric=False)


def contender() -> Contender:
    return Contender("executorch, dequantize and sdpa_with_kv_cache", False, _step)


def _step(data: Data, threads: int) -> Step:
    if not all(importlib.util.find_spec(name) for name in ("torch", "executorch")):
        raise Unavailable("not installed (executorch and torch)")
    try:
        import torch
        import torch.ao.quantization.fx._decomposed  # registers the operators
        from executorch.extension.llm.custom_ops import custom_ops  # noqa: F401
    except (ImportError, OSError, RuntimeError, AssertionError) as error:
        raise Unavailable(f"executorch does not load: {reason(error)}") from error
    case = data.case
    if case.ragged:
        raise Unavailable("one position for all sequences")
    torch.set_num_threads(threads)
    start, rows = case.starts[0], [torch.from_numpy(array) for array in (data.query, data.key, data.value)]
    contents = data.quantized(_PER_TOKEN)
    bytes_read = case.bytes_of(_PER_TOKEN.row_bytes(case.layer.head_size))

    def buffer() -> list[tuple[Any, Any, Any]]:
        return [
            (
                torch.from_numpy(content.codes.copy()),
                torch.from_numpy(content.scales.astype("float64")),
                torch.from_numpy(content.zero_points.astype("int64")),
            )
            for content in contents
        ]

    result: list[Any] = [None]
    dequantize: Any = torch.ops.quantized_decomposed.dequantize_per_token
    attend: Any = torch.ops.llama.sdpa_with_kv_cache

    @torch.inference_mode()
    def run(caches: list[tuple[Any, Any, Any]]) -> None:
        keys, values = (dequantize(*cache, -128, 127, torch.int8, torch.float32) for cache in caches)
        result[0] = attend(*rows, keys, values, start, case.rows, None, 0.0, True)

    return Step(
        runs=[functools.partial(run, buffer()) for _ in range(buffers_for(bytes_read))],
        output=lambda: result[0].numpy(),
        held=lambda: data.written((contents[0].values(), contents[1].values())),
        bytes_read=bytes_read,
    )
