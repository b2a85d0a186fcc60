"""Operator calls that tests build and run: one node, its inputs, and the ways to run it."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest

from graphrewrite import ort_tensors
from graphrewrite.custom_ops import library_path
from graphrewrite.custom_ops.functions import DOMAIN, attach
from tests.kernels.reference import Array, Sdpa, sdpa_with_bound, to_layout

Feeds = dict[str, "Array | None"]
NAN, INF = float("nan"), float("inf")
RUNTIME = tuple(map(int, ort.__version__.split(".")[:2]))


@dataclass
class Call:
    """One node: inputs by name in order (None: absent), attributes, names of its outputs."""

    op_type: str
    inputs: Feeds
    outputs: tuple[str, ...]
    attributes: Mapping[str, Any] = field(default_factory=dict)
    domain: str = DOMAIN

    @property
    def feeds(self) -> dict[str, Array]:
        return {name: array for name, array in self.inputs.items() if array is not None}


def node_of(call: Call, suffix: str = "") -> ir.Node:
    """The node of a call on values of known type and unknown extents."""
    inputs = [
        None
        if array is None
        else ir.Value(
            name=name + suffix,
            type=ir.TensorType(ir.DataType.from_numpy(array.dtype)),
            shape=ir.Shape([f"{name}{suffix}_{axis}" for axis in range(array.ndim)]),
        )
        for name, array in call.inputs.items()
    ]
    return ir.Node(
        call.domain,
        call.op_type,
        inputs,
        attributes=[ir.convenience.convert_attribute(key, value) for key, value in call.attributes.items()],
        outputs=[ir.Value(name=name + suffix) for name in call.outputs],
    )


def model_of(*nodes: ir.Node, opset: int = 17, returned: Mapping[str, ir.DataType] | None = None) -> ir.Model:
    """A model of these nodes, inputs and outputs in order; output types as onnxruntime infers them where not given."""
    used = [value for node in nodes for value in node.inputs if value is not None and value.producer() is None]
    inputs = list(dict.fromkeys(used))
    outputs = [value for node in nodes for value in node.outputs]
    for value in outputs:
        if returned and value.name in returned:
            value.type = ir.TensorType(returned[value.name])
    imports = {**{node.domain: 1 for node in nodes}, "": opset}
    return ir.Model(ir.Graph(inputs, outputs, nodes=nodes, opset_imports=imports, name="calls"), ir_version=8)


def session(model: ir.Model, *, library: bool = False) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 2
    if library:
        options.register_custom_ops_library(str(library_path()))
    serialized = ir.to_proto(model).SerializeToString()
    return ort.InferenceSession(serialized, options, providers=["CPUExecutionProvider"])


def run_session(loaded: ort.InferenceSession, feeds: Mapping[str, Array]) -> list[Array]:
    """All outputs, of any element type: `InferenceSession.run` takes and returns no bfloat16."""
    kinds = {item.name: item.type for item in loaded.get_inputs()}
    given = {name: ort_tensors.from_array(array, kinds[name]) for name, array in feeds.items()}
    return [ort_tensors.view(value).copy() for value in loaded.run_with_ort_values(None, given)]


def _skip_what_the_runtime_lacks(call: Call) -> None:
    """Old runtimes make no bfloat16 tensors from Python, and 1.18 crashes on a body with some of them."""
    if RUNTIME < (1, 20) and any(array.dtype.name == "bfloat16" for array in call.feeds.values()):
        pytest.skip("this onnxruntime has no bfloat16 in Python")


def run_body(call: Call, opset: int = 17) -> list[Array]:
    _skip_what_the_runtime_lacks(call)
    if RUNTIME < (1, 20) and not call.feeds.get("indices", np.ones(1)).size:
        pytest.skip("this onnxruntime does not expand empty tensors")
    model = model_of(node_of(call), opset=opset)
    attach(model)
    return run_session(session(model), call.feeds)


def run_kernel(call: Call) -> list[Array]:
    _skip_what_the_runtime_lacks(call)
    model = model_of(node_of(call))
    attach(model)
    return run_session(session(model, library=True), call.feeds)


def run_torch(call: Call) -> list[Array]:
    """The torch operator, which takes one position as an int, and one for each sequence as a tensor."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("graphrewrite.custom_ops.torch_ops")

    def tensor(array: Array) -> Any:
        # torch and numpy exchange no bfloat16.
        is_bfloat16 = array.dtype == ml_dtypes.bfloat16
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16) if is_bfloat16 else torch.from_numpy(array)

    def array(result: Any) -> Array:
        is_bfloat16 = result.dtype == torch.bfloat16
        values: Array = result.view(torch.int16).numpy().view(ml_dtypes.bfloat16) if is_bfloat16 else result.numpy()
        return values

    arguments: dict[str, Any] = {name: None if x is None else tensor(x) for name, x in call.inputs.items()}
    start = call.inputs.get("start_pos")
    if start is not None and start.ndim == 0:
        arguments["start_pos"] = int(start)
    attributes = {key: bool(value) if key == "is_causal" else value for key, value in call.attributes.items()}
    operator = getattr(torch.ops.graphrewrite, re.sub("(?<=[a-z])(?=[A-Z])", "_", call.op_type).lower())
    results = operator(*arguments.values(), **attributes)
    results = results if isinstance(results, tuple) else (results,)
    return [array(result) for result in results[: len(call.outputs)]]


WAYS: dict[str, Callable[[Call], list[Array]]] = {
    "body17": run_body,
    "body25": lambda call: run_body(call, 25),
    "kernel": run_kernel,
    "torch": run_torch,
}
ways = pytest.mark.parametrize("way", WAYS)
ways_once = pytest.mark.parametrize("way", ["body17", "kernel", "torch"])
layouts = pytest.mark.parametrize("layout", ["BSNH", "BNSH"])


def source_call(domain: str, op_type: str, inputs: Feeds, *outputs: str, **attributes: Any) -> Call:
    return Call(op_type, inputs, outputs, attributes, domain)


def update_call(value: Array, cache: Array, start: Any, layout: str = "BSNH", **attributes: Any) -> Call:
    inputs: Feeds = {
        "value": to_layout(value, layout),
        "cache": to_layout(cache, layout),
        "start_pos": np.asarray(start, np.int64),
    }
    return Call("UpdateCache", inputs, ("new_cache",), {"layout": layout, **attributes})


def rows_of(kind: str) -> Array:
    """Rows float32 [2,3,2,8] of which each one is hard in its way."""
    random = np.random.default_rng(2)
    value = random.standard_normal((2, 3, 2, 8), dtype=np.float32)
    if kind == "ties":
        # Halves of the step between codes: the range is 255 with scale 1, so x + zero_point ends in .5.
        value = random.integers(-100, 100, value.shape).astype(np.float32) + np.float32(0.5)
        value[..., 0], value[..., 1] = -128, 127
    elif kind == "extremes":
        value *= np.logspace(-44, 37, value.size, dtype=np.float32).reshape(value.shape)
        value[0, 0], value[0, 1], value[0, 2] = 0, 1e-42, np.abs(value[0, 2])
    elif kind == "offset":
        value += np.float32(50)
    return value


_OF_CACHES = ("key_scales", "key_zero_points", "value_scales", "value_zero_points", "recent_key", "recent_value")
_SDPA_INPUTS = ("query", "key_cache", "value_cache", "start_pos", *_OF_CACHES, "attn_mask", "sinks")
_QUANTIZED_QUERY = ("query_scales", "query_zero_points")


def _laid_out(arguments: Sdpa, name: str, layout: str) -> Array | None:
    array: Array | None = getattr(arguments, name)
    return array if array is None or array.ndim != 4 or name == "attn_mask" else to_layout(array, layout)


def _sdpa_attributes(a: Sdpa, layout: str) -> dict[str, Any]:
    given = {"is_causal": int(a.is_causal), "scale": a.scale, "softcap": a.softcap, "window": a.window}
    given["sink_tokens"] = a.sink_tokens
    return {name: value for name, value in given.items() if value or name == "is_causal"} | {"layout": layout}


def _without_absent_at_the_end(inputs: Feeds) -> Feeds:
    while next(reversed(inputs.values())) is None:
        inputs.popitem()
    return inputs


def sdpa_call(arguments: Sdpa, layout: str = "BSNH") -> Call:
    """CustomSdpa, or CustomQuantizedSdpa for a query of codes."""
    is_quantized = arguments.query_scales is not None
    names = (*_SDPA_INPUTS[:4], *_QUANTIZED_QUERY, *_SDPA_INPUTS[4:]) if is_quantized else _SDPA_INPUTS
    inputs = _without_absent_at_the_end({name: _laid_out(arguments, name, layout) for name in names})
    op_type = "CustomQuantizedSdpa" if is_quantized else "CustomSdpa"
    return Call(op_type, inputs, ("output",), _sdpa_attributes(arguments, layout))


def joint_call(arguments: Sdpa, layout: str = "BSNH") -> Call:
    """SdpaWithKvCache, where the recent rows are what is written."""
    names = {name: name for name in ("query", "key", "value", *_SDPA_INPUTS[1:4], "attn_mask", "sinks")}
    names |= {"key": "recent_key", "value": "recent_value"}
    inputs = _without_absent_at_the_end({name: _laid_out(arguments, source, layout) for name, source in names.items()})
    outputs = ("output", "new_key_cache", "new_value_cache")
    return Call("SdpaWithKvCache", inputs, outputs, _sdpa_attributes(arguments, layout))


def assert_attends(result: Array, arguments: Sdpa, layout: str = "BSNH", where: Array | None = None) -> None:
    """Attention's output is within the bound of float32 arithmetic, and not finite where the reference is not.

    The bound is that of sums in a row, the order that is open to an implementation and errs most.

    Args:
        where: the rows to look at, bool [B,S,Hq]; None: all.
    """
    expected, bound = sdpa_with_bound(arguments, lanes=1)
    result = to_layout(result, layout)
    assert result.shape == expected.shape
    assert result.dtype == (np.float32 if arguments.query.dtype == np.int8 else arguments.query.dtype)
    result = result.astype(np.float64)
    if where is not None:
        result, expected, bound = result[where], expected[where], bound[where]
    finite = np.isfinite(expected)
    np.testing.assert_array_equal(result[~finite], expected[~finite])
    error = np.abs(result[finite] - expected[finite])
    assert (error <= bound[finite]).all(), f"error {error.max()}, of the bound {(error / bound[finite]).max()}"
