"""The attention operators three ways: function body and kernel in onnxruntime, and torch operator."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.calls import INF, NAN, WAYS, assert_attends, joint_call, layouts, sdpa_call, ways, ways_once
from tests.kernels import reference
from tests.kernels.reference import make_sdpa, to_layout
from tests.sdpa_cases import JOINT_CASES, POSITIONS_AND_MASKS, SDPA_CASES


def taking_turns(case: str) -> str:
    """A layout for each case, so that all cases together try both."""
    return ("BSNH", "BNSH")[list(SDPA_CASES).index(case) % 2]


@ways
@layouts
@pytest.mark.parametrize("case", POSITIONS_AND_MASKS)
def test_attention_equals_the_reference(way: str, layout: str, case: str) -> None:
    arguments = make_sdpa(np.random.default_rng(5), **SDPA_CASES[case])
    assert_attends(WAYS[way](sdpa_call(arguments, layout))[0], arguments, layout)


@ways
@pytest.mark.parametrize("case", [case for case in SDPA_CASES if case not in POSITIONS_AND_MASKS])
def test_attention_of_every_kind_equals_the_reference(way: str, case: str) -> None:
    arguments = make_sdpa(np.random.default_rng(5), **SDPA_CASES[case])
    layout = taking_turns(case)
    assert_attends(WAYS[way](sdpa_call(arguments, layout))[0], arguments, layout)


@ways_once
@pytest.mark.parametrize("dim", [32, 40, 100, 256])
@pytest.mark.parametrize("heads", [(4, 1), (3, 3)])
def test_head_sizes(way: str, dim: int, heads: tuple[int, int]) -> None:
    cache = ("int8", "int4", "bfloat16", "float")[(32, 40, 100, 256).index(dim)]
    arguments = make_sdpa(
        np.random.default_rng(5), rows=3, start=9, dim=dim, heads=heads, cache=cache, is_causal=True, recent=True
    )
    assert_attends(WAYS[way](sdpa_call(arguments))[0], arguments)


@ways_once
@pytest.mark.parametrize("facts", [{}, {"cache": "int4", "groups": 2}, {"window": 9, "sink_tokens": 2}], ids=str)
def test_a_prefill_in_chunks_equals_one_prefill(way: str, facts: dict[str, Any]) -> None:
    whole = make_sdpa(np.random.default_rng(4), rows=40, capacity=48, heads=(4, 2), is_causal=True, **facts)
    (expected,) = WAYS[way](sdpa_call(whole))
    for begin, end in [(0, 16), (16, 17), (17, 40)]:
        chunk = replace(whole, query=whole.query[:, begin:end], start_pos=np.asarray(begin))
        (result,) = WAYS[way](sdpa_call(chunk))
        assert_attends(result, chunk)
        bound = reference.sdpa_with_bound(chunk, lanes=1)[1]
        # Either is within the bound of the exact result.
        assert (np.abs(result - expected[:, begin:end]) <= 2 * bound).all()


# What must not happen


@ways_once
@pytest.mark.parametrize("cache", ["float", "int8", "int4"])
@pytest.mark.parametrize("mask", ["bool", "float"])
@pytest.mark.parametrize("facts", [{}, {"recent": True}, {"sinks": True, "softcap": 2.0}], ids=str)
def test_a_row_that_sees_nothing_yields_zeros(way: str, cache: str, mask: str, facts: dict[str, Any]) -> None:
    arguments = make_sdpa(np.random.default_rng(6), rows=3, start=4, heads=(2, 1), cache=cache, mask=mask, **facts)
    assert arguments.attn_mask is not None
    arguments.attn_mask[1] = False if mask == "bool" else -INF
    (result,) = WAYS[way](sdpa_call(arguments))
    np.testing.assert_array_equal(result[:, 1], 0)
    assert_attends(result, arguments)


@ways_once
@pytest.mark.parametrize("facts", [{"recent": True, "is_causal": True}, {"mask": "float"}], ids=str)
@pytest.mark.parametrize("sink", [-INF, -40.0, 0.0, 40.0])
def test_sinks_of_any_size(way: str, sink: float, facts: dict[str, Any]) -> None:
    arguments = make_sdpa(np.random.default_rng(6), rows=3, start=4, heads=(2, 1), sinks=True, **facts)
    assert arguments.sinks is not None
    arguments.sinks[:] = sink
    (result,) = WAYS[way](sdpa_call(arguments))
    assert_attends(result, arguments)
    if sink == -INF:
        assert_attends(result, replace(arguments, sinks=None))


HIDDEN_SLOTS: dict[str, tuple[int, dict[str, Any]]] = {
    "beyond the valid length": (9, {"rows": 3, "start": 4}),
    "later than the first row": (6, {"rows": 3, "start": 4, "is_causal": True}),
    "hidden from one row by a mask": (2, {"rows": 3, "start": 4, "mask": "bool"}),
    "beyond one sequence": (8, {"batch": 2, "rows": 3, "start": (7, 1), "is_causal": True}),
    "replaced by a recent row": (5, {"rows": 3, "start": 4, "recent": True}),
    "beyond one sequence, recent": (5, {"batch": 2, "rows": 3, "start": (7, 1), "recent": True}),
    "before the window of a later row": (7, {"rows": 3, "start": 9, "window": 3, "is_causal": True}),
    "before the window of one sequence": (6, {"batch": 2, "rows": 1, "start": (12, 7), "window": 3, "recent": True}),
    "between sink tokens and window": (3, {"rows": 3, "start": 9, "window": 2, "sink_tokens": 3, "softcap": 2.0}),
    "before the window, under a mask": (7, {"rows": 3, "start": 9, "window": 3, "mask": "bool", "is_causal": True}),
}


@ways_once
@pytest.mark.parametrize("poison", [NAN, INF, -INF])
@pytest.mark.parametrize("which", ["key", "value"])
@pytest.mark.parametrize("case", HIDDEN_SLOTS)
def test_what_a_row_does_not_see_never_reaches_its_output(way: str, poison: float, which: str, case: str) -> None:
    slot, facts = HIDDEN_SLOTS[case]
    turn = list(HIDDEN_SLOTS).index(case) + 2 * (which == "key") + (poison == INF)
    cache = ("float", "int8", "bfloat16", "int4")[turn % 4]
    arguments = make_sdpa(np.random.default_rng(7), heads=(4, 2), cache=cache, **facts)
    if arguments.attn_mask is not None:
        arguments.attn_mask[:, slot] = [False, True, False]
    poisoned = replace(arguments)
    name = f"{which}_scales" if arguments.key_scales is not None else f"{which}_cache"
    setattr(poisoned, name, getattr(arguments, name).copy())
    getattr(poisoned, name)[:, slot] = poison
    (result,) = WAYS[way](sdpa_call(poisoned))
    visible = reference.visible_slots(arguments)[..., slot].transpose(0, 2, 1)
    hidden = ~visible | (arguments.recent_key is not None and case == "replaced by a recent row")
    assert hidden.any()
    assert_attends(result, arguments, where=hidden)
    # A row that does see it is not finite, unless an infinite score takes all of the weight or none of it.
    if which == "value" or np.isnan(poison):
        assert not np.isfinite(result[~hidden]).any()


@ways_once
def test_a_visible_infinite_value_stays_infinite(way: str) -> None:
    arguments = make_sdpa(np.random.default_rng(8), rows=2, start=4, cache="float", is_causal=True)
    arguments.value_cache[0, 1, 0, :3] = INF, -INF, NAN
    arguments.value_cache[0, 5, 0, 4] = INF
    assert_attends(WAYS[way](sdpa_call(arguments))[0], arguments)


@ways_once
def test_a_score_beyond_float16_is_no_fault_of_the_arithmetic(way: str) -> None:
    # 64 * 300 * 300 = 5.8e6 has no float16; the scores need float32, or else they are infinite and the output NaN.
    arguments = make_sdpa(
        np.random.default_rng(8), start=4, dim=64, dtype="float16", cache="float16", softcap=50.0, is_causal=True
    )
    arguments.query[...], arguments.key_cache[...] = 300, 300
    arguments.key_cache[:, 2] = -300
    assert_attends(WAYS[way](sdpa_call(arguments))[0], arguments)


# Errors


@ways_once
@pytest.mark.parametrize(
    ("facts", "start"),
    [
        ({"rows": 3}, 14),
        ({"rows": 1}, -1),
        ({"rows": 0}, 17),
        ({"rows": 2, "batch": 2}, (0, 15)),
        ({"rows": 1}, 2**63 - 1),
        ({"rows": 2, "window": 3, "sinks": True}, 15),
    ],
    ids=str,
)
@pytest.mark.parametrize("mask", [None, "bool"])
@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_attention_outside_the_cache_is_an_error(
    way: str, facts: dict[str, Any], start: Any, mask: str | None, dtype: str
) -> None:
    arguments = make_sdpa(np.random.default_rng(9), cache="float", mask=mask, dtype=dtype, **facts)
    arguments.start_pos = np.asarray(start, np.int64)
    with pytest.raises(Exception, match=r"Custom(Quantized)?Sdpa.*(start_pos|capacity)"):
        WAYS[way](sdpa_call(arguments))


@ways_once
def test_query_heads_that_the_key_heads_do_not_divide_are_an_error(way: str) -> None:
    arguments = make_sdpa(np.random.default_rng(9), cache="float", heads=(3, 2))
    with pytest.raises(Exception, match=r"CustomSdpa|custom_sdpa"):
        WAYS[way](sdpa_call(arguments))


_FLOAT_ROWS = np.ones((1, 16, 1, 8), np.float32)


@ways_once
@pytest.mark.parametrize(
    "change",
    [
        {"key_scales": None},
        {"value_scales": None},
        {"key_cache": _FLOAT_ROWS, "value_cache": _FLOAT_ROWS},
        {"key_cache": _FLOAT_ROWS, "value_cache": _FLOAT_ROWS, "key_scales": None, "value_scales": None},
        {"recent_key": _FLOAT_ROWS[:, :1]},
        {"recent_value": _FLOAT_ROWS[:, :1]},
    ],
    ids=["no key scales", "no value scales", "scales of floats", "zero points of floats", "no value", "no key"],
)
def test_inputs_that_do_not_go_together_are_an_error(way: str, change: dict[str, Any]) -> None:
    arguments = make_sdpa(np.random.default_rng(9), start=4)
    with pytest.raises(Exception, match=r"CustomSdpa|custom_sdpa"):
        WAYS[way](sdpa_call(replace(arguments, **change)))


# SdpaWithKvCache


@ways
@pytest.mark.parametrize("case", JOINT_CASES)
def test_sdpa_with_kv_cache_writes_then_attends(way: str, case: str) -> None:
    layout = ("BSNH", "BNSH")[(list(JOINT_CASES).index(case) + (way == "body25")) % 2]
    arguments = make_sdpa(np.random.default_rng(10), **JOINT_CASES[case])
    output, *caches = WAYS[way](joint_call(arguments, layout))
    assert_attends(output, arguments, layout)
    for result, which in zip(caches, ("key", "value"), strict=True):
        expected = arguments.rows(which)
        assert result.dtype == expected.dtype
        np.testing.assert_array_equal(result, to_layout(expected, layout))
