"""The speeds that the kernels aim at, measured: ``python -m tests.benchmarks.attention``.

Runs the layers the targets are about as `graphrewrite bench` does, prints its tables, and for each target what came
out. Needs a quiet machine and about ten minutes; a test it is not.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rich.console import Console

from graphrewrite.bench import layer as layers
from graphrewrite.bench import tables
from graphrewrite.bench.case import Case, Layer, decode_case, prefill_case
from graphrewrite.bench.machine import usable_processors
from graphrewrite.bench.results import CaseResult, LayerResults
from graphrewrite.bench.rounds import spread
from graphrewrite.bench.tables import Grid

INT8, INT4, FLOAT = "graphrewrite int8", "graphrewrite int4", "graphrewrite float32"
GQA_INT8, GQA_FLOAT, TORCH = "GroupQueryAttention int8 per tensor", "GroupQueryAttention float32", "torch SDPA float32"
MAIN = Layer(query_heads=32, kv_heads=8, head_size=128)
OTHERS = [Layer(32, 8, 128, batch=8), Layer(9, 3, 64), Layer(14, 2, 64)]
LONG = (16384, 32768)


@dataclass(frozen=True)
class Finding:
    """A target and what was measured; None where something it needs did not take part."""

    what: str
    wanted: str
    measured: float | None
    met: bool


def at_least(what: str, least: float, measured: float | None) -> Finding:
    return Finding(what, f"at least {least:g}", measured, measured is not None and measured >= least)


def at_most(what: str, most: float, measured: float | None) -> Finding:
    return Finding(what, f"at most {most:.3g}", measured, measured is not None and measured <= most)


def of_limit(result: CaseResult, name: str) -> float | None:
    outcome = result.outcome(name)
    return None if outcome is None else result.of_bound(outcome).median


def faster(result: CaseResult, name: str, *others: str) -> float | None:
    """How many times as fast as the fastest of the others that took part."""
    ours = result.outcome(name)
    peers = [outcome for other in others if (outcome := result.outcome(other)) is not None]
    if ours is None or not peers:
        return None
    return min(result.times_as_fast(ours, peer).median for peer in peers)


def seconds(result: CaseResult, name: str) -> float | None:
    outcome = result.outcome(name)
    return None if outcome is None else spread(outcome.samples).median


def quotient(over: float | None, under: float | None) -> float | None:
    return None if over is None or under is None else over / under


def decode_findings(result: CaseResult) -> Iterable[Finding]:
    name, context = result.case.name, result.case.context
    yield at_least(f"{name}: int8 against GroupQueryAttention int8", 4, faster(result, INT8, GQA_INT8))
    for peer in ("llama.cpp q8_0", "OpenVINO u8"):
        yield at_least(f"{name}: int8 against {peer}", 5, faster(result, INT8, peer))
    if context in LONG:
        yield at_most(f"{name}: int8, of the limit", 1.5, of_limit(result, INT8))
        yield at_least(f"{name}: int4 against int8", 1, faster(result, INT4, INT8))
    yield at_most(f"{name}: float32, of the limit", 1.2, of_limit(result, FLOAT))


def prefill_findings(result: CaseResult) -> Iterable[Finding]:
    name = result.case.name
    what = f"{name}: int8 against the better of torch and GroupQueryAttention float32"
    yield at_least(what, 1.5, faster(result, INT8, TORCH, GQA_FLOAT))
    yield at_most(f"{name}: float32, of the limit", 1 / 0.75, of_limit(result, FLOAT))


def other_layer_findings(main: LayerResults, other: LayerResults) -> Iterable[Finding]:
    """The same ratio to the limit as the main layer's, within 1.5."""
    for result in other.cases:
        same = next(case for case in main.cases if case.case.name == result.case.name)
        measured = quotient(of_limit(result, INT8), of_limit(same, INT8))
        shape = tables.shape(other.layer)
        yield at_most(f"{shape}, {result.case.name}: int8, of the limit, against {tables.shape(MAIN)}", 1.5, measured)


def cost_findings(main: LayerResults, roomy: LayerResults) -> Iterable[Finding]:
    """Linear in the valid length, flat in the capacity."""
    by_name = {result.case.name: result for result in main.cases}
    half, whole = (seconds(by_name[f"decode {context}"], INT8) for context in LONG)
    yield at_most(f"decode {LONG[1]}: int8, against {LONG[0]}", 2.2, quotient(whole, half))
    wide = seconds(roomy.cases[0], INT8)
    yield at_most(f"decode {LONG[0]}: int8, capacity {4 * LONG[0]} against {LONG[0]}", 1.1, quotient(wide, half))


def findings_grid(findings: Sequence[Finding]) -> Grid:
    rows = [
        [one.what, one.wanted, "not measured" if one.measured is None else f"{one.measured:.2f}", _verdict(one)]
        for one in findings
    ]
    return Grid("targets", ["", "wanted", "measured", ""], rows)


def _verdict(finding: Finding) -> str:
    return "" if finding.measured is None else "met" if finding.met else "NOT MET"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=min(2, usable_processors()))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=30.0)
    options = parser.parse_args(arguments)
    plan = layers.Plan(options.threads, options.rounds, options.seconds)
    console = Console() if sys.stdout.isatty() else Console(width=160)

    def run(layer: Layer, cases: Sequence[Case], schemes: Sequence[str], peers: Iterable[str]) -> LayerResults:
        results = layers.run(layer, cases, layers.contenders(schemes, list(peers)), plan)
        console.print(tables.summary(results), highlight=False)
        for result in results.cases:
            console.print(tables.rich_table(tables.case_grid(result, results.methods)))
        for line in tables.absentees(results):
            console.print(line, highlight=False)
        return results

    decode = [decode_case(MAIN, context) for context in (4096, *LONG)]
    prefill = [prefill_case(MAIN, rows) for rows in (512, 2048)]
    results = run(MAIN, [*decode, *prefill], ("int8", "int4", "float32"), layers.PEERS)
    findings: list[Finding] = []
    for result in results.cases:
        findings += decode_findings(result) if result.case.is_decode else prefill_findings(result)
    roomy = run(MAIN, [decode_case(MAIN, LONG[0], 4 * LONG[0])], ("int8",), ())
    findings += cost_findings(results, roomy)
    for layer in OTHERS:
        cases = [decode_case(layer, context, ragged=layer.batch > 1) for context in LONG]
        findings += other_layer_findings(results, run(layer, cases, ("int8",), ("onnxruntime",)))
    console.print(tables.rich_table(findings_grid(findings)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
