"""One attention layer in each FX source form, whole or with one flaw, for the pattern tests.

B=1, Hq=4, Hkv=2, D=16, capacity C=32; S is dynamic.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from graphrewrite import source_ops

QUERY_HEADS, KV_HEADS, HEAD_SIZE, CAPACITY = 4, 2, 16, 32

source_ops.register()
_llama: Any = torch.ops.llama
_quantized: Any = torch.ops.quantized_decomposed


class QuantizedCache(nn.Module):
    """int8 codes with one scale and zero point per token and head, written by llama.update_cache."""

    def __init__(self, *, symmetric: bool = False, flaw: str = "", head_size: int = HEAD_SIZE) -> None:
        super().__init__()
        self.symmetric, self.flaw = symmetric, flaw
        heads = (1, CAPACITY, KV_HEADS)
        scale_dtype = torch.float64 if flaw == "scale-dtype" else torch.float32
        self.register_buffer("codes", torch.zeros(*heads, head_size, dtype=torch.int8))
        # The flaw: one scale for all heads of a token.
        scale_heads = (1, CAPACITY, 1) if flaw == "scale-granularity" else heads
        self.register_buffer("scales", torch.ones(*scale_heads, 1, dtype=scale_dtype))
        zero_dtype = torch.int32 if flaw == "zero-point-dtype" else torch.int8
        self.register_buffer("zero_points", torch.zeros(*heads, 1, dtype=zero_dtype))

    def write(self, rows: Tensor, start: int) -> None:
        name = "choose_qparams_per_token" if self.symmetric else "choose_qparams_per_token_asymmetric"
        scales, zero_points = getattr(_quantized, name)(rows, torch.int8)
        codes = _quantized.quantize_per_token(rows, scales, zero_points, -128, 127, torch.int8)
        _llama.update_cache(codes, self.codes[:, 2:] if self.flaw == "part-of-a-buffer" else self.codes, start)
        if self.flaw == "lossy-scales":
            scales = scales.to(torch.float16)
        if self.flaw == "scale-granularity":
            scales = scales[:, :, :1]
        scale_start = start + 1 if self.flaw == "scales-elsewhere" else start
        # Not `.to`: of a symmetric scale torch.export believes float64, where it is float32, and asserts that.
        scales = torch.ops.aten._to_copy(scales, dtype=self.scales.dtype)
        _llama.update_cache(scales, self.scales, scale_start)
        _llama.update_cache(torch.ops.aten._to_copy(zero_points, dtype=self.zero_points.dtype), self.zero_points, start)

    def read(self) -> Tensor:
        zero_points = self.zero_points if self.flaw == "zero-point-wraps" else self.zero_points.to(torch.int64)
        if self.flaw == "spelled":  # (codes - zero_points) * scales, without the operator
            return (self.codes.to(torch.float32) - self.zero_points.to(torch.float32)) * self.scales
        if self.flaw == "unread-zero-points":
            return self.codes.to(torch.float32) * self.scales
        if self.flaw == "bitcast":
            return self.codes.view(torch.uint8).to(torch.float32) * self.scales
        scales = self.scales.to(torch.float64)
        dtype = torch.float64 if self.flaw == "dequantized-dtype" else torch.float32
        return _quantized.dequantize_per_token(self.codes, scales, zero_points, -128, 127, torch.int8, dtype)


class Layer(nn.Module):
    """form: "joint" (sdpa_with_kv_cache), "overlaid" (update_cache then custom_sdpa) or "dequantized" (custom_sdpa)."""

    def __init__(self, form: str, *, symmetric: bool = False, masked: bool = False, flaw: str = "") -> None:
        super().__init__()
        self.form, self.masked, self.flaw = form, masked, flaw
        self.keys = QuantizedCache(symmetric=symmetric, flaw=flaw)
        value_size = HEAD_SIZE // 2 if flaw == "cache-shapes" else HEAD_SIZE
        self.values = QuantizedCache(symmetric=symmetric, flaw=flaw, head_size=value_size)
        if flaw in ("half-quantized", "cache-not-quantized"):
            self.register_buffer("floats", torch.zeros(1, CAPACITY, KV_HEADS, HEAD_SIZE))

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, position: Tensor, mask: Tensor | None = None
    ) -> Tensor:
        if self.flaw == "cache-shapes":
            value = value[..., : HEAD_SIZE // 2]
        start: Any = position[0].item()
        count = query.shape[1]
        torch._check(start >= 0)
        torch._check(start + count <= CAPACITY)
        if self.flaw == "current-tokens-not-cached":
            keys, values = self.keys.read(), self.values.read()
            self.keys.write(key, start), self.values.write(value, start)
        else:
            self.keys.write(key, start), self.values.write(value, start)
            keys, values = self.keys.read(), self.values.read()
        if self.flaw in ("half-quantized", "cache-not-quantized"):
            keys = self.floats.clone()
        if self.flaw == "cache-not-quantized":
            values = self.floats.clone()
        # The position once more, by another way: one position all the same.
        again: Any = position.select(0, -1).item()
        torch._check(again >= 0)
        torch._check(again + count <= CAPACITY)
        causal = mask is None or self.flaw == "causal-with-mask"
        if self.flaw == "writes-a-view":
            keys, values = keys[:, 2:], values[:, 2:]
        if self.flaw == "query-dtype":
            query = query.to(torch.float64)
        if self.flaw == "recent-rows":
            query = query[:, -1:]
        if self.flaw == "attention-in-branch":
            return torch.cond(
                query.sum() > 0,
                lambda q, k, v, m: _llama.custom_sdpa(q, k, v, 0, m, 0.0, False),
                lambda q, k, v, m: _llama.custom_sdpa(q, k, v, 0, m, 0.0, False) + 1,
                (query, keys, values, mask),
            )
        if self.form == "joint":
            return _llama.sdpa_with_kv_cache(query, key, value, keys, values, again, count, mask, 0.0, causal)
        if self.form == "overlaid":
            _llama.update_cache(key, keys, start)
            _llama.update_cache(value, values, start - 1 if self.flaw == "position-differs" else start)
        return _llama.custom_sdpa(query, keys, values, again, mask, 0.0, causal)


class QuantizedQueryLayer(nn.Module):
    """An attention that takes the codes of query and caches as they are.

    heads_first: all tensors are [B,H,S,D]. flaw: "scale-granularity": one scale for all heads of a token.
    """

    def __init__(self, *, heads_first: bool = False, masked: bool = False, flaw: str = "") -> None:
        super().__init__()
        self.heads_first, self.masked, self.flaw = heads_first, masked, flaw
        self.keys, self.values = QuantizedCache(), QuantizedCache()

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, position: Tensor, mask: Tensor | None = None
    ) -> Tensor:
        start: Any = position[0].item()
        torch._check(start >= 0)
        torch._check(start + query.shape[1] <= CAPACITY)
        self.keys.write(key, start), self.values.write(value, start)
        scales, points = _quantized.choose_qparams_per_token_asymmetric(query, torch.int8)
        codes = _quantized.quantize_per_token(query, scales, points, -128, 127, torch.int8)
        parts = [codes, points.to(torch.int8), scales.to(torch.float32)]
        if self.flaw == "scale-granularity":
            parts[2] = parts[2][:, :, :1]
        parts += [part for c in (self.keys, self.values) for part in (c.codes, c.zero_points, c.scales)]
        if self.heads_first:
            parts = [part.transpose(1, 2) for part in parts]
        causal = mask is None
        output = _llama.custom_quantized_sdpa(
            parts[0], parts[3], parts[6], start, mask, 0.0, causal, None, *parts[1:3], *parts[4:6], *parts[7:9],
            self.heads_first,
        )  # fmt: skip
        return output.transpose(1, 2) if self.heads_first else output


class FloatLayer(nn.Module):
    """Caches of floats. joint: one operator writes and attends; otherwise update_cache, then custom_sdpa."""

    def __init__(self, *, joint: bool, dtype: torch.dtype = torch.float32, masked: bool = False) -> None:
        super().__init__()
        self.joint, self.masked, self.dtype = joint, masked, dtype
        for name in ("keys", "values"):
            self.register_buffer(name, torch.zeros(1, CAPACITY, KV_HEADS, HEAD_SIZE, dtype=dtype))

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, position: Tensor, mask: Tensor | None = None
    ) -> Tensor:
        start: Any = position[0].item()
        count = query.shape[1]
        torch._check(start >= 0)
        torch._check(start + count <= CAPACITY)
        query, key, value = (rows.to(self.dtype) for rows in (query, key, value))
        causal = mask is None
        if self.joint:
            return _llama.sdpa_with_kv_cache(query, key, value, self.keys, self.values, start, count, mask, 0.0, causal)
        _llama.update_cache(key, self.keys, start)
        _llama.update_cache(value, self.values, start)
        return _llama.custom_sdpa(query, self.keys, self.values, start, mask, 0.0, causal)


def inputs(count: int, start: int, *, masked: bool = False, seed: int = 0) -> tuple[Tensor, ...]:
    """Arguments of `Layer` for `count` new tokens from `start` on; with a mask, causal by that mask."""
    random = torch.Generator().manual_seed(seed + start)
    query = torch.randn(1, count, QUERY_HEADS, HEAD_SIZE, generator=random)
    key, value = (torch.randn(1, count, KV_HEADS, HEAD_SIZE, generator=random) for _ in range(2))
    rows = (query, key, value, torch.tensor([start]))
    if not masked:
        return rows
    seen = torch.arange(CAPACITY)[None, :] <= start + torch.arange(count)[:, None]
    return (*rows, torch.where(seen, 0.0, -torch.inf))


def export(layer: Any) -> ExportedProgram:
    count = Dim("S", min=1, max=CAPACITY - 1)
    rows = {1: count}
    shapes = (rows, rows, rows, None, {0: count} if layer.masked else None)
    example = inputs(3, 2, masked=layer.masked)
    return torch.export.export(layer, example, dynamic_shapes=shapes[: len(example)])
