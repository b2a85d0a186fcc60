"""Whole models through `gr.Decoder`, in turns in one process: tokens per second, and memory.

Every model reads the same tokens, chosen at random. A context is filled by prefill up to the steps that complete it, so
the figures of a longer prompt have the shorter ones in them.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime

import graphrewrite as gr
from graphrewrite import ort_tensors
from graphrewrite.arguments import whole_number
from graphrewrite.bench import machine
from graphrewrite.bench.data import Array
from graphrewrite.bench.machine import Machine, Meter
from graphrewrite.bench.memory import peak_bytes
from graphrewrite.bench.rounds import Sample, Spread, ratio, spread
from graphrewrite.cache_metadata import read_caches
from graphrewrite.errors import InputError

_QUIET_SECONDS = 0.05  # as between the turns of a layer's contenders
_BLOCK = 5  # steps one after another, of which the median counts

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Plan:
    """Contexts in positions; `chunk` tokens a run in prefill; `steps` decode steps that complete each context."""

    threads: int
    contexts: tuple[int, ...] = (256, 2048, 8000)
    chunk: int = 512
    steps: int = 25

    def __post_init__(self) -> None:
        for name, least in (("threads", 1), ("chunk", 1), ("steps", _BLOCK)):
            whole_number(name, getattr(self, name), least)
        before = 0
        for context in self.contexts:
            if context <= before + self.steps:
                raise InputError(f"a context of {context} has no room for {self.steps} steps after {before} positions")
            before = context


@dataclass
class Speed:
    """One model at one context. `prefill` seconds are of all tokens of the prompt so far, and of none decoded."""

    context: int
    prompt: int
    prefill: float
    disturbed: bool
    steps: list[Sample]
    difference: float

    @property
    def prefill_rate(self) -> float:
        """Tokens per second."""
        return self.prompt / self.prefill

    @property
    def decode_rate(self) -> Spread:
        """Tokens per second, quartiles from slow to fast."""
        seconds = spread(self.steps)
        return Spread(1 / seconds.median, 1 / seconds.upper, 1 / seconds.lower, seconds.count, seconds.disturbed)


@dataclass
class ModelOutcome:
    """Bytes are of the process that ran the model alone, and of all its caches."""

    name: str
    load_seconds: float
    peak_bytes: int
    cache_bytes: int
    speeds: list[Speed] = field(default_factory=list)


@dataclass(frozen=True)
class ModelResults:
    """The model in question first, then what it is held against."""

    machine: Machine
    plan: Plan
    outcomes: list[ModelOutcome]
    seconds: float

    def to_json(self) -> dict[str, Any]:
        """All samples, and the rates computed from them."""
        written = asdict(self)
        for outcome, target in zip(self.outcomes, written["outcomes"], strict=True):
            for speed, place in zip(outcome.speeds, target["speeds"], strict=True):
                place["prefill_tokens_a_second"] = speed.prefill_rate
                place["decode_tokens_a_second"] = asdict(speed.decode_rate)
        return written

    def decode_ratio(self, number: int, against: int) -> Spread:
        """How many times as fast as model `against` the first one decodes, at context `number`."""
        return ratio(self.outcomes[against].speeds[number].steps, self.outcomes[0].speeds[number].steps)


def run(paths: Sequence[Path], plan: Plan, progress: Progress = lambda _: None) -> ModelResults:
    """Measures models.

    Raises:
        InputError: a file is missing or is no model for a Decoder, or its capacity is less than the longest context.
    """
    started = time.perf_counter()
    running, outcomes = [], []
    for path in paths:
        progress(f"loading {path.name}")
        loaded = _Loaded(path, plan)
        running.append(loaded)
        outcomes.append(ModelOutcome(path.name, loaded.load_seconds, 0, loaded.cache_bytes))
    sizes = {loaded.warm_up() for loaded in running}
    tokens = np.random.default_rng(0).integers(0, min(sizes), plan.contexts[-1])
    filled = 0
    for context in plan.contexts:
        logits = _prefill(running, tokens[filled : context - plan.steps], plan, progress)
        for loaded, outcome, row in zip(running, outcomes, logits, strict=True):
            prompt, seconds = loaded.prompt, loaded.seconds
            difference = _difference(row, logits[0])
            outcome.speeds.append(Speed(context, prompt, seconds, loaded.disturbed, [], difference))
        progress(f"decoding at {context}")
        _decode(running, [outcome.speeds[-1] for outcome in outcomes], tokens[context - plan.steps : context])
        filled = context
    del running
    for path, outcome in zip(paths, outcomes, strict=True):
        progress(f"peak memory of {path.name}")
        outcome.peak_bytes = peak_bytes(path, plan.threads, plan.chunk)
    return ModelResults(machine.describe(), plan, outcomes, time.perf_counter() - started)


class _Loaded:
    """A decoder and how long its prefill has taken so far."""

    def __init__(self, path: Path, plan: Plan) -> None:
        started = time.perf_counter()
        session = gr.session(path, plan.threads)
        self.decoder = gr.Decoder(session)
        self.load_seconds = time.perf_counter() - started
        self.cache_bytes = _cache_bytes(session)
        if self.decoder.capacity < plan.contexts[-1]:
            raise InputError(
                f"{path} has room for {self.decoder.capacity} positions, a context of {plan.contexts[-1]} does not fit"
            )
        self.prompt, self.seconds, self.disturbed = 0, 0.0, False
        self._chunk = min(plan.chunk, plan.contexts[-1] - 1)

    def warm_up(self) -> int:
        """Runs a chunk and a step, forgets them, and returns the size of the vocabulary."""
        self.decoder.prefill([0] * self._chunk, chunk=self._chunk)
        size = self.decoder.step(0).size
        self.decoder.reset()
        return size

    def prefill(self, tokens: Array, meter: Meter) -> Array:
        meter.start()
        started = time.perf_counter()
        logits = self.decoder.prefill(tokens, chunk=len(tokens))
        self.seconds += time.perf_counter() - started
        self.disturbed |= meter.disturbed()
        self.prompt += len(tokens)
        return logits


def _prefill(running: Sequence[_Loaded], tokens: Array, plan: Plan, progress: Progress) -> list[Array]:
    """Feeds the tokens to every model, in turns chunk by chunk; the last logits of each."""
    meter = Meter()
    logits: list[Array] = []
    for first in range(0, len(tokens), plan.chunk):
        progress(f"prefill at {running[0].decoder.position}")
        logits = []
        for loaded in running:
            time.sleep(_QUIET_SECONDS)
            logits.append(loaded.prefill(tokens[first : first + plan.chunk], meter))
    return logits


def _decode(running: Sequence[_Loaded], speeds: Sequence[Speed], tokens: Array) -> None:
    meter = Meter()
    for block, first in enumerate(range(0, len(tokens), _BLOCK)):
        for loaded, speed in zip(running, speeds, strict=True):
            time.sleep(_QUIET_SECONDS)
            meter.start()
            times = []
            for token in tokens[first : first + _BLOCK]:
                started = time.perf_counter()
                loaded.decoder.step(token)
                times.append(time.perf_counter() - started)
            speed.steps.append(Sample(block, statistics.median(times), meter.disturbed()))


def _difference(logits: Array, reference: Array) -> float:
    """The largest difference, over the largest logit of the reference."""
    return float(np.abs(logits - reference).max() / np.abs(reference).max())


def _cache_bytes(session: onnxruntime.InferenceSession) -> int:
    """The bytes of all caches; twice those of one that takes turns with a second buffer."""
    inputs = {value.name: value for value in session.get_inputs()}
    total = 0
    for entry in read_caches(session.get_modelmeta().custom_metadata_map):
        value = inputs[entry.input]
        dtype = ort_tensors.numpy_dtype(value.type)
        assert dtype is not None, "a Decoder has allocated it"
        total += math.prod(value.shape) * dtype.itemsize * (1 if entry.in_place and entry.axis is not None else 2)
    return total
