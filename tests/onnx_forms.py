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
    functions: str = "",
) -> ir.Model:
    """The layer with the given spelling of its parts; `replace` changes its text, each change once."""
    parts = [part.replace("{x}", name) for part in (_QUANTIZE, _SCATTER, dequantize) for name in ("key", "value")]
    header = _SIGNATURE.replace("{opset}", str(opset)).replace("{domains}", domains)
    text = f"{header} {{ {''.join(parts)} {attention} }} {functions}"
    return model_of("", text, replace)


def model_of(body: str, text: str | None = None, replace: tuple[tuple[str, str], ...] = ()) -> ir.Model:
    """The layer with the given body, changed, and with its caches declared."""
    if text is None:
        text = _SIGNATURE.replace("{opset}", "24").replace("{domains}", "") + f"{{ {body} }}"
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


# The slots of the new rows, [S].
_SLOTS = """
    zero_n = Constant<value_int=0>()
    one_n = Constant<value_int=1>()
    count_n = Shape<start=2, end=3>(query)
    count_s = Squeeze(count_n)
    order = Range(zero_n, count_s, one_n)
    places = Add(order, position)
"""


def written(name: str, way: str) -> str:
    """`{name}_out`, the cache `name` with the new rows, by other operators than TensorScatter."""
    rows = name.replace("_", "_new_", 1)
    if way == "ScatterElements":
        return f"""
            {name}_column = Constant<value_ints=[1, 1, -1, 1]>()
            {name}_places = Reshape(places, {name}_column)
            {name}_shape = Shape({rows})
            {name}_indices = Expand({name}_places, {name}_shape)
            {name}_out = ScatterElements<axis=2>({name}, {name}_indices, {rows})
        """
    return f"""
        {name}_last = Constant<value_ints=[1]>()
        {name}_indices = Unsqueeze(places, {name}_last)
        {name}_first = Transpose<perm=[2, 0, 1, 3]>({name})
        {name}_rows = Transpose<perm=[2, 0, 1, 3]>({rows})
        {name}_done = ScatterND({name}_first, {name}_indices, {name}_rows)
        {name}_out = Transpose<perm=[1, 2, 0, 3]>({name}_done)
    """


def static(*, channels: bool, way: str = "TensorScatter", points: bool = True) -> ir.Model:
    """Scales that are given, one for each channel or one for all: QuantizeLinear, a write, DequantizeLinear (O2)."""
    size = 16 if channels else 1
    shape = "[16]" if channels else ""
    scales = ", ".join(str(0.02 + 0.002 * index) for index in range(size))
    parts = []
    for x in ("key", "value"):
        zeros = f", {x}_points" if points else ""
        parts.append(f"""
            {x}_given = Constant<value = float{shape} {{{scales}}}>()
            {x}_points = Constant<value = int8{shape} {{{", ".join(["3"] * size)}}}>()
            {x}_new_codes = QuantizeLinear<axis=3>({x}, {x}_given{zeros if points else f", {x}_nought"})
            {x}_scales_out = Identity({x}_scales)
            {x}_zeros_out = Identity({x}_zeros)
            {x}_float = DequantizeLinear<axis=3>({x}_codes_out, {x}_given{zeros})
        """)
        if not points:  # a zero point is what says that the codes are int8
            parts[-1] = f"{x}_nought = Constant<value = int8{shape} {{{', '.join(['0'] * size)}}}>()" + parts[-1]
        scatter = f"{x}_codes_out = TensorScatter<axis=2>({x}_codes, {x}_new_codes, position)"
        place = parts[-1].index(f"{x}_float =")
        write = scatter if way == "TensorScatter" else written(f"{x}_codes", way)
        parts[-1] = parts[-1][:place] + write + parts[-1][place:]
    return model_of(f"{_SLOTS} {''.join(parts)} {_VALID}")


# Each key head for its two query heads, as exporters write it.
def repeated(name: str, source: str, *, times: str = "Expand") -> str:
    counts = "[1, 2, 2, 32, 16]" if times == "Expand" else "[1, 1, 2, 1, 1]"
    return f"""
        {name}_axis = Constant<value_ints=[2]>()
        {name}_between = Unsqueeze({source}, {name}_axis)
        {name}_counts = Constant<value_ints={counts}>()
        {name}_groups = {times}({name}_between, {name}_counts)
        {name}_merged = Constant<value_ints=[1, 4, 32, 16]>()
        {name} = Reshape({name}_groups, {name}_merged)
    """


def written_out(*, guarded: bool = False) -> str:
    """Attention as products and a softmax over repeated heads, in the operators of opset 18 (O7)."""
    guard = """
        nothing = IsNaN(weights)
        nought = Constant<value_float=0.0>()
        guarded = Where(nothing, nought, weights)
    """
    return (
        MASKED.split("output =")[0]
        + repeated("keys", "key_float")
        + repeated("values", "value_float", times="Tile")
        + """
        size = Constant<value_float=16.0>()
        one = Constant<value_float=1.0>()
        root = Sqrt(size)
        scale = Div(one, root)
        half_scale = Sqrt(scale)
        query_scaled = Mul(query, half_scale)
        keys_last = Transpose<perm=[0, 1, 3, 2]>(keys)
        keys_scaled = Mul(keys_last, half_scale)
        scores = MatMul(query_scaled, keys_scaled)
        hidden = Constant<value_float=-inf>()
        masked = Where(mask, scores, hidden)
        weights = Softmax<axis=-1>(masked)
        """.replace("-inf", "-3.4028234e38" if not guarded else "-inf")
        + (guard if guarded else "")
        + f"output = MatMul({'guarded' if guarded else 'weights'}, values)"
    )


REPEATED = (
    repeated("keys", "key_float")
    + repeated("values", "value_float", times="Tile")
    + 'output = Attention<is_causal=1>(query, keys, values, "", "", "", valid)'
)
# com.microsoft: queries packed, keys and values [B,H,kv,D] (O5).
MULTI_HEAD = (
    MASKED.split("output =")[0]
    + repeated("keys", "key_float")
    + repeated("values", "value_float")
    + """
    rows_first = Transpose<perm=[0, 2, 1, 3]>(query)
    packed = Constant<value_ints=[0, 0, 64]>()
    query_packed = Reshape(rows_first, packed)
    visible_bias = Constant<value_float=0.0>()
    hidden_bias = Constant<value_float=-3.4028234e38>()
    bias_flat = Where(mask, visible_bias, hidden_bias)
    bias_axes = Constant<value_ints=[0, 1]>()
    bias = Unsqueeze(bias_flat, bias_axes)
    attended = com.microsoft.MultiHeadAttention<num_heads=4>(query_packed, keys, values, "", "", bias)
    unpacked = Constant<value_ints=[0, 0, 4, 16]>()
    output_rows = Reshape(attended, unpacked)
    output = Transpose<perm=[0, 2, 1, 3]>(output_rows)
    """
)

FORMS = {
    "O1 valid length": build,
    "O1 mask": lambda: build(attention=MASKED),
    "O3 valid length": lambda: build(dequantize=SPELLED),
    "O3 mask": lambda: build(dequantize=SPELLED, attention=MASKED),
    "O1 softcap": lambda: build(replace=(("Attention<is_causal=1>", "Attention<is_causal=1, softcap=2.0>"),)),
    "O2 static, channels": lambda: static(channels=True),
    "O2 static, channels, no zero points": lambda: static(channels=True, points=False),
    "O2 static, one scale": lambda: static(channels=False),
    "O2 static, ScatterND": lambda: static(channels=True, way="ScatterND"),
    "O2 static, ScatterElements": lambda: static(channels=False, way="ScatterElements"),
    "O4 repeated heads": lambda: build(attention=REPEATED),
    "O5 MultiHeadAttention": lambda: build(attention=MULTI_HEAD, domains=', "com.microsoft" : 1'),
    "O7 large negative mask": lambda: build(attention=written_out()),
    "O7 guarded": lambda: build(attention=written_out(guarded=True)),
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


# Caches that grow: the new codes are appended, and every slot is attended to.
GROWING = """
    <ir_version: 10, opset_import: ["" : 23]>
    layer (float[1,4,S,16] query, int8[1,2,S,16] key, int8[1,2,S,16] value, int8[1,2,P,16] past_key,
           int8[1,2,P,16] past_value)
       => (float[1,4,S,16] output, int8[1,2,T,16] present_key, int8[1,2,T,16] present_value)
    {
        scale = Constant<value_float=0.02>()
        present_key = Concat<axis=2>(past_key, key)
        present_value = Concat<axis=2>(past_value, value)
        keys = DequantizeLinear(present_key, scale)
        values = DequantizeLinear(present_value, scale)
        output = Attention(query, keys, values)
    }
"""


def growing_step(past: int, new: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(past)
    codes = {"key": new, "value": new, "past_key": past, "past_value": past}
    rows = {name: random.integers(-128, 128, (1, 2, count, 16), dtype=np.int8) for name, count in codes.items()}
    return {"query": random.standard_normal((1, 4, new, 16), dtype=np.float32), **rows}


# The valid-length form with its attention in a function that calls another.
FUNCTION_DOMAIN = ', "local" : 1'
FUNCTION_CALL = "output = local.layer(query, key_float, value_float, valid)"
FUNCTIONS = """
<domain: "local", opset_import: ["" : 24, "local" : 1]>
layer (q, k, v, n) => (out) { out = local.attend(q, k, v, n) }
<domain: "local", opset_import: ["" : 24]>
attend (q, k, v, n) => (out) { out = Attention<is_causal=1>(q, k, v, "", "", "", n) }
"""
