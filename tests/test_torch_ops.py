"""The torch operators: schemas, shape functions, tracing, errors. Their results are checked in test_functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import graphrewrite as gr
from graphrewrite.custom_ops.schema import operators
from graphrewrite.errors import KernelError

torch = pytest.importorskip("torch")
pytest.importorskip("graphrewrite.custom_ops.torch_ops")

OPS = torch.ops.graphrewrite
# B, S, C, Hq, Hkv, D
BATCH, ROWS, CAPACITY, HEADS, KV_HEADS, DIM = 2, 3, 8, 4, 2, 8

# Two orders of summation: scores of D = 8 terms, where |q| sums to less than 24 and |k| < 255 * 0.04, are each within
# (D + 2) * 2^-24 * 24 * 10.2 / sqrt(8) = 5.2e-5, so weights within a factor of exp(4 * 5.2e-5); values are below 10.2.
TOLERANCE = 2.2e-3


def floats(*shape: int) -> Any:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(*shape, generator=generator)


def arguments(op: str, *, layout: str = "BSNH", rows: int = ROWS) -> tuple[list[Any], dict[str, Any]]:
    """Valid arguments of an operator, int8 caches where it takes them."""

    def laid_out(tensor: Any) -> Any:
        return tensor if layout == "BSNH" else tensor.transpose(1, 2).contiguous()

    query = laid_out(floats(BATCH, rows, HEADS, DIM))
    value = laid_out(floats(BATCH, rows, KV_HEADS, DIM))
    cache = laid_out(floats(BATCH, CAPACITY, KV_HEADS, DIM))
    codes = laid_out(torch.arange(-128, 128).to(torch.int8).reshape(BATCH, CAPACITY, KV_HEADS, DIM))
    scales = laid_out(floats(BATCH, CAPACITY, KV_HEADS, 1).abs() / 100)
    points = laid_out(torch.arange(BATCH * CAPACITY * KV_HEADS).to(torch.int8).reshape(BATCH, CAPACITY, KV_HEADS, 1))
    parameters = [scales, points, scales.clone(), points.clone()]
    queries = laid_out(torch.arange(BATCH * rows * HEADS * DIM).to(torch.int8).reshape(BATCH, rows, HEADS, DIM))
    rows_scales, rows_points = floats(6, 1).abs() / 100, torch.arange(6).reshape(6, 1)
    positional: list[Any] = {
        "update_cache": [value, cache, 4],
        "update_cache_with_indices": [value, cache, (torch.arange(BATCH * rows) * 5 % CAPACITY).reshape(BATCH, rows)],
        "update_quantized_cache": [value, codes, scales, 4, points],
        "custom_sdpa": [query, codes, codes.clone(), 4, *parameters, value, value.clone()],
        "custom_quantized_sdpa": [
            *(queries, codes, codes.clone(), 4),
            *(queries[..., :1].float().abs() / 100, queries[..., 1:2].contiguous(), *parameters),
        ],
        "sdpa_with_kv_cache": [query, value, value.clone(), cache, cache.clone(), 4],
        "choose_qparams_per_token": [floats(6, 8)],
        "quantize_per_token": [floats(6, 8), rows_scales, rows_points],
        "dequantize_per_token": [torch.arange(48).to(torch.int8).reshape(6, 8), rows_scales, rows_points],
        "quantize_per_channel": [floats(6, 8), rows_scales[:, 0], rows_points[:, 0]],
        "dequantize_per_channel": [torch.arange(48).to(torch.int8).reshape(8, 6), rows_scales[:, 0], rows_points[:, 0]],
    }[op]
    keywords: dict[str, Any] = {"layout": layout} if op in STATEFUL else {}
    if "sdpa" in op:
        keywords["is_causal"] = True
    if op == "quantize_per_channel":
        keywords["axis"] = 0
    return positional, keywords


STATEFUL = [
    *("update_cache", "update_cache_with_indices", "update_quantized_cache"),
    *("custom_sdpa", "custom_quantized_sdpa", "sdpa_with_kv_cache"),
]
NAMES = sorted(schema.torch_name for schema in operators().values())
# The argument that is start_pos, by operator.
POSITIONS = {
    schema.torch_name: [tensor.name for tensor in schema.inputs].index("start_pos")
    for schema in operators().values()
    if any(tensor.name == "start_pos" for tensor in schema.inputs)
}
# Which arguments each operator's in-place form writes.
WRITTEN = {
    schema.torch_name: [output.like for output in schema.outputs if output.in_place]
    for schema in operators().values()
    if any(output.in_place for output in schema.outputs)
}
names = pytest.mark.parametrize("op", NAMES)
stateful = pytest.mark.parametrize("op", STATEFUL)
layouts = pytest.mark.parametrize("layout", ["BSNH", "BNSH"])


def tensors_of(results: Any) -> tuple[Any, ...]:
    return results if isinstance(results, tuple) else () if results is None else (results,)


def results_of(op: str, positional: list[Any], keywords: dict[str, Any]) -> tuple[Any, ...]:
    return tensors_of(getattr(OPS, op)(*positional, **keywords))


def copied(positional: list[Any]) -> list[Any]:
    return [item.clone() if isinstance(item, torch.Tensor) else item for item in positional]


def test_every_operator_has_its_forms() -> None:
    overloads = {
        name: set(getattr(OPS, name).overloads()) for name in dir(OPS) if hasattr(getattr(OPS, name), "default")
    }
    expected: dict[str, set[str]] = {}
    for name in NAMES:
        expected[name] = {"default", "per_sequence"} if name in POSITIONS else {"default"}
        if name in WRITTEN:
            expected[f"{name}_"] = expected[name]
    assert overloads == expected


@pytest.mark.parametrize("op", WRITTEN)
@layouts
@pytest.mark.parametrize("per_sequence", [False, True])
def test_the_form_in_place_writes_what_the_other_returns(op: str, layout: str, per_sequence: bool) -> None:
    positional, keywords = arguments(op, layout=layout)
    if per_sequence:
        if op not in POSITIONS:
            pytest.skip("takes no start_pos")
        positional[POSITIONS[op]] = torch.tensor([1, 5])
    expected = results_of(op, positional, keywords)
    written = copied(positional)
    returned = results_of(f"{op}_", written, keywords)
    states = [written[index] for index in WRITTEN[op]]
    assert len(returned) == len(expected) - len(states)
    for result, exact in zip((*returned, *states), expected, strict=True):
        assert torch.equal(result, exact)
    assert not all(torch.equal(positional[index], written[index]) for index in WRITTEN[op])


@pytest.mark.parametrize("op", POSITIONS)
def test_a_position_for_each_sequence(op: str) -> None:
    positional, keywords = arguments(op)
    positional[POSITIONS[op]] = torch.tensor([4, 1])
    together = results_of(op, positional, keywords)
    for b, start in enumerate([4, 1]):
        alone = [item[b : b + 1] if isinstance(item, torch.Tensor) else item for item in positional]
        alone[POSITIONS[op]] = start
        for result, exact in zip(together, results_of(op, alone, keywords), strict=True):
            torch.testing.assert_close(result[b : b + 1], exact, rtol=0, atol=TOLERANCE)


FORMS = [
    (name, overload)
    for name in NAMES
    for form in ([name, f"{name}_"] if name in WRITTEN else [name])
    for name, overload in ((form, "default"), (form, "per_sequence"))
    if overload == "default" or form.removesuffix("_") in POSITIONS
]


@pytest.mark.parametrize(("form", "overload"), FORMS)
def test_opcheck_finds_nothing(form: str, overload: str) -> None:
    op = form.removesuffix("_")
    positional, keywords = arguments(op)
    if overload == "per_sequence":
        positional[POSITIONS[op]] = torch.tensor([1, 5])
    torch.library.opcheck(getattr(getattr(OPS, form), overload), tuple(copied(positional)), keywords)


@pytest.mark.parametrize(
    ("op", "change"),
    [
        ("update_quantized_cache", lambda a, k: (a[:4], {**k, "scheme": "symmetric"})),
        ("custom_sdpa", lambda a, k: ([a[0], a[1].float(), a[2].float(), a[3]], k)),
        ("custom_sdpa", lambda a, k: ([*a, torch.ones(ROWS, CAPACITY, dtype=torch.bool)], k)),
        ("custom_sdpa", lambda a, k: ([*a, torch.zeros(ROWS, CAPACITY)], {**k, "scale": 0.5})),
        ("update_cache", lambda a, k: ([a[0][:, :0], *a[1:]], k)),
        ("update_cache", lambda a, k: ([a[0], a[1], 30], {**k, "write_mode": "circular"})),
        ("update_quantized_cache", lambda a, k: ([*a[:2], torch.ones(DIM), a[3]], {**k, "scheme": "static"})),
        ("custom_sdpa", lambda a, k: ([a[0].half(), *a[1:8]], {**k, "softcap": 20.0, "window": 3, "sink_tokens": 1})),
    ],
    ids=[
        *("symmetric", "float caches", "bool mask", "float mask", "no rows"),
        *("circular", "static scales", "half precision with a window"),
    ],
)
def test_opcheck_finds_nothing_with_options(op: str, change: Callable[..., tuple[list[Any], dict[str, Any]]]) -> None:
    positional, keywords = change(*arguments(op))
    torch.library.opcheck(getattr(OPS, op).default, tuple(positional), keywords)


@names
def test_arguments_stay_as_they_are(op: str) -> None:
    positional, keywords = arguments(op)
    before = copied(positional)
    results_of(op, positional, keywords)
    for item, copy in zip(positional, before, strict=True):
        assert not isinstance(item, torch.Tensor) or torch.equal(item, copy)


@stateful
def test_strided_arguments_give_the_same_results(op: str) -> None:
    positional, keywords = arguments(op)
    expected = results_of(op, positional, keywords)

    def strided(item: Any) -> Any:
        # Every second element of a buffer that is NaN (or a wrong code) in between.
        if not isinstance(item, torch.Tensor):
            return item
        filler = float("nan") if item.is_floating_point() else 77
        wide = torch.full((*item.shape[:2], 2, *item.shape[2:]), filler, dtype=item.dtype)
        wide[:, :, 0] = item
        return wide[:, :, 0]

    for result, exact in zip(results_of(op, [strided(item) for item in positional], keywords), expected, strict=True):
        assert result.is_contiguous()
        torch.testing.assert_close(result, exact, rtol=0, atol=TOLERANCE)


@names
def test_the_number_of_threads_does_not_change_results_beyond_rounding(op: str) -> None:
    positional, keywords = arguments(op)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        expected = results_of(op, positional, keywords)
        torch.set_num_threads(2)
        results = results_of(op, positional, keywords)
    finally:
        torch.set_num_threads(threads)
    for result, exact in zip(results, expected, strict=True):
        torch.testing.assert_close(result, exact, rtol=0, atol=TOLERANCE)


def test_without_zero_points_the_third_result_is_empty() -> None:
    positional, _ = arguments("update_quantized_cache")
    results = OPS.update_quantized_cache(*positional[:4], scheme="symmetric")
    assert results[2].shape == (0,)
    assert results[2].dtype == torch.int8


class Decoder(torch.nn.Module):  # type: ignore[misc, name-defined, unused-ignore]
    """One step over int8 caches; the position is read out of a tensor."""

    def forward(self, query: Any, value: Any, codes: Any, scales: Any, points: Any, position: Any) -> Any:
        start = position[0].item()
        codes, scales, points = OPS.update_quantized_cache(value, codes, scales, start, points)
        output = OPS.custom_sdpa(
            query, codes, codes, start, scales, points, scales, points, value, value, is_causal=True
        )
        return output, codes, scales, points


def decoder_inputs(rows: int = ROWS, start: int = 4) -> tuple[Any, ...]:
    positional, _ = arguments("custom_sdpa", rows=rows)
    query, codes, scales, points, value = (positional[index] for index in (0, 1, 4, 5, 8))
    return query, value, codes, scales, points, torch.tensor([start])


@pytest.mark.parametrize("decompose", [False, True])
def test_export_with_dynamic_rows_and_a_position_from_a_tensor(decompose: bool) -> None:
    rows = torch.export.Dim("rows", min=1, max=CAPACITY)
    dynamic = ({1: rows}, {1: rows}, None, None, None, None)
    program = torch.export.export(Decoder(), decoder_inputs(), dynamic_shapes=dynamic)
    if decompose:
        program = program.run_decompositions({})
    for node in program.graph.nodes:
        assert "assert" not in str(node.target), "a shape function asked for the value of a size or of the position"
    for rows_now, start in [(ROWS, 4), (1, 7), (CAPACITY, 0)]:
        inputs = decoder_inputs(rows_now, start)
        for result, expected in zip(program.module()(*inputs), Decoder()(*inputs), strict=True):
            assert torch.equal(result, expected)


def test_compile() -> None:
    torch._dynamo.reset()
    inputs = decoder_inputs()
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        compiled = torch.compile(Decoder(), backend="aot_eager", fullgraph=True)
        for result, expected in zip(compiled(*inputs), Decoder()(*inputs), strict=True):
            assert torch.equal(result, expected)


class Cache(torch.nn.Module):  # type: ignore[misc, name-defined, unused-ignore]
    """A layer with a float cache of its own, written in place; the positions are a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("cache", torch.zeros(BATCH, CAPACITY, KV_HEADS, DIM))

    def forward(self, query: Any, value: Any, positions: Any) -> Any:
        OPS.update_cache_(value, self.cache, positions)
        return OPS.custom_sdpa(query, self.cache, self.cache, positions, is_causal=True)


def cache_steps() -> list[tuple[Any, ...]]:
    query, value = floats(BATCH, CAPACITY, HEADS, DIM), floats(BATCH, CAPACITY, KV_HEADS, DIM)
    spans = [(0, 3), (3, 4), (4, 8)]
    return [(query[:, a:b].clone(), value[:, a:b].clone(), torch.tensor([a, a])) for a, b in spans]


def expected_of_steps() -> list[Any]:
    layer = Cache()
    with torch.no_grad():
        return [layer(*step) for step in cache_steps()]


def test_compile_of_a_cache_written_in_place() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(Cache(), backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        for step, expected in zip(cache_steps(), expected_of_steps(), strict=True):
            assert torch.equal(compiled(*step), expected)


@pytest.mark.parametrize("decompose", [False, True])
def test_export_of_a_cache_written_in_place(decompose: bool) -> None:
    rows = torch.export.Dim("rows", min=1, max=CAPACITY)
    program = torch.export.export(Cache(), cache_steps()[0], dynamic_shapes=({1: rows}, {1: rows}, None))
    program = program.run_decompositions({}) if decompose else program
    module = program.module()
    for step, expected in zip(cache_steps(), expected_of_steps(), strict=True):
        assert torch.equal(module(*step), expected)


def test_a_cache_written_in_place_becomes_an_input_and_an_output_of_the_onnx_model() -> None:
    rows = torch.export.Dim("rows", min=1, max=CAPACITY)
    program = torch.export.export(Cache(), cache_steps()[0], dynamic_shapes=({1: rows}, {1: rows}, None))
    model = gr.export_onnx(program, output_names=["output"])
    assert [node.op_type for node in model.graph] == ["UpdateCache", "CustomSdpa"]
    session = gr.session(model)
    cache = np.zeros((BATCH, CAPACITY, KV_HEADS, DIM), np.float32)
    names = [value.name for value in session.get_inputs()]
    for step, expected in zip(cache_steps(), expected_of_steps(), strict=True):
        feeds = dict(zip(names, [*(tensor.numpy() for tensor in step), cache], strict=True))
        output, cache = session.run(None, feeds)
        np.testing.assert_allclose(output, expected, rtol=0, atol=TOLERANCE)


@names
def test_a_gradient_is_refused(op: str) -> None:
    positional, keywords = arguments(op)
    if not positional[0].is_floating_point() or op.startswith("quantize"):
        pytest.skip("takes or gives integers alone, which carry no gradient")
    positional[0].requires_grad_()
    results = results_of(op, positional, keywords)
    total = sum(result.sum() for result in results if result.requires_grad)
    with pytest.raises(NotImplementedError, match=f"graphrewrite::{op} has no gradient"):
        total.backward()


@pytest.mark.parametrize("op", WRITTEN)
def test_a_gradient_is_refused_before_anything_is_written(op: str) -> None:
    positional, keywords = arguments(op)
    positional[0].requires_grad_()
    before = copied(positional)
    with pytest.raises(NotImplementedError, match=f"graphrewrite::{op}_ has no gradient"):
        results_of(f"{op}_", positional, keywords)
    assert all(torch.equal(positional[index], before[index]) for index in WRITTEN[op])
    with torch.no_grad():
        results_of(f"{op}_", positional, keywords)


def changed(position: int, change: Callable[[Any], Any]) -> Callable[[list[Any], dict[str, Any]], None]:
    def apply(positional: list[Any], keywords: dict[str, Any]) -> None:
        positional[position] = change(positional[position])

    return apply


BAD_CALLS = {
    "rank": ("update_cache", changed(0, lambda t: t[0]), "value must have 4 dimensions"),
    "heads of a cache": ("update_cache", changed(0, lambda t: t[:, :, :1]), r"cache .* in the place of H"),
    "element types": ("update_cache", changed(0, lambda t: t.to(torch.int8)), "cache is .*float32.*, and value has"),
    "layout": ("update_cache", lambda a, k: k.update(layout="SBNH"), "layout is 'SBNH'"),
    "codes": ("update_quantized_cache", changed(1, lambda t: t.float()), "codes is .*; expected int8 or uint8"),
    "query": ("custom_sdpa", changed(0, lambda t: t[..., :4]), "recent_key .* in the place of D"),
    "heads": ("custom_sdpa", changed(0, lambda t: t[:, :, :3]), "2 key/value heads do not divide 3 query heads"),
    "caches": ("custom_sdpa", changed(2, lambda t: t[:, :4]), "value_cache .* in the place of C"),
    "cache type": ("custom_sdpa", changed(1, lambda t: t.double()), "key_cache is .*float64"),
    "recent rows": ("custom_sdpa", changed(8, lambda t: t[:, :, :1]), "recent_key .* in the place of Hkv"),
    "mask": ("custom_sdpa", lambda a, k: a.append(torch.zeros(3, 8, dtype=torch.int8)), "attn_mask is .*int8"),
    "key": ("sdpa_with_kv_cache", changed(1, lambda t: t[:, :, :1]), "value .* in the place of Hkv"),
    "key type": ("sdpa_with_kv_cache", changed(1, lambda t: t.double()), "key is .*float64"),
    "a scalar": ("choose_qparams_per_token", changed(0, lambda t: t[0, 0]), "input has no dimensions"),
}


@pytest.mark.parametrize("case", BAD_CALLS)
def test_bad_arguments_are_named_when_tracing_and_when_running(case: str) -> None:
    op, change, message = BAD_CALLS[case]
    positional, keywords = arguments(op)
    change(positional, keywords)
    fake = torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True)
    with fake, pytest.raises(ValueError, match=f"graphrewrite::{op}: {message}"):
        results_of(op, [fake.from_tensor(t) if isinstance(t, torch.Tensor) else t for t in positional], keywords)
    with pytest.raises(KernelError):
        results_of(op, positional, keywords)


@pytest.mark.parametrize("op", POSITIONS)
@pytest.mark.parametrize("start", [-1, CAPACITY - ROWS + 1, 2**40])
def test_a_position_outside_the_cache_is_an_error_that_gives_the_values(op: str, start: int) -> None:
    positional, keywords = arguments(op)
    positional[POSITIONS[op]] = start
    with pytest.raises(KernelError, match=f"start_pos {start}"):
        results_of(op, positional, keywords)


def test_an_element_type_without_a_kernel_is_an_error() -> None:
    value = torch.zeros(1, 1, 1, 1, dtype=torch.complex64)
    with pytest.raises(KernelError, match="complex64 is not supported"):
        OPS.update_cache(value, value, 0)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64", "int32", "bool"])
def test_update_cache_moves_any_element_type(dtype: str) -> None:
    value = torch.ones(1, 1, 1, 2).to(getattr(torch, dtype))
    result = OPS.update_cache(value, torch.zeros_like(value).expand(1, 3, 1, 2), 1)
    assert result.dtype == value.dtype
    np.testing.assert_array_equal(result[0, :, 0, 0].float().numpy(), [0, 1, 0])
