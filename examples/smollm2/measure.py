"""Time and attention share of a decoding step in onnxruntime, at any context length.

The caches are filled with arbitrary codes instead of prefilling up to the context: what a step costs depends on how
many positions it reads and not on what they hold. Programs are measured in turns in one process, warmed up, and the
median counts, so what else the machine does falls on all of them alike.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime

import graphrewrite as gr
from graphrewrite.cache_metadata import read_caches
from graphrewrite.sessions import default_session_options

# onnxruntime's threads go on spinning for a while after a run; the other program must not pay for that.
_QUIET_SECONDS = 0.05


class StepRunner:
    """Runs a model with tokens ``[1,S]`` at any position, its caches bound in place where the model allows that."""

    def __init__(self, session: onnxruntime.InferenceSession) -> None:
        self._session = session
        inputs = {value.name: value for value in session.get_inputs()}
        entries = read_caches(session.get_modelmeta().custom_metadata_map)
        random = np.random.default_rng(0)
        self._caches: list[tuple[str, onnxruntime.OrtValue, str, onnxruntime.OrtValue]] = []
        for entry in entries:
            value = inputs.pop(entry.input)
            content = _cache_content(value, random)
            present = onnxruntime.OrtValue.ortvalue_from_numpy(content)
            following = present if entry.in_place else onnxruntime.OrtValue.ortvalue_from_numpy(content.copy())
            self._caches.append((entry.input, present, entry.output, following))
        self.cache_bytes = sum(value.tensor_size_in_bytes() for value in self._buffers())
        self._tokens = next(name for name, value in inputs.items() if len(value.shape) == 2)
        self._position = next(name for name, value in inputs.items() if len(value.shape) == 1)
        carried = {entry.output for entry in entries}
        self._outputs = [value.name for value in session.get_outputs() if value.name not in carried]

    def run(self, count: int, position: int) -> float:
        """Run ``count`` tokens at a position; seconds."""
        binding = self._session.io_binding()
        for source, present, target, following in self._caches:
            binding.bind_ortvalue_input(source, present)
            binding.bind_ortvalue_output(target, following)
        binding.bind_cpu_input(self._tokens, np.ones((1, count), dtype=np.int64))
        binding.bind_cpu_input(self._position, np.array([position], dtype=np.int64))
        for name in self._outputs:
            binding.bind_output(name)
        started = time.perf_counter()
        self._session.run_with_iobinding(binding)
        return time.perf_counter() - started

    def _buffers(self) -> list[onnxruntime.OrtValue]:
        buffers = [present for _, present, _, _ in self._caches]
        return buffers + [following for _, present, _, following in self._caches if following is not present]


def _cache_content(value: Any, random: np.random.Generator) -> np.ndarray:
    content: np.ndarray
    if value.type == "tensor(int8)":
        content = random.integers(-100, 100, value.shape, dtype=np.int8)
    else:
        content = np.full(value.shape, 0.02, dtype=np.float32)
    return content


def medians_in_turns(runs: Sequence[Callable[[], float]], *, rounds: int, seconds: float) -> list[float]:
    """The median of what each function returns, called in turns after one warm-up call each.

    Stops after ``rounds`` turns, or when ``seconds`` have passed and there were 3.
    """
    results: list[list[float]] = [[] for _ in runs]
    for run in runs:
        run()
    started = time.perf_counter()
    for turn in range(rounds):
        for run, result in zip(runs, results, strict=True):
            time.sleep(_QUIET_SECONDS)
            result.append(run())
        if turn >= 2 and time.perf_counter() - started > seconds:
            break
    return [statistics.median(result) for result in results]


@dataclass(frozen=True)
class Speed:
    """Tokens per second at a context, before and after. ``chunk`` is the number of tokens of the prefill run."""

    context: int
    chunk: int
    prefill: tuple[float, float]
    decode: tuple[float, float]


def speeds(runners: Sequence[StepRunner], context: int, *, chunk: int, seconds: float) -> Speed:
    """Prefill of the last ``chunk`` tokens of the context, and decode of the token that completes it."""
    chunk = min(chunk, context)

    def timed(count: int) -> list[float]:
        runs = [_bound(runner, count, context - count) for runner in runners]
        return medians_in_turns(runs, rounds=15, seconds=seconds)

    prefill = [chunk / value for value in timed(chunk)]
    decode = [1 / value for value in timed(1)]
    return Speed(context, chunk, (prefill[0], prefill[1]), (decode[0], decode[1]))


def _bound(runner: StepRunner, count: int, position: int) -> Callable[[], float]:
    return lambda: runner.run(count, position)


_FUSED_OPERATORS = {"UpdateCache", "UpdateQuantizedCache", "CustomSdpa", "SdpaWithKvCache"}
# onnxruntime names the nodes of an inlined function body after the function; every function of these models is a
# cache or attention operator. Casts between two of them stay outside and are not counted.
_INLINED = "_inlfunc_"


def attention_milliseconds(model: Path, context: int, *, threads: int, steps: int) -> float:
    """The cache and attention part of one decode step at a context: sum of its node times, median over the steps."""
    with tempfile.TemporaryDirectory() as folder:
        options = default_session_options()
        options.enable_profiling = True
        options.profile_file_prefix = str(Path(folder) / "profile")
        session = gr.session(model, threads, session_options=options)
        runner = StepRunner(session)
        for _ in range(steps + 1):
            runner.run(1, context - 1)
        events = json.loads(Path(session.end_profiling()).read_text(encoding="utf-8"))
    runs = [event for event in events if event["name"] == "model_run"]
    if len(runs) != steps + 1:
        raise gr.GraphRewriteError(f"the profile of {model} has {len(runs)} runs, expected {steps + 1}")
    nodes = sorted((event for event in events if _is_attention(event)), key=lambda event: event["ts"])
    return statistics.median(_covered(nodes, run) for run in runs[1:]) / 1000


def _is_attention(event: dict[str, Any]) -> bool:
    return event.get("cat") == "Node" and (
        event["name"].startswith(_INLINED) or event["args"].get("op_name") in _FUSED_OPERATORS
    )


def _covered(nodes: list[dict[str, Any]], run: dict[str, Any]) -> int:
    """Microseconds of a run that its nodes cover. A control-flow node covers its body's nodes, which count once."""
    covered, end = 0, run["ts"]
    for node in nodes:
        if run["ts"] <= node["ts"] < run["ts"] + run["dur"] and node["ts"] + node["dur"] > end:
            covered += node["ts"] + node["dur"] - max(end, node["ts"])
            end = node["ts"] + node["dur"]
    return covered
