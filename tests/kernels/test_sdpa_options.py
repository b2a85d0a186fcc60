"""CustomSdpa and CustomQuantizedSdpa: all element types, granularities and options, on every instruction set."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from tests.kernels.calls import custom_sdpa, instruction_set
from tests.kernels.cases import ISAS, Case, check, check_everywhere
from tests.kernels.memory import forbid, guarded
from tests.kernels.reference import FLOATS, make_sdpa, sdpa_with_bound

# Element type of the cache, granularity of the scales, groups of a row, element type of the scales.
FORMATS: list[tuple[str, str | tuple[str, str], int, str]] = [
    *((kind, "rows", 1, "float32") for kind in FLOATS),
    ("int8", "rows", 1, "float32"),
    ("int8", "rows", 2, "float32"),
    ("int8", "[]", 1, "float64"),
    ("int8", "[1]", 1, "float32"),
    ("int8", "[D]", 1, "float32"),
    ("int8", "[H,1]", 1, "float32"),
    ("int8", "[H,D]", 1, "float64"),
    ("int8", ("[H,D]", "rows"), 1, "float32"),
    ("int4", "rows", 1, "float32"),
    ("int4", "rows", 4, "float32"),
    ("int4", "[H,D]", 1, "float32"),
    ("int4", ("[D]", "rows"), 2, "float32"),
]


def table() -> list[Case]:
    """Every query type with every cache format and number of rows; the other parameters take turns.

    The lengths of their cycles have no common divisor, so that all pairs of values meet before long.
    """
    heads = itertools.cycle([(4, 1), (9, 3), (8, 2), (2, 2), (6, 1)])
    dims = itertools.cycle([32, 64, 80, 128, 40, 256, 96])
    layouts = itertools.cycle(["BSNH", "BNSH"])
    masks = itertools.cycle(
        [
            (None, ("S",)),
            ("bool", ("S",)),
            ("float", ("B", "1", "S")),
            (None, ("S",)),
            ("float16", ("H", "1")),
            (None, ("S",)),
            ("bfloat16", ("B", "H", "S")),
            ("bool", ("H", "S")),
            (None, ("S",)),
        ]
    )
    starts: Any = itertools.cycle([0, 7, (70, 33), 129, (300, 0), 1, 600, 64, (5, 6, 7), 33, 16])
    windows = itertools.cycle(
        [(0, 0), (5, 0), (0, 3), (70, 2), (1, 0), (0, 0), (16, 4), (0, 0), (200, 1), (3, 0), (9, 5)]
    )
    softcaps = itertools.cycle([0.0, 2.0, 0.0, 0.0, 30.0, 0.0, 0.5, 0.0, 0.0, 0.0, 0.0, 8.0, 0.0])
    flags = itertools.cycle(itertools.product([True, False], repeat=3))
    causal = itertools.cycle([True] * 9 + [False] * 8)
    cases = []
    for (cache, scales, groups, scales_type), dtype, rows in itertools.product(
        FORMATS, [*FLOATS, "int8"], [1, 3, 20, 70]
    ):
        start, (mask, leading), (window, sink_tokens) = next(starts), next(masks), next(windows)
        recent, zero_points, sinks = next(flags)
        cases.append(
            Case(
                cache,
                next(heads),
                next(dims),
                rows,
                next(layouts),
                mask,
                leading,
                start,
                batch=len(start) if isinstance(start, tuple) else 1,
                recent=recent,
                zero_points=zero_points,
                causal=next(causal),
                dtype=dtype,
                scales=scales,
                scales_type=scales_type,
                groups=groups,
                sinks=sinks,
                softcap=next(softcaps),
                window=window,
                sink_tokens=sink_tokens,
            )
        )
    return cases


@pytest.mark.parametrize("case", table(), ids=str)
def test_matches_reference(case: Case) -> None:
    check_everywhere(case)


# Formats whose last bytes are read in some special way, and sizes that fill no vector.
GUARDED = [
    Case("float16", (4, 1), 13, 1, start=30, spare=0, dtype="float16"),
    Case("bfloat16", (4, 1), 21, 3, "BNSH", start=30, spare=0, recent=True, dtype="bfloat16"),
    Case("float16", (2, 1), 37, 70, start=9, spare=0, dtype="bfloat16", recent=True),
    Case("int4", (4, 1), 26, 1, start=30, spare=0),
    Case("int4", (3, 3), 70, 40, "BNSH", start=9, spare=0, recent=True),
    Case("int4", (4, 2), 96, 2, start=30, spare=0, groups=3, mask="float16", sinks=True),
    Case("int8", (4, 2), 34, 1, start=30, spare=0, scales="[H,D]", softcap=3.0),
    Case("int8", (4, 2), 33, 66, start=3, spare=0, scales="[D]", window=9, sink_tokens=2),
    Case("int8", (4, 2), 19, 2, start=30, spare=0, dtype="int8", recent=True),
]


@pytest.mark.parametrize("case", GUARDED, ids=str)
@pytest.mark.parametrize("at_end", [True, False], ids=["end", "begin"])
def test_touches_nothing_outside_its_buffers(case: Case, at_end: bool) -> None:
    arguments = case.build()
    for isa in ISAS:
        with instruction_set(isa):
            check(custom_sdpa(arguments, layout=case.layout, place=partial(guarded, at_end=at_end)), arguments)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("rows", [1, 40])
def test_keys_outside_the_window_are_not_even_read(isa: str, rows: int) -> None:
    """All but the window and the first tokens lie on pages that nobody may touch."""
    arguments = make_sdpa(
        np.random.default_rng(1),
        rows=rows,
        capacity=5000,
        start=5000 - rows,
        heads=(2, 1),
        dim=64,
        cache="float32",
        is_causal=True,
        window=64,
        sink_tokens=2,
    )
    whole = arguments.key_cache.nbytes
    page = 4096

    with instruction_set(isa):
        expected = custom_sdpa(arguments)
        for name in ("key_cache", "value_cache"):
            copy = guarded(getattr(arguments, name))
            forbid(copy, page, whole - (64 + rows) * 256 - page)
            setattr(arguments, name, copy)
        np.testing.assert_array_equal(custom_sdpa(arguments), expected)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("rows", [1, 40])
@pytest.mark.parametrize("masked", [False, True])
def test_a_row_that_sees_nothing_gives_zeros_with_a_sink_too(isa: str, rows: int, masked: bool) -> None:
    arguments = make_sdpa(
        np.random.default_rng(6), rows=rows, capacity=rows + 4, heads=(2, 1), dim=20, mask="bool", sinks=True
    )
    assert arguments.attn_mask is not None
    arguments.attn_mask[0] = False
    with instruction_set(isa):
        output = custom_sdpa(arguments)
    assert not output[:, 0].any()
    check(output, arguments)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("rows", [1, 30])
@pytest.mark.parametrize("sink", [-np.inf, -1e30, 0.0, 40.0, 1e30])
def test_sinks_of_any_size(isa: str, rows: int, sink: float) -> None:
    arguments = make_sdpa(np.random.default_rng(7), rows=rows, capacity=rows + 70, start=70, heads=(4, 2), sinks=True)
    assert arguments.sinks is not None
    without = replace(arguments, sinks=None)
    arguments.sinks[1] = sink
    with instruction_set(isa):
        output = custom_sdpa(arguments)
        check(output, arguments)
        if sink < -1e3:
            check(output[:, :, 1:2], replace(without, query=without.query[:, :, 1:2], **first_kv_head(without)))
        if sink == 1e30:
            assert not output[:, :, 1].any()


def first_kv_head(arguments: Any) -> dict[str, Any]:
    """The caches of the first key/value head alone."""
    names = ("key_cache", "value_cache", "key_scales", "value_scales", "key_zero_points", "value_zero_points")
    return {name: getattr(arguments, name)[:, :, :1] for name in names}


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("rows", [1, 30])
@pytest.mark.parametrize("magnitude", [1e-4, 1.0, 100.0, 1e18])
def test_softcap_of_small_and_large_scores(isa: str, rows: int, magnitude: float) -> None:
    """Small scores keep their relative accuracy, large ones end at the cap, and a hidden key stays hidden."""
    arguments = make_sdpa(
        np.random.default_rng(8),
        rows=rows,
        capacity=rows + 40,
        start=40,
        heads=(2, 1),
        dim=32,
        cache="float32",
        is_causal=True,
        softcap=5.0,
        mask="float",
        mask_shape=(rows, rows + 40),
    )
    arguments.query *= np.float32(magnitude)
    with instruction_set(isa):
        check(custom_sdpa(arguments), arguments)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("rows", [1, 30])
def test_half_precision_is_accumulated_in_float32(dtype: str, rows: int) -> None:
    """4096 equal keys: the mean of as many values, which a sum of 11 or 8 bits would lose after a few hundred."""
    arguments = make_sdpa(
        np.random.default_rng(9), rows=rows, capacity=4096, start=4096 - rows, dim=32, dtype=dtype, cache=dtype
    )
    arguments.key_cache[...] = 0
    for isa in ISAS:
        with instruction_set(isa):
            check(custom_sdpa(arguments), arguments)


@pytest.mark.parametrize(
    "case",
    [
        Case("int8", (4, 2), 64, 1, start=700, dtype="bfloat16", recent=True),
        Case("int4", (4, 2), 64, 1, start=700, groups=2, recent=True),
        Case("int8", (4, 2), 64, 90, start=7, scales="[H,D]"),
    ],
    ids=str,
)
def test_strides_of_a_larger_tensor(case: Case) -> None:
    """Every second row and head of a larger cache; what lies between is NaN or a wrong code."""
    arguments = case.build()
    expected, bound = sdpa_with_bound(arguments)

    def place(array: Any) -> Any:
        if array.ndim != 4 or array is arguments.query:
            return array
        wide = np.full([array.shape[0], *(2 * size for size in array.shape[1:3]), array.shape[3]], 77, array.dtype)
        view = wide[:, ::2, ::2]
        view[...] = array
        return view

    for isa in ISAS:
        with instruction_set(isa):
            output = custom_sdpa(arguments, place=place)
        assert np.all(np.abs(output.astype(np.float64) - expected) <= bound), isa


@pytest.mark.parametrize("cache", ["float32", "int8", "int4"])
@pytest.mark.parametrize("window", [0, 50])
def test_a_prefill_in_chunks_equals_one_prefill(cache: str, window: int) -> None:
    """Rows of the same position see the same keys, however many rows come at once: within both results' bounds."""
    whole = make_sdpa(
        np.random.default_rng(10),
        rows=200,
        capacity=230,
        heads=(4, 2),
        dim=64,
        cache=cache,
        is_causal=True,
        window=window,
        sink_tokens=2,
    )
    _, bound = sdpa_with_bound(whole)
    for isa in ISAS:
        with instruction_set(isa):
            once = custom_sdpa(whole)
            for begin, end in ((0, 1), (1, 64), (64, 65), (65, 130), (130, 200)):
                part = replace(whole, query=whole.query[:, begin:end], start_pos=np.array(begin))
                assert np.all(np.abs(custom_sdpa(part) - once[:, begin:end]) <= 2 * bound[:, begin:end]), isa
