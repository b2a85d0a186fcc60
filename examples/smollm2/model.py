"""A plain torch decoder of the llama family with an int8 KV cache, written the way exported decoders look.

Shapes (BSNH): B batch, S new tokens, C cache capacity, Hq query heads, Hkv key heads, D head size.

Each attention layer quantizes the new keys and values per token and head, writes codes, scales and zero points into
its cache, dequantizes the *whole* cache and hands the float copy to ``llama.sdpa_with_kv_cache``, which overlays the
exact rows of the current tokens. That detour costs a full float copy of both caches per layer and step; it is what
``graphrewrite.rewrite`` removes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from torch import nn

from graphrewrite import source_ops

source_ops.register()

Rotation = tuple[torch.Tensor, torch.Tensor]

_INT8 = (-128, 127, torch.int8)


@dataclass(frozen=True)
class ModelConfig:
    """Hyper-parameters of the decoder."""

    layers: int
    query_heads: int
    kv_heads: int
    head_size: int
    hidden_size: int
    feed_forward_size: int
    vocabulary_size: int
    norm_epsilon: float
    rope_base: float
    context_length: int


def tiny_config() -> ModelConfig:
    """A configuration small enough for tests; pair it with random weights and capacity 64."""
    return ModelConfig(
        layers=2,
        query_heads=4,
        kv_heads=2,
        head_size=16,
        hidden_size=64,
        feed_forward_size=96,
        vocabulary_size=64,
        norm_epsilon=1e-5,
        rope_base=10000.0,
        context_length=64,
    )


class QuantizedCache(nn.Module):
    """One int8 cache (of keys or of values), asymmetric with a scale and a zero point per token and head."""

    codes: torch.Tensor
    scales: torch.Tensor
    zero_points: torch.Tensor

    def __init__(self, capacity: int, heads: int, head_size: int) -> None:
        super().__init__()
        self.heads, self.head_size = heads, head_size
        self.allocate(capacity)

    def allocate(self, capacity: int) -> None:
        heads, head_size = self.heads, self.head_size
        self.register_buffer("codes", torch.zeros(1, capacity, heads, head_size, dtype=torch.int8))
        self.register_buffer("scales", torch.ones(1, capacity, heads, 1))
        self.register_buffer("zero_points", torch.zeros(1, capacity, heads, 1, dtype=torch.int8))

    def forward(self, rows: torch.Tensor, start_pos: int) -> torch.Tensor:
        """Write float32 rows ``[B,S,Hkv,D]`` at ``start_pos``; return the dequantized cache ``[B,C,Hkv,D]``."""
        quantized = torch.ops.quantized_decomposed
        scales, zero_points = quantized.choose_qparams_per_token_asymmetric(rows, torch.int8)
        codes = quantized.quantize_per_token(rows, scales, zero_points, *_INT8)
        torch.ops.llama.update_cache(codes, self.codes, start_pos)
        torch.ops.llama.update_cache(scales.to(torch.float32), self.scales, start_pos)
        torch.ops.llama.update_cache(zero_points.to(torch.int8), self.zero_points, start_pos)
        dequantized: torch.Tensor = quantized.dequantize_per_token(
            self.codes, self.scales.to(torch.float64), self.zero_points.to(torch.int64), *_INT8, torch.float32
        )
        return dequantized


class FloatCache(nn.Module):
    """One float32 cache, written by the attention op itself."""

    rows: torch.Tensor

    def __init__(self, capacity: int, heads: int, head_size: int) -> None:
        super().__init__()
        self.heads, self.head_size = heads, head_size
        self.allocate(capacity)

    def allocate(self, capacity: int) -> None:
        self.register_buffer("rows", torch.zeros(1, capacity, self.heads, self.head_size))

    def forward(self, rows: torch.Tensor, start_pos: int) -> torch.Tensor:
        return self.rows


class Attention(nn.Module):
    """Grouped-query attention over a cache; the query and key rotate by position (rope)."""

    def __init__(self, config: ModelConfig, capacity: int, quantized: bool) -> None:
        super().__init__()
        self.head_size = config.head_size
        query_size, kv_size = config.query_heads * config.head_size, config.kv_heads * config.head_size
        self.query = nn.Linear(config.hidden_size, query_size, bias=False)
        self.key = nn.Linear(config.hidden_size, kv_size, bias=False)
        self.value = nn.Linear(config.hidden_size, kv_size, bias=False)
        self.output = nn.Linear(query_size, config.hidden_size, bias=False)
        cache = QuantizedCache if quantized else FloatCache
        self.key_cache = cache(capacity, config.kv_heads, config.head_size)
        self.value_cache = cache(capacity, config.kv_heads, config.head_size)

    def forward(self, hidden: torch.Tensor, rotation: Rotation, start_pos: int) -> torch.Tensor:
        heads = (-1, self.head_size)
        q = rotate(self.query(hidden).unflatten(-1, heads), rotation)
        k = rotate(self.key(hidden).unflatten(-1, heads), rotation)
        v = self.value(hidden).unflatten(-1, heads)
        cached_k = self.key_cache(k, start_pos)
        cached_v = self.value_cache(v, start_pos)
        attended = torch.ops.llama.sdpa_with_kv_cache(
            q, k, v, cached_k, cached_v, start_pos, q.shape[1], None, 0.0, True
        )
        output: torch.Tensor = self.output(attended.flatten(2))
        return output


class FeedForward(nn.Module):
    """SwiGLU: ``down(silu(gate(x)) * up(x))``."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate = nn.Linear(config.hidden_size, config.feed_forward_size, bias=False)
        self.up = nn.Linear(config.hidden_size, config.feed_forward_size, bias=False)
        self.down = nn.Linear(config.feed_forward_size, config.hidden_size, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.down(F.silu(self.gate(hidden)) * self.up(hidden))
        return output


class Layer(nn.Module):
    def __init__(self, config: ModelConfig, capacity: int, quantized: bool) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.hidden_size, config.norm_epsilon)
        self.attention = Attention(config, capacity, quantized)
        self.feed_forward_norm = nn.RMSNorm(config.hidden_size, config.norm_epsilon)
        self.feed_forward = FeedForward(config)

    def forward(self, hidden: torch.Tensor, rotation: Rotation, start_pos: int) -> torch.Tensor:
        hidden = hidden + self.attention(self.attention_norm(hidden), rotation, start_pos)
        output: torch.Tensor = hidden + self.feed_forward(self.feed_forward_norm(hidden))
        return output


class Decoder(nn.Module):
    """tokens int64 ``[1,S]`` and input_pos int64 ``[1]`` to the float32 logits ``[1,1,V]`` of the last token.

    The caches are buffers of the module and hold ``capacity`` positions; ``input_pos[0] + S`` must not exceed it.
    The output projection is tied to the token embedding.
    """

    inverse_frequencies: torch.Tensor

    def __init__(self, config: ModelConfig, capacity: int, *, quantized: bool = True) -> None:
        super().__init__()
        self.config = config
        self.capacity = capacity
        self.embedding = nn.Embedding(config.vocabulary_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config, capacity, quantized) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.hidden_size, config.norm_epsilon)
        exponents = torch.arange(0, config.head_size, 2, dtype=torch.float32) / config.head_size
        self.register_buffer("inverse_frequencies", 1.0 / config.rope_base**exponents, persistent=False)

    def allocate(self, capacity: int) -> None:
        """Replace the caches by empty ones of another capacity. Programs exported before keep theirs."""
        self.capacity = capacity
        for module in self.modules():
            if isinstance(module, QuantizedCache | FloatCache):
                module.allocate(capacity)

    def forward(self, tokens: torch.Tensor, input_pos: torch.Tensor) -> torch.Tensor:
        rows = tokens.shape[1]
        start_pos = cast(int, input_pos[0].item())
        # Not start_pos + rows <= capacity: tracing assumes rows >= 2, so the bound it derives from that sum would
        # refuse the last slot to a single token. The cache ops check the sum.
        torch._check(start_pos >= 0)
        torch._check(start_pos < self.capacity)
        positions = input_pos + torch.arange(rows, device=tokens.device)
        angles = positions.to(torch.float32)[:, None, None] * self.inverse_frequencies
        rotation = (angles.cos(), angles.sin())
        hidden = self.embedding(tokens)
        for layer in self.layers:
            hidden = layer(hidden, rotation, start_pos)
        return F.linear(self.norm(hidden[:, -1:]), self.embedding.weight)


def rotate(heads: torch.Tensor, rotation: Rotation) -> torch.Tensor:
    """Rotary position embedding of ``[B,S,H,D]``: pairs are dimension i and i + D/2; cos and sin ``[S,1,D/2]``."""
    cos, sin = rotation
    first, second = heads.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def export(model: Decoder) -> torch.export.ExportedProgram:
    """Export the model with a dynamic number of new tokens S, 1 <= S <= capacity."""
    rows = torch.export.Dim("S", min=1, max=model.capacity)
    example = (torch.zeros(1, 4, dtype=torch.int64), torch.zeros(1, dtype=torch.int64))
    with torch.no_grad():
        return torch.export.export(model.eval(), example, dynamic_shapes={"tokens": {1: rows}, "input_pos": {}})
