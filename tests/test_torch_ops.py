"""The torch operators: schemas, shape functions, tracing, errors. Their results are checked in test_functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

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
    positional: list[Any] = {
        "update_cache": [value, cache, 4],
        "update_quantized_cache": [value, codes, scales, 4, points],
        "custom_sdpa": [query, codes, codes.clone(), 4, *parameters, value, value.clone()],
        "sdpa_with_kv_cache": [query, value, value.clone(), cache, cache.clone(), 4],
    }[op]
    return positional, {"layout": layout} | ({"is_causal": True} if "sdpa" in op else {})


NAMES = ["update_cache", "update_quantized_cache", "custom_sdpa", "sdpa_with_kv_cache"]
names = pytest.mark.parametrize("op", NAMES)
layouts = pytest.mark.parametrize("layout", ["BSNH", "BNSH"])


def results_of(op: str, positional: list[Any], keywords: dict[str, Any]) -> tuple[Any, ...]:
    results = getattr(OPS, op)(*positional, **keywords)
    return results if isinstance(results, tuple) else (results,)


@names
@layouts
def test_opcheck_finds_nothing(op: str, layout: str) -> None:
    positional, keywords = arguments(op, layout=layout)
    torch.library.opcheck(getattr(OPS, op).default, tuple(positional), keywords)


@pytest.mark.parametrize(
    ("op", "change"),
    [
        ("update_quantized_cache", lambda a, k: (a[:4], {**k, "scheme": "symmetric"})),
        ("custom_sdpa", lambda a, k: ([a[0], a[1].float(), a[2].float(), a[3]], k)),
        ("custom_sdpa", lambda a, k: ([*a, torch.ones(ROWS, CAPACITY, dtype=torch.bool)], k)),
        ("custom_sdpa", lambda a, k: ([*a, torch.zeros(ROWS, CAPACITY)], {**k, "scale": 0.5})),
        ("update_cache", lambda a, k: ([a[0][:, :0], *a[1:]], k)),
    ],
    ids=["symmetric", "float caches", "bool mask", "float mask", "no rows"],
)
def test_opcheck_finds_nothing_with_options(op: str, change: Callable[..., tuple[list[Any], dict[str, Any]]]) -> None:
    positional, keywords = change(*arguments(op))
    torch.library.opcheck(getattr(OPS, op).default, tuple(positional), keywords)


@names
def test_arguments_stay_as_they_are(op: str) -> None:
    positional, keywords = arguments(op)
    before = [item.clone() if isinstance(item, torch.Tensor) else item for item in positional]
    results_of(op, positional, keywords)
    for item, copy in zip(positional, before, strict=True):
        assert not isinstance(item, torch.Tensor) or torch.equal(item, copy)


@names
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


@names
def test_a_gradient_is_refused(op: str) -> None:
    positional, keywords = arguments(op)
    positional[0].requires_grad_()
    results = results_of(op, positional, keywords)
    total = sum(result.sum() for result in results if result.requires_grad)
    with pytest.raises(NotImplementedError, match=f"graphrewrite::{op} has no gradient"):
        total.backward()


def changed(position: int, change: Callable[[Any], Any]) -> Callable[[list[Any], dict[str, Any]], None]:
    def apply(positional: list[Any], keywords: dict[str, Any]) -> None:
        positional[position] = change(positional[position])

    return apply


BAD_CALLS = {
    "rank": ("update_cache", changed(0, lambda t: t[0]), "value must have 4 dimensions"),
    "rows": ("update_cache", changed(0, lambda t: t[:, :, :1]), r"value .* does not fit cache"),
    "element types": ("update_cache", changed(0, lambda t: t.to(torch.int8)), "value is torch.int8 and cache"),
    "layout": ("update_cache", lambda a, k: k.update(layout="SBNH"), "layout is 'SBNH'"),
    "scheme": ("update_quantized_cache", lambda a, k: k.update(scheme="odd"), "scheme is 'odd'"),
    "codes": ("update_quantized_cache", changed(1, lambda t: t.to(torch.uint8)), "codes is not torch.int8"),
    "scales": ("update_quantized_cache", changed(2, lambda t: t[:, :4]), "scales .* does not fit codes"),
    "no zero points": ("update_quantized_cache", lambda a, k: a.pop(), "the asymmetric scheme needs zero_points"),
    "query": ("custom_sdpa", changed(0, lambda t: t[..., :4]), "query .* does not fit key_cache"),
    "heads": ("custom_sdpa", changed(0, lambda t: t[:, :, :3]), "2 key/value heads do not divide 3 query heads"),
    "caches": ("custom_sdpa", changed(2, lambda t: t[:, :4]), "key_cache .* and value_cache .* differ"),
    "cache type": ("custom_sdpa", changed(1, lambda t: t.double()), "key_cache is torch.float64"),
    "no scales": ("custom_sdpa", changed(4, lambda t: None), "key_scales must be given with torch.int8 caches"),
    "half of the recent rows": ("custom_sdpa", changed(8, lambda t: None), "recent_key and recent_value go together"),
    "recent rows": ("custom_sdpa", changed(8, lambda t: t[:, :, :1]), "recent_key .* does not fit key_cache"),
    "mask": ("custom_sdpa", lambda a, k: a.append(torch.zeros(8, dtype=torch.int8)), "attn_mask must be bool or float"),
    "key": ("sdpa_with_kv_cache", changed(1, lambda t: t[:, :, :1]), "key .* does not fit key_cache"),
    "key type": ("sdpa_with_kv_cache", changed(1, lambda t: t.double()), "key is not torch.float32"),
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


@names
@pytest.mark.parametrize("start", [-1, CAPACITY - ROWS + 1, 2**40])
def test_a_position_outside_the_cache_is_an_error_that_gives_the_values(op: str, start: int) -> None:
    positional, keywords = arguments(op)
    positional[5 if op == "sdpa_with_kv_cache" else 3 if op != "update_cache" else 2] = start
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
