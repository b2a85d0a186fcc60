"""Programs that call the torch operators: torch.export, torch.compile and ONNX."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import graphrewrite as gr
from tests.torch_calls import (
    BATCH,
    CAPACITY,
    DIM,
    HEADS,
    KV_HEADS,
    OPS,
    ROWS,
    TOLERANCE,
    arguments,
    floats,
)

torch = pytest.importorskip("torch")


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
