"""The fused operators of this project, in onnxruntime: UpdateQuantizedCache and CustomSdpa, or SdpaWithKvCache."""

from __future__ import annotations

import numpy as np
from onnx import helper

from graphrewrite.bench.case import Case
from graphrewrite.bench.contender import Contender, Step, Unavailable
from graphrewrite.bench.data import Array, Data, Quantization, Quantized, pack_nibbles, unpack_nibbles
from graphrewrite.bench.onnx_step import OUTPUT, OnnxStep
from graphrewrite.custom_ops.functions import DOMAIN

_OPSETS = {"": 17, DOMAIN: 1}
_GROUP = 32  # elements that share a scale in the int4 cache

# Arithmetic is float32, or of integers with 14 bits and more in a factor.
_TOLERANCE = 1e-3

SCHEMES = ("int8", "int8-symmetric", "int4", "float32")


def contender(scheme: str) -> Contender:
    """One of `SCHEMES`: int8 has a scale and a zero point per token and head, int4 one for 32 elements."""

    def prepare(data: Data, threads: int) -> Step:
        if scheme == "float32":
            return _float_step(data, threads)
        return _quantized_step(data, _quantization(scheme, data.case.layer.head_size), threads)

    return Contender(f"graphrewrite {scheme}", True, prepare, _TOLERANCE)


def _quantization(scheme: str, head_size: int) -> Quantization:
    if scheme != "int4":
        return Quantization(8, 1, scheme == "int8-symmetric")
    if head_size % _GROUP:
        raise Unavailable(f"int4: a head of {head_size} has no groups of {_GROUP}")
    return Quantization(4, head_size // _GROUP, False)


def positions(case: Case) -> Array:
    """start_pos: a scalar for one sequence, one for each of several."""
    return np.array(case.starts[0] if case.layer.batch == 1 else case.starts, dtype=np.int64)


def in_layout(array: Array, layout: str) -> Array:
    """[B,S,H,D] in a layout, contiguous; its own inverse."""
    return array if layout == "BSNH" else np.ascontiguousarray(array.transpose(0, 2, 1, 3))


def _empty_step(data: Data) -> OnnxStep:
    layout = data.case.layer.layout
    rows = {"query": data.query, "key": data.key, "value": data.value}
    inputs = {name: in_layout(array, layout) for name, array in rows.items()}
    return OnnxStep(inputs["query"].shape, inputs={**inputs, "start_pos": positions(data.case)})


def _float_step(data: Data, threads: int) -> Step:
    case, layout, step = data.case, data.case.layer.layout, _empty_step(data)
    for name, cache in (("key_cache", data.keys), ("value_cache", data.values)):
        step.caches[name], step.written[name] = in_layout(cache, layout), f"new_{name}"
    inputs = ["query", "key", "value", *step.caches, "start_pos"]
    outputs = [OUTPUT, *step.written.values()]
    step.nodes = [
        helper.make_node("SdpaWithKvCache", inputs, outputs, domain=DOMAIN, is_causal=1, layout=layout),
    ]

    def held(caches: dict[str, Array]) -> tuple[Array, Array]:
        return in_layout(caches["key_cache"], layout), in_layout(caches["value_cache"], layout)

    return step.prepare(
        step.model(_OPSETS),
        threads,
        bytes_read=case.bytes_of(4 * case.layer.head_size),
        output=lambda array: in_layout(array, layout),
        held=held,
        use_library=True,
    )


def _quantized_step(data: Data, how: Quantization, threads: int) -> Step:
    case, layout, step = data.case, data.case.layer.layout, _empty_step(data)
    for role, content in zip(("key", "value"), data.quantized(how), strict=True):
        _add_cache(step, role, content, how, layout)
    operands = ["query", "new_key_codes", "new_value_codes", "start_pos"]
    for role in ("key", "value"):
        operands += [f"new_{role}_scales", "" if how.symmetric else f"new_{role}_zero_points"]
    if case.layer.exact:
        operands += ["key", "value"]
    step.nodes.append(helper.make_node("CustomSdpa", operands, [OUTPUT], domain=DOMAIN, is_causal=1, layout=layout))

    def held(caches: dict[str, Array]) -> tuple[Array, Array]:
        arrays = {name: in_layout(array, layout) for name, array in caches.items()}
        read = _dequantized(arrays, "key", how), _dequantized(arrays, "value", how)
        return data.written(read) if case.layer.exact else read

    return step.prepare(
        step.model(_OPSETS),
        threads,
        bytes_read=case.bytes_of(how.row_bytes(case.layer.head_size)),
        output=lambda array: in_layout(array, layout),
        held=held,
        use_library=True,
    )


def _add_cache(step: OnnxStep, role: str, content: Quantized, how: Quantization, layout: str) -> None:
    """A quantized cache and the node that writes the new rows to it."""
    codes = pack_nibbles(content.codes) if how.bits == 4 else content.codes
    parts = {"codes": codes, "scales": content.scales}
    if not how.symmetric:
        parts["zero_points"] = content.zero_points
    for part, array in parts.items():
        step.caches[f"{role}_{part}"] = in_layout(array, layout)
        step.written[f"{role}_{part}"] = f"new_{role}_{part}"
    inputs = [role, f"{role}_codes", f"{role}_scales", "start_pos", *([] if how.symmetric else [f"{role}_zero_points"])]
    outputs = [f"new_{role}_{part}" for part in parts]
    scheme = "symmetric" if how.symmetric else "asymmetric"
    step.nodes.append(
        helper.make_node("UpdateQuantizedCache", inputs, outputs, domain=DOMAIN, scheme=scheme, layout=layout)
    )


def _dequantized(arrays: dict[str, Array], role: str, how: Quantization) -> Array:
    codes, scales = arrays[f"{role}_codes"], arrays[f"{role}_scales"]
    zero_points = np.zeros_like(scales) if how.symmetric else arrays[f"{role}_zero_points"]
    return Quantized(unpack_nibbles(codes) if how.bits == 4 else codes, scales, zero_points).values()
