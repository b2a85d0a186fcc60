"""One attention layer: every contender is checked against float64, then all are measured in turns."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from graphrewrite.bench import (
    executorch_ops,
    group_query_attention,
    llama_cpp,
    machine,
    openvino_sdpa,
    ours,
    torch_sdpa,
    unfused,
)
from graphrewrite.bench.case import Case, Layer
from graphrewrite.bench.contender import Contender, Step, Unavailable
from graphrewrite.bench.data import Array, Data, attention64, checked_rows, random_data
from graphrewrite.bench.limits import MultiplyLimit, ReadLimit
from graphrewrite.bench.results import CaseResult, LayerResults, Outcome
from graphrewrite.bench.rounds import in_rounds, turn
from graphrewrite.errors import InputError

PEERS: dict[str, Callable[[], Sequence[Contender]]] = {
    "unfused": lambda: [unfused.source_contender(), unfused.standard_contender()],
    "onnxruntime": lambda: [
        group_query_attention.contender(quantized=False),
        group_query_attention.contender(quantized=True),
    ],
    "torch": lambda: [torch_sdpa.contender()],
    "llama.cpp": lambda: [llama_cpp.contender(kind) for kind in llama_cpp.CACHES],
    "openvino": lambda: [openvino_sdpa.contender(precision) for precision in openvino_sdpa.PRECISIONS],
    "executorch": lambda: [executorch_ops.contender()],
}
"""The contenders by the name of the project they come from."""

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Plan:
    """How much is measured: `rounds` undisturbed rounds of a case, or as many as fit into `seconds`."""

    threads: int
    rounds: int = 15
    seconds: float = 30.0


def contenders(schemes: Sequence[str], peers: Sequence[str]) -> list[Contender]:
    """Our own for the schemes, and the peers'.

    Raises:
        InputError: a name is unknown.
    """
    _check_names("scheme", schemes, ours.SCHEMES)
    _check_names("peer", peers, tuple(PEERS))
    return [ours.contender(scheme) for scheme in schemes] + [one for peer in peers for one in PEERS[peer]()]


def _check_names(what: str, names: Sequence[str], known: Sequence[str]) -> None:
    for name in names:
        if name not in known:
            raise InputError(f"unknown {what} {name!r}; there are {', '.join(known)}")


def run(
    layer: Layer, cases: Sequence[Case], chosen: Sequence[Contender], plan: Plan, progress: Progress = lambda _: None
) -> LayerResults:
    """Measures the cases one after another.

    Raises:
        InputError: there are no cases or no contenders.
    """
    if not cases or not chosen:
        raise InputError("nothing to measure: give at least one case and one contender")
    started = time.perf_counter()
    progress("the limits of this machine")
    read, multiply = ReadLimit(plan.threads), MultiplyLimit(plan.threads)
    try:
        results = [run_case(case, chosen, plan, read, multiply, progress) for case in cases]
    finally:
        read.close()
    methods = (read.method, multiply.method)
    seconds = time.perf_counter() - started
    return LayerResults(_machine(), layer, plan.threads, methods, results, seconds)


def _machine() -> machine.Machine:
    described = machine.describe()
    ggml = llama_cpp.version()
    return replace(described, versions={**described.versions, **({"ggml": ggml} if ggml else {})})


def run_case(
    case: Case,
    chosen: Sequence[Contender],
    plan: Plan,
    read: ReadLimit,
    multiply: MultiplyLimit,
    progress: Progress = lambda _: None,
) -> CaseResult:
    """Checks every contender, then measures those that are right."""
    progress(f"{case.name}: preparing")
    data = random_data(case)
    exact = attention64(data, *data.written())
    steps: dict[str, Step] = {}
    outcomes: list[Outcome] = []
    for contender in chosen:
        progress(f"{case.name}: checking {contender.name}")
        step, outcome = _checked(contender, data, exact, plan.threads)
        outcomes.append(outcome)
        if step is not None:
            steps[contender.name] = step
    del data
    participants = {name: turn(step.runs) for name, step in steps.items()}
    participants[_READ] = lambda: read.measure(1)
    participants[_MULTIPLY] = lambda: multiply.measure(1)
    samples = in_rounds(
        participants,
        rounds=plan.rounds,
        seconds=plan.seconds,
        progress=lambda text: progress(f"{case.name}: {text}"),
    )
    for outcome in outcomes:
        outcome.samples.extend(samples.get(outcome.name, []))
    return CaseResult(case, outcomes, samples[_READ], samples[_MULTIPLY])


_READ, _MULTIPLY = "limit of reading", "limit of multiplying"


def _checked(contender: Contender, data: Data, exact: Array, threads: int) -> tuple[Step | None, Outcome]:
    try:
        step = contender.prepare(data, threads)
        step.runs[0]()
        output = step.output()[:, checked_rows(data.case)].astype(np.float64)
    except Unavailable as unavailable:
        return None, Outcome(contender.name, contender.ours, str(unavailable))
    loss = _relative(output, exact)
    error = loss if step.held is None else _relative(output, attention64(data, *step.held()))
    right = error <= contender.tolerance
    reason = "" if right else f"wrong: error {error:.1e}, allowed {contender.tolerance:.0e}"
    outcome = Outcome(contender.name, contender.ours, reason, error, loss, step.bytes_read, len(step.runs))
    return (step if right else None), outcome


def _relative(output: Array, expected: Array) -> float:
    """The largest difference over the largest value; infinite where the output is not finite."""
    difference = np.abs(output - expected).max() / np.abs(expected).max()
    return float(difference) if np.isfinite(difference) else float("inf")
