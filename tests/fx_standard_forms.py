"""One attention layer in torch's own operators, in each FX source form, whole or with one flaw.

Shapes as in `fx_forms`; inside, everything lies as [B,H,S,D].
"""

from __future__ import annotations

from typing import Any

import torch
from fx_forms import CAPACITY, HEAD_SIZE, KV_HEADS, QUERY_HEADS
from torch import Tensor, nn

_quantized: Any = torch.ops.quantized_decomposed
_torchao = torch.library.Library("torchao", "FRAGMENT")


def _dequantize_affine(
    codes: Tensor,
    block_size: list[int],
    scale: Tensor,
    zero_point: Tensor | None,
    input_dtype: torch.dtype,
    quant_min: int | None = None,
    quant_max: int | None = None,
    output_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """torchao's operator: blocks of codes, each with a scale and a zero point."""
    counts = [size // block for size, block in zip(codes.shape, block_size, strict=True)]
    blocks = [part for count, block in zip(counts, block_size, strict=True) for part in (count, block)]
    ones = [part for count in counts for part in (count, 1)]
    wide = codes.reshape(blocks).to(torch.int32)
    points = 0 if zero_point is None else zero_point.reshape(ones).to(torch.int32)
    return ((wide - points).to(output_dtype) * scale.reshape(ones).to(output_dtype)).reshape(codes.shape)


if not hasattr(torch.ops.torchao, "dequantize_affine"):  # a stand-in where torchao is not installed
    _torchao.define(
        "dequantize_affine(Tensor input, SymInt[] block_size, Tensor scale, Tensor? zero_point, ScalarType input_dtype,"
        " Scalar? quant_min=None, Scalar? quant_max=None, ScalarType output_dtype=float32) -> Tensor"
    )
    _torchao.impl("dequantize_affine", _dequantize_affine, "CPU")
    _torchao.impl(
        "dequantize_affine",
        lambda codes, *args, **kwargs: torch.empty_like(codes, dtype=torch.float32),
        "Meta",
    )


def dequantize_affine(codes: Tensor, block_size: list[int], scale: Tensor, zero_point: Tensor) -> Tensor:
    result: Tensor = torch.ops.torchao.dequantize_affine(codes, block_size, scale, zero_point, torch.int8, -128, 127)
    return result


class StaticCache(nn.Module):
    """int8 codes [B,H,C,D] with scales that are given: one for each channel, or one for all."""

    def __init__(self, read: str, flaw: str = "") -> None:
        super().__init__()
        self.read_as, self.flaw = read, flaw
        dtype = torch.float64 if "float64" in read else torch.float32
        scales = torch.linspace(0.02, 0.05, HEAD_SIZE, dtype=dtype)
        if "tensor" in read:
            scales = torch.tensor([0.03], dtype=dtype)
        elif read == "affine heads":
            scales = torch.linspace(0.02, 0.05, KV_HEADS).reshape(1, KV_HEADS, 1, 1)
        elif "heads" in read:
            scales = torch.linspace(0.02, 0.05, KV_HEADS * HEAD_SIZE, dtype=dtype).reshape(1, KV_HEADS, 1, HEAD_SIZE)
        elif flaw == "scale-granularity":  # one for each slot: they belong to no channel, and to no head
            scales = torch.linspace(0.02, 0.05, CAPACITY, dtype=dtype)
        self.register_buffer("codes", torch.zeros(1, KV_HEADS, CAPACITY, HEAD_SIZE, dtype=torch.int8))
        self.register_buffer("scales", scales)
        points_dtype = torch.int64 if flaw == "zero-point-dtype" else torch.int8
        self.register_buffer("zero_points", torch.full_like(scales, 3, dtype=points_dtype))

    def quantized(self, rows: Tensor) -> tuple[Tensor, ...]:
        scales = self.scales.to(torch.float32)
        if "per_channel" in self.read_as and self.flaw != "scale-granularity":
            points = self.zero_points.to(torch.int64)
            return (_quantized.quantize_per_channel(rows, self.scales, points, 3, -128, 127, torch.int8),)
        scales = scales.mean() if self.flaw == "scale-granularity" else scales
        return (torch.clamp(torch.round(rows / scales), -128, 127).to(torch.int8),)

    def parts(self) -> tuple[Tensor, ...]:
        return (self.codes,)

    def dequantized(self) -> Tensor:
        points = self.zero_points.to(torch.int32 if "affine" in self.read_as else torch.int64)
        if "per_channel" in self.read_as:
            axis = 2 if self.flaw == "scale-granularity" else -1
            if self.flaw == "zero-point-wraps":
                points = self.zero_points
            return _quantized.dequantize_per_channel(
                self.codes, self.scales, points, axis, -128, 127, torch.int8, out_dtype=torch.float32
            )
        if "affine" in self.read_as:
            heads = 1 if "heads" in self.read_as else KV_HEADS
            channels = 1 if "channel" in self.read_as else HEAD_SIZE
            return dequantize_affine(self.codes, [1, heads, CAPACITY, channels], self.scales, points)
        return self.codes.to(torch.float32) * self.scales


class RowCache(nn.Module):
    """int8 codes [B,H,C,D] with a scale and a zero point for each row, or for each of the groups of a row."""

    def __init__(self, read: str, flaw: str = "") -> None:
        super().__init__()
        self.read_as, self.flaw = read, flaw
        self.other: RowCache | None = None
        groups = 2 if "groups" in read else 1
        self.register_buffer("codes", torch.zeros(1, KV_HEADS, CAPACITY, HEAD_SIZE, dtype=torch.int8))
        self.register_buffer("scales", torch.ones(1, KV_HEADS, CAPACITY, groups))
        self.register_buffer("zero_points", torch.zeros(1, KV_HEADS, CAPACITY, groups, dtype=torch.int8))

    def quantized(self, rows: Tensor) -> tuple[Tensor, ...]:
        groups = rows.unflatten(-1, (self.scales.shape[-1], -1))
        scales, points = _quantized.choose_qparams_per_token_asymmetric(
            groups if self.scales.shape[-1] > 1 else rows, torch.int8
        )
        source = groups if self.scales.shape[-1] > 1 else rows
        codes = _quantized.quantize_per_token(source, scales, points, -128, 127, torch.int8)
        if self.scales.shape[-1] > 1:
            codes, scales, points = codes.flatten(-2), scales.squeeze(-1), points.squeeze(-1)
        return codes, scales.to(torch.float32), points.to(torch.int8)

    def parts(self) -> tuple[Tensor, ...]:
        return (self.codes, self.scales, self.zero_points)

    def dequantized(self) -> Tensor:
        if "affine" in self.read_as:
            block = HEAD_SIZE // self.scales.shape[-1]
            return dequantize_affine(self.codes, [1, 1, 1, block], self.scales, self.zero_points.to(torch.int32))
        if self.read_as == "per_token":
            points = self.zero_points.to(torch.int64)
            return _quantized.dequantize_per_token(
                self.codes, self.scales.to(torch.float64), points, -128, 127, torch.int8, torch.float32
            )
        scales = self.scales if self.other is None else self.other.scales
        if self.flaw == "zero point dropped":
            return self.codes.to(torch.float32) * scales
        if self.flaw == "scale on another axis":  # that of the slot in the place of the channel
            scales = scales[:, :, :HEAD_SIZE].transpose(2, 3)
        return (self.codes.to(torch.float32) - self.zero_points.to(torch.float32)) * scales


class StandardLayer(nn.Module):
    """Attention in torch's own operators over caches [B,H,C,D], as a hand-written decoder has it.

    read: how the cache is dequantized. write: how rows get into it. core: which attention, and what it sees.
    heads: how key heads are repeated. exact: the current tokens' rows are overwritten by the exact ones.
    half: the attention is computed in float16.
    """

    def __init__(
        self,
        read: str = "spelled",
        *,
        write: str = "index_put",
        core: str = "sdpa",
        heads: str = "gqa",
        exact: bool = False,
        half: bool = False,
        flaw: str = "",
    ) -> None:
        super().__init__()
        self.half = half
        self.write, self.core, self.heads, self.exact, self.flaw = write, core, heads, exact, flaw
        is_static = any(word in read for word in ("per_channel", "static", "channel", "tensor", "heads"))
        make = StaticCache if is_static else RowCache
        self.keys, self.values = make(read, flaw), make(read, flaw)
        if flaw == "scales of the other cache" and isinstance(self.keys, RowCache):
            object.__setattr__(self.keys, "other", self.values)  # no submodule of it
        self.masked = "sliced" not in core and "causal" not in core

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, position: Tensor, mask: Tensor | None = None
    ) -> Tensor:
        query, key, value = (rows.transpose(1, 2) for rows in (query, key, value))
        if self.flaw == "mask off by one" and mask is not None:
            mask = mask.roll(1, -1)
        count = query.shape[2]
        start: Any = position[0].item()
        torch._check(start >= 0)
        torch._check(start + count <= CAPACITY)
        floats = []
        for cache, rows in ((self.keys, key), (self.values, value)):
            for part, new in zip(cache.parts(), cache.quantized(rows), strict=True):
                self._put(part, new, position, start)
            floating = cache.dequantized()
            if self.exact:
                floating = floating.clone()
                self._put(floating, rows, position, start)
            floats.append(floating)
        if self.half:
            query, *floats = (rows.to(torch.float16) for rows in (query, *floats))
            mask = None if mask is None else mask.to(torch.float16)
        keys, values = (self._repeated(floating) for floating in floats)
        if "sliced" in self.core:
            end = start + count
            keys = keys[:, :, :end]
            values = values[:, :, :end]
        return self._attend(query, keys, values, mask).transpose(1, 2)

    def _put(self, cache: Tensor, rows: Tensor, position: Tensor, start: Any) -> None:
        count = rows.shape[2]
        slots = torch.arange(count) + position
        if self.write == "ring":
            slots = slots % CAPACITY
        if self.write == "index_copy":
            cache.index_copy_(2, slots, rows)
        elif self.write == "narrow":
            cache.narrow(2, start, count).copy_(rows)
        elif self.write == "slices":
            cache[:, :, start : start + count] = rows
        elif self.write == "scrambled":  # by indices about which the graph says nothing
            cache[:, :, slots.flip(0)] = rows.flip(2)
        else:
            cache[:, :, slots] = rows

    def _repeated(self, rows: Tensor) -> Tensor:
        group = QUERY_HEADS // KV_HEADS
        if self.flaw == "heads-in-turn":  # 0 1 0 1, where query heads 0 and 1 share key head 0
            return rows.repeat(1, group, 1, 1)
        if self.heads == "repeat":
            return rows.repeat_interleave(group, dim=1)
        if self.heads == "expand":
            shape = (1, KV_HEADS, group, CAPACITY, HEAD_SIZE)
            return rows[:, :, None].expand(shape).reshape(1, QUERY_HEADS, CAPACITY, HEAD_SIZE)
        return rows

    def _attend(self, query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
        if "sdpa" in self.core:
            if "bool" in self.core and mask is not None:
                mask = mask == 0
            return nn.functional.scaled_dot_product_attention(
                query, keys, values, mask, is_causal="causal" in self.core, enable_gqa=self.heads == "gqa"
            )
        return written_out(query, keys, values, mask, self.core)


def written_out(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, core: str) -> Tensor:
    """Attention as products and a softmax; `core` says where the scale and the mask come in."""
    scale = HEAD_SIZE**-0.5
    if mask is not None and "one column" in core:
        mask = mask[:, :1]
    if "both" in core:
        scores = (query * scale**0.5) @ (keys.transpose(2, 3) * scale**0.5)
    elif "query" in core:
        scores = (query * scale) @ keys.transpose(2, 3)
    else:
        scores = query @ keys.transpose(2, 3) / HEAD_SIZE**0.5
    if "capped" in core:
        scores = 2.0 * torch.tanh(scores / 2.0)
    if "where" in core:
        scores = torch.where(mask == 0, scores, torch.finfo(torch.float32).min)
    elif "filled" in core:
        scores = scores.masked_fill(mask != 0, -torch.inf)
    elif mask is not None:
        scores = scores + mask
    weights = torch.softmax(scores, -1)
    if "guarded" in core:
        weights = torch.where(torch.isnan(weights), 0.0, weights)
    if "sharpened" in core:  # no attention that any operator computes
        weights = weights * weights
    return weights @ values
