"""Latency against context, log-log, with the limit as a line."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import TYPE_CHECKING, Any

from graphrewrite.bench.results import CaseResult, LayerResults
from graphrewrite.bench.rounds import spread
from graphrewrite.bench.tables import summary
from graphrewrite.errors import InputError
from graphrewrite.files import check_output

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SUFFIXES = (".png", ".svg", ".pdf")


def check(path: Path) -> None:
    """Raises InputError unless a plot can be made and written there."""
    if path.suffix not in SUFFIXES:
        raise InputError(f"{path}: unknown suffix {path.suffix!r}; a plot is a {', '.join(SUFFIXES)} file")
    check_output(path)
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise InputError("a plot needs matplotlib; install graphrewrite[bench]") from None


def write(results: LayerResults, path: Path) -> None:
    """Draws decode cases and prefills of whole prompts, each kind in a panel of its own.

    Raises:
        InputError: as `check`, or there are no such cases.
    """
    check(path)
    from matplotlib import cm
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    panels = [
        (title, cases)
        for title, cases in (
            ("decode, one token", [case for case in results.cases if case.case.is_decode]),
            ("prefill of a whole prompt", [case for case in results.cases if _is_whole_prompt(case)]),
        )
        if cases
    ]
    if not panels:
        raise InputError(f"{path} is not drawn: no decode and no prefill of a whole prompt was measured")
    figure = Figure(figsize=(7 * len(panels), 7), layout="constrained")
    FigureCanvasAgg(figure)  # no window, whatever the machine has
    axes = figure.subplots(1, len(panels), squeeze=False)[0]
    names = dict.fromkeys(outcome.name for case in results.cases for outcome in case.measured)
    shades = cm.tab20.colors  # type: ignore[attr-defined]
    colors = dict(zip(names, itertools.cycle(shades), strict=False))
    for axis, (title, cases) in zip(axes, panels, strict=True):
        _draw(axis, title, sorted(cases, key=_place), colors)
    lines = {label: line for axis in axes for line, label in zip(*axis.get_legend_handles_labels(), strict=True)}
    figure.legend(lines.values(), lines.keys(), loc="outside lower center", ncols=2 * len(panels), fontsize=8)
    figure.suptitle(summary(results), fontsize=7, wrap=True)
    figure.savefig(path, dpi=150)


def _is_whole_prompt(result: CaseResult) -> bool:
    return not result.case.is_decode and not any(result.case.starts)


def _place(result: CaseResult) -> int:
    return result.case.context if result.case.is_decode else result.case.rows


def _draw(axis: Axes, title: str, cases: list[CaseResult], colors: dict[str, Any]) -> None:
    from matplotlib.ticker import NullFormatter

    names = dict.fromkeys(outcome.name for case in cases for outcome in case.measured)
    for name in names:
        points = [(_place(case), outcome) for case in cases if (outcome := case.outcome(name)) is not None]
        times = [spread(outcome.samples) for _, outcome in points]
        medians = [time.median * 1e3 for time in times]
        errors = [
            [(time.median - time.lower) * 1e3 for time in times],
            [(time.upper - time.median) * 1e3 for time in times],
        ]
        ours = points[0][1].ours
        style: dict[str, Any] = {"linewidth": 2.2 if ours else 1.1, "linestyle": "-" if ours else "--", "marker": "o"}
        axis.errorbar(
            [place for place, _ in points], medians, errors, label=name, markersize=4, color=colors[name], **style
        )
    limits = [(_place(case), case, next((one for one in case.measured if one.ours), None)) for case in cases]
    drawn = [(place, spread(case.bound(one)).median * 1e3) for place, case, one in limits if one is not None]
    if drawn:
        first = next(one.name for _, _, one in limits if one is not None)
        axis.plot(*zip(*drawn, strict=True), color="black", linestyle=":", marker="x", label=f"limit of {first}")
    axis.set(xscale="log", yscale="log", title=title, ylabel="milliseconds")
    axis.set_xlabel("context, positions" if cases[0].case.is_decode else "rows")
    places = sorted({_place(case) for case in cases})
    axis.set_xticks(places, [str(place) for place in places])
    axis.xaxis.set_minor_formatter(NullFormatter())
    axis.grid(True, which="both", linewidth=0.3)
