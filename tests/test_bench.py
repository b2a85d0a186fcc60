"""`graphrewrite bench`: what is computed and how it is counted. Nothing here looks at how fast anything is."""

from __future__ import annotations

import importlib.util
import itertools
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from graphrewrite.bench import layer as layers
from graphrewrite.bench import limits, llama_cpp, rounds, tables
from graphrewrite.bench.case import Case, Layer, decode_case, prefill_case
from graphrewrite.bench.contender import Contender, Step, Unavailable
from graphrewrite.bench.data import (
    Quantization,
    attention64,
    checked_rows,
    pack_nibbles,
    quantize,
    random_data,
    unpack_nibbles,
)
from graphrewrite.bench.machine import Meter
from graphrewrite.bench.rounds import Sample, in_rounds, ratio, spread, spread_of, turn
from graphrewrite.errors import InputError

SMALL = Layer(query_heads=4, kv_heads=2, head_size=32)
BATCH = Layer(query_heads=4, kv_heads=2, head_size=32, batch=3)

CASES = {
    "decode": decode_case(SMALL, 37),
    "decode with room": decode_case(SMALL, 37, 64),
    "prefill": prefill_case(SMALL, 9),
    "prefill after cached positions": prefill_case(SMALL, 5, 21),
    "one query head a KV head": decode_case(Layer(2, 2, 32), 11),
    "as the cache holds them": prefill_case(Layer(4, 2, 32, exact=False), 5, 21),
    "BNSH": prefill_case(Layer(4, 2, 32, layout="BNSH"), 5, 21),
    "batch": decode_case(BATCH, 30),
    "ragged": decode_case(BATCH, 30, ragged=True),
    "ragged prefill": prefill_case(BATCH, 4, 30, ragged=True),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_operations_are_those_of_the_visible_pairs(case: Case) -> None:
    pairs = sum(
        position <= start + row
        for length, start in zip(case.lengths, case.starts, strict=True)
        for row in range(case.rows)
        for position in range(length)
    )
    # Two products of D terms for each query head, a multiply-add being two operations.
    assert case.operations == pairs * case.layer.query_heads * 2 * 2 * case.layer.head_size


@pytest.mark.parametrize(
    ("how", "bits"),
    [
        (Quantization(8, 1, symmetric=False), 32 * 8 + 32 + 8),
        (Quantization(8, 1, symmetric=True), 32 * 8 + 32),
        (Quantization(4, 1, symmetric=False), 32 * 4 + 32 + 8),
        (Quantization(4, 2, symmetric=False), 32 * 4 + 2 * (32 + 8)),
    ],
)
def test_bytes_are_those_of_keys_and_values_at_filled_positions(how: Quantization, bits: int) -> None:
    case = CASES["ragged"]
    assert case.lengths == (10, 20, 30)
    assert case.bytes_of(how.row_bytes(32)) == 2 * 60 * 2 * bits // 8


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Layer(3, 2, 8), "3 query heads"),
        (lambda: Layer(layout="SBNH"), "layout"),
        (lambda: Layer(head_size=0), "head_size"),
        (lambda: decode_case(SMALL, 9, 8), "capacity 8"),
        (lambda: prefill_case(SMALL, 9, 8), "9 rows"),
        (lambda: prefill_case(SMALL, 0), "rows"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        make()


@pytest.mark.parametrize(
    "how",
    [
        Quantization(8, 1, symmetric=False),
        Quantization(8, 1, symmetric=True),
        Quantization(8, 4, symmetric=False),
        Quantization(4, 1, symmetric=False),
        Quantization(4, 4, symmetric=False),
    ],
)
def test_quantized_rows_are_within_a_step_of_what_they_were(how: Quantization) -> None:
    rows = np.random.default_rng(1).standard_normal((2, 5, 2, 32), dtype=np.float32)
    coded = quantize(rows, how)
    # Half a step for the code and half a step for the zero point, which is rounded as well; 1e-6 for float32 itself.
    steps = np.repeat(coded.scales, 32 // how.groups, axis=-1)
    assert (np.abs(coded.values() - rows) <= steps * (1 + 1e-6)).all()
    if how.bits == 4:
        assert coded.codes.max() == 15
        np.testing.assert_array_equal(unpack_nibbles(pack_nibbles(coded.codes)), coded.codes)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_reference_is_attention_row_by_row(case: Case) -> None:
    data = random_data(case)
    keys, values = data.written()
    result = attention64(data, keys, values)
    layer = case.layer
    for sequence, row, head in itertools.product(range(layer.batch), range(case.rows), range(layer.query_heads)):
        end = case.starts[sequence] + row + 1
        shared = head // layer.group
        scores = keys[sequence, :end, shared].astype(float) @ data.query[sequence, row, head].astype(float)
        weights = np.exp(scores / np.sqrt(layer.head_size))
        expected = weights @ values[sequence, :end, shared] / weights.sum()
        np.testing.assert_allclose(result[sequence, row, head], expected, rtol=1e-12, atol=1e-12)


def test_of_many_rows_some_are_compared_with_the_reference() -> None:
    rows = checked_rows(prefill_case(SMALL, 1000))
    assert rows[0] == 0 and rows[-1] == 999 and len(rows) == 64


def _contenders() -> list[Contender]:
    return layers.contenders(layers.ours.SCHEMES, ["unfused", "onnxruntime", "torch"])


# What a contender does not do, by its name and the case.
_CANNOT = {
    "unfused, exported source operators": {"ragged", "ragged prefill"},
    "torch SDPA float32": {"ragged", "ragged prefill"},
    "GroupQueryAttention float32": {"ragged prefill"},
    "GroupQueryAttention int8 per tensor": {"ragged prefill"},
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("contender", _contenders(), ids=lambda contender: contender.name)
def test_every_contender_computes_attention(contender: Contender, name: str) -> None:
    if contender.name.startswith("torch"):
        pytest.importorskip("torch")
    data = random_data(CASES[name])
    if name in _CANNOT.get(contender.name, ()):
        with pytest.raises(Unavailable):
            contender.prepare(data, 2)
        return
    step = contender.prepare(data, 2)
    assert step.held is not None
    for run_step in step.runs[:2]:
        run_step()
    step.runs[0]()  # a step again: it may write its rows twice
    output = step.output()[:, checked_rows(data.case)]
    expected = attention64(data, *step.held())
    # Sums of at most 37 positions and 32 elements in float32, or products of integers with 14 bits in a factor, whose
    # rounding of 2**-15 each falls on weights that sum to 1 and on scores of a few units.
    assert np.abs(output - expected).max() <= 16 * 2.0**-15 * np.abs(expected).max()
    # What the cache loses: rows in -4..4 or so are off by a step, which is 8/255 or, of four bits, 8/15; the scores,
    # of standard deviation 1, by as much.
    exact = attention64(data, *data.written())
    step_size = 8 / 15 if "int4" in contender.name else 8 / 255
    assert np.abs(output - exact).max() <= 2 * step_size


@pytest.mark.parametrize("kind", llama_cpp.CACHES)
def test_rows_in_the_blocks_of_ggml_are_within_a_step(kind: str) -> None:
    rows = np.random.default_rng(2).standard_normal((2, 3, 64), dtype=np.float32)
    encoded = llama_cpp.encode(rows, kind)
    _, block, size = llama_cpp.CACHES[kind]
    assert encoded.nbytes == rows.size // block * size
    # f16 keeps 11 bits. A block's largest is 127 or 7 steps, of which half a one is lost; its scale is a float16.
    steps = {"f16": 2.0**11, "q8_0": 2 * 127, "q4_0": 2 * 7}[kind]
    largest = np.abs(rows.reshape(2, 3, 2, 32)).max(-1).repeat(32, -1)
    assert (np.abs(llama_cpp.decode(encoded, kind) - rows) <= largest * (1 / steps + 2.0**-10)).all()


@pytest.mark.parametrize("peer", ["llama.cpp", "openvino", "executorch", "torch"])
def test_a_peer_that_is_not_installed_is_said_so(peer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    absent = {"llama_cpp", "openvino", "executorch", "torch"}
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in absent else find_spec(name))
    monkeypatch.delenv("GGML_DIR", raising=False)
    for module in ("openvino", "torch"):
        monkeypatch.setitem(sys.modules, module, None)
    for contender in layers.contenders([], [peer]):
        with pytest.raises(Unavailable, match="not installed"):
            contender.prepare(random_data(CASES["decode"]), 1)


class _Still(Meter):
    """A meter that tells what it was given, turn by turn; then nothing."""

    def __init__(self, *disturbed: bool) -> None:
        self._disturbed = list(disturbed)

    def start(self) -> None:
        pass

    def disturbed(self) -> bool:
        return self._disturbed.pop(0) if self._disturbed else False


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounds, "_QUIET_SECONDS", 0.0)


def test_every_participant_runs_once_a_round() -> None:
    order: list[str] = []

    def participant(name: str) -> Callable[[], float]:
        def measure() -> float:
            order.append(name)
            return float(len(order))

        return measure

    samples = in_rounds({name: participant(name) for name in "ab"}, rounds=4, seconds=60, meter=_Still())
    assert order == list("ab" * 4)
    assert [sample.seconds for sample in samples["b"]] == [2, 4, 6, 8]


def test_a_disturbed_round_is_made_up_for() -> None:
    samples = in_rounds({"a": lambda: 1.0}, rounds=4, seconds=60, meter=_Still(True, False, True))
    assert [sample.disturbed for sample in samples["a"]] == [True, False, True, False, False, False]


def test_without_time_there_are_three_rounds() -> None:
    samples = in_rounds({"a": lambda: 1.0, "b": lambda: 1.0}, rounds=9, seconds=0, meter=_Still())
    assert [len(found) for found in samples.values()] == [3, 3]


def test_turns_go_around_the_buffers() -> None:
    used: list[int] = []
    runs = [lambda number=number: used.append(number) for number in range(4)]
    measure = turn(runs)
    measure(), measure()
    assert used == [number % 4 for number in range(20)]


def test_quartiles_are_those_of_numpy() -> None:
    values = [5.0, 1.0, 4.0, 2.0, 8.0, 9.0]
    found = spread_of(values)
    np.testing.assert_allclose([found.lower, found.median, found.upper], np.percentile(values, [25, 50, 75]))
    with pytest.raises(ValueError, match="no values"):
        spread_of([])


def test_disturbed_samples_are_left_out_when_enough_others_are_there() -> None:
    samples = [Sample(number, float(number), number in (3, 4)) for number in range(5)]
    assert spread(samples).median == 1 and spread(samples).disturbed == 0
    assert spread(samples[1:]).median == 2.5 and spread(samples[1:]).disturbed == 2


def test_ratios_are_taken_within_rounds() -> None:
    over = [Sample(number, 6.0 * 2**number, False) for number in range(4)]
    under = [Sample(number, 3.0 * 2**number, False) for number in (0, 1, 3)]
    found = ratio(over, under)
    assert (found.lower, found.median, found.upper, found.count) == (2, 2, 2, 3)


@pytest.mark.parametrize(("user", "steal", "disturbed"), [(0, 0, False), (1, 0, False), (0, 1, True), (100, 0, True)])
def test_stolen_time_and_other_processes_disturb(tmp_path: Path, user: int, steal: int, disturbed: bool) -> None:
    stat = tmp_path / "stat"

    def write(user: int, steal: int) -> None:
        stat.write_text(f"cpu  {1000 + user} 0 50 9000 7 0 3 {70 + steal} 500 0\ncpu0 1 2 3\n", encoding="ascii")

    write(0, 0)
    meter = Meter(stat)
    write(user, steal)
    assert meter.disturbed() is disturbed


def test_where_the_system_says_nothing_nothing_is_disturbed(tmp_path: Path) -> None:
    assert Meter(tmp_path / "none").disturbed() is False


def test_limits_are_proportional_to_what_is_done() -> None:
    read, multiply = limits.ReadLimit(2, 1 << 20), limits.MultiplyLimit(1, 32)
    assert read.measure(1) > 0 and multiply.measure(1) > 0
    assert read.measure(0) == 0 and multiply.measure(0) == 0
    read.close()


def _wrong(data: layers.Data, threads: int) -> Step:
    return Step([lambda: None], lambda: data.query * 0, None, 1)


def test_what_computes_something_else_is_not_measured() -> None:
    results = layers.run_case(
        CASES["decode"],
        [Contender("wrong", False, _wrong), layers.ours.contender("int8")],
        layers.Plan(threads=1, rounds=3, seconds=0),
        limits.ReadLimit(1, 1 << 20),
        limits.MultiplyLimit(1, 32),
    )
    wrong, right = results.outcomes
    assert wrong.reason == "wrong: error 1.0e+00, allowed 5e-02" and not wrong.samples
    assert len(right.samples) >= 3 and right.error is not None and right.error < 1e-3
    grid = tables.case_grid(results, ("a", "b"))
    assert [row[0] for row in grid.rows] == ["graphrewrite int8"]
    assert "wrong: wrong: error 1.0e+00, allowed 5e-02" in grid.notes
