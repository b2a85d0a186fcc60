"""CustomSdpa against float64 numpy: a table of shapes, for every instruction set and several thread counts."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from graphrewrite.custom_ops import capi
from tests.kernels.calls import custom_sdpa, instruction_set, sdpa_attributes, sdpa_inputs
from tests.kernels.cases import ISAS, Case, check, check_everywhere
from tests.kernels.memory import guarded
from tests.kernels.reference import make_sdpa, sdpa_with_bound, visible_slots

Array = npt.NDArray[Any]


def table() -> list[Case]:
    """Every cache type, head count, head size and number of rows; the other parameters take turns.

    The lengths of their cycles have no common divisor with each other where it matters, so pairs of values meet.
    """
    layouts = itertools.cycle(["BSNH", "BNSH"])
    masks = itertools.cycle(
        [
            (None, ("S",)),
            ("bool", ("S",)),
            ("float", ("B", "1", "S")),
            ("bool", ("H", "1")),
            ("float", ("B", "H", "S")),
        ]
    )
    starts: Any = itertools.cycle([0, 7, (70, 33), (300, 0), 129, 1, 64])
    recent, zero_points = itertools.cycle([False, True, True]), itertools.cycle([True, False, True, True])
    causal = itertools.cycle([True] * 5 + [False] * 4)
    cases = []
    for cache, heads, dim, rows in itertools.product(
        ["int8", "float"], [(1, 1), (4, 1), (32, 8), (9, 3)], [8, 40, 64, 80, 128], [1, 3, 64, 130]
    ):
        start = next(starts)
        mask, leading = next(masks)
        cases.append(
            Case(
                cache=cache,
                heads=heads,
                dim=dim,
                rows=rows,
                layout=next(layouts),
                mask=mask,
                mask_leading=leading,
                start=start,
                batch=2 if isinstance(start, tuple) else 1,
                recent=next(recent),
                zero_points=next(zero_points),
                causal=next(causal),
            )
        )
    return cases


# Head sizes that fill no vector, groups of every size that decoding distinguishes, long caches that are read in parts.
ODD = [
    *(
        Case("int8", (group, 1), dim, 1, start=21)
        for group, dim in itertools.product([1, 2, 3, 5, 6, 7, 8], [1, 3, 17])
    ),
    *(Case(cache, (4, 2), 20, 2, start=2100, recent=True) for cache in ("int8", "float")),
    Case("int8", (1, 1), 64, 1, start=5000),
    Case("int8", (2, 1), 24, 200, start=1500, layout="BNSH"),
    Case("float", (2, 2), 24, 70, start=1500, causal=False, mask="bool"),
    Case("int8", (6, 1), 33, 193, recent=True),
    Case("float", (200, 1), 8, 2, start=5),
    Case("int8", (4, 2), 16, 1, mask="float", start=4, spare=90, recent=True),
    Case("float", (4, 2), 16, 5, mask="bool", start=4, spare=90, recent=True, causal=False),
]


@pytest.mark.parametrize("case", [*table(), *ODD], ids=str)
def test_matches_reference(case: Case) -> None:
    check_everywhere(case)


GUARDED = [
    Case("int8", (4, 1), 40, 1, start=30, spare=0, recent=True),
    Case("int8", (9, 3), 17, 1, "BNSH", start=30, spare=0, mask="bool"),
    Case("int8", (2, 1), 13, 70, start=9, spare=0, recent=True),
    Case("int8", (9, 3), 64, 65, "BNSH", start=30, spare=0, mask="float", mask_leading=("B", "H", "S")),
    Case("float", (4, 1), 13, 3, start=30, spare=0, mask="bool"),
    Case("float", (2, 1), 40, 70, "BNSH", start=9, spare=0, recent=True, mask="float", mask_leading=("H", "1")),
    Case("float", (3, 3), 5, 33, start=0, spare=0),
]


@pytest.mark.parametrize("case", GUARDED, ids=str)
@pytest.mark.parametrize("at_end", [True, False], ids=["end", "begin"])
def test_touches_nothing_outside_its_buffers(case: Case, at_end: bool) -> None:
    arguments = case.build()
    for isa in ISAS:
        with instruction_set(isa):
            check(custom_sdpa(arguments, layout=case.layout, place=partial(guarded, at_end=at_end)), arguments)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize(
    "where", ["key_cache", "value_cache", "recent_key", "recent_value", "key_scales", "value_scales"]
)
@pytest.mark.parametrize("rows", [2, 3, 64])
@pytest.mark.parametrize("mask", [None, "bool", "float"])
def test_hidden_values_stay_hidden(isa: str, value: float, where: str, rows: int, mask: str | None) -> None:
    """A value that some rows see and others do not reaches the output of the former alone."""
    start = 70
    arguments = make_sdpa(
        np.random.default_rng(5),
        rows=rows,
        capacity=start + rows,
        start=start,
        heads=(4, 2),
        dim=12,
        cache="int8" if where.endswith("scales") else "float",
        recent=where.startswith("recent"),
        is_causal=True,
        mask=mask,
    )
    slot = start + rows - 1 if mask is None else 20
    if mask is not None:
        assert arguments.attn_mask is not None
        arguments.attn_mask[:, slot] = [i % 2 == 0 for i in range(rows)] if mask == "bool" else 0
        arguments.attn_mask[1::2, slot] = False if mask == "bool" else -np.inf
        if where.startswith("recent"):
            slot, arguments.attn_mask[0, start] = start, mask == "bool"
            arguments.attn_mask[1:, start] = False if mask == "bool" else -np.inf
    getattr(arguments, where)[0, slot - start if where.startswith("recent") else slot, 0] = value
    with instruction_set(isa), np.errstate(all="ignore"):
        output = custom_sdpa(arguments)
        expected, bound = sdpa_with_bound(arguments)
    clean = ~visible_slots(arguments)[0, :, :, slot].T  # [S,Hq]
    clean[:, 2:] = True  # the other key/value head
    assert clean[:, :2].any(), "the test hides the value from no row"
    assert not clean.all(), "the test shows the value to no row"
    with np.errstate(invalid="ignore"):
        error = np.abs(output[0] - expected[0])
    assert np.all(error[clean] <= bound[0][clean])
    if np.isnan(value):
        assert np.isnan(output[0][~clean]).any(axis=-1).all()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("rows", [1, 40])
@pytest.mark.parametrize("mask", ["bool", "float"])
def test_a_row_that_sees_nothing_gives_zeros(isa: str, rows: int, mask: str) -> None:
    arguments = make_sdpa(np.random.default_rng(6), rows=rows, capacity=rows + 4, heads=(2, 1), dim=20, mask=mask)
    assert arguments.attn_mask is not None
    arguments.attn_mask[0] = False if mask == "bool" else -np.inf
    with instruction_set(isa):
        output = custom_sdpa(arguments)
    assert not output[:, 0].any()
    check(output, arguments)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("rows", [1, 40])
def test_a_mask_without_keys_hides_everything(isa: str, rows: int) -> None:
    arguments = make_sdpa(np.random.default_rng(7), rows=rows, capacity=rows)
    arguments.attn_mask = np.zeros((rows, 0), bool)
    with instruction_set(isa):
        assert not custom_sdpa(arguments).any()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("batch", "rows"), [(0, 3), (2, 0), (0, 0)])
def test_empty_query_gives_empty_output(isa: str, batch: int, rows: int) -> None:
    arguments = make_sdpa(np.random.default_rng(8), batch=batch, rows=rows, capacity=8, heads=(4, 2), recent=True)
    with instruction_set(isa):
        assert custom_sdpa(arguments).shape == (batch, rows, 4, 8)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("scores", [200.0, 1e4, 3e37])
@pytest.mark.parametrize("rows", [1, 20])
def test_large_scores_do_not_overflow(isa: str, scores: float, rows: int) -> None:
    """Scores far apart: all weight goes to the largest one."""
    arguments = make_sdpa(np.random.default_rng(9), rows=rows, capacity=rows + 90, start=90, cache="float", dim=16)
    arguments.query *= np.float32(scores)
    with instruction_set(isa):
        output = custom_sdpa(arguments)
    assert np.isfinite(output).all()
    check(output, arguments)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("rows", [1, 40])
def test_scale_is_used(isa: str, rows: int) -> None:
    arguments = make_sdpa(np.random.default_rng(10), rows=rows, capacity=64, scale=0.37)
    with instruction_set(isa):
        check(custom_sdpa(arguments), arguments)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", ["query", "key_cache", "value_cache", "recent_key", "recent_value", "attn_mask"])
@pytest.mark.parametrize("rows", [1, 40])
def test_strided_inputs(isa: str, name: str, rows: int) -> None:
    """Every second element along each dimension of a larger tensor, the innermost one among them."""
    arguments = make_sdpa(
        np.random.default_rng(11), rows=rows, capacity=64, heads=(4, 2), cache="float", recent=True, mask="float"
    )
    expected, bound = sdpa_with_bound(arguments)

    def place(array: Any) -> Any:
        if array is not getattr(arguments, name):
            return array
        larger = np.full([2 * size for size in array.shape], np.nan, array.dtype)
        view = larger[(slice(None, None, 2),) * array.ndim]
        view[...] = array
        return view

    with instruction_set(isa):
        output = custom_sdpa(arguments, place=place)
    assert np.all(np.abs(output - expected) <= bound)


def test_extreme_codes_do_not_wrap() -> None:
    """127 - (-128) is 255, not -1."""
    arguments = make_sdpa(np.random.default_rng(12), rows=1, capacity=1, dim=8)
    arguments.value_cache[...] = 127
    assert arguments.value_zero_points is not None and arguments.value_scales is not None
    arguments.value_zero_points[...] = -128
    arguments.value_scales[...] = 1
    for isa in ISAS:
        with instruction_set(isa):
            np.testing.assert_array_equal(custom_sdpa(arguments), np.full((1, 1, 1, 8), 255, np.float32))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("rows", [1, 40])
@pytest.mark.parametrize("cache", ["float", "int8", "int4"])
def test_one_row_may_stand_for_all(isa: str, rows: int, cache: str) -> None:
    """Keys and values that are expanded along the sequence: a stride of 0."""
    arguments = make_sdpa(np.random.default_rng(13), rows=rows, capacity=rows + 20, start=20, dim=16, cache=cache)
    for name in ("key_cache", "value_cache"):
        row = getattr(arguments, name)[:, :1]
        setattr(arguments, name, np.broadcast_to(row, getattr(arguments, name).shape))
    inputs = sdpa_inputs(arguments, "BSNH")
    inputs |= {"key_cache": arguments.key_cache, "value_cache": arguments.value_cache}
    output = np.empty_like(arguments.query)
    with instruction_set(isa):
        capi.run("CustomSdpa", list(inputs.values()), [output], sdpa_attributes(arguments, "BSNH"))
    check(output, arguments)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("strided", [False, True])
def test_a_key_that_is_nan_is_not_forgotten_for_a_later_hidden_one(isa: str, strided: bool) -> None:
    arguments = make_sdpa(np.random.default_rng(14), capacity=2, dim=8, cache="float")
    arguments.key_cache[0, 0] = np.nan
    arguments.attn_mask = np.array([[True, False]])

    def place(array: Array) -> Array:
        return np.repeat(array, 2, axis=-1)[..., ::2] if strided and array.ndim == 4 else array

    with instruction_set(isa):
        assert np.isnan(custom_sdpa(arguments, place=place)).all()
