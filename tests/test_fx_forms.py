"""Every source form of torch.export beyond those of `test_patterns`: found, equal to what it was, held still; every
near miss refused, with its code."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from fx_forms import FloatLayer, QuantizedQueryLayer, export, inputs
from fx_standard_forms import StandardLayer
from test_patterns import SCHEDULE, TOLERANCE, codes_of
from torch.export import ExportedProgram

import graphrewrite as gr

# name: layer, what the report says (pattern, updates)
FORMS: dict[str, tuple[Callable[[], Any], tuple[str, str]]] = {
    "F4": (QuantizedQueryLayer, ("quantized-sdpa", "key+value")),
    "F4 heads first": (lambda: QuantizedQueryLayer(heads_first=True), ("quantized-sdpa", "key+value")),
    "F4 masked": (lambda: QuantizedQueryLayer(masked=True), ("quantized-sdpa", "key+value")),
    "F10 ring": (lambda: StandardLayer(write="ring"), ("dequantized-sdpa", "key+value")),
}


def _form(name: str, pattern: str, updates: str, *args: Any, **options: Any) -> None:
    FORMS[name] = (lambda: StandardLayer(*args, **options), (f"{pattern}-sdpa", updates))


# The writes of groups stay, and those that multiply by reciprocals of scales: the operator divides.
_form("F9 dequantize_per_token", "dequantized", "key+value", "per_token")
_form("F9 dequantize_per_channel, float32", "dequantized", "none", "per_channel float32")
_form("F9 dequantize_per_channel, float64", "dequantized", "none", "per_channel float64")
_form("F9 codes times scales of channels", "dequantized", "key+value", "static")
_form("F9 codes times scales of heads and channels", "dequantized", "key+value", "static heads")
_form("F9 codes times one scale", "dequantized", "key+value", "static tensor")
_form("F9 dequantize_affine, rows", "dequantized", "key+value", "affine token")
_form("F9 dequantize_affine, groups", "dequantized", "none", "affine groups")
_form("F9 dequantize_affine, channels", "dequantized", "key+value", "affine channel")
_form("F9 dequantize_affine, heads", "dequantized", "key+value", "affine heads")
_form("F9 dequantize_affine, one", "dequantized", "key+value", "affine tensor")
_form("F7 float mask, enable_gqa", "dequantized", "key+value")
_form("F7 bool mask", "dequantized", "key+value", core="sdpa bool")
_form("F7 repeat_interleave", "dequantized", "key+value", heads="repeat")
_form("F7 expanded heads", "dequantized", "key+value", heads="expand")
_form("F7 sliced", "dequantized", "key+value", core="sdpa sliced")
_form("F7 exact rows", "overlaid", "key+value", exact=True)
_form("F7 exact rows, sliced", "overlaid", "key+value", core="sdpa sliced", exact=True)
_form("F8 divided", "dequantized", "key+value", core="written", heads="repeat")
_form("F8 scaled both", "dequantized", "key+value", core="written both", heads="expand")
_form("F8 scaled query", "dequantized", "key+value", core="written query", heads="repeat")
_form("F8 capped", "dequantized", "key+value", core="written capped", heads="repeat")
_form("F8 where", "dequantized", "key+value", core="written where", heads="repeat")
_form("F8 filled, guarded", "dequantized", "key+value", core="written filled guarded", heads="repeat")
_form("F8 sliced", "dequantized", "key+value", core="written sliced", heads="repeat")
_form("F8 exact rows", "overlaid", "key+value", core="written", heads="expand", exact=True)
_form("F6 index_copy", "dequantized", "key+value", write="index_copy")
_form("F6 narrow, copy_", "dequantized", "key+value", write="narrow")
_form("F6 slices", "dequantized", "key+value", write="slices")
_form("F6 slices, exact rows", "overlaid", "key+value", write="slices", exact=True)
_form("F6 indices of no order", "dequantized", "none", write="scrambled")

# torch takes these apart: attention into products and a softmax, repeated heads into views, rows into index_put.
DECOMPOSED = ("F4", "F6 index_copy", "F7 bool mask", "F7 exact rows, sliced", "F7 expanded heads", "F8 scaled both",
              "F9 dequantize_per_channel, float64", "F9 dequantize_affine, rows", "F10 ring")  # fmt: skip


@cache
def exported(name: str) -> ExportedProgram:
    """The form, exported once: no test may change it, and a rewrite must not."""
    return export(FORMS[name][0]())


def steps_of(program: ExportedProgram) -> list[tuple[Any, ...]]:
    masked = len(program.graph_signature.user_inputs) == 5
    return [inputs(count, start, masked=masked) for count, start in SCHEDULE]


@pytest.mark.parametrize("name", FORMS)
def test_form_is_rewritten_and_equal(name: str) -> None:
    before = exported(name)
    result = gr.rewrite(before, require=1)
    (site,) = result.report.sites
    assert (site.pattern, site.updates) == FORMS[name][1]
    assert site.current_tokens == ("exact" if "exact rows" in name else "quantized")
    left = {str(node.target) for node in result.model.graph.nodes if node.op == "call_function"}
    assert not {target for target in left if "scaled_dot_product" in target or "softmax" in target}
    assert not {target for target in left if "dequantize" in target or "llama" in target}
    verification = gr.verify(before, result.model, steps_of(before), **TOLERANCE)
    assert verification.ok, verification.summary()


@pytest.mark.parametrize("name", DECOMPOSED)
def test_decomposed_form_is_rewritten_and_equal(name: str) -> None:
    before = exported(name).run_decompositions()
    result = gr.rewrite(before, require=1)
    (site,) = result.report.sites
    assert (site.pattern, site.updates) == FORMS[name][1]
    verification = gr.verify(before, result.model, steps_of(exported(name)), **TOLERANCE)
    assert verification.ok, verification.summary()


def test_half_precision_is_computed_in_float32() -> None:
    before = export(StandardLayer(half=True))
    result = gr.rewrite(before, require=1)
    # The source rounds keys, weights and output to 11 bits, each to 2^-11 of values up to 4; ours the output alone.
    verification = gr.verify(before, result.model, steps_of(before), rtol=0.0, atol=4 * 4 * 2.0**-11)
    assert verification.ok, verification.summary()


@pytest.mark.parametrize("options", [{"joint": True}, {"joint": False}, {"joint": True, "masked": True}])
def test_float_caches_are_written_by_operators_of_their_own(options: dict[str, bool]) -> None:
    """F5"""
    before = export(FloatLayer(**options))
    assert codes_of(gr.explain(before)) == ["cache-not-quantized"]
    result = gr.rewrite(before, passes=["fuse_quantized_sdpa", "separate_cache_update"], require=1)
    assert not result.report.refusals
    after = result.model
    (site,) = result.report.sites
    assert (site.pattern, site.updates, site.current_tokens) == ("float-sdpa", "key+value", "exact")
    calls = [str(node.target) for node in after.graph.nodes if "graphrewrite" in str(node.target)]
    assert sorted(calls) == ["graphrewrite.custom_sdpa.default", *["graphrewrite.update_cache.default"] * 2]
    assert not any("functionalized" in str(node.target) for node in after.graph.nodes)
    verification = gr.verify(before, after, steps_of(before), **TOLERANCE)
    assert verification.ok, verification.summary()


def test_float_caches_of_another_type_are_refused() -> None:
    program = export(FloatLayer(joint=True, dtype=torch.float64))
    assert codes_of(gr.rewrite(program, passes=["separate_cache_update"]).report) == ["cache-dtype"]


def test_exact_rows_of_a_ring_can_be_read_back_only() -> None:
    """F10: the fused operator takes exact rows at a run of slots, which those of a ring are not."""
    before = export(StandardLayer(write="ring", exact=True))
    (refusal,) = gr.rewrite(before).report.refusals
    assert refusal.code == "recent-slots" and "quantized" in (refusal.remedy or "")
    after = gr.rewrite(before, current_tokens="quantized", require=1).model
    same = exported("F10 ring")  # the form that reads them back itself
    assert gr.verify(same, after, steps_of(same), **TOLERANCE).ok
    assert not gr.verify(before, after, steps_of(same), **TOLERANCE).ok


# name: the layer, the code of its refusal
REFUSALS: dict[str, tuple[Callable[[], Any], str]] = {
    "F4 one scale for all heads of a query": (
        lambda: QuantizedQueryLayer(flaw="scale-granularity"),
        "scale-granularity",
    ),
    "F6 exact rows at indices of no order": (lambda: StandardLayer(write="scrambled", exact=True), "recent-slots"),
    "F7 heads repeated in turn": (lambda: StandardLayer(flaw="heads-in-turn"), "no-pattern"),
    "F7 causal over a slice": (lambda: StandardLayer(core="sdpa causal sliced"), "causal-over-slice"),
    "F8 weights that are no softmax": (
        lambda: StandardLayer(core="written sharpened", heads="repeat"),
        "attention-form",
    ),
    "F8 a mask of one column": (lambda: StandardLayer(core="written one column", heads="repeat"), "mask-shape"),
    "F9 a scale for each slot": (
        lambda: StandardLayer("per_channel float32", flaw="scale-granularity"),
        "scale-granularity",
    ),
    "F9 zero points of another type": (
        lambda: StandardLayer("per_channel", flaw="zero-point-dtype"),
        "zero-point-dtype",
    ),
    "F9 zero points that wrap": (lambda: StandardLayer("per_channel", flaw="zero-point-wraps"), "zero-point-wraps"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_near_miss_is_refused(name: str) -> None:
    make, code = REFUSALS[name]
    program = export(make())
    result = gr.rewrite(program)
    assert result.model is program
    assert codes_of(result.report) == [code]


class Router(torch.nn.Module):
    """A softmax over experts, which no attention is."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = torch.nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, chosen = torch.topk(torch.softmax(self.gate(x), -1), 2)
        return weights * chosen


def test_a_softmax_that_is_no_attention_is_not_reported() -> None:
    program = torch.export.export(Router(), (torch.randn(1, 3, 16),))
    assert gr.explain(program).attention_cores == 0


# A layer that differs from a right one in one place, and that right one.
WRONG: dict[str, tuple[Callable[[], Any], str]] = {
    "mask off by one": (lambda: StandardLayer(flaw="mask off by one"), "F7 float mask, enable_gqa"),
    "scale on another axis": (lambda: StandardLayer(flaw="scale on another axis"), "F7 float mask, enable_gqa"),
    "zero point dropped": (lambda: StandardLayer(flaw="zero point dropped"), "F7 float mask, enable_gqa"),
    "scales of the other cache": (
        lambda: StandardLayer(flaw="scales of the other cache"),
        "F7 float mask, enable_gqa",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_variant_is_never_the_right_one(name: str) -> None:
    """It is refused, or fused into what it says and not into what it should say."""
    make, right = WRONG[name]
    wrong = export(make())
    result = gr.rewrite(wrong)
    if result.report.sites:
        assert gr.verify(wrong, result.model, steps_of(wrong)).ok
    assert not gr.verify(exported(right), result.model, steps_of(wrong), **TOLERANCE).ok


GOLDENS = {
    "fx-quantized-query": "F4",
    "fx-slices": "F6 slices, exact rows",
    "fx-sdpa": "F7 repeat_interleave",
    "fx-written-out": "F8 scaled both",
    "fx-per-channel": "F9 dequantize_per_channel, float64",
    "fx-ring": "F10 ring",
}


@pytest.mark.parametrize("name", GOLDENS)
def test_graphs_before_and_after_stand_still(name: str, golden: Callable[[str, object], None]) -> None:
    # Exported anew: running a program teaches the shape environment that it shares with its copies.
    before = export(FORMS[GOLDENS[name]][0]()).run_decompositions({})
    golden(f"{name}-before", before)
    golden(f"{name}-after", gr.rewrite(before, require=1).model)
