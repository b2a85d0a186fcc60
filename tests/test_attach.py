"""Signatures, and giving models the function bodies they need."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import onnx
import onnx.reference
import onnx_ir as ir
import pytest

from graphrewrite.custom_ops.functions import DOMAIN, MINIMUM_OPSET, Signature, attach, body, signature_of
from graphrewrite.errors import InputError
from tests.calls import (
    NAN,
    Call,
    Feeds,
    assert_attends,
    joint_call,
    model_of,
    node_of,
    run_session,
    sdpa_call,
    session,
    source_call,
    update_call,
)
from tests.kernels.reference import Array, Sdpa, make_sdpa
from tests.sdpa_cases import JOINT_CASES, SDPA_CASES


@pytest.mark.parametrize(
    ("opset", "case"),
    [
        (MINIMUM_OPSET, "scale"),
        (17, "chunk of float rows"),
        (18, "positions per sequence, all"),
        # The evaluator has no DequantizeLinear older than opset 19.
        *((opset, case) for opset in (19, 21, 25) for case in ("decode", "no zero points", "mask and causal")),
        *((21, case) for case in ("int4 in groups", "sinks, recent", "window and mask, recent", "softcap, float mask")),
        *((25, case) for case in ("scales of channels", "sink tokens, decode", "float16", "int8 query")),
    ],
)
def test_bodies_pass_the_checker_and_run_in_the_reference_evaluator(opset: int, case: str) -> None:
    arguments = make_sdpa(np.random.default_rng(14), **SDPA_CASES[case])
    call = sdpa_call(arguments)
    returned = ir.DataType.FLOAT16 if arguments.query.dtype == np.float16 else ir.DataType.FLOAT
    model = model_of(node_of(call), opset=opset, returned={"output": returned})
    model.graph.outputs[0].shape = ir.Shape([None] * 4)
    attach(model)
    proto = ir.to_proto(model)
    onnx.checker.check_model(proto, full_check=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        (result,) = onnx.reference.ReferenceEvaluator(proto).run(None, call.feeds)
    assert_attends(result, arguments)


def two_attentions(first: dict[str, Any], second: dict[str, Any]) -> tuple[ir.Model, dict[str, Array], list[Sdpa]]:
    """A model of two CustomSdpa nodes, its inputs and the arguments of both."""
    arguments = [
        make_sdpa(np.random.default_rng(15), rows=3, start=4, heads=(4, 2), **facts) for facts in (first, second)
    ]
    calls = [sdpa_call(item) for item in arguments]
    model = model_of(*(node_of(call, f"_{number}") for number, call in enumerate(calls)))
    feeds = {f"{name}_{number}": array for number, call in enumerate(calls) for name, array in call.feeds.items()}
    return model, feeds, arguments


@pytest.mark.parametrize(
    ("first", "second", "overloads"),
    [
        ({"is_causal": True}, {"is_causal": True}, ["", ""]),
        ({"is_causal": True}, {}, ["", "1"]),
        ({"cache": "float"}, {"cache": "int8"}, ["", "1"]),
        ({"mask": "bool"}, {"mask": "float"}, ["", "1"]),
        ({"recent": True}, {"recent": False}, ["", "1"]),
        ({"scale": 0.3}, {"scale": 0.7}, ["", ""]),
        ({"scale": 0.3}, {}, ["", "1"]),
        ({"window": 3, "softcap": 2.0}, {"window": 5, "softcap": 3.0}, ["", ""]),
        ({"window": 3}, {}, ["", "1"]),
        ({"groups": 1}, {"groups": 4}, ["", ""]),
        ({"scales": "[D]"}, {"scales": "[]"}, ["", ""]),
        ({"scales": "[D]"}, {}, ["", "1"]),
        ({"dtype": "float16"}, {}, ["", "1"]),
        ({"cache": "int4", "sinks": True}, {"cache": "int4"}, ["", "1"]),
    ],
    ids=str,
)
@pytest.mark.parametrize("library", [False, True])
def test_calls_that_differ_get_bodies_of_their_own(
    first: dict[str, Any], second: dict[str, Any], overloads: list[str], library: bool
) -> None:
    model, feeds, arguments = two_attentions(first, second)
    attach(model)
    assert [node.overload for node in model.graph] == overloads
    assert [key[2] for key in model.functions] == sorted(set(overloads))
    for result, item in zip(session(model, library=library).run(None, feeds), arguments, strict=True):
        assert_attends(result, item)


def test_a_runtime_that_mixes_up_overloads_fails() -> None:
    model, feeds, _ = two_attentions({"is_causal": True}, {})
    attach(model)
    # What onnxruntime up to 1.26 does: one body serves every call.
    for node in model.graph:
        node.overload = ""
    del model.functions[DOMAIN, "CustomSdpa", "1"]
    with pytest.raises(Exception, match="must select function overloads"):
        session(model).run(None, feeds)


def test_attach_is_idempotent_and_follows_the_model() -> None:
    model, _, _ = two_attentions({"is_causal": True}, {})
    attach(model)
    once = ir.to_proto(model).SerializeToString(deterministic=True)
    attach(model)
    assert ir.to_proto(model).SerializeToString(deterministic=True) == once
    model.graph.remove(model.graph[1])
    del model.graph.outputs[1:]
    attach(model)
    assert list(model.functions) == [(DOMAIN, "CustomSdpa", "")]
    assert "variant" not in model.graph[0].attributes


def test_attach_finds_calls_in_subgraphs_and_functions() -> None:
    value, cache = np.ones((1, 1, 1, 2), np.float32), np.zeros((1, 3, 1, 2), np.float32)
    call = update_call(value, cache, 1)
    inner = node_of(call)
    function = ir.Function(
        "user",
        "Write",
        graph=ir.Graph(
            list(filter(None, inner.inputs)), inner.outputs, nodes=[inner], opset_imports={"": 17}, name="f"
        ),
        attributes=[],
    )
    outer = node_of(replace(call, op_type="Write", domain="user", attributes={}))
    branches = {}
    for key in ("then_branch", "else_branch"):
        node = ir.Node(DOMAIN, "UpdateCache", outer.inputs, outputs=[ir.Value(name=key)])
        branches[key] = ir.Graph([], node.outputs, nodes=[node], name=key)
    condition = ir.Value(name="condition", type=ir.TensorType(ir.DataType.BOOL), shape=ir.Shape([]))
    choice = ir.node("If", [condition], branches, outputs=[ir.Value(name="chosen")])
    model = model_of(outer, choice)
    model.functions[function.identifier()] = function
    attach(model)
    assert (DOMAIN, "UpdateCache", "") in model.functions
    assert function.opset_imports[DOMAIN] == model.opset_imports[DOMAIN] == 1
    results = session(model).run(None, {**call.feeds, "condition": np.array(True)})
    for result in results:
        assert result[0, :, 0, 0].tolist() == [0, 1, 0]


def test_a_function_of_a_source_operator_that_came_with_the_model_stays() -> None:
    inputs: Feeds = {"value": np.ones((1, 1, 1, 1), np.float32), "cache": np.zeros((1, 2, 1, 1), np.float32)}
    call = source_call("llama", "update_cache", inputs | {"start_pos": np.array(0)}, "new_cache")
    model = model_of(node_of(call))
    formal = [ir.Value(name=name) for name in call.inputs]
    identity = ir.node("Identity", [formal[1]])
    own = ir.Function(
        "llama",
        "update_cache",
        graph=ir.Graph(formal, identity.outputs, nodes=[identity], opset_imports={"": 17}),
        attributes=[],
    )
    model.functions[own.identifier()] = own
    attach(model)
    assert list(model.functions.values()) == [own]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda model: model.graph.opset_imports.update({"": MINIMUM_OPSET - 1}), "needs opset 14 or newer"),
        (lambda model: setattr(model.graph[0], "op_type", "Missing"), "there is no operator graphrewrite::Missing"),
        (lambda model: model.graph[0].attributes.add(ir.AttrString("layout", "SBNH")), "layout is 'SBNH'"),
        (lambda model: setattr(model.graph[0].inputs[10], "type", None), "is not known .*run shape inference"),
        (lambda model: setattr(model.graph[0].inputs[10], "dtype", ir.DataType.INT32), "has element type INT32"),
        (lambda model: setattr(model.graph[0].inputs[0], "type", None), "the element type of input 0 .* is not known"),
        (lambda model: setattr(model.graph[0].inputs[4], "shape", None), "the rank of input 4 .* is not known"),
        (lambda model: model.graph[0].attributes.add(ir.AttrInt64("window", -1)), "window is -1; expected 0 or more"),
        (lambda model: model.graph[0].attributes.add(ir.AttrFloat32("softcap", NAN)), "softcap is nan"),
        (lambda model: model.graph[0].replace_input_with(4, None), "key_scales go with a key_cache of codes"),
    ],
    ids=[
        "opset",
        "operator",
        "layout",
        "unknown mask type",
        "wrong mask type",
        "unknown query type",
        "unknown rank of scales",
        "window",
        "softcap",
        "no scales",
    ],
)
def test_a_model_that_cannot_get_bodies_is_refused_and_unchanged(
    change: Callable[[ir.Model], None], message: str
) -> None:
    model, _, _ = two_attentions({"mask": "bool"}, {"mask": "float"})
    change(model)
    before = ir.to_proto(model).SerializeToString(deterministic=True)
    with pytest.raises(InputError, match=message):
        attach(model)
    assert ir.to_proto(model).SerializeToString(deterministic=True) == before


def test_a_body_can_be_asked_for_by_signature() -> None:
    call = update_call(np.ones((1, 1, 1, 2), np.float32), np.zeros((1, 3, 1, 2), np.float32), 1, "BNSH")
    signature = signature_of(node_of(call))
    assert signature == Signature("UpdateCache", (True, True, True), layout="BNSH")
    assert body(signature).identifier() == (DOMAIN, "UpdateCache", "")
    with pytest.raises(InputError, match="no function body for the operator graphrewrite::Missing"):
        body(Signature("Missing", ()))


@pytest.mark.parametrize("case", ["bfloat16", "float32 over bfloat16"])
def test_types_are_looked_up_through_nodes_that_keep_them(case: str) -> None:
    # As a pass leaves a graph that it edited: only the inputs of the model have types.
    arguments = make_sdpa(np.random.default_rng(16), **JOINT_CASES[case])
    first = joint_call(arguments)
    caches = node_of(first)
    query = ir.node("Transpose", [caches.inputs[0]], {"perm": [0, 2, 1, 3]}, outputs=[ir.Value(name="transposed")])
    back = ir.node("Transpose", query.outputs, {"perm": [0, 2, 1, 3]}, outputs=[ir.Value(name="back")])
    second = node_of(sdpa_call(replace(arguments, recent_key=None, recent_value=None)), "_2")
    for position, value in enumerate([*back.outputs, *caches.outputs[1:]]):
        second.replace_input_with(position, value)
    second.replace_input_with(3, caches.inputs[5])
    if "sinks" in first.inputs:
        second.replace_input_with(11, caches.inputs[7])
    model = model_of(caches, query, back, second)
    del model.graph.outputs[1:-1]
    attach(model)
    for result in run_session(session(model), first.feeds):
        assert_attends(result, arguments)


def test_the_rank_of_scales_is_looked_up_too() -> None:
    call = Call("UpdateQuantizedCache", {}, ("codes", "scales", "points"))
    arguments = make_sdpa(np.random.default_rng(17), start=4)
    attention = node_of(sdpa_call(arguments))
    _, key_cache, _, start, scales, points, *_ = attention.inputs
    call.inputs |= {"value": np.ones((1, 1, 1, 8), np.float32)}
    value = node_of(call).inputs[0]
    update = ir.node("UpdateQuantizedCache", [value, key_cache, scales, start, points], domain=DOMAIN, num_outputs=3)
    for position, output in zip((1, 4, 5), update.outputs, strict=True):
        attention.replace_input_with(position, output)
    assert signature_of(attention).static == ()
    assert signature_of(attention).types[:6] == tuple(
        ir.DataType[name] if name else None for name in ("FLOAT", "INT8", "INT8", "", "FLOAT", "INT8")
    )


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        ({"mode": "circular"}, "there is no attribute mode"),
        ({"is_causal": 2}, "attribute is_causal is 2; expected 0 or 1"),
        ({"scale": float("nan")}, "attribute scale is nan; expected a finite number"),
        ({"softcap": float("inf")}, "attribute softcap is inf"),
        ({"window": -1}, "attribute window is -1"),
    ],
    ids=str,
)
def test_attributes_that_no_body_has(attributes: dict[str, Any], message: str) -> None:
    call = sdpa_call(make_sdpa(np.random.default_rng(18)))
    call.attributes = {**call.attributes, **attributes}
    model = model_of(node_of(call))
    with pytest.raises(InputError, match=f"CustomSdpa.*{message}"):
        attach(model)
    assert not model.functions


def test_a_range_that_int8_lacks() -> None:
    inputs: Feeds = {"input": np.ones((2, 3), np.float32), "scales": np.ones((2, 1), np.float32)}
    model = model_of(node_of(Call("QuantizePerToken", inputs, ("codes",), {"quant_max": 200})))
    with pytest.raises(InputError, match="quant_min is -128 and quant_max 200"):
        attach(model)
