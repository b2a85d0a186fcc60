"""The decoder: where tokens go, that buffers stay, that an error leaves it usable."""

from __future__ import annotations

import copy
import json
import math
from typing import Any

import numpy as np
import onnxruntime
import pytest
from decoder_models import COUNTER_ENTRY, TABLE, VOCABULARY, cache_entry, toy_decoder, toy_logits

import graphrewrite
from graphrewrite import ort_tensors, sessions
from graphrewrite.decoder import Decoder
from graphrewrite.errors import InputError, KernelError

# Sums of up to 8 rows of 4 numbers of magnitude about 1, then dot products of 4: fewer than 16 roundings of values
# below 16, each of at most 2**-24 relative.
TOLERANCE = 16 * 16 * 2.0**-24


def toy_session(model: Any) -> onnxruntime.InferenceSession:
    return sessions.session(model, threads=1, use_library=False)


@pytest.mark.parametrize(
    ("model", "prompt", "chunk"),
    [
        pytest.param({}, [1, 2, 3], 512, id="one chunk"),
        pytest.param({}, [1, 2, 3, 4, 5], 2, id="chunks with a rest"),
        pytest.param({}, [1, 2, 3, 4], 1, id="chunks of one"),
        pytest.param({}, [3], 512, id="one token"),
        pytest.param({"position_shape": ()}, [1, 2], 512, id="scalar position"),
        pytest.param({"last_only": False}, [1, 2, 3], 512, id="logits of every token"),
        pytest.param({"new_tokens": 1}, [1, 2, 3], 512, id="model of one token a run"),
        pytest.param({"new_tokens": 2}, [1, 2, 3, 4], 512, id="model of two tokens a run"),
    ],
)
def test_prefill_equals_the_sum_over_all_tokens(model: dict[str, Any], prompt: list[int], chunk: int) -> None:
    decoder = Decoder(toy_session(toy_decoder(**model)))
    logits = decoder.prefill(prompt, chunk=chunk)
    assert logits.shape == (VOCABULARY,)
    np.testing.assert_allclose(logits, toy_logits(prompt), rtol=0, atol=TOLERANCE)
    assert (decoder.position, decoder.capacity) == (len(prompt), 8)


@pytest.mark.parametrize("in_place", [True, False])
def test_steps_after_prefill_and_after_reset(in_place: bool) -> None:
    decoder = Decoder(toy_session(toy_decoder(in_place=in_place)))
    for _ in range(2):
        sequence = [1, 2, 3]
        decoder.prefill(sequence, chunk=2)
        for token in (4, 0, 9):
            logits = decoder.step(token)
            sequence.append(token)
            # The model whose cache is not in place answers with the new rows alone: past subtracted from present.
            expected = toy_logits(sequence) if in_place else toy_logits([token])
            np.testing.assert_allclose(logits, expected, rtol=0, atol=TOLERANCE)
        np.testing.assert_array_equal(decoder.caches["past_rows"][0, :6], TABLE[sequence])
        np.testing.assert_array_equal(decoder.caches["past_rows"][0, 6:], 0)
        decoder.reset()
        assert decoder.position == 0
        np.testing.assert_array_equal(decoder.caches["past_rows"], 0)


def test_returned_logits_are_not_overwritten_by_the_next_step() -> None:
    decoder = Decoder(toy_session(toy_decoder()))
    first = decoder.step(1)
    kept = first.copy()
    decoder.step(2)
    np.testing.assert_array_equal(first, kept)


@pytest.mark.parametrize(("in_place", "buffers"), [(True, 1), (False, 2)])
def test_the_same_buffers_are_bound_at_every_step(
    monkeypatch: pytest.MonkeyPatch, in_place: bool, buffers: int
) -> None:
    session = toy_session(toy_decoder(in_place=in_place))
    seen: list[tuple[int, int]] = []
    run = session.run_with_iobinding

    def record(binding: Any, *arguments: Any) -> None:
        past = binding._bound_inputs["past_rows"].data_ptr()
        present = binding._bound_outputs["present_rows"].data_ptr()
        run(binding, *arguments)
        # What the run really wrote to, and not only what was asked for.
        assert binding.get_outputs()[1].data_ptr() == present
        seen.append((past, present))

    monkeypatch.setattr(session, "run_with_iobinding", record)
    decoder = Decoder(session)
    decoder.prefill([1, 2, 3], chunk=2)
    decoder.step(4)
    decoder.reset()
    decoder.step(5)
    decoder.step(6)
    assert len({pointer for pair in seen for pointer in pair}) == buffers
    assert all((past == present) == in_place for past, present in seen)
    # Each run reads what the one before it wrote.
    assert all(seen[i][1] == seen[i + 1][0] for i in range(len(seen) - 1))


def test_steps_make_no_binding_and_no_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = Decoder(toy_session(toy_decoder(in_place=False)))
    decoder.step(1)
    decoder.step(2)

    def forbidden(*_: Any) -> None:
        raise AssertionError("a step allocates")

    monkeypatch.setattr(ort_tensors, "empty", forbidden)
    monkeypatch.setattr(decoder._session, "io_binding", forbidden)
    decoder.step(3)
    decoder.step(4)


@pytest.mark.parametrize(
    ("filled", "new", "chunk"),
    [
        pytest.param(0, 9, 512, id="prompt of one too many"),
        pytest.param(8, 1, 512, id="a step when full"),
        pytest.param(5, 4, 2, id="chunks that would fit at first"),
    ],
)
def test_overrun_is_refused_before_anything_runs(filled: int, new: int, chunk: int) -> None:
    decoder = Decoder(toy_session(toy_decoder()))
    if filled:
        decoder.prefill([1] * filled)
    before = decoder.caches
    with pytest.raises(InputError, match=f"position {filled} .* {new} new tokens .* capacity 8"):
        decoder.prefill([2] * new, chunk=chunk)
    assert decoder.position == filled
    np.testing.assert_array_equal(decoder.caches["past_rows"], before["past_rows"])
    if filled < 8:
        sequence = [1] * filled + [3]
        np.testing.assert_allclose(decoder.step(3), toy_logits(sequence), rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("bad", [[VOCABULARY + 5], [3, 4, VOCABULARY + 5]])
def test_an_operator_error_leaves_position_and_decoder(
    in_place: bool, bad: list[int], capfd: pytest.CaptureFixture[str]
) -> None:
    """A token outside the vocabulary fails in Gather; the chunks before it have run by then."""
    decoder = Decoder(toy_session(toy_decoder(in_place=in_place)))
    decoder.prefill([1, 2])
    with pytest.raises(KernelError, match="at position"):
        decoder.prefill(bad, chunk=1)
    assert decoder.position == 2
    assert capfd.readouterr() == ("", "")
    np.testing.assert_allclose(decoder.step(3), toy_logits([1, 2, 3] if in_place else [3]), rtol=0, atol=TOLERANCE)
    np.testing.assert_array_equal(decoder.caches["past_rows"][0, :3], TABLE[[1, 2, 3]])


@pytest.mark.parametrize("chunk", [1, 2, 512])
def test_state_without_positions_is_what_it_was_after_an_error(chunk: int) -> None:
    decoder = Decoder(toy_session(toy_decoder(counter=True)))
    decoder.prefill([1, 2, 3], chunk=2)
    with pytest.raises(KernelError):
        decoder.prefill([4, 5, VOCABULARY + 5], chunk=chunk)
    assert decoder.caches["past_count"] == [3]
    decoder.step(4)
    assert decoder.caches["past_count"] == [4]
    decoder.reset()
    assert decoder.caches["past_count"] == [0]


def test_two_sequences() -> None:
    decoder = Decoder(toy_session(toy_decoder(batch=2, position_shape=(2,))))
    tokens = [[1, 2, 3], [4, 5, 6]]
    logits = np.stack([decoder.prefill(np.array(tokens)), decoder.step([7, 8])])
    longer = [[*tokens[0], 7], [*tokens[1], 8]]
    expected = np.array([[toy_logits(row) for row in rows] for rows in (tokens, longer)])
    np.testing.assert_allclose(logits, expected, rtol=0, atol=TOLERANCE)


COUNTER_FILLED = json.dumps([cache_entry(8), {**COUNTER_ENTRY, "fill": 0.5}])


@pytest.mark.parametrize(
    ("model", "names", "message"),
    [
        ({"metadata": False}, {}, "declares no caches.*gr.export_onnx"),
        ({"metadata": "{"}, {}, "not JSON"),
        ({"metadata": "{}"}, {}, "not a list"),
        ({"metadata": "[3]"}, {}, "entry 0 is not an object"),
        ({"metadata": json.dumps([cache_entry(8, input="nope")])}, {}, "names the input 'nope'"),
        ({"metadata": json.dumps([cache_entry(8, output="nope")])}, {}, "names the output 'nope'"),
        ({"metadata": json.dumps([cache_entry(9)])}, {}, "capacity 9 on axis 1"),
        ({"metadata": json.dumps([cache_entry(8, axis=5)])}, {}, "on axis 5"),
        ({"metadata": json.dumps([cache_entry(8, axis=None)])}, {}, "both or neither"),
        ({"metadata": json.dumps([{**cache_entry(8, axis=None), "capacity": None}])}, {}, "no cache a capacity"),
        ({"metadata": json.dumps([cache_entry(8, fill="0")])}, {}, "'fill' is '0'"),
        ({"metadata": json.dumps([{**cache_entry(8), "in_place": 1}])}, {}, "'in_place' is 1"),
        ({"metadata": json.dumps([{**cache_entry(8), "capacity": True}])}, {}, "'capacity' is True"),
        ({"metadata": "[" * 100_000}, {}, "not JSON"),
        ({"metadata": json.dumps([cache_entry(8, fill=10**400)])}, {}, "'fill' is not a number"),
        ({"metadata": json.dumps([cache_entry(8, fill=math.nan)])}, {}, "'fill' is not a number"),
        ({"metadata": json.dumps([cache_entry(8, fill=1e39)])}, {}, "filled with 1e.39, which float32"),
        ({"metadata": json.dumps([cache_entry(8)] * 2)}, {}, "the input 'past_rows' twice"),
        ({"metadata": json.dumps([cache_entry(8), cache_entry(8, input="other")])}, {}, "output 'present_rows' twice"),
        ({"metadata": json.dumps([cache_entry(8, output="logits")])}, {}, "'logits' .* does not carry on the cache"),
        ({"counter": True, "metadata": COUNTER_FILLED}, {}, "'past_count' is filled with 0.5, which int64"),
        ({"batch": "B"}, {}, "dynamic batch is not supported"),
        ({"extra_input": True}, {}, "'temperature'"),
        ({"position_shape": (1, 1)}, {}, "cannot tell which input is the tokens"),
        ({}, {"tokens": "position"}, "tokens='position'"),
        ({}, {"position": "tokens"}, "position='tokens'"),
        ({}, {"logits": "present_rows"}, "logits='present_rows'"),
    ],
)
def test_a_model_it_cannot_drive_is_refused(model: dict[str, Any], names: dict[str, str], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Decoder(toy_session(toy_decoder(**model)), **names)


@pytest.mark.parametrize(
    ("tokens", "chunk", "message"),
    [
        ([], 512, "no tokens"),
        ([3, -1], 512, "token -1 is negative"),
        ([[1], [2]], 512, r"shape \[2, 1\]"),
        ([1.0], 512, "float64"),
        ([1], 0, "chunk is 0"),
        ([1], True, "chunk is True"),
        ([1], np.True_, "chunk is "),
        ([1], 1.0, "chunk is 1.0"),
        ([[1, 2], [3]], 512, "every row must have the same length"),
    ],
)
def test_bad_arguments_of_prefill(tokens: Any, chunk: int, message: str) -> None:
    decoder = Decoder(toy_session(toy_decoder()))
    with pytest.raises(InputError, match=message):
        decoder.prefill(tokens, chunk=chunk)
    assert decoder.position == 0


def test_a_chunk_may_be_a_number_of_numpy() -> None:
    decoder = Decoder(toy_session(toy_decoder()))
    logits = decoder.prefill([1, 2, 3], chunk=np.int32(2))  # type: ignore[arg-type]
    np.testing.assert_allclose(logits, toy_logits([1, 2, 3]), rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("session", [None, "toy.onnx", toy_decoder()])
def test_what_is_no_session(session: Any) -> None:
    with pytest.raises(InputError, match=r"is not an onnxruntime.InferenceSession; make one with gr.session"):
        Decoder(session)


def test_a_fixed_run_length_that_does_not_divide() -> None:
    decoder = Decoder(toy_session(toy_decoder(new_tokens=2)))
    with pytest.raises(InputError, match="exactly 2 tokens"):
        decoder.prefill([1, 2, 3])


@pytest.fixture(scope="module")
def language_model() -> tuple[Any, list[Any], list[int]]:
    """A rewritten two-layer model of 12 int8 caches, and the logits of the program it was made from."""
    torch = pytest.importorskip("torch")
    example = pytest.importorskip("examples.smollm2.model")
    torch.manual_seed(0)
    program = example.export(example.Decoder(example.tiny_config(), 64))
    model = graphrewrite.export_onnx(graphrewrite.rewrite(program, require=2).model, output_names=["logits"])
    tokens = np.random.default_rng(0).integers(0, 64, 14).tolist()
    module = copy.deepcopy(program).module()
    with torch.no_grad():
        expected = [module(torch.tensor([tokens[:10]]), torch.tensor([0]))]
        expected += [module(torch.tensor([[tokens[i]]]), torch.tensor([i])) for i in range(10, 14)]
    return model, [logits[0, -1].numpy() for logits in expected], tokens


@pytest.mark.parametrize("use_library", [True, False])
def test_a_fused_language_model_decodes_as_its_source_does(
    use_library: bool, language_model: tuple[Any, list[Any], list[int]]
) -> None:
    model, expected, tokens = language_model
    decoder = Decoder(sessions.session(model, threads=1, use_library=use_library))
    assert all(cache.present is cache.following for cache in decoder._caches)
    for _ in range(2):
        found = [decoder.prefill(tokens[:10]), *(decoder.step(token) for token in tokens[10:])]
        # Sums of at most 96 terms in 15 matrices, in float32, on a scale of the largest logit.
        largest = max(float(np.abs(logits).max()) for logits in expected)
        np.testing.assert_allclose(found, expected, rtol=0, atol=4 * 2**-24 * (96 * 15) ** 0.5 * largest)
        with pytest.raises(InputError, match=r"position 14 .* 51 new tokens .* capacity 64"):
            decoder.prefill([0] * 51)
        with pytest.raises(KernelError, match="at position 16"):
            decoder.prefill([1, 2, 99], chunk=1)
        assert decoder.position == 14
        decoder.reset()


def test_step_takes_one_token() -> None:
    with pytest.raises(InputError, match="step takes 1"):
        Decoder(toy_session(toy_decoder())).step([1, 2])
