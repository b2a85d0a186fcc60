"""Verification: what is equal, what is not, and what each program is left with."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from decoder_models import TABLE, toy_decoder
from onnx import TensorProto, helper, numpy_helper
from rich.console import Console

from graphrewrite.errors import InputError
from graphrewrite.verification import differences as comparing
from graphrewrite.verification import verify
from graphrewrite.verification.inputs import made_steps
from graphrewrite.verification.runners import OnnxRunner


def elementwise(
    expression: str = "Mul", scale: Any = 1.0, shape: tuple[Any, ...] = (2, 3), names: tuple[str, str] = ("a", "b")
) -> onnx.ModelProto:
    """One operator with a constant: b = a <op> scale."""
    a, b = names
    graph = helper.make_graph(
        [helper.make_node(expression, [a, "scale"], [b])],
        "elementwise",
        [helper.make_tensor_value_info(a, TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info(b, TensorProto.FLOAT, None)],
        [numpy_helper.from_array(np.asarray(scale, np.float32), "scale")],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)


def subtraction(inputs: str) -> onnx.ModelProto:
    """difference = a - b, with the graph's inputs in the order given."""
    graph = helper.make_graph(
        [helper.make_node("Sub", ["a", "b"], ["difference"])],
        "subtraction",
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, [2]) for name in inputs.split()],
        [helper.make_tensor_value_info("difference", TensorProto.FLOAT, [2])],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)


class TorchToy(torch.nn.Module):
    """The toy decoder of decoder_models in torch, its cache a buffer; `per_step` is added to the logits."""

    past_rows: torch.Tensor

    def __init__(self, capacity: int = 8, bias: float = 0.0, drift: float = 0.0) -> None:
        super().__init__()
        self.table = torch.nn.Parameter(torch.from_numpy(TABLE))
        self.register_buffer("past_rows", torch.zeros(1, capacity, TABLE.shape[1]))
        self.bias, self.drift = bias, drift

    def forward(self, tokens: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        rows = self.table[tokens] + self.drift
        slots = torch.arange(tokens.shape[1]) + position
        self.past_rows.index_copy_(1, slots, rows)
        seen = torch.arange(self.past_rows.shape[1]) < position + tokens.shape[1]
        total = torch.where(seen[None, :, None], self.past_rows, 0.0).sum(1, keepdim=True)
        return total @ self.table.T + self.bias


def torch_toy(decompose: bool = False, **settings: Any) -> Any:
    tokens = torch.tensor([[1, 2, 3]])
    dynamic = {"tokens": {1: torch.export.Dim("S", min=1, max=8)}, "position": None}
    with torch.no_grad():
        program = torch.export.export(TorchToy(**settings).eval(), (tokens, torch.tensor([0])), dynamic_shapes=dynamic)
    return program.run_decompositions({}) if decompose else program


@pytest.mark.parametrize(
    ("before", "after", "ok", "first"),
    [
        pytest.param(elementwise, elementwise, True, None, id="the same model"),
        pytest.param(elementwise, lambda: elementwise(names=("x", "y")), True, None, id="other names, by order"),
        pytest.param(elementwise, lambda: elementwise(scale=1.001), False, ("b", 0), id="off by a thousandth"),
        pytest.param(elementwise, lambda: elementwise(scale=math.nan), False, ("b", 0), id="NaN after only"),
        pytest.param(lambda: elementwise(scale=math.nan), elementwise, False, ("b", 0), id="NaN before only"),
        pytest.param(
            lambda: elementwise(scale=math.nan), lambda: elementwise(scale=math.nan), True, None, id="NaN on both sides"
        ),
        pytest.param(
            lambda: elementwise(scale=[[1.0]] * 2), lambda: elementwise(scale=[[[1.0]]]), False, ("b", 0), id="shape"
        ),
        pytest.param(
            lambda: subtraction("a b"), lambda: subtraction("b a"), True, None, id="inputs by name, in another order"
        ),
        pytest.param(toy_decoder, toy_decoder, True, None, id="caches"),
        pytest.param(toy_decoder, lambda: toy_decoder(bias=0.01), False, ("logits", 0), id="logits of the first step"),
        pytest.param(torch_toy, torch_toy, True, None, id="torch"),
        pytest.param(
            torch_toy, lambda: torch_toy(decompose=True), True, None, id="torch, before and after decomposition"
        ),
        pytest.param(torch_toy, lambda: torch_toy(bias=0.01), False, (None, 0), id="torch, other logits"),
        pytest.param(
            torch_toy, lambda: torch_toy(drift=0.01), False, ("past_rows", 0), id="torch, the cache parts first"
        ),
        pytest.param(torch_toy, toy_decoder, True, None, id="torch before, ONNX after"),
        pytest.param(toy_decoder, torch_toy, True, None, id="ONNX before, torch after"),
        pytest.param(
            lambda: torch_toy(drift=0.01), toy_decoder, False, ("past_rows", 0), id="torch and ONNX part in the cache"
        ),
    ],
)
def test_verdict_and_first_divergence(before: Any, after: Any, ok: bool, first: tuple[str | None, int] | None) -> None:
    result = verify(before(), after())
    assert result.ok is ok and bool(result) is ok
    if first is None:
        assert result.first_divergence is None
    else:
        assert result.first_divergence is not None
        assert result.first_divergence.step == first[1]
        assert first[0] in (None, result.first_divergence.name)
        assert result.first_divergence.name in result.summary()


def test_divergence_that_only_later_steps_have() -> None:
    """The second program forgets what came before, which the first step cannot show."""
    forgetful = toy_decoder(in_place=False)
    result = verify(toy_decoder(), forgetful, [(np.array([[1, 2]]), np.array([0])), (np.array([[3]]), np.array([2]))])
    assert result.first_divergence is not None
    assert (result.first_divergence.name, result.first_divergence.step) == ("logits", 1)


@pytest.mark.parametrize("decompose", [False, True])
def test_a_torch_program_keeps_its_state(decompose: bool) -> None:
    program = torch_toy(decompose)
    before = {name: tensor.clone() for name, tensor in program.state_dict.items()}
    # Twice: caches that the first run had left behind would make the second differ.
    for _ in range(2):
        result = verify(program, toy_decoder())
        assert result.ok, result.summary()
    assert all(torch.equal(program.state_dict[name], tensor) for name, tensor in before.items())


def test_made_steps_fill_several_positions_and_then_one_at_a_time() -> None:
    result = verify(toy_decoder(capacity=9), toy_decoder(capacity=9), steps=5)
    # 7 new tokens, then 1 and 1: the capacity of 9 ends the steps.
    assert [c.step for c in result.outputs if c.kind == "output"] == [0, 1, 2]
    assert [c.kind for c in result.outputs if c.step == 0] == ["cache", "output"]


def keys_model(batch: int | str, axis: int | None) -> onnx.ModelProto:
    """A cache [B,2,32,16] that new keys [B,2,S,16] are written to at the position; it counts the valid positions."""
    nodes = [
        helper.make_node("TensorScatter", ["cache", "keys", "position"], ["cache_after"], axis=2),
        helper.make_node("Identity", ["valid"], ["count"]),
        helper.make_node("Shape", ["keys"], ["new"], start=2, end=3),
    ]
    inputs = {"keys": [batch, 2, "S", 16], "position": [batch], "valid": [batch], "cache": [batch, 2, 32, 16]}
    kinds = {"keys": TensorProto.FLOAT, "cache": TensorProto.FLOAT}
    graph = helper.make_graph(
        nodes,
        "keys",
        [helper.make_tensor_value_info(n, kinds.get(n, TensorProto.INT64), shape) for n, shape in inputs.items()],
        [
            helper.make_tensor_value_info("count", TensorProto.INT64, [batch]),
            helper.make_tensor_value_info("new", TensorProto.INT64, [1]),
            helper.make_tensor_value_info("cache_after", TensorProto.FLOAT, [batch, 2, 32, 16]),
        ],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 24)], ir_version=11)
    capacity = None if axis is None else 32
    entry = {"input": "cache", "output": "cache_after", "fill": 0, "axis": axis, "capacity": capacity, "in_place": True}
    helper.set_model_props(model, {"graphrewrite.caches": json.dumps([entry])})
    return model


@pytest.mark.parametrize("batch", [1, "B"])
@pytest.mark.parametrize("axis", [2, None])
def test_made_keys_count_their_own_number_with_an_open_batch_too(batch: int | str, axis: int | None) -> None:
    model = keys_model(batch, axis)
    steps = made_steps(OnnxRunner(model, model), 3, 0)
    assert [[keys.shape, int(position[0]), int(valid[0])] for keys, position, valid in steps] == [
        [(1, 2, 7, 16), 0, 7],
        [(1, 2, 1, 16), 7, 8],
        [(1, 2, 1, 16), 8, 9],
    ]
    assert verify(model, model).ok


@pytest.mark.parametrize(
    "form",
    [
        pytest.param(lambda model, folder: model, id="ModelProto"),
        pytest.param(lambda model, folder: ir.from_proto(model), id="onnx_ir.Model"),
        pytest.param(lambda model, folder: (onnx.save(model, folder / "m.onnx"), folder / "m.onnx")[1], id="path"),
    ],
)
def test_every_kind_of_onnx_model(form: Any, tmp_path: Path) -> None:
    assert verify(toy_decoder(), form(toy_decoder(), tmp_path)).ok


def test_a_program_in_a_file(tmp_path: Path) -> None:
    torch.export.save(torch_toy(), tmp_path / "toy.pt2")
    assert verify(tmp_path / "toy.pt2", toy_decoder()).ok


@pytest.mark.parametrize(
    ("tolerance", "ok"),
    [
        # The output is off by 1e-3 of itself in every element.
        ({"rtol": 2e-3}, True),
        ({"rtol": 5e-4}, False),
        ({"atol": 1.0}, True),
        ({"atol": 1e-9}, False),
        ({"rtol": 0.0, "atol": 0.0}, False),
    ],
)
def test_given_tolerances(tolerance: dict[str, float], ok: bool) -> None:
    result = verify(elementwise(), elementwise(scale=1.001), **tolerance)  # type: ignore[arg-type]
    assert result.ok is ok
    assert result.tolerance.derivation.startswith("given: an element may be off by ")


def test_the_derived_tolerance_says_where_it_comes_from() -> None:
    tolerance = verify(toy_decoder(), toy_decoder()).tolerance
    # Weights: table and its transpose on each side; the longest sum is at least 16.
    assert tolerance.rtol == pytest.approx(4 * 2**-24 * math.sqrt(16) * math.sqrt(4 + 4))
    assert tolerance.derivation.startswith(f"an element may be off by {tolerance.rtol:.1e} of the largest magnitude")
    assert "sqrt(16)" in tolerance.derivation and "sqrt(8)" in tolerance.derivation


def codes(*values: int) -> Any:
    return np.array(values, np.int8)


@pytest.mark.parametrize(
    ("before", "after", "ok", "widened"),
    [
        pytest.param(codes(*range(-100, 100)), codes(*range(-100, 100)), True, False, id="equal"),
        pytest.param(codes(1, 2, 3), codes(1, 2, 4), True, True, id="one code by one"),
        pytest.param(codes(1, 2, 3), codes(1, 2, 5), False, True, id="one code by two"),
        pytest.param(codes(1, 2, 3), codes(2, 3, 3), False, True, id="too many codes by one"),
        pytest.param(codes(127, 1), codes(-128, 1), False, True, id="no wrap in the difference"),
    ],
)
def test_codes_may_be_off_by_one_where_they_are_few(before: Any, after: Any, ok: bool, widened: bool) -> None:
    count = comparing.CodeCount()
    tolerance = comparing.derive_tolerance([], 16, [np.dtype(np.float32)])
    assert comparing.compare("c", "cache", 0, before, after, tolerance, count).ok is ok
    assert (count.allowance() > 0) is widened
    one, two = np.ones(4, np.float32), np.full(4, 1.002, np.float32)
    # One step of 1/255 at most: 0.002 is within it only where codes differ.
    assert comparing.compare("o", "output", 0, one, two, tolerance, count).ok is widened


@pytest.mark.parametrize(
    ("before", "after", "ok"),
    [
        ([math.inf, 1], [math.inf, 1], True),
        ([math.inf, 1], [-math.inf, 1], False),
        ([math.inf, 1], [1e30, 1], False),
        ([math.nan, 1], [math.nan, 1], True),
        ([math.nan, 1], [0, 1], False),
        ([0, 0], [0, 0], True),
        ([0, 0], [1e-30, 0], False),
        ([1e-9, 1], [2e-9, 1], True),
    ],
)
def test_values_that_are_not_finite_or_zero(before: list[float], after: list[float], ok: bool) -> None:
    tolerance = comparing.derive_tolerance([], 16, [np.dtype(np.float32)])
    one, two = np.array([before], np.float32), np.array([after], np.float32)
    assert comparing.compare("o", "output", 0, one, two, tolerance, comparing.CodeCount()).ok is ok


def test_integer_outputs_are_equal_or_not() -> None:
    tolerance = comparing.derive_tolerance([], 16, [np.dtype(np.int64)])
    for other, ok in ((5, True), (6, False)):
        result = comparing.compare("o", "output", 0, np.array([5]), np.array([other]), tolerance, comparing.CodeCount())
        assert result.ok is ok


def test_argmax_agreement() -> None:
    tolerance = comparing.given_tolerance(None, 1.0)
    one, two = np.array([[0, 1.0], [1, 0]], np.float32), np.array([[0, 1.0], [0, 0.5]], np.float32)
    assert comparing.compare("o", "output", 0, one, two, tolerance, comparing.CodeCount()).argmax_agreement == 0.5


@pytest.mark.parametrize(
    ("before", "after", "inputs", "options", "message"),
    [
        (elementwise, toy_decoder, None, {}, "inputs do not correspond"),
        (elementwise, elementwise, None, {"steps": 0}, "steps is 0"),
        (elementwise, elementwise, None, {"rtol": -1.0}, "rtol is -1"),
        (elementwise, elementwise, None, {"atol": math.nan}, "atol is nan"),
        (elementwise, elementwise, None, {"atol": "1"}, "atol is '1'"),
        (elementwise, elementwise, None, {"rtol": 10**400}, "rtol is inf"),
        (elementwise, elementwise, None, {"rtol": True}, "rtol is True"),
        (elementwise, elementwise, None, {"steps": 1.5}, "steps is 1.5"),
        (elementwise, elementwise, None, {"steps": True}, "steps is True"),
        (elementwise, elementwise, None, {"steps": None}, "steps is None"),
        (elementwise, elementwise, None, {"seed": -1}, "seed is -1"),
        (elementwise, elementwise, None, {"seed": "a"}, "seed is 'a'"),
        (elementwise, elementwise, [], {}, "sequence of steps"),
        (elementwise, elementwise, {"a": np.ones((2, 3))}, {}, "sequence of steps"),
        (elementwise, elementwise, [np.ones((2, 3))], {}, "step 0 is a ndarray"),
        (elementwise, elementwise, [{"z": np.ones((2, 3))}], {}, r"takes \['a'\], given are \['z'\]"),
        (elementwise, elementwise, [(1, 2)], {}, "takes 1 .* given are 2"),
        (elementwise, elementwise, [{"a": np.ones((2, 3), complex)}], {}, "is float32, given is complex128"),
        (elementwise, elementwise, [{"a": np.ones((5, 3), np.float32)}], {}, "fails on these inputs"),
        (torch_toy, torch_toy, [(torch.tensor([[99]]), torch.tensor([0]))], {}, "exported program fails"),
        (lambda: 3, elementwise, None, {}, "is not a model"),
    ],
)
def test_bad_arguments(before: Any, after: Any, inputs: Any, options: Any, message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        verify(before(), after(), inputs, **options)
    assert "\n" not in str(caught.value)


def test_json_and_print_say_the_same() -> None:
    result = verify(elementwise(), elementwise(scale=math.nan))
    document = json.loads(result.to_json())
    assert document["ok"] is False
    assert document["first_divergence"]["name"] == "b"
    assert document["outputs"][0]["max_abs"] == "inf"
    text = io.StringIO()
    result.print(Console(file=text, width=200))
    assert "not equal: output 'b' diverges first, at step 0" in text.getvalue()
    assert "tolerance: an element may be off by" in text.getvalue()
    assert "largest difference of 'b' over all steps: inf, relative inf" in text.getvalue()
    assert document["largest"] == {"b": {"max_abs": "inf", "max_rel": "inf"}}


def test_a_cache_on_one_side_only_is_noted() -> None:
    result = verify(torch_toy(), _other_cache_name())
    assert result.ok and any("past_rows" in note for note in result.notes)


def _other_cache_name() -> onnx.ModelProto:
    model = toy_decoder()
    text = model.SerializeToString().replace(b"past_rows", b"other_row")
    return onnx.load_from_string(text)
