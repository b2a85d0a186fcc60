"""Operator calls that tests build and run: one node, its inputs, and the ways to run it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest

from graphrewrite.custom_ops import library_path
from graphrewrite.custom_ops.functions import DOMAIN, attach
from tests.kernels.reference import Array, Sdpa, to_layout

Feeds = dict[str, "Array | None"]
NAN, INF = float("nan"), float("inf")
UNIT_ROUNDOFF = 2.0**-24


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


def run_body(call: Call, opset: int = 17) -> list[Array]:
    model = model_of(node_of(call), opset=opset)
    attach(model)
    results: list[Array] = session(model).run(None, call.feeds)
    return results


def run_kernel(call: Call) -> list[Array]:
    model = model_of(node_of(call))
    attach(model)
    results: list[Array] = session(model, library=True).run(None, call.feeds)
    return results


TORCH_NAMES = {
    "UpdateCache": "update_cache",
    "UpdateQuantizedCache": "update_quantized_cache",
    "CustomSdpa": "custom_sdpa",
    "SdpaWithKvCache": "sdpa_with_kv_cache",
}


def run_torch(call: Call) -> list[Array]:
    """The torch operator, which takes one position for all sequences: once for each, where they have their own."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("graphrewrite.custom_ops.torch_ops")
    operator = getattr(torch.ops.graphrewrite, TORCH_NAMES[call.op_type])
    attributes = {key: bool(value) if key == "is_causal" else value for key, value in call.attributes.items()}

    def run(start: int, part: slice) -> list[Array]:
        arguments = []
        for name, array in call.inputs.items():
            if array is not None and array.ndim == 4 and len(array) > 1:
                array = array[part]
            tensor = None if array is None else torch.from_numpy(array)
            arguments.append(start if name == "start_pos" else tensor)
        results = operator(*arguments, **attributes)
        results = results if isinstance(results, tuple) else (results,)
        return [result.numpy() for result in results[: len(call.outputs)]]

    positions = call.feeds["start_pos"]
    if not positions.size or not positions.ndim:
        return run(int(positions) if positions.size else 0, slice(None))
    parts = [run(int(start), slice(b, b + 1)) for b, start in enumerate(positions)]
    return [np.concatenate(results) for results in zip(*parts, strict=True)]


WAYS: dict[str, Callable[[Call], list[Array]]] = {
    "body17": run_body,
    "body25": lambda call: run_body(call, 25),
    "kernel": run_kernel,
    "torch": run_torch,
}
ways = pytest.mark.parametrize("way", WAYS)
ways_once = pytest.mark.parametrize("way", ["body17", "kernel", "torch"])
layouts = pytest.mark.parametrize("layout", ["BSNH", "BNSH"])


def update_call(value: Array, cache: Array, start: Any, layout: str = "BSNH") -> Call:
    inputs: Feeds = {
        "value": to_layout(value, layout),
        "cache": to_layout(cache, layout),
        "start_pos": np.asarray(start, np.int64),
    }
    return Call("UpdateCache", inputs, ("new_cache",), {"layout": layout})


def source_call(domain: str, op_type: str, inputs: Feeds, *outputs: str, **attributes: Any) -> Call:
    return Call(op_type, inputs, outputs, attributes, domain)


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


def sdpa_call(arguments: Sdpa, layout: str = "BSNH") -> Call:
    def laid_out(name: str, array: Array | None) -> Array | None:
        return array if array is None or name in ("start_pos", "attn_mask") else to_layout(array, layout)

    names = [item.name for item in fields(Sdpa)][:11]
    inputs: Feeds = {name: laid_out(name, getattr(arguments, name)) for name in names}
    while next(reversed(inputs.values())) is None:
        inputs.popitem()
    attributes: dict[str, Any] = {"is_causal": int(arguments.is_causal), "layout": layout}
    if arguments.scale is not None:
        attributes["scale"] = arguments.scale
    return Call("CustomSdpa", inputs, ("output",), attributes)


def tolerance(a: Sdpa) -> float:
    """Bound of the error of float32 attention against exact arithmetic on the same inputs.

    A dot product of D terms, scaled, is off by at most (D + 2) u sum |q||k|, u = 2^-24; where an implementation expands
    (code - zero_point) * scale, |k| is (|code| + |zero_point|) * scale. Scores off by e change each weight, a quotient
    of sums of exponentials, by a factor within exp(2 e), and exponentials, sums and products of n terms round n + 8
    times more. The output is a mean of values, so it is off by that factor of the largest |value|.
    """

    def magnitude(which: str) -> float:
        cache, scales = getattr(a, f"{which}_cache"), getattr(a, f"{which}_scales")
        points, recent = getattr(a, f"{which}_zero_points"), getattr(a, f"recent_{which}")
        rows = np.abs(cache.astype(np.float64))
        if scales is not None:
            rows = (rows + (0 if points is None else np.abs(points.astype(np.float64)))) * scales
        largest = [np.max(rows[np.isfinite(rows)], initial=0)]
        return float(max(largest + ([] if recent is None else [np.max(np.abs(recent), initial=0)])))

    dim, slots = a.query.shape[-1], a.key_cache.shape[1]
    scale = dim**-0.5 if a.scale is None else abs(a.scale)
    largest_query = float(np.abs(a.query).sum(-1).max(initial=0))
    bias = 0.0
    if a.attn_mask is not None and a.attn_mask.dtype != bool:
        bias = float(np.abs(a.attn_mask[np.isfinite(a.attn_mask)]).max(initial=0))
    score_error = UNIT_ROUNDOFF * ((dim + 2) * scale * largest_query * magnitude("key") + bias)
    return magnitude("value") * float(np.expm1(2 * score_error) + (slots + 8) * UNIT_ROUNDOFF)


SDPA_CASES: dict[str, dict[str, Any]] = {
    "decode": {"start": 9, "is_causal": True, "recent": True, "heads": (4, 2)},
    "prefill": {"rows": 6, "is_causal": True, "recent": True, "heads": (6, 2)},
    "chunk": {"batch": 2, "rows": 5, "start": 7, "is_causal": True, "heads": (6, 3)},
    "chunk of float rows": {"rows": 5, "start": 7, "is_causal": True, "heads": (6, 3), "cache": "float"},
    "not causal": {"rows": 3, "start": 4, "heads": (2, 1)},
    "not causal, recent": {"rows": 3, "start": 4, "heads": (2, 1), "recent": True},
    "no zero points": {"rows": 2, "start": 4, "zero_points": False, "is_causal": True},
    "positions per sequence": {"batch": 3, "rows": 2, "start": (0, 9, 14), "is_causal": True, "heads": (4, 2)},
    "positions per sequence, recent": {"batch": 2, "rows": 3, "start": (11, 2), "is_causal": True, "recent": True},
    "positions per sequence, all": {"batch": 2, "rows": 3, "start": (11, 2), "recent": True, "cache": "float"},
    "positions per sequence, mask": {"batch": 2, "rows": 3, "start": (11, 2), "recent": True, "mask": "bool"},
    "mask [S,kv]": {"rows": 4, "start": 3, "mask": "bool", "heads": (4, 2)},
    "mask [Hq,S,kv]": {"batch": 2, "rows": 4, "start": 3, "mask": "float", "mask_shape": (4, 4, 12), "heads": (4, 2)},
    "mask [1,S,kv]": {"rows": 2, "start": 3, "mask": "bool", "mask_shape": (1, 2, 16), "heads": (4, 2)},
    "mask [B,Hq,S,kv]": {"batch": 2, "rows": 4, "mask": "bool", "mask_shape": (2, 4, 4, 16), "heads": (4, 2)},
    "mask [B,1,1,kv]": {"batch": 2, "rows": 4, "mask": "float", "mask_shape": (2, 1, 1, 16), "heads": (4, 2)},
    "mask and causal": {"rows": 4, "start": 3, "mask": "float", "is_causal": True, "heads": (4, 2)},
    "mask narrower than the recent rows": {"rows": 4, "start": 6, "mask": "bool", "mask_shape": (4, 8), "recent": True},
    "float mask narrower, causal": {
        "rows": 4,
        "start": 6,
        "mask": "float",
        "mask_shape": (4, 8),
        "recent": True,
        "is_causal": True,
        "heads": (4, 2),
    },
    "mask of one key": {"rows": 2, "start": 5, "mask": "bool", "mask_shape": (2, 1), "recent": True},
    "scale": {"rows": 3, "start": 4, "scale": 0.7, "is_causal": True, "cache": "float"},
    "full cache": {"rows": 2, "start": 14, "is_causal": True, "recent": True, "heads": (4, 2)},
    "no rows": {"rows": 0, "start": 4, "is_causal": True, "recent": True, "heads": (4, 2)},
    "no rows, masked": {"rows": 0, "start": 4, "mask": "float", "heads": (4, 2)},
    "no rows at the end": {"rows": 0, "start": 16, "cache": "float"},
    "no sequences": {"batch": 0, "rows": 2, "start": 4, "is_causal": True, "recent": True},
    "no sequences, no positions": {"batch": 0, "rows": 2, "start": (), "mask": "bool", "cache": "float"},
}
