"""Calls of the torch operators that tests make: arguments of each one, and what it gives back."""

from __future__ import annotations

from typing import Any

import pytest

from graphrewrite.custom_ops.schema import operators

torch = pytest.importorskip("torch")
pytest.importorskip("graphrewrite.custom_ops.torch_ops")

OPS = torch.ops.graphrewrite
# B, S, C, Hq, Hkv, D
BATCH, ROWS, CAPACITY, HEADS, KV_HEADS, DIM = 2, 3, 8, 4, 2, 8

# Two orders of summation: scores of D = 8 terms, where |q| sums to less than 24 and |k| < 255 * 0.04, are each within
# (D + 2) * 2^-24 * 24 * 10.2 / sqrt(8) = 5.2e-5, so weights within a factor of exp(4 * 5.2e-5); values are below 10.2.
TOLERANCE = 2.2e-3


def floats(*shape: int) -> Any:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(*shape, generator=generator)


def arguments(op: str, *, layout: str = "BSNH", rows: int = ROWS) -> tuple[list[Any], dict[str, Any]]:
    """Valid arguments of an operator, int8 caches where it takes them."""

    def laid_out(tensor: Any) -> Any:
        return tensor if layout == "BSNH" else tensor.transpose(1, 2).contiguous()

    query = laid_out(floats(BATCH, rows, HEADS, DIM))
    value = laid_out(floats(BATCH, rows, KV_HEADS, DIM))
    cache = laid_out(floats(BATCH, CAPACITY, KV_HEADS, DIM))
    codes = laid_out(torch.arange(-128, 128).to(torch.int8).reshape(BATCH, CAPACITY, KV_HEADS, DIM))
    scales = laid_out(floats(BATCH, CAPACITY, KV_HEADS, 1).abs() / 100)
    points = laid_out(torch.arange(BATCH * CAPACITY * KV_HEADS).to(torch.int8).reshape(BATCH, CAPACITY, KV_HEADS, 1))
    parameters = [scales, points, scales.clone(), points.clone()]
    queries = laid_out(torch.arange(BATCH * rows * HEADS * DIM).to(torch.int8).reshape(BATCH, rows, HEADS, DIM))
    rows_scales, rows_points = floats(6, 1).abs() / 100, torch.arange(6).reshape(6, 1)
    positional: list[Any] = {
        "update_cache": [value, cache, 4],
        "update_cache_with_indices": [value, cache, (torch.arange(BATCH * rows) * 5 % CAPACITY).reshape(BATCH, rows)],
        "update_quantized_cache": [value, codes, scales, 4, points],
        "custom_sdpa": [query, codes, codes.clone(), 4, *parameters, value, value.clone()],
        "custom_quantized_sdpa": [
            *(queries, codes, codes.clone(), 4),
            *(queries[..., :1].float().abs() / 100, queries[..., 1:2].contiguous(), *parameters),
        ],
        "sdpa_with_kv_cache": [query, value, value.clone(), cache, cache.clone(), 4],
        "choose_qparams_per_token": [floats(6, 8)],
        "quantize_per_token": [floats(6, 8), rows_scales, rows_points],
        "dequantize_per_token": [torch.arange(48).to(torch.int8).reshape(6, 8), rows_scales, rows_points],
        "quantize_per_channel": [floats(6, 8), rows_scales[:, 0], rows_points[:, 0]],
        "dequantize_per_channel": [torch.arange(48).to(torch.int8).reshape(8, 6), rows_scales[:, 0], rows_points[:, 0]],
    }[op]
    keywords: dict[str, Any] = {"layout": layout} if op in STATEFUL else {}
    if "sdpa" in op:
        keywords["is_causal"] = True
    if op == "quantize_per_channel":
        keywords["axis"] = 0
    return positional, keywords


STATEFUL = [
    *("update_cache", "update_cache_with_indices", "update_quantized_cache"),
    *("custom_sdpa", "custom_quantized_sdpa", "sdpa_with_kv_cache"),
]
NAMES = sorted(schema.torch_name for schema in operators().values())
# The argument that is start_pos, by operator.
POSITIONS = {
    schema.torch_name: [tensor.name for tensor in schema.inputs].index("start_pos")
    for schema in operators().values()
    if any(tensor.name == "start_pos" for tensor in schema.inputs)
}
# Which arguments each operator's in-place form writes.
WRITTEN = {
    schema.torch_name: [output.like for output in schema.outputs if output.in_place]
    for schema in operators().values()
    if any(output.in_place for output in schema.outputs)
}
names = pytest.mark.parametrize("op", NAMES)
stateful = pytest.mark.parametrize("op", STATEFUL)
layouts = pytest.mark.parametrize("layout", ["BSNH", "BNSH"])


def tensors_of(results: Any) -> tuple[Any, ...]:
    return results if isinstance(results, tuple) else () if results is None else (results,)


def results_of(op: str, positional: list[Any], keywords: dict[str, Any]) -> tuple[Any, ...]:
    return tensors_of(getattr(OPS, op)(*positional, **keywords))


def copied(positional: list[Any]) -> list[Any]:
    return [item.clone() if isinstance(item, torch.Tensor) else item for item in positional]
