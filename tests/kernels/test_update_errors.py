"""Bad arguments of the operators that quantize or write caches: each is an error that names operator, argument and
values, and nothing has been written."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from graphrewrite.custom_ops import capi
from graphrewrite.custom_ops.schema import operators
from graphrewrite.errors import KernelError
from tests.kernels.reference import Array
from tests.kernels.test_quantized_updates import quantized_state

Arguments = dict[str, Any]
QUANTIZED = "UpdateQuantizedCache asymmetric int8"
INT4 = "UpdateQuantizedCache asymmetric int4"
STATIC = "UpdateQuantizedCache static int8"


def good(target: str) -> Arguments:
    """Arguments that are all right. Caches have B=2, S=3, C=8, H=2, D=16; what stands alone is [4,6]. `target`: an
    operator, and for UpdateQuantizedCache a scheme and codes."""
    op = target.split()[0]
    if op == "UpdateQuantizedCache":
        return quantized(*target.split()[1:])
    random = np.random.default_rng(10)
    value, cache, new_cache = (random.standard_normal((2, size, 2, 16)).astype(np.float32) for size in (3, 8, 8))
    parameters = (6,) if "Channel" in op else (4, 1)
    known: Arguments = {
        "value": value,
        "cache": cache,
        "new_cache": new_cache,
        "start_pos": np.array(2),
        "indices": np.array([[1, 2, 3]]),
        "input": np.ones((4, 6), np.float32),
        "codes": np.ones((4, 6), np.int8),
        "values": np.ones((4, 6), np.float32),
        "scales": np.ones(parameters, np.float64),
        "zero_points": np.ones(parameters, np.int64),
    }
    declared = operators()[op]
    return {tensor.name: known[tensor.name] for tensor in (*declared.inputs, *declared.outputs)}


def quantized(scheme: str, codes: str) -> Arguments:
    random = np.random.default_rng(10)
    value = random.standard_normal((2, 3, 2, 16)).astype(np.float32)
    arguments: Arguments = {"value": value, "start_pos": np.array(2), "scheme": scheme}
    for prefix in ("", "new_"):
        state = quantized_state(random, 2, 8, 2, 16, codes, 2)
        arguments |= {f"{prefix}{name}": part for name, part in zip(PARTS, state, strict=True)}
    if scheme == "static":
        given = {"scales": np.full((2, 16), 0.5, np.float64), "zero_points": arguments["zero_points"][0, 0, :, :1]}
        arguments |= given | dict.fromkeys(("new_scales", "new_zero_points"))
    return arguments


def call(target: str, arguments: Arguments) -> None:
    declared = operators()[target.split()[0]]
    names = [tensor.name for tensor in (*declared.inputs, *declared.outputs)]
    tensors = [arguments[name] for name in names]
    count = len(declared.inputs)
    attributes = {name: value for name, value in arguments.items() if name not in names}
    capi.run(declared.name, tensors[:count], tensors[count:], attributes)


def wrong_scale(scale: float) -> Array:
    scales = np.full((2, 16), 0.5)
    scales[1, 3] = scale
    return scales


PARTS = ("codes", "scales", "zero_points")
SHARED = np.zeros(96, np.uint8)
ERRORS: list[tuple[str, Arguments, str]] = [
    ("UpdateCache", {"write_mode": "ring"}, 'write_mode "ring" is unknown'),
    (
        "UpdateCache",
        {"write_mode": "circular", "start_pos": np.array([3, -1])},
        "start_pos -1 of sequence 1 is negative",
    ),
    (
        "UpdateCache",
        {"write_mode": "circular"} | dict.fromkeys(["cache", "new_cache"], np.zeros((2, 0, 2, 16), np.float32)),
        "the cache capacity 0 leaves no slot for 3 new rows",
    ),
    (
        "UpdateCacheWithIndices",
        {"indices": np.array([1, 8, 0])},
        "indices has 8 for row 1, outside the cache of capacity 8",
    ),
    (
        "UpdateCacheWithIndices",
        {"indices": np.array([[1, 2, 3], [4, 5, -1]])},
        "indices has -1 for row 2 of sequence 1, outside the cache of capacity 8",
    ),
    (
        "UpdateCacheWithIndices",
        {"indices": np.zeros((3, 3), np.int64)},
        "indices has shape [3,3], expected [2,3], [1,3] or [3], one slot per row of value",
    ),
    (
        "UpdateCacheWithIndices",
        {"indices": np.zeros(2, np.int64)},
        "indices has shape [2], expected [2,3], [1,3] or [3]",
    ),
    ("UpdateCacheWithIndices", {"indices": np.array(1)}, "indices has shape [], expected [2,3]"),
    ("UpdateCacheWithIndices", {"indices": np.zeros(3, np.int32)}, "indices has element type int32, expected int64"),
    ("UpdateCacheWithIndices", {"value": np.zeros((2, 3, 2, 16))}, "value has element type float64, expected float32"),
    (QUANTIZED, {"scheme": "affine"}, 'scheme "affine" is unknown'),
    (QUANTIZED, {"rounding": "up"}, 'rounding "up" is unknown'),
    (QUANTIZED, {"write_mode": "ring"}, 'write_mode "ring" is unknown'),
    (QUANTIZED, {"zero_points": None}, 'zero_points is missing, and the scheme "asymmetric" needs it'),
    (QUANTIZED, {"new_scales": None}, "new_scales is missing"),
    (QUANTIZED, {"new_zero_points": None}, "zero_points is given but new_zero_points is not an output"),
    (
        QUANTIZED,
        {"zero_points": None, "scheme": "symmetric"},
        "new_zero_points is an output but zero_points is missing",
    ),
    (QUANTIZED, {"value": np.zeros((2, 3, 2, 16))}, "value has element type float64, expected float32 or float16"),
    (QUANTIZED, {"codes": np.zeros((2, 8, 2, 16), np.int32)}, "codes has element type int32, expected int8 or uint8"),
    (
        QUANTIZED,
        {"value": np.zeros((2, 3, 2, 8), np.float32)},
        "value has shape [2,3,2,8], expected [2,3,2,16] like codes",
    ),
    (QUANTIZED, {"scales": np.ones((2, 8, 2, 2))}, "scales has element type float64, expected float32"),
    (QUANTIZED, {"scales": np.ones((2, 8, 2, 3), np.float32)}, "3 groups do not divide rows of 16 elements"),
    (QUANTIZED, {"scales": np.ones((2, 8, 2, 0), np.float32)}, "0 groups do not divide rows of 16 elements"),
    (
        QUANTIZED,
        {"scales": np.ones((2, 7, 2, 2), np.float32)},
        "scales has shape [2,7,2,2], expected [2,8,2,2] like codes",
    ),
    (
        QUANTIZED,
        {"zero_points": np.zeros((2, 8, 2, 1), np.int8)},
        "zero_points has shape [2,8,2,1], expected [2,8,2,2]",
    ),
    (QUANTIZED, {"zero_points": np.zeros((2, 8, 2, 2), np.uint8)}, "zero_points has element type uint8, expected int8"),
    (QUANTIZED, {"start_pos": np.array(6)}, "start_pos 6 + 3 new rows exceeds the cache capacity 8"),
    (
        INT4,
        {"value": np.zeros((2, 3, 2, 15), np.float32)},
        "value has shape [2,3,2,15], expected [2,3,2,16] like codes, which",
    ),
    (INT4, {"scales": np.ones((2, 8, 2, 16), np.float32)}, "groups of 1 elements share bytes of int4 codes"),
    (STATIC, {"new_scales": np.ones((2, 16))}, 'new_scales is an output, and the scheme "static" changes neither'),
    (STATIC, {"new_zero_points": np.zeros((2, 1), np.int8)}, "new_zero_points is an output, and the scheme"),
    (STATIC, {"scales": np.ones(8)}, "scales has shape [8], expected one that broadcasts to [2,16]"),
    (STATIC, {"scales": np.ones((2, 8, 2, 1))}, "scales has shape [2,8,2,1], expected one that broadcasts to [2,16]"),
    (STATIC, {"zero_points": np.zeros((16, 2), np.int8)}, "zero_points has shape [16,2], expected one that broadcasts"),
    (STATIC, {"zero_points": np.zeros((), np.uint8)}, "zero_points has element type uint8, expected int8"),
    (
        STATIC,
        {"scales": wrong_scale(np.nan)},
        "scales has nan for element 3 of head 1, expected a positive finite number",
    ),
    (STATIC, {"scales": wrong_scale(np.inf)}, "scales has inf for element 3 of head 1"),
    (STATIC, {"scales": wrong_scale(0)}, "scales has 0.000000 for element 3 of head 1"),
    (STATIC, {"scales": wrong_scale(-1)}, "scales has -1.000000 for element 3 of head 1"),
    (
        "ChooseQParamsPerToken",
        {"input": np.ones((4, 6))},
        "input has element type float64, expected float32 or float16",
    ),
    ("ChooseQParamsPerToken", {"input": np.array(1, np.float32)}, "input has shape [], expected rank 1 or more"),
    ("ChooseQParamsPerToken", {"input": np.ones((4, 0), np.float32)}, "rows without elements have no scale"),
    ("ChooseQParamsPerToken", {"scales": np.ones((4, 2))}, "scales has shape [4,2], expected one element for each row"),
    ("ChooseQParamsPerToken", {"zero_points": np.ones((4, 1))}, "zero_points has element type float64, expected int64"),
    ("ChooseQParamsPerToken", {"scheme": "static"}, 'scheme "static" is unknown'),
    (
        "ChooseQParamsPerToken",
        {"scales": SHARED[:32].view(np.float64).reshape(4, 1), "zero_points": SHARED[:32].view(np.int64).reshape(4, 1)},
        "overlaps",
    ),
    ("QuantizePerToken", {"scales": np.ones((6, 1))}, "scales has shape [6,1], expected [4,1] for the rows of input"),
    ("QuantizePerToken", {"zero_points": np.ones(4, np.int8)}, "zero_points has shape [4], expected [4,1]"),
    (
        "QuantizePerToken",
        {"scales": np.ones((4, 1), np.float16)},
        "scales has element type float16, expected float32 or",
    ),
    (
        "QuantizePerToken",
        {"zero_points": np.ones((4, 1))},
        "zero_points has element type float64, expected int8 or int32",
    ),
    ("QuantizePerToken", {"codes": np.ones((4, 6), np.uint8)}, "codes has element type uint8, expected int8"),
    ("QuantizePerToken", {"codes": np.ones((6, 4), np.int8)}, "codes has shape [6,4], expected [4,6] like input"),
    ("QuantizePerToken", {"quant_min": -129}, "quant_min -129 and quant_max 127 are no range within [-128, 127]"),
    ("QuantizePerToken", {"quant_max": 128}, "quant_min -128 and quant_max 128 are no range"),
    ("QuantizePerToken", {"quant_min": 5, "quant_max": 4}, "quant_min 5 and quant_max 4 are no range"),
    ("QuantizePerToken", {"rounding": "up"}, 'rounding "up" is unknown'),
    (
        "QuantizePerToken",
        {"input": SHARED.view(np.float32).reshape(4, 6), "codes": SHARED[72:].view(np.int8).reshape(4, 6)},
        "codes overlaps input in memory",
    ),
    ("QuantizePerChannel", {"axis": 2}, "axis 2 is outside [-2, 1] for input of shape [4,6]"),
    ("QuantizePerChannel", {"axis": -3}, "axis -3 is outside [-2, 1]"),
    ("QuantizePerChannel", {"axis": 0}, "scales has shape [6], expected [4] for the channels of axis 0 of input"),
    ("QuantizePerChannel", {"zero_points": np.ones(1, np.int64)}, "zero_points has shape [1], expected [6]"),
    (
        "DequantizePerToken",
        {"codes": np.ones((4, 6), np.int32)},
        "codes has element type int32, expected int8 or uint8",
    ),
    ("DequantizePerToken", {"values": np.ones((4, 6))}, "values has element type float64, expected float32"),
    (
        "DequantizePerToken",
        {"values": np.ones((4, 5), np.float32)},
        "values has shape [4,5], expected [4,6] like codes",
    ),
    ("DequantizePerChannel", {"scales": np.ones((6, 1))}, "scales has shape [6,1], expected [6]"),
    (
        "DequantizePerChannel",
        {"values": SHARED.view(np.float32).reshape(4, 6), "scales": SHARED[:48].view(np.float64)},
        "values overlaps scales in memory",
    ),
]


@pytest.mark.parametrize(
    ("target", "change", "message"), ERRORS, ids=[f"{target}-{message[:40]}" for target, _, message in ERRORS]
)
def test_errors(target: str, change: Arguments, message: str) -> None:
    arguments = good(target) | change
    before = {name: array.copy() for name, array in arguments.items() if isinstance(array, np.ndarray)}
    with pytest.raises(KernelError) as caught:
        call(target, arguments)
    assert str(caught.value).startswith(f"{target.split()[0]}: ")
    assert message in str(caught.value)
    for name, array in before.items():
        np.testing.assert_array_equal(arguments[name], array, err_msg=name)


@pytest.mark.parametrize("target", sorted({target for target, _, _ in ERRORS}))
def test_the_arguments_the_errors_start_from_are_good(target: str) -> None:
    call(target, good(target))


@pytest.mark.parametrize(
    ("target", "first", "second"),
    [
        ("UpdateCacheWithIndices", "cache", "new_cache"),
        ("UpdateCacheWithIndices", "value", "new_cache"),
        (QUANTIZED, "codes", "new_codes"),
        (QUANTIZED, "zero_points", "new_zero_points"),
        (QUANTIZED, "value", "new_codes"),
        (QUANTIZED, "new_codes", "new_scales"),
        (INT4, "scales", "new_scales"),
        (INT4, "new_zero_points", "codes"),
        (STATIC, "scales", "new_codes"),
        (STATIC, "new_codes", "zero_points"),
    ],
)
def test_partly_overlapping_buffers_are_an_error(target: str, first: str, second: str) -> None:
    arguments = good(target)
    buffer = np.zeros(8192, np.uint8)
    for name, begin in ((first, 0), (second, 8)):
        array = arguments[name]
        arguments[name] = buffer[begin : begin + array.nbytes].view(array.dtype).reshape(array.shape)
    arguments[first][...] = 1
    before = buffer.copy()
    with pytest.raises(KernelError, match="overlaps"):
        call(target, arguments)
    np.testing.assert_array_equal(buffer, before)
