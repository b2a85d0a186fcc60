"""onnxruntime's own GroupQueryAttention: a float32 cache, or int8 codes with one scale for the whole cache."""

from __future__ import annotations

from typing import Any

import numpy as np
from onnx import helper

from graphrewrite.bench.contender import Contender, Step, Unavailable
from graphrewrite.bench.data import Array, Data
from graphrewrite.bench.onnx_step import OUTPUT, OnnxStep

_DOMAIN = "com.microsoft"
_OPSETS = {"": 21, _DOMAIN: 1}
_LARGEST_CODE = 127


def contender(*, quantized: bool) -> Contender:
    name = "GroupQueryAttention int8 per tensor" if quantized else "GroupQueryAttention float32"
    return Contender(name, False, _quantized_step if quantized else _float_step)


def _parts(data: Data) -> OnnxStep:
    """The operator takes rows [B,S,H*D] and caches [B,H,C,D]."""
    case = data.case
    if case.ragged and not case.is_decode:
        raise Unavailable("no prefill of ragged sequences")
    rows = (case.layer.batch, case.rows, -1)
    step = OnnxStep((*rows[:2], case.layer.query_heads * case.layer.head_size))
    for name, array in (("query", data.query), ("key", data.key), ("value", data.value)):
        step.inputs[name] = array.reshape(rows)
    step.inputs["last_position"] = np.array(case.lengths, dtype=np.int32) - 1
    step.inputs["total_length"] = np.array([case.context], dtype=np.int32)
    step.written = {"past_key": "new_key", "past_value": "new_value"}
    return step


def _prepare(data: Data, step: OnnxStep, threads: int, row_bytes: float, scales: tuple[float, float]) -> Step:
    def held(caches: dict[str, Array]) -> tuple[Array, Array]:
        key, value = (caches[name].transpose(0, 2, 1, 3) for name in step.written)
        return key * np.float32(scales[0]), value * np.float32(scales[1])

    return step.prepare(
        step.model(_OPSETS),
        threads,
        bytes_read=data.case.bytes_of(row_bytes),
        output=lambda array: array.reshape(data.query.shape),
        held=held,
    )


def _node(data: Data, step: OnnxStep, more_inputs: list[str], attributes: dict[str, Any]) -> None:
    layer = data.case.layer
    step.nodes = [
        helper.make_node(
            "GroupQueryAttention",
            ["query", "key", "value", "past_key", "past_value", "last_position", "total_length", *more_inputs],
            [OUTPUT, *step.written.values()],
            domain=_DOMAIN,
            num_heads=layer.query_heads,
            kv_num_heads=layer.kv_heads,
            **attributes,
        )
    ]


def _float_step(data: Data, threads: int) -> Step:
    step = _parts(data)
    for name, cache in zip(step.written, (data.keys, data.values), strict=True):
        step.caches[name] = np.ascontiguousarray(cache.transpose(0, 2, 1, 3))
    _node(data, step, [], {})
    return _prepare(data, step, threads, 4 * data.case.layer.head_size, (1.0, 1.0))


def _quantized_step(data: Data, threads: int) -> Step:
    step = _parts(data)
    scales = []
    for name, cache, rows in zip(step.written, (data.keys, data.values), (data.key, data.value), strict=True):
        scale = np.float32(max(np.abs(cache).max(), np.abs(rows).max()) / _LARGEST_CODE)
        codes = np.rint(cache.transpose(0, 2, 1, 3) / scale).astype(np.int8)
        step.caches[name] = np.ascontiguousarray(codes)
        step.inputs[f"{name}_scale"] = np.array([scale])
        scales.append(float(scale))
    quantization = {"kv_cache_bit_width": 8, "k_quant_type": "PER_TENSOR", "v_quant_type": "PER_TENSOR"}
    _node(data, step, ["", "", "", "", "", "past_key_scale", "past_value_scale"], quantization)
    return _prepare(data, step, threads, data.case.layer.head_size, (scales[0], scales[1]))
