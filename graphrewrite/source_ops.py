"""The source operators: the ``llama::`` ops that exported decoders call, and ``quantized_decomposed::``.

executorch ships the ``llama::`` ops in a C++ extension. A graph that names them can be loaded, rewritten and run in
torch only where they are defined, so :func:`register` imports executorch's own when it is installed and otherwise
defines the missing ones here with the same schemas and CPU semantics. The ``quantized_decomposed::`` ops come with
torch.

Shapes (BSNH): query ``[B,S,Hq,D]``, key and value ``[B,S,Hkv,D]``, caches ``[B,C,Hkv,D]``; G = Hq / Hkv.

Attention, with ``s = 1/sqrt(D)`` unless a scale is given::

    out[b,i,h] = sum_j softmax_j(s * q[b,i,h] . k[b,j,h//G] + mask[i,j]) * v[b,j,h//G]

where row i sees the keys ``j <= start_pos + i`` when causal, the keys ``j < start_pos + S`` when neither causal nor
masked, and every one of the C slots (``start_pos`` ignored) when a mask is given.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable

import torch
import torch.nn.functional as F

_SDPA_TAIL = "Tensor? attn_mask=None, float drpout_p=0.0, bool is_causal=False, float? scale=None) -> Tensor"
_CODES_TAIL = (
    "Tensor? q_zero_points=None, Tensor? q_scales=None, Tensor? k_zero_points=None, Tensor? k_scales=None, "
    "Tensor? v_zero_points=None, Tensor? v_scales=None, bool is_seq_at_dim_2=False) -> Tensor"
)
_SCHEMAS = {
    "sdpa_with_kv_cache": "(Tensor query, Tensor key, Tensor value, Tensor(a!) key_cache, Tensor(b!) value_cache, "
    "SymInt start_pos, SymInt seq_len, " + _SDPA_TAIL,
    "custom_sdpa": "(Tensor query, Tensor key, Tensor value, SymInt start_pos, " + _SDPA_TAIL,
    "custom_quantized_sdpa": "(Tensor query, Tensor key, Tensor value, SymInt start_pos, "
    + _SDPA_TAIL.replace(") -> Tensor", ", " + _CODES_TAIL),
    "update_cache": "(Tensor value, Tensor(a!) cache, SymInt start_pos) -> Tensor",
    "update_cache_with_indices": "(Tensor value, Tensor(a!) cache, SymInt start_pos, Tensor indices) -> Tensor",
}

# A Library unregisters its ops when it is collected, so it lives as long as the process.
_library: torch.library.Library | None = None


def register() -> None:
    """Make every source op available under ``torch.ops``. Idempotent; an op that already exists is left alone."""
    global _library
    importlib.import_module("torch.ao.quantization.fx._decomposed")
    if _library is not None:
        return
    if not all(_is_defined(name) for name in _SCHEMAS):
        # Without executorch, or with one whose extension does not load in this torch, the definitions below stand in.
        with contextlib.suppress(ImportError, OSError, AssertionError, RuntimeError):
            importlib.import_module("executorch.extension.llm.custom_ops.custom_ops")
    _library = torch.library.Library("llama", "FRAGMENT")
    for name, schema in _SCHEMAS.items():
        if not _is_defined(name):
            _define(_library, name, schema)


def _is_defined(name: str) -> bool:
    return hasattr(torch.ops.llama, name)


def _define(library: torch.library.Library, name: str, schema: str) -> None:
    cpu, fake = _IMPLEMENTATIONS[name]
    library.define(name + schema)
    library.impl(name, cpu, "CPU")
    torch.library.register_fake(f"llama::{name}", fake, lib=library)


def _update_cache(value: torch.Tensor, cache: torch.Tensor, start_pos: int) -> torch.Tensor:
    _check_rows("update_cache", value, cache)
    _check_range("update_cache", start_pos, value.shape[1], cache.shape[1])
    cache.narrow(1, start_pos, value.shape[1]).copy_(value)
    return value.new_zeros(1)


def _update_cache_with_indices(
    value: torch.Tensor, cache: torch.Tensor, start_pos: int, indices: torch.Tensor
) -> torch.Tensor:
    _check_rows("update_cache_with_indices", value, cache)
    batch, rows = value.shape[:2]
    if indices.dtype != torch.int64 or indices.shape != (batch, rows):
        raise ValueError(
            f"update_cache_with_indices: indices must be int64 [{batch}, {rows}], "
            f"got {indices.dtype} {list(indices.shape)}"
        )
    outside = (indices < 0) | (indices >= cache.shape[1])
    if outside.any():
        first = int(indices[outside][0])
        raise ValueError(f"update_cache_with_indices: index {first} is outside the cache capacity {cache.shape[1]}")
    for b in range(batch):
        # One row after another, because of a slot named twice the last row must stay.
        for row, slot in enumerate(indices[b].tolist()):
            cache[b, slot] = value[b, row]
    return value.new_zeros(1)


def _custom_sdpa(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    start_pos: int,
    attn_mask: torch.Tensor | None = None,
    drpout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
) -> torch.Tensor:
    batch, rows, heads, head_size = query.shape
    capacity, kv_heads = key.shape[1:3]
    if kv_heads == 0 or heads % kv_heads:
        raise ValueError(f"custom_sdpa: {heads} query heads are not a multiple of {kv_heads} key heads")
    mask = attn_mask
    if mask is not None:
        if is_causal:
            raise ValueError("custom_sdpa: attn_mask and is_causal exclude each other")
        if mask.shape != (rows, capacity):
            raise ValueError(f"custom_sdpa: attn_mask must be [{rows}, {capacity}], got {list(mask.shape)}")
    else:
        _check_range("custom_sdpa", start_pos, rows, capacity)
        key, value = (cache.narrow(1, 0, start_pos + rows) for cache in (key, value))
        if is_causal and rows > 1:
            mask = torch.ones(rows, start_pos + rows, dtype=torch.bool, device=query.device).tril(start_pos)

    # The G query heads of one key head become G * S rows of that head, so the keys are never repeated in memory.
    group = heads // kv_heads
    folded = query.unflatten(2, (kv_heads, group)).permute(0, 2, 3, 1, 4).flatten(2, 3)
    if mask is not None and group > 1:
        mask = mask.repeat(group, 1)
    key, value = key.transpose(1, 2), value.transpose(1, 2)
    out = F.scaled_dot_product_attention(folded, key, value, attn_mask=mask, scale=scale)
    return out.reshape(batch, kv_heads, group, rows, head_size).permute(0, 3, 1, 2, 4).reshape(query.shape).contiguous()


def _custom_quantized_sdpa(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    start_pos: int,
    attn_mask: torch.Tensor | None = None,
    drpout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    q_zero_points: torch.Tensor | None = None,
    q_scales: torch.Tensor | None = None,
    k_zero_points: torch.Tensor | None = None,
    k_scales: torch.Tensor | None = None,
    v_zero_points: torch.Tensor | None = None,
    v_scales: torch.Tensor | None = None,
    is_seq_at_dim_2: bool = False,
) -> torch.Tensor:
    """int8 query, key and value with scales and zero points [B,S,H,1]; with `is_seq_at_dim_2` all are [B,H,S,D]."""
    parameters = ((query, q_scales, q_zero_points), (key, k_scales, k_zero_points), (value, v_scales, v_zero_points))
    floats = []
    for codes, scales, points in parameters:
        if scales is None or points is None:
            raise ValueError("custom_quantized_sdpa: query, key and value need scales and zero points")
        rows = (codes.to(torch.float32) - points.to(torch.float32)) * scales
        floats.append(rows.transpose(1, 2) if is_seq_at_dim_2 else rows)
    output = _custom_sdpa(floats[0], floats[1], floats[2], start_pos, attn_mask, drpout_p, is_causal, scale)
    return output.transpose(1, 2).contiguous() if is_seq_at_dim_2 else output


def _sdpa_with_kv_cache(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    start_pos: int,
    seq_len: int,
    attn_mask: torch.Tensor | None = None,
    drpout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
) -> torch.Tensor:
    if seq_len != query.shape[1]:
        raise ValueError(f"sdpa_with_kv_cache: seq_len {seq_len} differs from the {query.shape[1]} rows of query")
    _check_rows("sdpa_with_kv_cache", key, key_cache)
    _check_rows("sdpa_with_kv_cache", value, value_cache)
    _update_cache(key, key_cache, start_pos)
    _update_cache(value, value_cache, start_pos)
    return _custom_sdpa(query, key_cache, value_cache, start_pos, attn_mask, drpout_p, is_causal, scale)


def _check_rows(op: str, value: torch.Tensor, cache: torch.Tensor) -> None:
    """Check that value ``[B,S,H,D]`` holds rows of cache ``[B,C,H,D]``."""
    four = value.dim() == 4 and cache.dim() == 4
    if not four or value.shape[0] != cache.shape[0] or value.shape[2:] != cache.shape[2:] or value.dtype != cache.dtype:
        raise ValueError(
            f"{op}: value {value.dtype} {list(value.shape)} does not fit cache {cache.dtype} {list(cache.shape)}"
        )


def _check_range(op: str, start_pos: int, rows: int, capacity: int) -> None:
    if start_pos < 0 or start_pos + rows > capacity:
        raise ValueError(f"{op}: start_pos {start_pos} + {rows} rows is outside the cache capacity {capacity}")


def _like_query(query: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
    return torch.empty_like(query, memory_format=torch.contiguous_format)


def _float_like_query(query: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
    return torch.empty_like(query, dtype=torch.float32, memory_format=torch.contiguous_format)


def _dummy(value: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
    return value.new_zeros(1)


_IMPLEMENTATIONS: dict[str, tuple[Callable[..., torch.Tensor], Callable[..., torch.Tensor]]] = {
    "sdpa_with_kv_cache": (_sdpa_with_kv_cache, _like_query),
    "custom_sdpa": (_custom_sdpa, _like_query),
    "custom_quantized_sdpa": (_custom_quantized_sdpa, _float_like_query),
    "update_cache": (_update_cache, _dummy),
    "update_cache_with_indices": (_update_cache_with_indices, _dummy),
}
