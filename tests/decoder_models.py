"""A toy decoder with caches, in standard ONNX operators, and what it computes in numpy.

``total = sum of the embeddings of all tokens so far``; ``logits = total @ table.T``. The cache holds the embedding row
of each position.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper, numpy_helper

VOCABULARY = 11
WIDTH = 4
TABLE = np.random.default_rng(7).standard_normal((VOCABULARY, WIDTH)).astype(np.float32)


def toy_decoder(
    capacity: int = 8,
    *,
    batch: int | str = 1,
    new_tokens: int | str = "S",
    position_shape: tuple[int | str, ...] = (1,),
    in_place: bool = True,
    last_only: bool = True,
    metadata: bool | str = True,
    extra_input: bool = False,
    counter: bool = False,
    bias: float = 0.0,
) -> onnx.ModelProto:
    """Inputs tokens int64 [B,S], position; outputs logits float32 [B,1 or S,V] and the caches."""
    int64, float32 = TensorProto.INT64, TensorProto.FLOAT
    cache_shape = [batch, capacity, WIDTH]
    nodes = [
        helper.make_node("Gather", ["table", "tokens"], ["rows"]),
        helper.make_node("Reshape", ["position", "minus_one"], ["position_1d"]),
        helper.make_node("TensorScatter", ["past_rows", "rows", "position_1d"], ["present_rows"], axis=1),
        helper.make_node("Shape", ["tokens"], ["count"], start=1, end=2),
        helper.make_node("Add", ["position_1d", "count"], ["end"]),
        *_masked_sum("present_rows", "end", "total"),
        helper.make_node("MatMul", ["total", "table_t"], ["plain"]),
    ]
    if in_place:
        nodes.append(helper.make_node("Add", ["plain", "bias"], ["last"]))
    else:
        # Reads the past rows a second time, after the write: wrong values if one buffer served for both.
        nodes += [
            *_masked_sum("past_rows", "position_1d", "past_total"),
            helper.make_node("Sub", ["total", "past_total"], ["new_total"]),
            helper.make_node("MatMul", ["new_total", "table_t"], ["last"]),
        ]
    if last_only:
        nodes.append(helper.make_node("Identity", ["last"], ["logits"]))
    else:
        nodes += [
            # Row i is off by its distance from the last row, so that only that one is right.
            helper.make_node("Squeeze", ["count"], ["count_0d"]),
            helper.make_node("Range", ["count_0d", "zero_i", "minus_one_i"], ["distances_1"]),
            helper.make_node("Sub", ["distances_1", "one_i"], ["distances"]),
            helper.make_node("Cast", ["distances"], ["distances_f"], to=float32),
            helper.make_node("Unsqueeze", ["distances_f", "outer_axes"], ["distances_3d"]),
            helper.make_node("Add", ["last", "distances_3d"], ["logits"]),
        ]
    inputs = [
        helper.make_tensor_value_info("tokens", int64, [batch, new_tokens]),
        helper.make_tensor_value_info("position", int64, list(position_shape)),
        helper.make_tensor_value_info("past_rows", float32, cache_shape),
    ]
    if extra_input:
        inputs.append(helper.make_tensor_value_info("temperature", float32, [1]))
        nodes.append(helper.make_node("Identity", ["temperature"], ["unused"]))
    initializers: dict[str, npt.NDArray[Any]] = {
        "table": TABLE,
        "table_t": np.ascontiguousarray(TABLE.T),
        "minus_one": np.array([-1]),
        "slots": np.arange(capacity)[np.newaxis],
        "axis_1": np.array([1]),
        "two": np.array([2]),
        "outer_axes": np.array([0, 2]),
        "zero_i": np.array(0),
        "one_i": np.array(1),
        "minus_one_i": np.array(-1),
        "zero": np.array(0, np.float32),
        "bias": np.array(bias, np.float32),
    }
    graph = helper.make_graph(
        nodes,
        "toy",
        inputs,
        [
            helper.make_tensor_value_info("logits", float32, [batch, 1 if last_only else new_tokens, VOCABULARY]),
            helper.make_tensor_value_info("present_rows", float32, cache_shape),
        ],
        [numpy_helper.from_array(array, name) for name, array in initializers.items()],
    )
    if counter:
        _add_counter(graph)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 24)], ir_version=11)
    if metadata:
        entries = [cache_entry(capacity, in_place), *([COUNTER_ENTRY] if counter else [])]
        text = metadata if isinstance(metadata, str) else json.dumps(entries)
        helper.set_model_props(model, {"graphrewrite.caches": text})
    return model


COUNTER_ENTRY = {
    "input": "past_count",
    "output": "present_count",
    "fill": 0,
    "axis": None,
    "capacity": None,
    "in_place": True,
}


def _add_counter(graph: onnx.GraphProto) -> None:
    """State that is no cache: the number of tokens seen."""
    graph.node.append(helper.make_node("Add", ["past_count", "count"], ["present_count"]))
    graph.input.append(helper.make_tensor_value_info("past_count", TensorProto.INT64, [1]))
    graph.output.append(helper.make_tensor_value_info("present_count", TensorProto.INT64, [1]))


def _masked_sum(rows: str, end: str, total: str) -> list[onnx.NodeProto]:
    """Sums the rows at positions before `end` ([1] or [B]), as attention reads no slot behind them."""
    return [
        helper.make_node("Unsqueeze", [end, "axis_1"], [f"{total}_end"]),
        helper.make_node("Less", ["slots", f"{total}_end"], [f"{total}_seen"]),
        helper.make_node("Unsqueeze", [f"{total}_seen", "two"], [f"{total}_mask"]),
        helper.make_node("Where", [f"{total}_mask", rows, "zero"], [f"{total}_rows"]),
        helper.make_node("ReduceSum", [f"{total}_rows", "axis_1"], [total], keepdims=1),
    ]


def cache_entry(capacity: int, in_place: bool = True, **changes: Any) -> dict[str, Any]:
    entry = {"input": "past_rows", "output": "present_rows", "fill": 0, "axis": 1, "capacity": capacity}
    return {**entry, "in_place": in_place, **changes}


def toy_logits(tokens: list[int]) -> npt.NDArray[np.float32]:
    """What the in-place toy's last logits are after these tokens."""
    logits: npt.NDArray[np.float32] = TABLE[tokens].sum(axis=0, dtype=np.float32) @ TABLE.T
    return logits
