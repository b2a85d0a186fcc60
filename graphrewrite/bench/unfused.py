"""The graphs that the rewrite replaces: an int8 cache that is dequantized whole in every step.

Two spellings. One is what `gr.export_onnx` makes of a torch program that was not rewritten: the source operators with
the function bodies of this project. The other is in operators of ONNX opset 24 alone: TensorScatter, DequantizeLinear
and Attention.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
from onnx import TensorProto, helper

from graphrewrite.bench.contender import Contender, Step, Unavailable
from graphrewrite.bench.data import Array, Data, Quantization, Quantized
from graphrewrite.bench.onnx_step import OUTPUT, OnnxStep
from graphrewrite.custom_ops.functions import SOURCE_DOMAINS, attach

_LLAMA, _DECOMPOSED = SOURCE_DOMAINS
_PER_TOKEN = Quantization(8, 1, symmetric=False)
_ROLES = ("key", "value")
_PARTS = ("codes", "scales", "zero_points")


def source_contender() -> Contender:
    return Contender("unfused, exported source operators", False, _source_step)


def standard_contender() -> Contender:
    return Contender("unfused, DequantizeLinear and Attention", False, _standard_step)


def _step(data: Data, *, bnsh: bool) -> OnnxStep:
    def laid_out(array: Array) -> Array:
        return np.ascontiguousarray(array.transpose(0, 2, 1, 3)) if bnsh else array

    rows = {"query": data.query, "key": data.key, "value": data.value}
    inputs = {name: laid_out(array) for name, array in rows.items()}
    step = OnnxStep(inputs["query"].shape, inputs=inputs)
    for role, content in zip(_ROLES, data.quantized(_PER_TOKEN), strict=True):
        for part in _PARTS:
            step.caches[f"{role}_{part}"] = laid_out(getattr(content, part))
            step.written[f"{role}_{part}"] = f"new_{role}_{part}"
    return step


def _read(caches: dict[str, Array], role: str) -> Array:
    return Quantized(*(caches[f"{role}_{part}"] for part in _PARTS)).values()


def _source_step(data: Data, threads: int) -> Step:
    """Float rows of the current tokens lie over the dequantized cache: what is attended to is exact there."""
    if data.case.ragged:
        raise Unavailable("the source operators take one position for all sequences")
    step = _step(data, bnsh=False)
    step.inputs["start_pos"] = np.array(data.case.starts[0], dtype=np.int64)
    step.inputs["seq_len"] = np.array(data.case.rows, dtype=np.int64)
    for role in _ROLES:
        step.nodes += _source_cache(role)
    operands = ["query", "key", "value", "key_read", "value_read", "start_pos", "seq_len"]
    outputs = [OUTPUT, "key_attended", "value_attended"]
    step.nodes.append(helper.make_node("sdpa_with_kv_cache", operands, outputs, domain=_LLAMA, is_causal=1))
    opsets = {"": 21, _LLAMA: 1, _DECOMPOSED: 1}
    model = ir.from_proto(step.model(opsets, list(_source_types(step))))
    attach(model)
    return step.prepare(
        model,
        threads,
        bytes_read=data.case.bytes_of(_PER_TOKEN.row_bytes(data.case.layer.head_size)),
        output=lambda array: array,
        held=lambda caches: data.written((_read(caches, "key"), _read(caches, "value"))),
    )


def _source_cache(role: str) -> Iterator[onnx.NodeProto]:
    """The new rows' codes and parameters written to the caches, and the caches dequantized."""
    parameters = [f"{role}_row_scales", f"{role}_row_zeros"]
    yield helper.make_node("choose_qparams_per_token_asymmetric", [role], parameters, domain=_DECOMPOSED)
    yield helper.make_node("quantize_per_token", [role, *parameters], [f"{role}_row_codes"], domain=_DECOMPOSED)
    yield helper.make_node("Cast", [parameters[0]], [f"{role}_row_scales32"], to=TensorProto.FLOAT)
    yield helper.make_node("Cast", [parameters[1]], [f"{role}_row_zeros8"], to=TensorProto.INT8)
    for part, rows in zip(_PARTS, ("row_codes", "row_scales32", "row_zeros8"), strict=True):
        operands = [f"{role}_{rows}", f"{role}_{part}", "start_pos"]
        yield helper.make_node("update_cache", operands, [f"new_{role}_{part}"], domain=_LLAMA)
    yield helper.make_node("Cast", [f"new_{role}_scales"], [f"{role}_scales64"], to=TensorProto.DOUBLE)
    yield helper.make_node("Cast", [f"new_{role}_zero_points"], [f"{role}_zeros64"], to=TensorProto.INT64)
    operands = [f"new_{role}_codes", f"{role}_scales64", f"{role}_zeros64"]
    yield helper.make_node("dequantize_per_token", operands, [f"{role}_read"], domain=_DECOMPOSED)


def _source_types(step: OnnxStep) -> Iterator[onnx.ValueInfoProto]:
    """Element types of the values between the nodes, which the choice of a body depends on."""
    types = {
        "row_scales": TensorProto.DOUBLE,
        "row_zeros": TensorProto.INT64,
        "row_codes": TensorProto.INT8,
        "row_scales32": TensorProto.FLOAT,
        "row_zeros8": TensorProto.INT8,
        "scales64": TensorProto.DOUBLE,
        "zeros64": TensorProto.INT64,
        "read": TensorProto.FLOAT,
    }
    for role in _ROLES:
        rank = step.inputs[role].ndim
        for name, kind in types.items():
            yield helper.make_tensor_value_info(f"{role}_{name}", kind, [None] * rank)


# Scales and zero points of the new rows: the range of each, zero included, over 255 steps.
_STANDARD_CACHE = """
    {x}_low_row = ReduceMin<keepdims=1>({x}, last)
    {x}_high_row = ReduceMax<keepdims=1>({x}, last)
    {x}_low = Min({x}_low_row, zero)
    {x}_high = Max({x}_high_row, zero)
    {x}_range = Sub({x}_high, {x}_low)
    {x}_step = Div({x}_range, steps)
    {x}_row_scales = Max({x}_step, least)
    {x}_low_steps = Div({x}_low, {x}_row_scales)
    {x}_zero_real = Sub(lowest, {x}_low_steps)
    {x}_zero_round = Round({x}_zero_real)
    {x}_zero = Clip({x}_zero_round, lowest, highest)
    {x}_row_zeros = Cast<to=3>({x}_zero)
    {x}_scaled = Div({x}, {x}_row_scales)
    {x}_shifted = Add({x}_scaled, {x}_zero)
    {x}_round = Round({x}_shifted)
    {x}_clipped = Clip({x}_round, lowest, highest)
    {x}_row_codes = Cast<to=3>({x}_clipped)
    new_{x}_codes = TensorScatter<axis=2>({x}_codes, {x}_row_codes, start_pos)
    new_{x}_scales = TensorScatter<axis=2>({x}_scales, {x}_row_scales, start_pos)
    new_{x}_zero_points = TensorScatter<axis=2>({x}_zero_points, {x}_row_zeros, start_pos)
    {x}_read = DequantizeLinear<axis=-1, block_size={size}>(new_{x}_codes, new_{x}_scales, new_{x}_zero_points)
"""
_STANDARD = """
<ir_version: 11, opset_import: ["": 24]> agraph (float x) => (float y) {{
    last = Constant<value_ints=[-1]>()
    zero = Constant<value_float=0.0>()
    steps = Constant<value_float=255.0>()
    lowest = Constant<value_float=-128.0>()
    highest = Constant<value_float=127.0>()
    least = Constant<value_float=1.1920929e-07>()
    {caches}
    output = Attention<is_causal=1>(query, key_read, value_read, "", "", "", lengths)
}}
"""


def _standard_step(data: Data, threads: int) -> Step:
    step, size = _step(data, bnsh=True), data.case.layer.head_size
    step.inputs["start_pos"] = np.array(data.case.starts, dtype=np.int64)
    step.inputs["lengths"] = np.array(data.case.lengths, dtype=np.int64)
    caches = "".join(_STANDARD_CACHE.format(x=role, size=size) for role in _ROLES)
    step.nodes = list(onnx.parser.parse_model(_STANDARD.format(caches=caches)).graph.node)
    return step.prepare(
        step.model({"": 24}),
        threads,
        bytes_read=data.case.bytes_of(_PER_TOKEN.row_bytes(size)),
        output=_transposed,
        held=lambda caches: (_transposed(_read(caches, "key")), _transposed(_read(caches, "value"))),
    )


def _transposed(array: Array) -> Array:
    transposed: Array = array.transpose(0, 2, 1, 3)
    return transposed
