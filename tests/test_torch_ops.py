"""The torch operators: schemas, shape functions, forms, errors. Their results are checked in test_functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from graphrewrite.errors import KernelError
from tests.torch_calls import (
    CAPACITY,
    DIM,
    NAMES,
    OPS,
    POSITIONS,
    ROWS,
    TOLERANCE,
    WRITTEN,
    arguments,
    copied,
    layouts,
    names,
    results_of,
    stateful,
)

torch = pytest.importorskip("torch")


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
    with pytest.raises(KernelError, match="update_cache: value has element type complex64, which is not supported"):
        OPS.update_cache(value, value, 0)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64", "int32", "bool"])
def test_update_cache_moves_any_element_type(dtype: str) -> None:
    value = torch.ones(1, 1, 1, 2).to(getattr(torch, dtype))
    result = OPS.update_cache(value, torch.zeros_like(value).expand(1, 3, 1, 2), 1)
    assert result.dtype == value.dtype
    np.testing.assert_array_equal(result[0, :, 0, 0].float().numpy(), [0, 1, 0])


@pytest.mark.parametrize("form", ["update_cache", "update_cache_"])
def test_tensors_on_several_devices_are_an_error(form: str) -> None:
    value, cache = torch.ones(1, 1, 1, 2), torch.zeros(1, 3, 1, 2)
    with pytest.raises(ValueError, match=f"graphrewrite::{form}: tensors are on cpu and meta"):
        getattr(OPS, form)(value.to("meta"), cache, 1)
