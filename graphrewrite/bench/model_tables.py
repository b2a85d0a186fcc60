"""Results of whole models as tables."""

from __future__ import annotations

from graphrewrite.bench.models import ModelResults
from graphrewrite.bench.tables import Grid


def summary(results: ModelResults) -> str:
    """What was measured, on what."""
    machine, plan = results.machine, results.plan
    versions = ", ".join(f"{name} {version}" for name, version in machine.versions.items())
    return (
        f"{' against '.join(outcome.name for outcome in results.outcomes)}; prefill in chunks of {plan.chunk}; "
        f"{plan.threads} threads of {machine.processors} processors, {machine.processor}, kernels {machine.isa}; "
        f"{machine.system}; {versions}"
    )


def grids(results: ModelResults) -> list[Grid]:
    """Tokens per second by context, and memory."""
    return [_speeds(results), _memory(results)]


def _speeds(results: ModelResults) -> Grid:
    headings = ["", "context", "prefill tokens/s", "decode tokens/s", "quartiles", "decode of the first", "logits"]
    rows = []
    disturbed = False
    for number, context in enumerate(results.plan.contexts):
        for position, outcome in enumerate(results.outcomes):
            speed = outcome.speeds[number]
            rate = speed.decode_rate
            disturbed |= speed.disturbed or rate.disturbed > 0
            first = f"{results.decode_ratio(number, position).median:.2f}x as fast" if position else ""
            rows.append(
                [
                    outcome.name,
                    str(context),
                    _marked(speed.prefill_rate, speed.disturbed),
                    _marked(rate.median, rate.disturbed > 0),
                    f"{rate.lower:.1f} to {rate.upper:.1f}",
                    first,
                    f"{speed.difference:.0e}" if position else "",
                ]
            )
    notes = ["prefill: of all tokens of a prompt of this context; logits: largest difference over the largest logit"]
    if disturbed:
        notes.append("*: measured while something else had the processors")
    return Grid("tokens per second", headings, rows, notes)


def _memory(results: ModelResults) -> Grid:
    headings = ["", "caches MiB", "peak of the process MiB", "session start s"]
    rows = [
        [
            outcome.name,
            f"{outcome.cache_bytes / 2**20:.0f}",
            f"{outcome.peak_bytes / 2**20:.0f}",
            f"{outcome.load_seconds:.2f}",
        ]
        for outcome in results.outcomes
    ]
    note = (
        f"peak resident memory of a process that loads the model, prefills {results.plan.chunk} tokens, decodes a few"
    )
    return Grid("memory", headings, rows, [note])


def _marked(rate: float, disturbed: bool) -> str:
    return f"{rate:.1f}{'*' if disturbed else ''}"
