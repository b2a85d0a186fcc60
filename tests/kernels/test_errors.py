"""Bad arguments: each is an error that names operator, argument and values, and nothing has been written."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from graphrewrite.custom_ops import capi
from graphrewrite.custom_ops.schema import operators
from graphrewrite.errors import KernelError

Arguments = dict[str, Any]

# Every array is different, so that a write shows.
RANDOM = np.random.default_rng(0)


def floats(*shape: int) -> Any:
    return RANDOM.standard_normal(shape, dtype=np.float32)


def codes(*shape: int) -> Any:
    return RANDOM.integers(-128, 128, shape).astype(np.int8)


def good(op: str, cache: str) -> Arguments:
    """Arguments that are all right: B=2, S=3, C=8, Hq=4, Hkv=2, D=16."""
    start = np.array(2)
    if op == "UpdateCache":
        return {"value": floats(2, 3, 2, 16), "cache": floats(2, 8, 2, 16), "start_pos": start} | {
            "new_cache": floats(2, 8, 2, 16)
        }
    if op == "UpdateQuantizedCache":
        state = {"codes": codes(2, 8, 2, 16), "scales": floats(2, 8, 2, 1), "zero_points": codes(2, 8, 2, 1)}
        new = {"new_codes": codes(2, 8, 2, 16), "new_scales": floats(2, 8, 2, 1), "new_zero_points": codes(2, 8, 2, 1)}
        return {"value": floats(2, 3, 2, 16), "start_pos": start} | state | new
    if op == "SdpaWithKvCache":
        caches = {f"{prefix}{name}_cache": floats(2, 8, 2, 16) for prefix in ("", "new_") for name in ("key", "value")}
        rows = {"query": floats(2, 3, 4, 16), "key": floats(2, 3, 2, 16), "value": floats(2, 3, 2, 16)}
        return rows | caches | {"start_pos": start, "output": floats(2, 3, 4, 16), "attn_mask": floats(3, 8)}
    make = codes if cache == "int8" else floats
    arguments = {"query": floats(2, 3, 4, 16), "output": floats(2, 3, 4, 16), "start_pos": start}
    for name in ("key", "value"):
        arguments[f"{name}_cache"] = make(2, 8, 2, 16)
        arguments[f"recent_{name}"] = floats(2, 3, 2, 16)
        if cache == "int8":
            arguments[f"{name}_scales"], arguments[f"{name}_zero_points"] = floats(2, 8, 2, 1), codes(2, 8, 2, 1)
    return arguments | {"attn_mask": np.ones((3, 8), bool)}


def call(op: str, arguments: Arguments) -> None:
    schema = operators()[op]
    inputs, outputs = ([arguments.get(tensor.name) for tensor in group] for group in (schema.inputs, schema.outputs))
    names = {tensor.name for tensor in (*schema.inputs, *schema.outputs)}
    capi.run(op, inputs, outputs, {name: value for name, value in arguments.items() if name not in names})


# Operator, what is changed, and the message. A cache type after the operator where it matters.
ERRORS: list[tuple[str, Arguments, str]] = [
    ("UpdateCache", {"value": None}, "value is missing"),
    ("UpdateCache", {"start_pos": np.array(6)}, "start_pos 6 + 3 new rows exceeds the cache capacity 8"),
    ("UpdateCache", {"start_pos": np.array(-1)}, "start_pos -1 is negative"),
    (
        "UpdateCache",
        {"start_pos": np.array([0, 2**63 - 1])},
        "start_pos 9223372036854775807 of sequence 1 + 3 new rows exceeds the cache capacity 8",
    ),
    (
        "UpdateCache",
        {"start_pos": np.array([0, 1, 2])},
        "start_pos has shape [3], expected a scalar or [2], one position per sequence",
    ),
    ("UpdateCache", {"start_pos": np.array([[0], [1]])}, "start_pos has shape [2,1], expected a scalar or [2]"),
    ("UpdateCache", {"start_pos": np.array(1, np.int32)}, "start_pos has element type int32, expected int64"),
    ("UpdateCache", {"value": codes(2, 3, 2, 16)}, "value has element type int8, expected float32"),
    ("UpdateCache", {"new_cache": codes(2, 8, 2, 16)}, "new_cache has element type int8, expected float32"),
    ("UpdateCache", {"value": floats(2, 3, 2, 8)}, "value has shape [2,3,2,8], expected [2,3,2,16] like the cache"),
    ("UpdateCache", {"value": floats(2, 3, 32)}, "value has shape [2,3,32], expected rank 4 ([B,S,H,D])"),
    ("UpdateCache", {"value": floats(2, 9, 2, 16), "start_pos": np.array(0)}, "start_pos 0 + 9 new rows exceeds"),
    (
        "UpdateCache",
        {"new_cache": floats(2, 7, 2, 16)},
        "new_cache has shape [2,7,2,16], expected [2,8,2,16] like the cache",
    ),
    ("UpdateCache", {"layout": "SBNH"}, 'layout "SBNH" is unknown, expected "BSNH" or "BNSH"'),
    ("UpdateCache", {"layout": "BNSH"}, "value has shape [2,3,2,16], expected [2,8,2,16] like the cache"),
    ("UpdateCache", {"cache": capi.tensor(0, 1, (2, 8, 2, 16))}, "cache of shape [2,8,2,16] has no data"),
    ("UpdateCache", {"cache": capi.tensor(64, 99, (2, 8, 2, 16))}, "cache has element type 99, which is not supported"),
    ("UpdateCache", {"cache": capi.tensor(64, 1, (2, -8, 2, 16))}, "cache has shape [2,-8,2,16], which is negative"),
    ("UpdateCache", {"cache": capi.tensor(64, 1, (2**40, 2**20, 4, 16))}, "exceeds 63-bit offsets"),
    (
        "UpdateCache",
        {"cache": capi.tensor(64, 1, (2, 8, 2, 16), (2**62, 2**62, 16, 1))},
        "cache of shape [2,8,2,16] exceeds 63-bit offsets",
    ),
    ("UpdateCache", {"cache": capi.tensor(64, 1, (2, 8, 2, 16), (-1, 1, 1, 1))}, "cache has the negative stride -1"),
    (
        "UpdateCache",
        {"new_cache": capi.tensor(64, 1, (2, 8, 2, 16), (0, 32, 16, 1))},
        "new_cache has stride 0 in dimension 0, so its elements overlap each other",
    ),
    (
        "UpdateQuantizedCache",
        {"zero_points": None},
        'zero_points is missing, and the scheme "asymmetric" needs it',
    ),
    ("UpdateQuantizedCache", {"new_zero_points": None}, "zero_points is given but new_zero_points is not an output"),
    (
        "UpdateQuantizedCache",
        {"zero_points": None, "scheme": "symmetric"},
        "new_zero_points is an output but zero_points is missing",
    ),
    (
        "UpdateQuantizedCache",
        {"scheme": "affine"},
        'scheme "affine" is unknown, expected one of "asymmetric", "symmetric", "static"',
    ),
    ("UpdateQuantizedCache", {"codes": floats(2, 8, 2, 16)}, "codes has element type float32, expected int8"),
    ("UpdateQuantizedCache", {"scales": codes(2, 8, 2, 1)}, "scales has element type int8, expected float32"),
    (
        "UpdateQuantizedCache",
        {"scales": floats(2, 8, 2, 16)},
        "zero_points has shape [2,8,2,1], expected [2,8,2,16] like codes with one element a group",
    ),
    (
        "UpdateQuantizedCache",
        {"zero_points": codes(2, 8, 1, 1)},
        "zero_points has shape [2,8,1,1], expected [2,8,2,1]",
    ),
    ("UpdateQuantizedCache", {"start_pos": np.array([0, 6])}, "start_pos 6 of sequence 1 + 3 new rows exceeds"),
    ("UpdateQuantizedCache", {"value": codes(2, 3, 2, 16)}, "value has element type int8, expected float32"),
    ("CustomSdpa", {"query": codes(2, 3, 4, 16)}, "query has element type int8, expected float32"),
    ("CustomSdpa", {"query": floats(2, 3, 3, 16), "output": floats(2, 3, 3, 16)}, "query has 3 heads, not a multiple"),
    ("CustomSdpa", {"query": floats(2, 3, 4, 8), "output": floats(2, 3, 4, 8)}, "key_cache has shape [2,8,2,16]"),
    ("CustomSdpa", {"output": floats(2, 3, 4, 8)}, "output has shape [2,3,4,8], expected [2,3,4,16] like query"),
    ("CustomSdpa", {"value_cache": floats(2, 8, 2, 16)}, "value_cache has element type float32, expected int8"),
    ("CustomSdpa", {"value_cache": codes(2, 8, 2, 8)}, "value_cache has shape [2,8,2,8], expected [2,8,2,16]"),
    ("CustomSdpa", {"key_scales": None}, "key_scales is missing, and the int8 key_cache needs it"),
    ("CustomSdpa", {"value_scales": floats(2, 8, 2)}, "value_scales has shape [2,8,2], expected rank 4"),
    ("CustomSdpa", {"key_zero_points": floats(2, 8, 2, 1)}, "key_zero_points has element type float32, expected int8"),
    ("CustomSdpa", {"recent_key": None}, "recent_value is given without recent_key"),
    ("CustomSdpa", {"recent_value": None}, "recent_key is given without recent_value"),
    ("CustomSdpa", {"recent_key": floats(2, 2, 2, 16)}, "recent_key has shape [2,2,2,16], expected [2,3,2,16]"),
    ("CustomSdpa", {"start_pos": np.array(6)}, "start_pos 6 + 3 new rows exceeds the cache capacity 8"),
    ("CustomSdpa", {"attn_mask": np.ones((3, 9), bool)}, "attn_mask covers 9 keys, more than the cache capacity 8"),
    ("CustomSdpa", {"attn_mask": np.ones(8, bool)}, "attn_mask has shape [8], expected rank 2, 3 or 4"),
    (
        "CustomSdpa",
        {"attn_mask": np.ones((2, 1, 3, 8), bool).repeat(3, 1)},
        "attn_mask has shape [2,3,3,8], which does not broadcast to [2,4,3,kv]",
    ),
    ("CustomSdpa", {"attn_mask": codes(3, 8)}, "attn_mask has element type int8, expected bool or float32"),
    ("CustomSdpa", {"scale": float("nan")}, "scale nan is not finite"),
    ("CustomSdpa float", {"key_scales": floats(2, 8, 2, 1)}, "key_scales is given, but key_cache is float32"),
    ("CustomSdpa float", {"value_zero_points": codes(2, 8, 2, 1)}, "value_zero_points is given, but value_cache is"),
    ("SdpaWithKvCache", {"key": floats(2, 2, 2, 16)}, "key has 2 new rows, but query has 3"),
    ("SdpaWithKvCache", {"start_pos": np.array(6)}, "start_pos 6 + 3 new rows exceeds the cache capacity 8"),
    (
        "SdpaWithKvCache",
        dict.fromkeys(["key_cache", "new_key_cache"], codes(2, 8, 2, 16)) | {"key": codes(2, 3, 2, 16)},
        "key_cache has element type int8, expected float32",
    ),
    (
        "SdpaWithKvCache",
        {"value_cache": floats(2, 7, 2, 16)},
        "new_value_cache has shape [2,8,2,16], expected [2,7,2,16]",
    ),
    ("SdpaWithKvCache", {"attn_mask": floats(3, 9)}, "attn_mask covers 9 keys, more than the cache capacity 8"),
    ("SdpaWithKvCache", {"output": floats(2, 3, 2, 16)}, "output has shape [2,3,2,16], expected [2,3,4,16]"),
]


@pytest.mark.parametrize(
    ("target", "change", "message"), ERRORS, ids=lambda value: value if isinstance(value, str) else ""
)
def test_bad_argument(target: str, change: Arguments, message: str) -> None:
    op, cache = [*target.split(), "int8"][:2]
    arguments = good(op, cache) | change
    before = {name: array.copy() for name, array in arguments.items() if isinstance(array, np.ndarray)}
    with pytest.raises(KernelError) as caught:
        call(op, arguments)
    assert str(caught.value).startswith(f"{op}: ")
    assert message in str(caught.value)
    for name, array in before.items():
        np.testing.assert_array_equal(arguments[name], array, err_msg=name)


@pytest.mark.parametrize(
    "target", ["UpdateCache", "UpdateQuantizedCache", "CustomSdpa", "CustomSdpa float", "SdpaWithKvCache"]
)
def test_the_arguments_the_errors_start_from_are_good(target: str) -> None:
    op, cache = [*target.split(), "int8"][:2]
    call(op, good(op, cache))


def shifted(array: Any) -> Any:
    """Two views of one buffer, half of each in the other."""
    buffer = RANDOM.integers(-128, 128, array.size * 3 // 2).astype(array.dtype)
    return buffer[: array.size].reshape(array.shape), buffer[array.size // 2 :].reshape(array.shape)


OVERLAPS = [
    ("UpdateCache", "cache", "new_cache"),
    ("UpdateQuantizedCache", "codes", "new_codes"),
    ("UpdateQuantizedCache", "scales", "new_scales"),
    ("UpdateQuantizedCache", "zero_points", "new_zero_points"),
    ("SdpaWithKvCache", "key_cache", "new_key_cache"),
    ("SdpaWithKvCache", "value_cache", "new_value_cache"),
    ("SdpaWithKvCache", "new_key_cache", "new_value_cache"),
    ("SdpaWithKvCache", "key_cache", "new_value_cache"),
    ("CustomSdpa float", "query", "output"),
]


@pytest.mark.parametrize(("target", "first", "second"), OVERLAPS)
def test_partly_overlapping_buffers_are_an_error(target: str, first: str, second: str) -> None:
    op, cache = [*target.split(), "int8"][:2]
    arguments = good(op, cache)
    arguments[first], arguments[second] = shifted(arguments[first])
    before = {name: array.copy() for name, array in arguments.items()}
    with pytest.raises(KernelError, match="overlaps"):
        call(op, arguments)
    for name, array in before.items():
        np.testing.assert_array_equal(arguments[name], array, err_msg=name)


@pytest.mark.parametrize(
    ("op", "first", "second"),
    [
        ("UpdateCache", "value", "new_cache"),
        ("CustomSdpa", "recent_key", "output"),
        ("CustomSdpa", "query", "output"),
        ("SdpaWithKvCache", "key", "new_key_cache"),
        ("SdpaWithKvCache", "output", "query"),
        ("UpdateQuantizedCache", "new_scales", "value"),
    ],
)
def test_outputs_may_not_be_other_inputs(op: str, first: str, second: str) -> None:
    arguments = good(op, "int8")
    shared = np.ones(max(arguments[first].size, arguments[second].size), np.float32)
    for name in (first, second):
        arguments[name] = shared[: arguments[name].size].reshape(arguments[name].shape)
    with pytest.raises(KernelError, match="overlaps"):
        call(op, arguments)


def test_unknown_numpy_type() -> None:
    with pytest.raises(KernelError, match="complex64 is not supported"):
        capi.from_numpy(np.zeros(1, np.complex64))


def test_arrays_that_no_kernel_can_read() -> None:
    packed = np.zeros((1, 2, 1, 4), [("a", "f4"), ("b", "i1")])
    with pytest.raises(KernelError, match="no multiples of the 4 bytes of an element"):
        capi.from_numpy(packed["a"])
    with pytest.raises(KernelError, match=r">f4.* is not supported"):
        capi.from_numpy(np.zeros(2, ">f4"))
    cache = np.frombuffer(bytes(64), np.float32).reshape(1, 4, 1, 4)
    with pytest.raises(KernelError, match="UpdateCache: an output is an array that may not be written"):
        capi.run("UpdateCache", [np.ones((1, 1, 1, 4), np.float32), cache, np.array(0)], [cache])


@pytest.mark.parametrize("attributes", [{"window": 2**64}, {"layout": "BSNH\0x"}, {"scale": b"1"}], ids=str)
def test_attributes_that_no_kernel_can_read(attributes: Arguments) -> None:
    with pytest.raises(KernelError, match=f"CustomSdpa: attribute {next(iter(attributes))} is .*, expected a string"):
        call("CustomSdpa", good("CustomSdpa", "int8") | attributes)


def test_elements_lie_at_multiples_of_their_size() -> None:
    memory = np.zeros(4 * 16 + 1, np.int8)
    output = capi.tensor(memory.ctypes.data + 1, capi.DTYPES["float32"], (1, 16))
    with pytest.raises(KernelError, match="values does not lie at a multiple of the 4 bytes of its elements"):
        capi.run("DequantizePerToken", [np.zeros((1, 16), np.int8), np.ones((1, 1), np.float32)], [output])


def test_a_tensor_of_more_bytes_than_there_are_numbers() -> None:
    one = np.zeros(1, np.float32)
    row = capi.tensor(one.ctypes.data, capi.DTYPES["float32"], (1, 2**62), (0, 0))
    with pytest.raises(KernelError, match="exceeds 63-bit offsets"):
        capi.run("ChooseQParamsPerToken", [row], [np.zeros((1, 1)), np.zeros((1, 1), np.int64)])


def test_scales_of_keys_and_values_are_of_one_type() -> None:
    change = {"key_scales": np.ones(16), "value_scales": np.ones(16, np.float32)}
    with pytest.raises(KernelError, match="key_scales has element type float64 and value_scales float32"):
        call("CustomSdpa", good("CustomSdpa", "int8") | change)


def test_long_messages_are_cut() -> None:
    with pytest.raises(KernelError) as caught:
        call("UpdateCache", good("UpdateCache", "float") | {"layout": "x" * 5000})
    assert len(str(caught.value)) == 1023
