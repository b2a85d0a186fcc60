"""One attention layer in each ONNX source form, whole or with one flaw, for the pattern tests.

B=1, Hq=4, Hkv=2, D=16, capacity C=32, layout BNSH; S is dynamic. Written as ONNX text, in which a test's change to the
graph is a change of one line.
"""

from __future__ import annotations

import json

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir

CAPACITY = 32
CACHES = [f"{cache}_{part}" for cache in ("key", "value") for part in ("codes", "scales", "zeros")]

_SIGNATURE = """
<ir_version: 10, opset_import: ["" : {opset}{domains}]>
layer (float[1,4,S,16] query, float[1,2,S,16] key, float[1,2,S,16] value, int64[1] position, int64[1] valid,
       int8[1,2,32,16] key_codes, float[1,2,32,1] key_scales, int8[1,2,32,1] key_zeros,
       int8[1,2,32,16] value_codes, float[1,2,32,1] value_scales, int8[1,2,32,1] value_zeros)
   => (float[1,4,S,16] output, int8[1,2,32,16] key_codes_out, float[1,2,32,1] key_scales_out,
       int8[1,2,32,1] key_zeros_out, int8[1,2,32,16] value_codes_out, float[1,2,32,1] value_scales_out,
       int8[1,2,32,1] value_zeros_out)
"""

# Scales and zero points made by hand: the range of each row, zero included, over 255 steps.
_QUANTIZE = """
    {x}_last = Constant<value_ints=[-1]>()
    {x}_zero = Constant<value_float=0.0>()
    {x}_steps = Constant<value_float=255.0>()
    {x}_first_code = Constant<value_float=-128.0>()
    {x}_low_row = ReduceMin<keepdims=1>({x}, {x}_last)
    {x}_high_row = ReduceMax<keepdims=1>({x}, {x}_last)
    {x}_low = Min({x}_low_row, {x}_zero)
    {x}_high = Max({x}_high_row, {x}_zero)
    {x}_range = Sub({x}_high, {x}_low)
    {x}_new_scales = Div({x}_range, {x}_steps)
    {x}_low_steps = Div({x}_low, {x}_new_scales)
    {x}_zero_real = Sub({x}_first_code, {x}_low_steps)
    {x}_zero_round = Round({x}_zero_real)
    {x}_new_zeros = Cast<to=3>({x}_zero_round)
    {x}_zero_float = Cast<to=1>({x}_new_zeros)
    {x}_scaled = Div({x}, {x}_new_scales)
    {x}_shifted = Add({x}_scaled, {x}_zero_float)
    {x}_code_round = Round({x}_shifted)
    {x}_last_code = Constant<value_float=127.0>()
    {x}_clipped = Clip({x}_code_round, {x}_first_code, {x}_last_code)
    {x}_new_codes = Cast<to=3>({x}_clipped)
"""
_SCATTER = """
    {x}_codes_out = TensorScatter<axis=2>({x}_codes, {x}_new_codes, position)
    {x}_scales_out = TensorScatter<axis=2>({x}_scales, {x}_new_scales, position)
    {x}_zeros_out = TensorScatter<axis=2>({x}_zeros, {x}_new_zeros, position)
"""
_LINEAR = """
    {x}_float = DequantizeLinear<axis=-1, block_size=16>({x}_codes_out, {x}_scales_out, {x}_zeros_out)
"""
SPELLED = """
    {x}_wide = Cast<to=1>({x}_codes_out)
    {x}_zeros_wide = Cast<to=1>({x}_zeros_out)
    {x}_difference = Sub({x}_wide, {x}_zeros_wide)
    {x}_float = Mul({x}_scales_out, {x}_difference)
"""
_VALID = 'output = Attention<is_causal=1>(query, key_float, value_float, "", "", "", valid)'
MASKED = """
    slots = Constant<value_ints=[32]>()
    zero_i = Constant<value_int=0>()
    one_i = Constant<value_int=1>()
    capacity_i = Constant<value_int=32>()
    count = Shape<start=2, end=3>(query)
    count_i = Squeeze(count)
    columns = Range(zero_i, capacity_i, one_i)
    rows = Range(zero_i, count_i, one_i)
    row_positions = Add(rows, position)
    last_axis = Constant<value_ints=[1]>()
    row_column = Unsqueeze(row_positions, last_axis)
    mask = LessOrEqual(columns, row_column)
    output = Attention(query, key_float, value_float, mask)
"""


def build(
    *,
    dequantize: str = _LINEAR,
    attention: str = _VALID,
    replace: tuple[tuple[str, str], ...] = (),
    opset: int = 24,
    domains: str = "",
) -> ir.Model:
    """The layer with the given spelling of its parts; `replace` changes its text, each change once."""
    parts = [part.replace("{x}", name) for part in (_QUANTIZE, _SCATTER, dequantize) for name in ("key", "value")]
    header = _SIGNATURE.replace("{opset}", str(opset)).replace("{domains}", domains)
    text = f"{header} {{ {''.join(parts)} {attention} }}"
    for old, new in replace:
        assert text.count(old) == 1, f"{old!r} stands {text.count(old)} times in the text"
        text = text.replace(old, new)
    proto = onnx.parser.parse_model(text)
    onnx.checker.check_model(proto)
    model = ir.from_proto(proto)
    model.metadata_props["graphrewrite.caches"] = json.dumps([_cache(name) for name in CACHES])
    return model


def _cache(name: str) -> dict[str, object]:
    fill = 1.0 if name.endswith("scales") else 0
    return {"input": name, "output": f"{name}_out", "fill": fill, "axis": 2, "capacity": CAPACITY, "in_place": True}


FORMS = {
    "O1 valid length": build,
    "O1 mask": lambda: build(attention=MASKED),
    "O3 valid length": lambda: build(dequantize=SPELLED),
    "O3 mask": lambda: build(dequantize=SPELLED, attention=MASKED),
}


def steps(*, seed: int = 0) -> list[dict[str, np.ndarray]]:
    """A prefill of 5 tokens and three steps, without the caches, which are carried along."""
    random = np.random.default_rng(seed)
    result = []
    for start, count in ((0, 5), (5, 1), (6, 1), (7, 4)):
        rows = {name: (1, heads, count, 16) for name, heads in (("query", 4), ("key", 2), ("value", 2))}
        step = {name: random.standard_normal(shape, dtype=np.float32) for name, shape in rows.items()}
        result.append({**step, "position": np.array([start]), "valid": np.array([start + count])})
    return result
