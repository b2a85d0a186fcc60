"""What the demo finds out, as one table for people and one JSON object for programs."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from rich.table import Table

from examples.smollm2.compare import Agreement
from examples.smollm2.measure import Speed
from examples.smollm2.memory import Footprint
from examples.smollm2.peer import CONTEXT, HEAD_SIZE, KV_HEADS, QUERY_HEADS, LayerTimes


@dataclass
class Results:
    """Pairs are (before, after), of the ONNX models in onnxruntime unless a name says torch."""

    threads: int
    sites: int
    attention_cores: int
    prompts: int
    agreements: list[Agreement] = field(default_factory=list)
    speeds: list[Speed] = field(default_factory=list)
    attention_milliseconds: dict[int, tuple[float, float]] = field(default_factory=dict)
    cache_mib: tuple[float, float] = (0.0, 0.0)
    onnx_footprints: tuple[Footprint, Footprint] | None = None
    layer: LayerTimes | None = None
    seconds: float = 0.0

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def table(results: Results) -> Table:
    """The results as a table: before, after and what became of it."""
    made = Table(title=f"SmolLM2-135M, int8 KV cache, {results.threads} threads", title_justify="left")
    made.add_column("", overflow="fold")
    for heading in ("before", "after", ""):
        made.add_column(heading, justify="right", overflow="fold")
    made.add_row("attention sites matched", "", f"{results.sites} of {results.attention_cores}", "")
    _add_agreements(made, results)
    _add_speeds(made, results)
    made.add_section()
    made.add_row("cache, MiB", *_numbers(results.cache_mib, 1), "")
    if results.onnx_footprints:
        before, after = results.onnx_footprints
        peaks = (before.peak_mib, after.peak_mib)
        made.add_row("peak memory of the process, MiB", *_numbers(peaks, 0), "")
    if results.layer:
        made.add_section()
        made.add_row(
            f"one layer, {CONTEXT} positions, Hq={QUERY_HEADS} Hkv={KV_HEADS} D={HEAD_SIZE}, ms a token:\n"
            "GroupQueryAttention int8 per tensor (before), ours int8 per token and head (after)",
            *_numbers((results.layer.group_query_attention, results.layer.ours), 2),
            _factor(results.layer.group_query_attention, results.layer.ours),
        )
    return made


def _add_agreements(made: Table, results: Results) -> None:
    made.add_section()
    for agreement in results.agreements[1:]:
        reference = results.agreements[0].name
        made.add_row(
            f"greedy tokens of {agreement.name} identical to {reference}, {results.prompts} prompts",
            str(agreement.steps),
            str(agreement.identical),
            "all" if not agreement.differences else f"{len(agreement.differences)} differ",
        )
        for difference in agreement.differences:
            made.add_row(
                f"  prompt {difference.prompt + 1}, token {difference.step + 1}: gap of the two logits in {reference}",
                "",
                "",
                f"{difference.gap:.2g}",
            )
    for agreement in results.agreements[1:]:
        label = f"largest logit difference of {agreement.name} (largest logit {agreement.largest_logit:.1f})"
        made.add_row(f"{label}, on the prompts", "", f"{agreement.prompt_difference:.2g}", "")
        made.add_row(
            "  over all tokens, each with its own cache of rounded codes", "", f"{agreement.largest_difference:.2g}", ""
        )


def _add_speeds(made: Table, results: Results) -> None:
    made.add_section()
    for speed in results.speeds:
        pair = speed.prefill
        cached = speed.context - speed.chunk
        label = f"prefill of {speed.chunk} tokens after {cached} cached (of any content), tokens/s"
        made.add_row(label, *_numbers(pair, 1), _factor(pair[1], pair[0]))
    for speed in results.speeds:
        pair = speed.decode
        made.add_row(f"decode, tokens/s, context {speed.context}", *_numbers(pair, 1), _factor(pair[1], pair[0]))
    for context, pair in results.attention_milliseconds.items():
        label = f"attention and cache nodes, ms a token in a profiled (slower) run, context {context}"
        made.add_row(label, *_numbers(pair, 2), _factor(pair[0], pair[1]))


def _numbers(pair: tuple[float, float], digits: int) -> tuple[str, str]:
    return f"{pair[0]:,.{digits}f}", f"{pair[1]:,.{digits}f}"


def _factor(larger: float, smaller: float) -> str:
    return f"{larger / smaller:.1f}x"
