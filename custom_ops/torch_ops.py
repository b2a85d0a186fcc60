"""The kernels as torch operators: importing this module defines `torch.ops.graphrewrite.*`.

    update_cache, update_quantized_cache, custom_sdpa, sdpa_with_kv_cache

All are functional: they return new caches and leave their arguments alone. They run on CPU, in float32 and int8 as
`graphrewrite/kernels.h` says, with `torch.get_num_threads()` threads; they trace (torch.export, torch.compile) through
shape functions; they have no gradient. Argument order is the input order of the ONNX operators of the same meaning.

Shape letters: B batch, S new tokens, C cache capacity, Hq query heads, Hkv key/value heads, D head size. `layout` is
"BSNH" ([B,S,H,D]) or "BNSH" ([B,H,S,D]) and holds for every 4-D tensor of a call.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch

from graphrewrite.custom_ops import capi
from graphrewrite.errors import KernelError

__all__ = ["NAMESPACE"]

NAMESPACE = "graphrewrite"
_LAYOUTS = ("BSNH", "BNSH")
_SCHEMES = ("asymmetric", "symmetric")

_SCHEMAS = {
    "update_cache": '(Tensor value, Tensor cache, SymInt start_pos, *, str layout="BSNH") -> Tensor',
    "update_quantized_cache": "(Tensor value, Tensor codes, Tensor scales, SymInt start_pos, "
    'Tensor? zero_points=None, *, str scheme="asymmetric", str layout="BSNH") -> (Tensor, Tensor, Tensor)',
    "custom_sdpa": "(Tensor query, Tensor key_cache, Tensor value_cache, SymInt start_pos, Tensor? key_scales=None, "
    "Tensor? key_zero_points=None, Tensor? value_scales=None, Tensor? value_zero_points=None, "
    "Tensor? recent_key=None, Tensor? recent_value=None, Tensor? attn_mask=None, *, bool is_causal=False, "
    'float? scale=None, str layout="BSNH") -> Tensor',
    "sdpa_with_kv_cache": "(Tensor query, Tensor key, Tensor value, Tensor key_cache, Tensor value_cache, "
    "SymInt start_pos, Tensor? attn_mask=None, *, bool is_causal=False, float? scale=None, "
    'str layout="BSNH") -> (Tensor, Tensor, Tensor)',
}


# Kernels. They check their arguments themselves, whole and before writing.


def _update_cache(value: torch.Tensor, cache: torch.Tensor, start_pos: int, *, layout: str = "BSNH") -> torch.Tensor:
    new_cache = _empty_like(cache)
    capi.update_cache(
        _view(value), _view(cache), _scalar(start_pos), _view(new_cache), layout=layout, threads=_threads()
    )
    return new_cache


def _update_quantized_cache(
    value: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    start_pos: int,
    zero_points: torch.Tensor | None = None,
    *,
    scheme: str = "asymmetric",
    layout: str = "BSNH",
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    new_codes, new_scales, new_zero_points = _new_quantized_cache(codes, scales, zero_points)
    capi.update_quantized_cache(
        _view(value),
        _view(codes),
        _view(scales),
        _scalar(start_pos),
        _view_if_given(zero_points),
        _view(new_codes),
        _view(new_scales),
        None if zero_points is None else _view(new_zero_points),
        scheme=scheme,
        layout=layout,
        threads=_threads(),
    )
    return new_codes, new_scales, new_zero_points


def _custom_sdpa(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    start_pos: int,
    key_scales: torch.Tensor | None = None,
    key_zero_points: torch.Tensor | None = None,
    value_scales: torch.Tensor | None = None,
    value_zero_points: torch.Tensor | None = None,
    recent_key: torch.Tensor | None = None,
    recent_value: torch.Tensor | None = None,
    attn_mask: torch.Tensor | None = None,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    layout: str = "BSNH",
) -> torch.Tensor:
    output = _empty_like(query)
    capi.custom_sdpa(
        _view(query),
        _view(key_cache),
        _view(value_cache),
        _scalar(start_pos),
        _view_if_given(key_scales),
        _view_if_given(key_zero_points),
        _view_if_given(value_scales),
        _view_if_given(value_zero_points),
        _view_if_given(recent_key),
        _view_if_given(recent_value),
        _view_if_given(attn_mask),
        _view(output),
        is_causal=is_causal,
        scale=scale,
        layout=layout,
        threads=_threads(),
    )
    return output


def _sdpa_with_kv_cache(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    start_pos: int,
    attn_mask: torch.Tensor | None = None,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    layout: str = "BSNH",
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    output, new_key_cache, new_value_cache = _empty_like(query), _empty_like(key_cache), _empty_like(value_cache)
    capi.sdpa_with_kv_cache(
        _view(query),
        _view(key),
        _view(value),
        _view(key_cache),
        _view(value_cache),
        _scalar(start_pos),
        _view_if_given(attn_mask),
        _view(output),
        _view(new_key_cache),
        _view(new_value_cache),
        is_causal=is_causal,
        scale=scale,
        layout=layout,
        threads=_threads(),
    )
    return output, new_key_cache, new_value_cache


# Shape functions. They compare what is known as a number and never look at start_pos, so that a position read out of a
# tensor, and dynamic sizes, trace without guards.


def _fake_update_cache(
    value: torch.Tensor, cache: torch.Tensor, start_pos: int, *, layout: str = "BSNH"
) -> torch.Tensor:
    call = _Check("update_cache", layout)
    call.rows("value", value, "cache", cache)
    call.that(value.dtype == cache.dtype, f"value is {value.dtype} and cache {cache.dtype}")
    return _empty_like(cache)


def _fake_update_quantized_cache(
    value: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    start_pos: int,
    zero_points: torch.Tensor | None = None,
    *,
    scheme: str = "asymmetric",
    layout: str = "BSNH",
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    call = _Check("update_quantized_cache", layout)
    call.that(scheme in _SCHEMES, f"scheme is {scheme!r}; expected one of {', '.join(_SCHEMES)}")
    call.rows("value", value, "codes", codes)
    call.dtype(torch.float32, value=value, scales=scales)
    call.dtype(torch.int8, codes=codes, zero_points=zero_points)
    call.parameters("codes", codes, scales=scales, zero_points=zero_points)
    call.that(scheme == "symmetric" or zero_points is not None, "the asymmetric scheme needs zero_points")
    return _new_quantized_cache(codes, scales, zero_points)


def _fake_custom_sdpa(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    start_pos: int,
    key_scales: torch.Tensor | None = None,
    key_zero_points: torch.Tensor | None = None,
    value_scales: torch.Tensor | None = None,
    value_zero_points: torch.Tensor | None = None,
    recent_key: torch.Tensor | None = None,
    recent_value: torch.Tensor | None = None,
    attn_mask: torch.Tensor | None = None,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    layout: str = "BSNH",
) -> torch.Tensor:
    call = _Check("custom_sdpa", layout)
    call.attention(query, key_cache, value_cache, attn_mask)
    call.that(key_cache.dtype in (torch.float32, torch.int8), f"key_cache is {key_cache.dtype}")
    call.dtype(key_cache.dtype, value_cache=value_cache)
    is_quantized = key_cache.dtype == torch.int8
    for name, scales in (("key_scales", key_scales), ("value_scales", value_scales)):
        call.that(
            is_quantized == (scales is not None),
            f"{name} must {'' if is_quantized else 'not '}be given with {key_cache.dtype} caches",
        )
    call.that(is_quantized or (key_zero_points is None and value_zero_points is None), "zero points need int8 caches")
    call.dtype(torch.float32, query=query, key_scales=key_scales, value_scales=value_scales)
    call.dtype(torch.int8, key_zero_points=key_zero_points, value_zero_points=value_zero_points)
    call.parameters("key_cache", key_cache, key_scales=key_scales, key_zero_points=key_zero_points)
    call.parameters("value_cache", value_cache, value_scales=value_scales, value_zero_points=value_zero_points)
    call.that((recent_key is None) == (recent_value is None), "recent_key and recent_value go together")
    call.dtype(torch.float32, recent_key=recent_key, recent_value=recent_value)
    if recent_key is not None and recent_value is not None:
        call.rows("recent_key", recent_key, "key_cache", key_cache)
        call.rows("recent_value", recent_value, "value_cache", value_cache)
    return _empty_like(query)


def _fake_sdpa_with_kv_cache(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    start_pos: int,
    attn_mask: torch.Tensor | None = None,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    layout: str = "BSNH",
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    call = _Check("sdpa_with_kv_cache", layout)
    call.attention(query, key_cache, value_cache, attn_mask)
    call.dtype(torch.float32, query=query, key=key, value=value, key_cache=key_cache, value_cache=value_cache)
    call.rows("key", key, "key_cache", key_cache)
    call.rows("value", value, "value_cache", value_cache)
    return _empty_like(query), _empty_like(key_cache), _empty_like(value_cache)


class _Check:
    """What can be said about the arguments of one call without their values."""

    def __init__(self, op: str, layout: str) -> None:
        self._op = op
        self.that(layout in _LAYOUTS, f"layout is {layout!r}; expected one of {', '.join(_LAYOUTS)}")
        self._sequence = 1 if layout == "BSNH" else 2

    def that(self, condition: bool, message: str) -> None:
        if not condition:
            raise ValueError(f"{NAMESPACE}::{self._op}: {message}")

    def dtype(self, expected: torch.dtype, **tensors: torch.Tensor | None) -> None:
        for name, tensor in tensors.items():
            self.that(tensor is None or tensor.dtype == expected, f"{name} is not {expected}: {_described(tensor)}")

    def rank(self, **tensors: torch.Tensor) -> None:
        for name, tensor in tensors.items():
            self.that(tensor.dim() == 4, f"{name} must have 4 dimensions, not {_described(tensor)}")

    def rows(self, name: str, rows: torch.Tensor, cache_name: str, cache: torch.Tensor) -> None:
        """`rows` may be written into `cache`: all sizes but the sequence's agree."""
        self.rank(**{name: rows, cache_name: cache})
        others = [axis for axis in range(4) if axis != self._sequence]
        self.that(
            all(_may_equal(rows.shape[axis], cache.shape[axis]) for axis in others),
            f"{name} {_described(rows)} does not fit {cache_name} {_described(cache)}",
        )

    def parameters(self, cache_name: str, cache: torch.Tensor, **tensors: torch.Tensor | None) -> None:
        """Scales and zero points have the cache's shape with 1 for the head size."""
        expected = [*cache.shape[:3], 1]
        for name, tensor in tensors.items():
            if tensor is not None:
                self.that(
                    tensor.dim() == 4 and all(map(_may_equal, tensor.shape, expected)),
                    f"{name} {_described(tensor)} does not fit {cache_name} {_described(cache)}",
                )

    def attention(
        self, query: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, mask: torch.Tensor | None
    ) -> None:
        self.rank(query=query, key_cache=key_cache, value_cache=value_cache)
        self.that(
            all(map(_may_equal, key_cache.shape, value_cache.shape)),
            f"key_cache {_described(key_cache)} and value_cache {_described(value_cache)} differ",
        )
        fits = _may_equal(query.shape[0], key_cache.shape[0]) and _may_equal(query.shape[3], key_cache.shape[3])
        self.that(fits, f"query {_described(query)} does not fit key_cache {_described(key_cache)}")
        heads, kv_heads = query.shape[3 - self._sequence], key_cache.shape[3 - self._sequence]
        divides = not (_is_number(heads) and _is_number(kv_heads)) or (kv_heads > 0 and heads % kv_heads == 0)
        self.that(divides, f"{kv_heads} key/value heads do not divide {heads} query heads")
        if mask is not None:
            self.that(
                mask.dtype in (torch.bool, torch.float32) and 2 <= mask.dim() <= 4,
                f"attn_mask must be bool or float32 with 2 to 4 dimensions, not {_described(mask)}",
            )


def _is_number(size: object) -> bool:
    return isinstance(size, int)


def _may_equal(first: int, second: int) -> bool:
    """False where two sizes are known and differ."""
    return not (_is_number(first) and _is_number(second)) or first == second


def _described(tensor: torch.Tensor | None) -> str:
    return "absent" if tensor is None else f"{tensor.dtype} {list(tensor.shape)}"


def _empty_like(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(tensor, memory_format=torch.contiguous_format)


def _new_quantized_cache(
    codes: torch.Tensor, scales: torch.Tensor, zero_points: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Results of update_quantized_cache; without zero points the third one is empty."""
    third = codes.new_empty(0) if zero_points is None else _empty_like(zero_points)
    return _empty_like(codes), _empty_like(scales), third


def _view(tensor: torch.Tensor) -> capi.Tensor:
    name = str(tensor.dtype).removeprefix("torch.")
    if name not in capi.DTYPES:
        raise KernelError(f"element type {name} is not supported, expected one of {', '.join(capi.DTYPES)}")
    strides = None if tensor.is_contiguous() else tensor.stride()
    return capi.tensor(tensor.data_ptr(), capi.DTYPES[name], tensor.shape, strides)


def _view_if_given(tensor: torch.Tensor | None) -> capi.Tensor | None:
    return None if tensor is None else _view(tensor)


def _scalar(value: int) -> capi.Tensor:
    memory = ctypes.c_int64(value)
    described = capi.tensor(ctypes.addressof(memory), capi.DTYPES["int64"], ())
    described.memory = memory  # kept alive with the descriptor
    return described


def _threads() -> int:
    return int(torch.get_num_threads())


def _refuse_gradient(name: str) -> Callable[..., NoReturn]:
    def backward(context: Any, *gradients: Sequence[Any]) -> NoReturn:
        raise NotImplementedError(
            f"{NAMESPACE}::{name} has no gradient: it is for inference. Run the model under torch.no_grad(), or train "
            "the program it was rewritten from"
        )

    return backward


def _define(name: str, kernel: Callable[..., Any], fake: Callable[..., Any]) -> None:
    operator = torch.library.custom_op(
        f"{NAMESPACE}::{name}", kernel, mutates_args=(), device_types="cpu", schema=_SCHEMAS[name]
    )
    operator.register_fake(fake)
    operator.register_autograd(_refuse_gradient(name))


_define("update_cache", _update_cache, _fake_update_cache)
_define("update_quantized_cache", _update_quantized_cache, _fake_update_quantized_cache)
_define("custom_sdpa", _custom_sdpa, _fake_custom_sdpa)
_define("sdpa_with_kv_cache", _sdpa_with_kv_cache, _fake_sdpa_with_kv_cache)
