"""Results as tables, for a terminal and for Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from rich import box
from rich.table import Table

from graphrewrite.bench.case import Layer
from graphrewrite.bench.results import CaseResult, LayerResults, Outcome
from graphrewrite.bench.rounds import Spread, spread


@dataclass(frozen=True)
class Grid:
    """A table: the first column is text, the others are numbers. Notes stand below it."""

    title: str
    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str] = field(default_factory=tuple)


def rich_table(grid: Grid) -> Table:
    caption = "\n".join(grid.notes) or None
    table = Table(title=grid.title, title_justify="left", caption=caption, caption_justify="left", box=box.SIMPLE_HEAD)
    for number, heading in enumerate(grid.headings):
        table.add_column(heading, justify="right" if number else "left", overflow="fold")
    for row in grid.rows:
        table.add_row(*row)
    return table


def markdown(grid: Grid) -> str:
    lines = [f"**{grid.title}**", "", _line(grid.headings)]
    lines.append(_line(["---", *["---:"] * (len(grid.headings) - 1)]))
    lines += [_line(row) for row in grid.rows]
    if grid.notes:
        lines += ["", *(f"- {note}" for note in grid.notes)]
    return "\n".join(lines) + "\n"


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def summary(results: LayerResults) -> str:
    """What was measured, on what."""
    layer, machine = results.layer, results.machine
    versions = ", ".join(f"{name} {version}" for name, version in machine.versions.items())
    rows = "read exactly" if layer.exact else "read as the cache holds them"
    return (
        f"{shape(layer)}, layout {layer.layout}, new rows {rows}; "
        f"{results.threads} threads of {machine.processors} processors, {machine.processor}, "
        f"kernels {machine.isa}; {machine.system}; {versions}"
    )


def shape(layer: Layer) -> str:
    return f"B={layer.batch} Hq={layer.query_heads} Hkv={layer.kv_heads} D={layer.head_size}"


def absentees(results: LayerResults) -> list[str]:
    """What did not take part, and why; with the cases where it is not so in all of them."""
    cases: dict[str, list[str]] = {}
    for result in results.cases:
        for outcome in result.outcomes:
            if outcome.error is None:
                cases.setdefault(f"{outcome.name}: {outcome.reason}", []).append(result.case.name)
    everywhere = len(results.cases)
    return [reason if len(names) == everywhere else f"{reason} ({', '.join(names)})" for reason, names in cases.items()]


def case_grid(result: CaseResult, methods: tuple[str, str]) -> Grid:
    """The contenders of a case: errors, times, and how they stand to the limit and to each of our own."""
    own = [outcome for outcome in result.measured if outcome.ours]
    short = [outcome.name.partition(" ")[2] for outcome in own]
    headings = ["", "error", "loss", "ms", "quartiles", "of limit", *(f"{name} faster" for name in short)]
    rows = [_row(result, outcome, own) for outcome in result.measured]
    notes = [
        f"{outcome.name}: {outcome.reason}"
        for outcome in result.outcomes
        if outcome.error is not None and outcome.reason
    ]
    marked = any(spread(outcome.samples).disturbed for outcome in result.measured)
    if marked:
        notes.append("*: measured while something else had the processors")
    return Grid(_title(result), headings, rows, [_limits(result, methods), *notes])


def _title(result: CaseResult) -> str:
    case = result.case
    capacity = "" if case.capacity == case.context else f", capacity {case.capacity}"
    lengths = f", lengths {', '.join(map(str, case.lengths))}" if case.ragged else ""
    return f"{case.name}{capacity}{lengths}"


def _limits(result: CaseResult, methods: tuple[str, str]) -> str:
    read, multiply = spread(result.read), spread(result.multiply)
    operations = result.case.operations
    return (
        f"limits: {1e-9 / read.median:.1f} GB/s read ({methods[0]}), {1e-9 / multiply.median:.0f} GFLOP/s float32 "
        f"({methods[1]}): {operations * 1e-9:.2f} GFLOP in {operations * multiply.median * 1e3:.2f} ms; "
        "a contender's limit is the larger of that and reading its own cache once"
    )


def _row(result: CaseResult, outcome: Outcome, own: Sequence[Outcome]) -> list[str]:
    times = spread(outcome.samples)
    mark = "*" if times.disturbed else ""
    return [
        outcome.name,
        _small(outcome.error),
        _small(outcome.loss),
        f"{milliseconds(times.median)}{mark}",
        f"{milliseconds(times.lower)} to {milliseconds(times.upper)}",
        _factor(result.of_bound(outcome)),
        *("" if one is outcome else _factor(result.times_as_fast(one, outcome)) for one in own),
    ]


def milliseconds(seconds: float) -> str:
    """Three digits, or all before the point; no more than three after it."""
    value = seconds * 1e3
    digits = 0 if value >= 100 else 1 if value >= 10 else 2 if value >= 1 else 3
    return f"{value:.{digits}f}"


def _factor(value: Spread) -> str:
    """The median, and half the distance of the quartiles in percent of it."""
    digits = 0 if value.median >= 100 else 1 if value.median >= 10 else 2
    return f"{value.median:.{digits}f}x ±{50 * (value.upper - value.lower) / value.median:.0f}%"


def _small(value: float | None) -> str:
    return "" if value is None else f"{value:.0e}"
