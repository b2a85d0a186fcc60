"""`torch.compile` with the backend that rewrites: the same outputs and the same buffers as without it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from fx_forms import HEAD_SIZE, KV_HEADS, QUERY_HEADS, Layer, inputs
from torch import Tensor, nn

import graphrewrite as gr
from graphrewrite.passes import CompileBackend

# A prefill of 5 tokens, two steps, and a chunk over what is cached.
SCHEDULE = ((5, 0), (1, 5), (1, 6), (4, 7))
LAYERS, WIDTH, VOCABULARY = 2, QUERY_HEADS * HEAD_SIZE, 13
# Outputs are sums over WIDTH = 64 terms in two layers of three products each, in float32 and in another order: off by
# about 2^-24 * sqrt(64) * sqrt(6) of their magnitude, which is at most 4; and 4 times that for the tail.
TOLERANCE = 4 * 4 * 2.0**-24 * 64**0.5 * 6**0.5


class Block(nn.Module):
    """Attention over an int8 cache, and a residual."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.attention = Layer(form)
        self.qkv = nn.Linear(WIDTH, (QUERY_HEADS + 2 * KV_HEADS) * HEAD_SIZE, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, hidden: Tensor, position: Tensor) -> Tensor:
        heads = self.qkv(hidden).unflatten(-1, (-1, HEAD_SIZE))
        query, key, value = heads.split([QUERY_HEADS, KV_HEADS, KV_HEADS], dim=2)
        return hidden + self.out(self.attention(query, key, value, position).flatten(2))


class Decoder(nn.Module):
    """Token ids [1,S] and a position to logits [1,S,V]; the caches are buffers."""

    def __init__(self, form: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block(form) for _ in range(LAYERS))

    def forward(self, tokens: Tensor, position: Tensor) -> Tensor:
        hidden = self.embedding(tokens)
        for block in self.blocks:
            hidden = block(hidden, position)
        return hidden @ self.embedding.weight.T


@pytest.fixture(autouse=True)
def scalars_in_the_graph() -> Iterator[None]:
    """`position.item()` breaks the graph by default."""
    torch._dynamo.reset()
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        yield


@pytest.mark.parametrize("form", ["joint", "overlaid", "dequantized"])
def test_a_compiled_decoder_equals_the_eager_one_step_by_step(form: str) -> None:
    eager, compiled = Decoder(form).eval(), Decoder(form).eval()
    backend = CompileBackend(require=LAYERS)
    run = torch.compile(compiled, backend=backend, fullgraph=True)
    random = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for count, start in SCHEDULE:
            tokens = torch.randint(0, VOCABULARY, (1, count), generator=random)
            expected, found = eager(tokens, torch.tensor([start])), run(tokens, torch.tensor([start]))
            torch.testing.assert_close(found, expected, rtol=0, atol=TOLERANCE)
            for (name, one), two in zip(eager.named_buffers(), compiled.buffers(), strict=True):
                # A value whose last bit differs may be next to a rounding boundary.
                off = (one.to(torch.float64) - two.to(torch.float64)).abs()
                assert off.max() <= (1 if one.dtype is torch.int8 else TOLERANCE), name
    assert backend.reports and all(len(report.sites) == LAYERS for report in backend.reports)


def test_the_graph_that_is_left_goes_to_the_inner_compiler() -> None:
    seen: list[set[str]] = []

    def inner(module: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
        seen.append({str(node.target) for node in module.graph.nodes if node.op == "call_function"})
        return torch._functorch._aot_autograd.utils.make_boxed_func(module.forward)

    layer = Layer("overlaid").eval()
    with torch.no_grad():
        torch.compile(layer, backend=CompileBackend(inner=inner), fullgraph=True)(*inputs(3, 0))
    assert len(seen) == 1
    assert {"graphrewrite.custom_sdpa.default", "graphrewrite.update_quantized_cache.default"} <= seen[0]
    assert not any("llama" in target or "quantized_decomposed" in target for target in seen[0])


def test_a_graph_with_gradients_is_left_alone() -> None:
    backend = CompileBackend()
    weight = torch.ones(3, requires_grad=True)
    torch.compile(lambda x: (x * weight).sum(), backend=backend)(torch.arange(3.0)).backward()
    assert torch.equal(weight.grad, torch.arange(3.0)) and backend.reports == []  # type: ignore[arg-type]


def test_too_few_sites_is_an_error_when_it_compiles() -> None:
    backend = CompileBackend(require=1)
    with (
        torch.no_grad(),
        pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="1 fused attentions are required"),
    ):
        torch.compile(lambda x: x * 2, backend=backend)(torch.ones(3))


def test_bad_arguments() -> None:
    with pytest.raises(gr.InputError, match="current_tokens"):
        CompileBackend(current_tokens="none")  # type: ignore[arg-type]
