"""What a comparison of one layer found out, for tables, plots and programs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from graphrewrite.bench.case import Case, Layer
from graphrewrite.bench.machine import Machine
from graphrewrite.bench.rounds import Sample, Spread, ratio, spread


@dataclass(frozen=True)
class Outcome:
    """What became of a contender in a case.

    Attributes:
        reason: why it was not measured; empty when it was.
        error: largest difference from attention in float64 over the cache as the contender holds it, divided by the
            largest output; None when it could not run. Where a contender hides its cache it is the loss.
        loss: likewise, over the rows before they were quantized.
        bytes_read: what the step has to read of its caches.
        buffers: the sets of caches it went around.
        samples: seconds of a step, by round.
    """

    name: str
    ours: bool
    reason: str = ""
    error: float | None = None
    loss: float | None = None
    bytes_read: int = 0
    buffers: int = 0
    samples: list[Sample] = field(default_factory=list)


@dataclass(frozen=True)
class CaseResult:
    """A case. The limits' samples are seconds of one byte, and of one float32 operation."""

    case: Case
    outcomes: list[Outcome]
    read: list[Sample]
    multiply: list[Sample]

    @property
    def measured(self) -> list[Outcome]:
        return [outcome for outcome in self.outcomes if outcome.samples]

    def read_bound(self, outcome: Outcome) -> list[Sample]:
        """Seconds to read the bytes the outcome's step has to read."""
        return _scaled(self.read, outcome.bytes_read)

    def bound(self, outcome: Outcome) -> list[Sample]:
        """The larger of the two limits in each round."""
        read, multiply = self.read_bound(outcome), _scaled(self.multiply, self.case.operations)
        others = {sample.round: sample for sample in multiply}
        return [
            Sample(
                sample.round,
                max(sample.seconds, others[sample.round].seconds),
                sample.disturbed or others[sample.round].disturbed,
            )
            for sample in read
            if sample.round in others
        ]

    def is_read_bound(self, outcome: Outcome) -> bool:
        return spread(self.read_bound(outcome)).median >= self.multiply_seconds

    @property
    def multiply_seconds(self) -> float:
        return spread(_scaled(self.multiply, self.case.operations)).median

    def of_bound(self, outcome: Outcome) -> Spread:
        """How many times the limit a step takes."""
        return ratio(outcome.samples, self.bound(outcome))

    def times_as_fast(self, ours: Outcome, other: Outcome) -> Spread:
        return ratio(other.samples, ours.samples)

    def outcome(self, name: str) -> Outcome | None:
        """The outcome of that name, if it was measured."""
        return next((outcome for outcome in self.measured if outcome.name == name), None)


@dataclass(frozen=True)
class LayerResults:
    """A whole run. `methods` names what the limits were measured with: read, multiply."""

    machine: Machine
    layer: Layer
    threads: int
    methods: tuple[str, str]
    cases: list[CaseResult]
    seconds: float

    def to_json(self) -> dict[str, Any]:
        """All samples, and what is computed from them."""
        return {
            **{name: asdict(value) for name, value in (("machine", self.machine), ("layer", self.layer))},
            "threads": self.threads,
            "limits": {"read": self.methods[0], "multiply": self.methods[1]},
            "seconds": self.seconds,
            "cases": [_case_json(case) for case in self.cases],
        }


def _scaled(samples: Sequence[Sample], factor: float) -> list[Sample]:
    return [Sample(sample.round, sample.seconds * factor, sample.disturbed) for sample in samples]


def _case_json(result: CaseResult) -> dict[str, Any]:
    case = result.case
    return {
        "name": case.name,
        **{name: getattr(case, name) for name in ("rows", "lengths", "capacity", "operations")},
        "bytes_a_second": 1 / spread(result.read).median,
        "operations_a_second": 1 / spread(result.multiply).median,
        "contenders": [_outcome_json(result, outcome) for outcome in result.outcomes],
    }


def _outcome_json(result: CaseResult, outcome: Outcome) -> dict[str, Any]:
    written = asdict(outcome)
    if outcome.samples:
        written["seconds"] = asdict(spread(outcome.samples))
        written["of_limit"] = asdict(result.of_bound(outcome))
        written["limit_is"] = "read" if result.is_read_bound(outcome) else "multiply"
        written["times_as_fast"] = {
            other.name: asdict(result.times_as_fast(other, outcome)) for other in result.measured if other.ours
        }
    return written
