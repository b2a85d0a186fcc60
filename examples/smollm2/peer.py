"""One attention layer over a long int8 cache: the fused operators and onnxruntime's GroupQueryAttention.

Both write one token's key and value and read the whole cache, in place. GroupQueryAttention takes int8 caches with one
scale for the tensor; the fused operators have a scale and a zero point per token and head, which is more work.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import onnx
import onnxruntime
from onnx import helper

import graphrewrite as gr
from examples.smollm2.measure import medians_in_turns

QUERY_HEADS, KV_HEADS, HEAD_SIZE = 32, 8, 128
CONTEXT, CAPACITY = 16001, 16384

Feeds = dict[str, np.ndarray]


@dataclass(frozen=True)
class LayerTimes:
    """Milliseconds of one decode step of one layer."""

    ours: float
    group_query_attention: float


def layer_times(threads: int, *, seconds: float) -> LayerTimes:
    """Measure both in turns."""
    ours, theirs = _ours(threads), _group_query_attention(threads)
    times = medians_in_turns([ours, theirs], rounds=40, seconds=seconds)
    return LayerTimes(times[0] * 1000, times[1] * 1000)


def _model(nodes: list[onnx.NodeProto], inputs: list[onnx.ValueInfoProto], outputs: list[onnx.ValueInfoProto]) -> bytes:
    graph = helper.make_graph(nodes, "layer", inputs, outputs)
    opsets = [
        helper.make_opsetid("", 21),
        helper.make_opsetid("com.microsoft", 1),
        helper.make_opsetid("graphrewrite", 1),
    ]
    model: bytes = helper.make_model(graph, opset_imports=opsets, ir_version=10).SerializeToString()
    return model


def _infos(tensors: Feeds) -> list[onnx.ValueInfoProto]:
    return [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(value.dtype), value.shape)
        for name, value in tensors.items()
    ]


def _timed(model: bytes, feeds: Feeds, in_place: dict[str, str], threads: int) -> Callable[[], float]:
    """A function that runs the model once, its caches bound in place, and returns the seconds."""
    session = gr.session(onnx.load_from_string(model), threads)
    binding = session.io_binding()
    values = {name: onnxruntime.OrtValue.ortvalue_from_numpy(value) for name, value in feeds.items()}
    for name, value in values.items():
        binding.bind_ortvalue_input(name, value)
    for source, target in in_place.items():
        binding.bind_ortvalue_output(target, values[source])
    binding.bind_output("out")

    def run() -> float:
        started = time.perf_counter()
        session.run_with_iobinding(binding)
        return time.perf_counter() - started

    # The binding holds the tensors by address alone.
    run.values = values  # type: ignore[attr-defined]
    return run


def _ours(threads: int) -> Callable[[], float]:
    random = np.random.default_rng(0)

    def floats(heads: int) -> np.ndarray:
        return random.standard_normal((1, 1, heads, HEAD_SIZE), dtype=np.float32)

    feeds: Feeds = {"query": floats(QUERY_HEADS), "key": floats(KV_HEADS), "value": floats(KV_HEADS)}
    feeds["position"] = np.array(CONTEXT - 1, dtype=np.int64)
    nodes: list[onnx.NodeProto] = []
    caches: dict[str, str] = {}
    for role in ("key", "value"):
        rows = (1, CAPACITY, KV_HEADS)
        cache: Feeds = {
            f"{role}_codes": random.integers(-128, 128, (*rows, HEAD_SIZE), dtype=np.int8),
            f"{role}_scales": np.full((*rows, 1), 0.02, dtype=np.float32),
            f"{role}_zero_points": random.integers(-20, 20, (*rows, 1), dtype=np.int8),
        }
        codes, scales, zero_points = cache
        written = [f"new_{name}" for name in cache]
        nodes.append(
            helper.make_node(
                "UpdateQuantizedCache", [role, codes, scales, "position", zero_points], written, domain="graphrewrite"
            )
        )
        feeds |= cache
        caches |= dict(zip(cache, written, strict=True))
    key, value = list(caches.values())[:3], list(caches.values())[3:]
    inputs = ["query", key[0], value[0], "position", *key[1:], *value[1:], "key", "value"]
    nodes.append(helper.make_node("CustomSdpa", inputs, ["out"], domain="graphrewrite", is_causal=1))
    outputs = {"out": feeds["query"]} | {target: feeds[source] for source, target in caches.items()}
    return _timed(_model(nodes, _infos(feeds), _infos(outputs)), feeds, caches, threads)


def _group_query_attention(threads: int) -> Callable[[], float]:
    random = np.random.default_rng(0)
    feeds: Feeds = {
        name: random.standard_normal((1, 1, heads * HEAD_SIZE), dtype=np.float32)
        for name, heads in (("query", QUERY_HEADS), ("key", KV_HEADS), ("value", KV_HEADS))
    }
    for name in ("past_key", "past_value"):
        feeds[name] = random.integers(-128, 128, (1, KV_HEADS, CAPACITY, HEAD_SIZE), dtype=np.int8)
    feeds["last_position"] = np.array([CONTEXT - 1], dtype=np.int32)
    feeds["total_length"] = np.array([CONTEXT], dtype=np.int32)
    feeds["key_scale"] = feeds["value_scale"] = np.array([0.02], dtype=np.float32)
    node = helper.make_node(
        "GroupQueryAttention",
        [*list(feeds)[:7], "", "", "", "", "", "key_scale", "value_scale"],
        ["out", "new_key", "new_value"],
        domain="com.microsoft",
        num_heads=QUERY_HEADS,
        kv_num_heads=KV_HEADS,
        kv_cache_bit_width=8,
        k_quant_type="PER_TENSOR",
        v_quant_type="PER_TENSOR",
    )
    outputs = {"out": feeds["query"], "new_key": feeds["past_key"], "new_value": feeds["past_value"]}
    model = _model([node], _infos(feeds), _infos(outputs))
    return _timed(model, feeds, {"past_key": "new_key", "past_value": "new_value"}, threads)
