"""Rewriting is linear in the nodes of the graph: counted in calls, so that the machine does not matter.

`tests/benchmarks/scale.py` measures the time.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import onnx_ir as ir
import pytest
from benchmarks.scale import one_torch_layer, onnx_decoder, torch_decoder

import graphrewrite as gr
from graphrewrite.fx.reader import FxGraph
from graphrewrite.garbage import collection_paused
from graphrewrite.matcher import find_sites


def calls(run: Callable[[], object]) -> int:
    """How many functions are called, Python's and built-in ones."""
    count = 0

    def profile(frame: FrameType, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        run()
    finally:
        sys.setprofile(before)
    return count


def onnx_rewrite(layers: int) -> Callable[[], object]:
    model = onnx_decoder(layers)
    return lambda: gr.rewrite(model, require=layers)


def onnx_explanation(layers: int) -> Callable[[], object]:
    model = onnx_decoder(layers)
    return lambda: gr.explain(model)


def torch_matching(layers: int) -> Callable[[], object]:
    # Not the rewrite: torch's check of a program asks for all its buffers once for each of them.
    program = torch_decoder(layers, one_torch_layer())
    return lambda: find_sites(FxGraph(program))


@pytest.mark.parametrize("make", [onnx_rewrite, onnx_explanation, torch_matching])
def test_work_is_linear_in_the_layers(make: Callable[[int], Callable[[], object]]) -> None:
    make(2)()  # imports and caches
    small, large = calls(make(4)), calls(make(16))
    # Four times the layers. A part that is quadratic becomes 16 times as many: one of 1 % would show.
    assert large <= 4.1 * small


def test_the_decoders_are_what_is_rewritten() -> None:
    assert len(gr.explain(onnx_decoder(3)).sites) == 3
    program = torch_decoder(3, one_torch_layer())
    assert len(gr.rewrite(program, require=3).report.sites) == 3


def test_outputs_of_a_deep_model_keep_their_places() -> None:
    model = onnx_decoder(3)
    result: Any = gr.rewrite(model, require=3).model
    assert [value.name for value in result.graph.outputs] == [value.name for value in model.graph.outputs]
    assert isinstance(result, ir.Model) and not result.graph.outputs[0].uses()


def test_the_collector_is_held_back_and_comes_back() -> None:
    assert gc.isenabled()
    with collection_paused():
        assert not gc.isenabled()
        with collection_paused():
            pass
        assert not gc.isenabled()
    assert gc.isenabled()
    with pytest.raises(ValueError), collection_paused():
        raise ValueError
    assert gc.isenabled()
