"""Faults that other implementations of these operators have had, each pinned where it applies to ours.

The threads named are public reports of the fault elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import onnxruntime as ort
import pytest

from graphrewrite.custom_ops import capi
from graphrewrite.custom_ops.schema import operators
from graphrewrite.errors import KernelError
from tests.calls import Call, model_of, node_of, session
from tests.kernels.calls import custom_sdpa, instruction_set
from tests.kernels.cases import ISAS, check
from tests.kernels.memory import forbid, guarded
from tests.kernels.reference import Array, make_sdpa, quantize, update_cache


@pytest.fixture(params=ISAS)
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """The test runs on every instruction set."""
    with instruction_set(request.param):
        yield request.param


def run(op: str, *inputs: Any, **attributes: Any) -> list[Array]:
    """An operator with outputs of its own, by the rules of its declaration."""
    arrays = [None if value is None else np.asarray(value) for value in inputs]
    schema = operators()[op]
    outputs: list[Array | None] = []
    for output in schema.outputs:
        like = arrays[output.like] if output.like < len(arrays) else None
        if like is None:
            outputs.append(None)
            continue
        same = [
            array for tensor, array in zip(schema.inputs, arrays, strict=False) if tensor.variable == output.variable
        ]
        dtype = np.dtype(output.dtypes[0]) if output.variable is None or same[0] is None else same[0].dtype
        outputs.append(np.zeros((*like.shape[:-1], 1) if output.per_row else like.shape, dtype))
    capi.run(op, arrays, outputs, attributes)
    return [output for output in outputs if output is not None]


# Numerics


@pytest.mark.parametrize(
    ("rounding", "expected"),
    [("after_zero_point", [0, 2, 2, 4]), ("before_zero_point", [1, 1, 3, 3])],
)
def test_01_the_zero_point_joins_before_or_after_rounding(isa: str, rounding: str, expected: list[int]) -> None:
    """Ties with an odd zero point differ by one code between the two orders (pytorch/ao#1964)."""
    x = np.array([[-0.5, 0.5, 1.5, 2.5]], np.float32)
    (codes,) = run("QuantizePerToken", x, [[np.float32(1)]], [[np.int8(1)]], rounding=rounding)
    np.testing.assert_array_equal(codes, [expected])


def test_02_an_int8_zero_point_is_not_subtracted_in_int8(isa: str) -> None:
    """127 - (-128) is 255, not -1 (executorch#20655)."""
    codes, scales, zeros = np.array([[127]], np.int8), np.array([[1.0]], np.float32), np.array([[-128]], np.int8)
    assert run("DequantizePerToken", codes, scales, zeros)[0] == [[255]]
    assert run("DequantizePerChannel", codes, scales[0], zeros[0])[0] == [[255]]


def test_03_long_prefills_stay_within_a_derived_tolerance(isa: str) -> None:
    """A fixed 1e-6 flakes from 512 rows on (executorch#22904)."""
    arguments = make_sdpa(np.random.default_rng(3), rows=520, capacity=520, dim=64, is_causal=True)
    check(custom_sdpa(arguments), arguments)


@pytest.mark.parametrize("start", [1, 63, 511, 513, 700])
@pytest.mark.parametrize("rows", [2, 65, 100])
def test_04_causal_limits_fall_inside_blocks_of_keys(isa: str, start: int, rows: int) -> None:
    """Chunks whose start is no multiple of any block (executorch#9105)."""
    arguments = make_sdpa(
        np.random.default_rng(4),
        rows=rows,
        capacity=start + rows + 9,
        start=start,
        heads=(2, 1),
        dim=32,
        is_causal=True,
    )
    check(custom_sdpa(arguments), arguments)


def test_05_decoding_splits_long_caches_over_threads(isa: str) -> None:
    """One row, a long cache, several threads, after a prefill (executorch#4322, #4319)."""
    arguments = make_sdpa(np.random.default_rng(5), capacity=6001, start=6000, heads=(4, 2), dim=64, is_causal=True)
    one = custom_sdpa(arguments)
    check(one, arguments)
    for threads in (2, 3, 7):
        np.testing.assert_array_equal(custom_sdpa(arguments, threads=threads), one)


@pytest.mark.parametrize("rows", [1, 5, 70])
def test_06_start_pos_counts_with_a_mask_too(isa: str, rows: int) -> None:
    """A mask that hides nothing leaves causality as it was, counted from start_pos (optimum-executorch#77)."""
    arguments = make_sdpa(np.random.default_rng(6), rows=rows, capacity=rows + 20, start=11, dim=32, is_causal=True)
    masked = replace(arguments, attn_mask=np.ones((rows, rows + 20), bool))
    check(custom_sdpa(masked), arguments)


@pytest.mark.parametrize("mask", ["bool", "float", "float16", "bfloat16"])
def test_07_a_row_that_sees_nothing_gives_zeros(isa: str, mask: str) -> None:
    """Not NaN and not the mean of the values (onnxscript#2479, onnxruntime#28904, pytorch#103749)."""
    arguments = make_sdpa(np.random.default_rng(7), rows=3, capacity=9, mask=mask)
    assert arguments.attn_mask is not None
    arguments.attn_mask[1] = False if mask == "bool" else -np.inf
    assert not custom_sdpa(arguments)[:, 1].any()


def test_08_the_clamp_comes_last_and_schemes_are_not_mixed_up(isa: str) -> None:
    """A zero point added after the clamp leaves the range (executorch#2167), symmetric is not asymmetric (#2166)."""
    x = np.array([[-300.0, 300.0, 0.0]], np.float32)
    for rounding in ("after_zero_point", "before_zero_point"):
        (codes,) = run("QuantizePerToken", x, [[np.float32(1)]], [[np.int8(100)]], rounding=rounding)
        np.testing.assert_array_equal(codes, [[-128, 127, 100]])
    value = np.array([1.0, 2.0, 3.0, 4.0], np.float32).reshape(1, 1, 1, 4)
    cache = [np.zeros((1, 1, 1, 4), np.int8), np.zeros((1, 1, 1, 1), np.float32)]
    points = np.zeros((1, 1, 1, 1), np.int8)
    for scheme in ("symmetric", "asymmetric"):
        results = run("UpdateQuantizedCache", value, *cache, 0, points, scheme=scheme)
        for result, expected in zip(results, quantize(value, scheme), strict=True):
            np.testing.assert_array_equal(result, expected)
    with pytest.raises(KernelError, match="zero_points has element type float32"):  # executorch#6152
        run("UpdateQuantizedCache", value, *cache, 0, points.astype(np.float32))


@pytest.mark.parametrize("scales", [np.float32, np.float64])
@pytest.mark.parametrize("zeros", [np.int8, np.int32, np.int64])
def test_09_scales_and_zero_points_are_read_at_their_own_width(isa: str, scales: Any, zeros: Any) -> None:
    """float64 scales (executorch#5524), int32 zero points read as int64 (#21773)."""
    codes = np.arange(-64, 64, dtype=np.int8).reshape(16, 8)
    scale, zero = np.linspace(0.1, 0.8, 8).astype(scales), np.arange(-4, 4).astype(zeros)
    expected = ((codes.astype(np.int64) - zero).astype(scales) * scale).astype(np.float32)
    np.testing.assert_array_equal(run("DequantizePerChannel", codes, scale, zero)[0], expected)
    (back,) = run("QuantizePerChannel", expected, scale, zero)
    np.testing.assert_array_equal(back, codes)


@pytest.mark.parametrize("rows", [1, 40])
def test_10_half_precision_meets_other_types_and_large_scores(isa: str, rows: int) -> None:
    """A bfloat16 query over a float32 cache (executorch#20133), softmax in float32 (onnxruntime#22102), and scores
    beyond the range of float16 under a softcap (onnxruntime-genai#876)."""
    mixed = make_sdpa(
        np.random.default_rng(10), rows=rows, capacity=99, start=50, dtype="bfloat16", cache="float32", dim=64
    )
    check(custom_sdpa(mixed), mixed)
    large = make_sdpa(
        np.random.default_rng(10),
        rows=rows,
        capacity=99,
        start=50,
        dtype="float16",
        cache="float16",
        dim=64,
        softcap=50.0,
    )
    large.query *= np.float16(1e3)
    large.key_cache *= np.float16(1e3)
    output = custom_sdpa(large)
    assert np.isfinite(output).all()
    check(output, large)


@pytest.mark.parametrize("rows", [1, 40])
def test_11_softcap_meets_a_mask_and_batches_their_strides(isa: str, rows: int) -> None:
    """Minus infinity stays so whatever the softcap (onnx#8054); quantized caches of several sequences
    (onnxruntime#28963)."""
    arguments = make_sdpa(
        np.random.default_rng(11),
        batch=3,
        rows=rows,
        capacity=rows + 30,
        start=(0, 30, 17),
        heads=(4, 2),
        dim=40,
        mask="float",
        softcap=5.0,
        is_causal=True,
    )
    for layout in ("BSNH", "BNSH"):
        check(custom_sdpa(arguments, layout=layout), arguments)


@pytest.mark.parametrize("scheme", ["asymmetric", "symmetric"])
@pytest.mark.parametrize("codes", [np.int8, np.uint8])
def test_11_scales_are_never_zero_and_rows_may_be_anything(isa: str, scheme: str, codes: Any) -> None:
    """Rows of zeros, of subnormal numbers, with NaN and with infinity."""
    value = np.zeros((1, 5, 1, 32), np.float32)
    value[0, 1], value[0, 2, 0, ::2], value[0, 3, 0, 3], value[0, 4, 0, 5] = 1e-42, 1e-40, np.nan, np.inf
    packed = np.zeros((1, 5, 1, 32 if codes is np.int8 else 16), codes)
    parameters = np.zeros((1, 5, 1, 1))
    results = run(
        "UpdateQuantizedCache", value, packed, parameters.astype(np.float32), 0, parameters.astype(codes), scheme=scheme
    )
    assert (results[1][0, :3] > 0).all()
    rows = make_sdpa(
        np.random.default_rng(0), rows=1, capacity=3, start=2, dim=32, cache="int8" if codes is np.int8 else "int4"
    )
    rows.value_cache, rows.value_scales, rows.value_zero_points = (result[:, :3] for result in results)
    output = custom_sdpa(rows)
    assert np.isfinite(output).all()
    assert np.abs(output).max() < 1e-5  # the least step of either scheme


# Caches


def test_12_a_ring_keeps_the_last_rows_and_touches_no_others(isa: str) -> None:
    """Slots not yet written stay as they were (executorch#17252), of more rows than slots the last ones stay (#18860),
    and indices outside the cache are errors (#15605)."""
    cache = np.full((1, 6, 1, 1), -1, np.float32)
    rows = np.arange(20, dtype=np.float32).reshape(1, 20, 1, 1)
    (first,) = run("UpdateCache", rows[:, :3], cache, 4, write_mode="circular")
    np.testing.assert_array_equal(first.ravel(), [2, -1, -1, -1, 0, 1])
    (last,) = run("UpdateCache", rows, cache, 4, write_mode="circular")
    np.testing.assert_array_equal(last, update_cache(rows, cache, np.array(4), "circular"))
    np.testing.assert_array_equal(np.sort(last.ravel()), [14, 15, 16, 17, 18, 19])
    (doubled,) = run("UpdateCacheWithIndices", rows[:, :3], cache, [[2, 0, 2]])
    np.testing.assert_array_equal(doubled.ravel(), [1, -1, 2, -1, -1, -1])
    for indices in ([[0, 6, 1]], [[0, -1, 1]]):
        with pytest.raises(KernelError, match=rf"UpdateCacheWithIndices: indices .*{indices[0][1]}"):
            run("UpdateCacheWithIndices", rows[:, :3], cache, indices)


@pytest.mark.parametrize("layout", ["BSNH", "BNSH"])
def test_13_cost_follows_the_valid_length_and_not_the_capacity(isa: str, layout: str) -> None:
    """Memory behind the valid length is never touched, neither by a write in place nor by attention: it may not be,
    here (onnxruntime#31150, #29686)."""
    arguments = make_sdpa(np.random.default_rng(13), rows=2, capacity=8192, start=10, dim=64, cache="float32")
    expected = custom_sdpa(arguments)
    arguments.key_cache, arguments.value_cache = guarded(arguments.key_cache), guarded(arguments.value_cache)
    for cache in (arguments.key_cache, arguments.value_cache):
        forbid(cache, 4096, cache.nbytes)
    np.testing.assert_array_equal(custom_sdpa(arguments), expected)
    order = [0, 1, 2, 3] if layout == "BSNH" else [0, 2, 1, 3]  # of one head, the same memory
    value, cache = np.ones((1, 2, 1, 64), np.float32), arguments.key_cache.transpose(order)
    capi.run("UpdateCache", [value.transpose(order), cache, np.array(12)], [cache], {"layout": layout})
    assert (arguments.key_cache[0, 12:14] == 1).all()


def test_14_a_ring_turns_along_the_sequence_alone(isa: str) -> None:
    """Heads and elements beyond the capacity are no positions (onnx#8353); a length of -1 for an idle sequence is an
    error that says so (onnxruntime#28031)."""
    cache, rows = np.zeros((2, 3, 5, 7), np.float32), np.arange(140, dtype=np.float32).reshape(2, 2, 5, 7)
    for layout in ("BSNH", "BNSH"):
        order = [0, 1, 2, 3] if layout == "BSNH" else [0, 2, 1, 3]
        (result,) = run(
            "UpdateCache", rows.transpose(order), cache.transpose(order), [2, 7], write_mode="circular", layout=layout
        )
        np.testing.assert_array_equal(result.transpose(order), update_cache(rows, cache, np.array([2, 7]), "circular"))
    for mode in ("linear", "circular"):
        with pytest.raises(KernelError, match="start_pos -1 of sequence 1 is negative"):
            run("UpdateCache", rows, cache, [0, -1], write_mode=mode)


def test_15_bound_buffers_are_those_of_the_last_binding() -> None:
    """A rebind is followed (onnxruntime#11096), and an input whose output is not bound to it stays (#26262)."""
    value = np.ones((1, 1, 1, 2), np.float32)
    caches = [np.zeros((1, 4, 1, 2), np.float32), np.full((1, 4, 1, 2), 5, np.float32)]
    call = Call("UpdateCache", {"value": value, "cache": caches[0], "start_pos": np.array(2)}, ("new_cache",))
    loaded = session(model_of(node_of(call)), library=True)
    binding = loaded.io_binding()
    kept = [ort.OrtValue.ortvalue_from_numpy(cache) for cache in caches]
    binding.bind_cpu_input("value", value)
    binding.bind_cpu_input("start_pos", np.array(2))
    for index in (0, 1, 0):
        binding.bind_ortvalue_input("cache", kept[index])
        binding.bind_ortvalue_output("new_cache", kept[index])
        before = [value.numpy().copy() for value in kept]
        loaded.run_with_iobinding(binding)
        np.testing.assert_array_equal(kept[index].numpy(), update_cache(value, before[index], np.array(2)))
        np.testing.assert_array_equal(kept[1 - index].numpy(), before[1 - index])
    fresh = ort.OrtValue.ortvalue_from_numpy(caches[0])
    binding.bind_ortvalue_input("cache", fresh)
    binding.bind_output("new_cache")
    loaded.run_with_iobinding(binding)
    np.testing.assert_array_equal(fresh.numpy(), caches[0])
    np.testing.assert_array_equal(binding.copy_outputs_to_cpu()[0], update_cache(value, caches[0], np.array(2)))


def test_10_bfloat16_is_rounded_to_nearest_even() -> None:
    """One value, so the result is that value in float32, rounded once."""
    arguments = make_sdpa(np.random.default_rng(0), capacity=1, dim=4, dtype="bfloat16", cache="float32")
    arguments.value_cache[0, 0, 0] = [1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-20, -(1 + 2**-8)]
    for isa in ISAS:
        with instruction_set(isa):
            expected = arguments.value_cache.astype(ml_dtypes.bfloat16)
            np.testing.assert_array_equal(custom_sdpa(arguments), expected)
