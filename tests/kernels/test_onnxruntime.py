"""The operators in onnxruntime: dispatch by type, shapes, in-place updates through IO binding, and errors."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper

from graphrewrite.custom_ops import library_path
from tests.kernels import reference
from tests.kernels.calls import sdpa_inputs
from tests.kernels.reference import make_sdpa, sdpa_with_bound, to_layout

Array = npt.NDArray[Any]
DOMAIN = "graphrewrite"
# Older runtimes crash in shape inference of nodes with absent inputs, so for them the library leaves it out.
INFERS_SHAPES = tuple(map(int, ort.__version__.split(".")[:2])) >= (1, 24)


def make_model(
    op: str,
    inputs: dict[str, Array | None],
    outputs: dict[str, Any],
    shapes: dict[str, Any] | None = None,
    **attributes: Any,
) -> onnx.ModelProto:
    """A model of one node. An input that is None is absent; an output's shape is left for inference.

    Args:
        outputs: element types by name.
        shapes: declared shapes of inputs where not their own.
    """
    names = [name if array is not None else "" for name, array in inputs.items()]
    while names and not names[-1]:
        names.pop()
    node = helper.make_node(op, names, list(outputs), domain=DOMAIN, **attributes)
    declared = [
        helper.make_tensor_value_info(
            name, helper.np_dtype_to_tensor_dtype(array.dtype), (shapes or {}).get(name, array.shape)
        )
        for name, array in inputs.items()
        if array is not None
    ]
    results = [helper.make_tensor_value_info(name, dtype, None) for name, dtype in outputs.items()]
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid(DOMAIN, 1)]
    return helper.make_model(helper.make_graph([node], "test", declared, results), opset_imports=opsets, ir_version=10)


def make_session(model: onnx.ModelProto, threads: int = 2) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 4  # errors come back as exceptions; the log only repeats them
    options.register_custom_ops_library(str(library_path()))
    return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def feeds(inputs: dict[str, Array | None]) -> dict[str, Array]:
    return {name: array for name, array in inputs.items() if array is not None}


@pytest.mark.parametrize("cache", ["float", "int8"])
@pytest.mark.parametrize("mask", [None, "bool", "float"])
@pytest.mark.parametrize("recent", [False, True])
@pytest.mark.parametrize("layout", ["BSNH", "BNSH"])
@pytest.mark.parametrize("rows", [1, 40])
def test_custom_sdpa(cache: str, mask: str | None, recent: bool, layout: str, rows: int) -> None:
    arguments = make_sdpa(
        np.random.default_rng(1),
        batch=2,
        rows=rows,
        capacity=300 + rows,
        start=[300, 20],
        heads=(4, 2),
        dim=24,
        cache=cache,
        mask=mask,
        recent=recent,
        is_causal=True,
        scale=0.3,
    )
    inputs = sdpa_inputs(arguments, layout)
    model = make_model("CustomSdpa", inputs, {"output": TensorProto.FLOAT}, is_causal=1, layout=layout, scale=0.3)
    session = make_session(model)
    if INFERS_SHAPES:
        assert session.get_outputs()[0].shape == list(to_layout(arguments.query, layout).shape)
    output = to_layout(session.run(None, feeds(inputs))[0], layout)
    expected, bound = sdpa_with_bound(arguments)
    assert np.all(np.abs(output - expected) <= bound)


@pytest.mark.parametrize("dtype", ["float32", "float16", "float64", "int8", "uint8", "int32", "int64", "bool"])
def test_update_cache(dtype: str) -> None:
    random = np.random.default_rng(2)
    value, cache = (random.integers(0, 2, (2, size, 3, 4)).astype(dtype) for size in (3, 8))
    inputs: dict[str, Array | None] = {"value": value, "cache": cache, "start_pos": np.array([1, 4])}
    model = make_model("UpdateCache", inputs, {"new_cache": helper.np_dtype_to_tensor_dtype(np.dtype(dtype))})
    output = make_session(model).run(None, feeds(inputs))[0]
    np.testing.assert_array_equal(output, reference.update_cache(value, cache, np.array([1, 4])))


def small_update() -> dict[str, Array | None]:
    """Inputs of UpdateQuantizedCache: one row of one head of 8, a cache of four."""
    return {
        "value": np.zeros((1, 1, 1, 8), np.float32),
        "codes": np.zeros((1, 4, 1, 8), np.int8),
        "scales": np.zeros((1, 4, 1, 1), np.float32),
        "start_pos": np.array(0),
        "zero_points": np.zeros((1, 4, 1, 1), np.int8),
    }


@pytest.mark.skipif(not INFERS_SHAPES, reason="this onnxruntime is not asked to infer shapes")
def test_symbolic_shapes_pass_through() -> None:
    inputs = small_update()
    shapes = {
        "value": ["B", "S", "H", 8],
        "codes": ["B", "C", "H", 8],
        "scales": ["B", "C", "H", 1],
        "zero_points": ["B", "C", "H", 1],
    }
    outputs = {"new_codes": TensorProto.INT8, "new_scales": TensorProto.FLOAT, "new_zero_points": TensorProto.INT8}
    session = make_session(make_model("UpdateQuantizedCache", inputs, outputs, shapes))
    assert [output.shape for output in session.get_outputs()] == [
        ["B", "C", "H", 8],
        ["B", "C", "H", 1],
        ["B", "C", "H", 1],
    ]


def test_unknown_shapes_stay_unknown() -> None:
    """A tensor whose rank is not known is not taken for a scalar."""
    arguments = make_sdpa(np.random.default_rng(3), rows=2, capacity=8)
    inputs = sdpa_inputs(arguments, "BSNH")
    shapes = {name: None for name in inputs if name != "start_pos"}
    session = make_session(make_model("CustomSdpa", inputs, {"output": TensorProto.FLOAT}, shapes))
    expected, bound = sdpa_with_bound(arguments)
    assert np.all(np.abs(session.run(None, feeds(inputs))[0] - expected) <= bound)


@pytest.mark.parametrize(("scheme", "zero_points"), [("asymmetric", True), ("symmetric", True), ("symmetric", False)])
def test_update_quantized_cache_in_place(scheme: str, zero_points: bool) -> None:
    """State bound to one buffer as input and output: the address stays, and only the new rows change."""
    random = np.random.default_rng(4)
    value = random.standard_normal((1, 3, 2, 16), dtype=np.float32)
    state: dict[str, Array] = {
        "codes": random.integers(-128, 128, (1, 32, 2, 16)).astype(np.int8),
        "scales": random.random((1, 32, 2, 1), dtype=np.float32),
    }
    inputs: dict[str, Array | None] = {"value": value, **state, "start_pos": np.array(7)}
    outputs = {"new_codes": TensorProto.INT8, "new_scales": TensorProto.FLOAT}
    if zero_points:
        state["zero_points"] = random.integers(-128, 128, (1, 32, 2, 1)).astype(np.int8)
        inputs["zero_points"] = state["zero_points"]
        outputs["new_zero_points"] = TensorProto.INT8
    session = make_session(make_model("UpdateQuantizedCache", inputs, outputs, scheme=scheme))
    binding = session.io_binding()
    kept = {name: ort.OrtValue.ortvalue_from_numpy(array) for name, array in feeds(inputs).items()}
    for name, value_ in kept.items():
        binding.bind_ortvalue_input(name, value_)
        if name in state:
            binding.bind_ortvalue_output(f"new_{name}", kept[name])
    session.run_with_iobinding(binding)
    addresses = [output.data_ptr() for output in binding.get_outputs()]
    assert addresses == [kept[name].data_ptr() for name in state]
    expected = dict(zip(["codes", "scales", "zero_points"], reference.quantize(value, scheme), strict=True))
    for name, before in state.items():
        wanted = reference.update_cache(expected[name], before, np.array(7))
        np.testing.assert_array_equal(kept[name].numpy(), wanted, err_msg=name)


@pytest.mark.parametrize("in_place", [True, False])
def test_sdpa_with_kv_cache(in_place: bool) -> None:
    arguments = make_sdpa(
        np.random.default_rng(5), rows=4, capacity=16, start=9, heads=(4, 2), cache="float", recent=True, is_causal=True
    )
    a = arguments
    inputs: dict[str, Array | None] = {
        "query": a.query,
        "key": a.recent_key,
        "value": a.recent_value,
        "key_cache": a.key_cache,
        "value_cache": a.value_cache,
        "start_pos": a.start_pos,
    }
    outputs = dict.fromkeys(["output", "new_key_cache", "new_value_cache"], TensorProto.FLOAT)
    session = make_session(make_model("SdpaWithKvCache", inputs, outputs, is_causal=1))
    binding = session.io_binding()
    kept = {name: ort.OrtValue.ortvalue_from_numpy(array) for name, array in feeds(inputs).items()}
    for name, value in kept.items():
        binding.bind_ortvalue_input(name, value)
    binding.bind_output("output")
    for name in ("key_cache", "value_cache"):
        if in_place:
            binding.bind_ortvalue_output(f"new_{name}", kept[name])
        else:
            binding.bind_output(f"new_{name}")
    session.run_with_iobinding(binding)
    output, new_key, new_value = (result.numpy() for result in binding.get_outputs())
    expected, bound = sdpa_with_bound(arguments)
    assert np.all(np.abs(output - expected) <= bound)
    np.testing.assert_array_equal(new_key, a.rows("key"))
    np.testing.assert_array_equal(new_value, a.rows("value"))
    if not in_place:
        np.testing.assert_array_equal(kept["key_cache"].numpy(), a.key_cache)


def test_intermediate_caches_are_updated_in_place_too() -> None:
    """Sixteen updates of a cache nobody else reads cost about what one does, as none of them copies it."""
    capacity = 1 << 15
    value, cache = np.ones((1, 1, 8, 64), np.float32), np.zeros((1, capacity, 8, 64), np.float32)

    def fastest(updates: int) -> float:
        nodes = [helper.make_node("Neg", ["cache"], ["cache0"])]
        for n in range(updates):
            inputs = ["value", f"cache{n}", "start_pos"]
            nodes.append(helper.make_node("UpdateCache", inputs, [f"cache{n + 1}"], domain=DOMAIN))
        nodes.append(helper.make_node("ReduceMax", [f"cache{updates}"], ["output"], keepdims=0))
        declared = [
            helper.make_tensor_value_info("value", TensorProto.FLOAT, value.shape),
            helper.make_tensor_value_info("cache", TensorProto.FLOAT, cache.shape),
            helper.make_tensor_value_info("start_pos", TensorProto.INT64, []),
        ]
        graph = helper.make_graph(nodes, "test", declared, [helper.make_tensor_value_info("output", 1, [])])
        opsets = [helper.make_opsetid("", 21), helper.make_opsetid(DOMAIN, 1)]
        session = make_session(helper.make_model(graph, opset_imports=opsets, ir_version=10))
        times = []
        for _ in range(4):
            begin = time.perf_counter()
            assert session.run(None, {"value": value, "cache": cache, "start_pos": np.array(5)})[0] == 1
            times.append(time.perf_counter() - begin)
        return min(times)

    assert fastest(16) < 3 * fastest(1)


def test_two_sessions_share_the_library_and_outlive_each_other() -> None:
    arguments = make_sdpa(np.random.default_rng(6), rows=2, capacity=8)
    inputs = sdpa_inputs(arguments, "BSNH")
    model = make_model("CustomSdpa", inputs, {"output": TensorProto.FLOAT})
    expected, bound = sdpa_with_bound(arguments)
    first, second = make_session(model), make_session(model, threads=1)
    for session in (first, second):
        assert np.all(np.abs(session.run(None, feeds(inputs))[0] - expected) <= bound)
    del first, session
    assert np.all(np.abs(second.run(None, feeds(inputs))[0] - expected) <= bound)


def test_concurrent_runs_of_one_session() -> None:
    cases = [
        make_sdpa(np.random.default_rng(seed), rows=20, capacity=600, start=500, heads=(4, 2), dim=64, is_causal=True)
        for seed in range(4)
    ]
    model = make_model("CustomSdpa", sdpa_inputs(cases[0], "BSNH"), {"output": TensorProto.FLOAT}, is_causal=1)
    session = make_session(model)
    expected = [session.run(None, feeds(sdpa_inputs(case, "BSNH")))[0] for case in cases]
    with ThreadPoolExecutor(4) as pool:
        outputs = pool.map(lambda n: session.run(None, feeds(sdpa_inputs(cases[n % 4], "BSNH")))[0], range(40))
        for n, output in enumerate(outputs):
            np.testing.assert_array_equal(output, expected[n % 4])


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_the_number_of_threads_changes_nothing(threads: int) -> None:
    arguments = make_sdpa(np.random.default_rng(8), capacity=3001, start=3000, heads=(4, 2), dim=64)
    inputs = sdpa_inputs(arguments, "BSNH")
    model = make_model("CustomSdpa", inputs, {"output": TensorProto.FLOAT})
    expected = make_session(model, 2).run(None, feeds(inputs))[0]
    np.testing.assert_array_equal(make_session(model, threads).run(None, feeds(inputs))[0], expected)


def test_a_bad_run_is_an_exception_and_writes_nothing() -> None:
    cache = np.ones((1, 8, 1, 4), np.float32)
    inputs: dict[str, Array | None] = {
        "value": np.zeros((1, 4, 1, 4), np.float32),
        "cache": cache,
        "start_pos": np.array(6),
    }
    session = make_session(make_model("UpdateCache", inputs, {"new_cache": TensorProto.FLOAT}))
    binding = session.io_binding()
    kept = {name: ort.OrtValue.ortvalue_from_numpy(array) for name, array in feeds(inputs).items()}
    for name, value in kept.items():
        binding.bind_ortvalue_input(name, value)
    binding.bind_ortvalue_output("new_cache", kept["cache"])
    with pytest.raises(Exception, match=r"UpdateCache: start_pos 6 \+ 4 new rows exceeds the cache capacity 8"):
        session.run_with_iobinding(binding)
    assert (kept["cache"].numpy() == 1).all()


BAD_ATTRIBUTES = [
    ("CustomSdpa", {"layout": "SBNH"}, 'CustomSdpa: layout "SBNH" is unknown, expected "BSNH" or "BNSH"'),
    ("CustomSdpa", {"layout": 1}, "CustomSdpa: attribute layout is an integer, expected a string"),
    ("CustomSdpa", {"is_causal": 2}, "CustomSdpa: is_causal is 2, expected 0 or 1"),
    ("CustomSdpa", {"is_causal": "yes"}, "CustomSdpa: attribute is_causal is a string, expected an integer"),
    ("CustomSdpa", {"scale": 1}, "CustomSdpa: attribute scale is an integer, expected a float"),
    ("CustomSdpa", {"scale": float("inf")}, "CustomSdpa: scale inf is not finite"),
    ("UpdateCache", {"layout": "x"}, 'UpdateCache: layout "x" is unknown'),
    ("UpdateQuantizedCache", {"scheme": "affine"}, 'UpdateQuantizedCache: scheme "affine" is unknown'),
]


@pytest.mark.parametrize(("op", "attributes", "message"), BAD_ATTRIBUTES)
def test_a_bad_attribute_fails_when_the_session_is_made(op: str, attributes: dict[str, Any], message: str) -> None:
    inputs = sdpa_inputs(make_sdpa(np.random.default_rng(9), capacity=8), "BSNH")
    outputs = {"output": TensorProto.FLOAT}
    if op != "CustomSdpa":
        cache = np.zeros((1, 8, 1, 8), np.int8 if op == "UpdateQuantizedCache" else np.float32)
        inputs = {"value": np.zeros((1, 1, 1, 8), np.float32), "cache": cache}
        if op == "UpdateQuantizedCache":
            inputs["scales"] = np.zeros((1, 8, 1, 1), np.float32)
            outputs = {"new_codes": TensorProto.INT8, "new_scales": TensorProto.FLOAT}
        inputs["start_pos"] = np.array(0)
    with pytest.raises(Exception) as caught:
        make_session(make_model(op, inputs, outputs, **attributes))
    assert message in str(caught.value)


def test_zero_points_without_their_output() -> None:
    inputs = small_update()
    outputs = {"new_codes": TensorProto.INT8, "new_scales": TensorProto.FLOAT}
    session = make_session(make_model("UpdateQuantizedCache", inputs, outputs))
    with pytest.raises(Exception, match="zero_points is given but new_zero_points is not an output"):
        session.run(None, feeds(inputs))
