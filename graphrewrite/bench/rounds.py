"""Measuring in turns: in each round every participant runs, so what else the machine does falls on all alike."""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from graphrewrite.bench.machine import Meter

# Threads of a runtime go on spinning for a while after a run; the next participant must not pay for that.
_QUIET_SECONDS = 0.05
# A turn lasts about this long: runs one after another, as the layers of a model, whose threads are awake.
_TURN_SECONDS = 0.02
_MOST_RUNS = 9
_FEWEST = 3


@dataclass(frozen=True)
class Sample:
    """One participant's seconds in one round. `disturbed`: something else had the processors meanwhile."""

    round: int
    seconds: float
    disturbed: bool


@dataclass(frozen=True)
class Spread:
    """Median and quartiles of `count` samples, of which `disturbed` were so; 0 where the others sufficed."""

    median: float
    lower: float
    upper: float
    count: int
    disturbed: int = 0


def turn(runs: Sequence[Callable[[], object]]) -> Callable[[], float]:
    """A function that runs the next few of `runs`, around and around, and returns the median of their seconds.

    The first run of a turn wakes the threads and counts only when it is long.
    """
    following = itertools.cycle(runs)

    def timed() -> float:
        run = next(following)
        started = time.perf_counter()
        run()
        return time.perf_counter() - started

    def measure() -> float:
        first = timed()
        if first > _TURN_SECONDS:
            return first
        count = min(_MOST_RUNS, max(3, math.ceil(_TURN_SECONDS / max(first, 1e-9))))
        return statistics.median(timed() for _ in range(count))

    return measure


def in_rounds(
    participants: Mapping[str, Callable[[], float]],
    *,
    rounds: int,
    seconds: float,
    meter: Meter | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> dict[str, list[Sample]]:
    """What each participant measured in each round.

    Ends after `rounds` rounds in which nothing was disturbed, or when `seconds` have passed and there were three. A
    participant that has used more than its share of the time sits out after three rounds, so that one slow peer does
    not leave the others with few.
    """
    meter = meter or Meter()
    samples: dict[str, list[Sample]] = {name: [] for name in participants}
    used = dict.fromkeys(participants, 0.0)
    started, share, clean = time.perf_counter(), seconds / max(1, len(participants)), 0
    for number in itertools.count():
        disturbed = False
        for name, measure in participants.items():
            if number >= _FEWEST and used[name] > share:
                continue
            progress(f"round {number + 1}, {name}")
            time.sleep(_QUIET_SECONDS)
            meter.start()
            before = time.perf_counter()
            value = measure()
            used[name] += time.perf_counter() - before
            samples[name].append(Sample(number, value, meter.disturbed()))
            disturbed |= samples[name][-1].disturbed
        clean += not disturbed
        late = number + 1 >= _FEWEST and time.perf_counter() - started > seconds
        if clean >= rounds or late or number + 1 >= 2 * rounds:
            return samples
    raise AssertionError("the rounds above end by themselves")


def spread(samples: Iterable[Sample]) -> Spread:
    """The spread of the undisturbed samples; of all, where there are fewer than three of them."""
    every = list(samples)
    clean = [sample for sample in every if not sample.disturbed]
    kept = clean if len(clean) >= _FEWEST else every
    return spread_of([sample.seconds for sample in kept], sum(sample.disturbed for sample in kept))


def spread_of(values: Sequence[float], disturbed: int = 0) -> Spread:
    """Raises ValueError when there are no values."""
    if not values:
        raise ValueError("no values")
    ordered = sorted(values)
    lower, upper = (_quantile(ordered, share) for share in (0.25, 0.75))
    return Spread(_quantile(ordered, 0.5), lower, upper, len(ordered), disturbed)


def ratio(dividend: Iterable[Sample], divisor: Iterable[Sample]) -> Spread:
    """The spread of the quotients within each round."""
    by_round = {sample.round: sample for sample in divisor}
    quotients = [
        Sample(over.round, over.seconds / under.seconds, over.disturbed or under.disturbed)
        for over in dividend
        if (under := by_round.get(over.round)) is not None
    ]
    return spread(quotients)


def _quantile(ordered: Sequence[float], share: float) -> float:
    """Linear between the two nearest."""
    place = share * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)
