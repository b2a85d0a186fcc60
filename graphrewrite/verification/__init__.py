"""Whether two programs give the same outputs and leave the same caches, step by step."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, cast

import numpy as np
import onnx
import onnx_ir as ir
from rich.console import Console, Group, RenderableType
from rich.table import Column, Table
from rich.text import Text

from graphrewrite.arguments import tolerance as checked_tolerance
from graphrewrite.arguments import whole_number
from graphrewrite.errors import InputError
from graphrewrite.models import LoadedModel, ModelLike, is_exported_program, load
from graphrewrite.ort_tensors import Array
from graphrewrite.verification.differences import (
    CodeCount,
    Comparison,
    Tolerance,
    compare,
    derive_tolerance,
    given_tolerance,
)
from graphrewrite.verification.inputs import given_steps, made_steps
from graphrewrite.verification.runners import OnnxRunner, Runner, StepResult, TorchRunner
from graphrewrite.verification.sites import Site, by_name, comparable, onnx_sites, torch_sites

__all__ = ["Comparison", "Tolerance", "Verification", "verify"]


@dataclass(frozen=True)
class Verification:
    """What `verify` found. True in a condition when the programs agree.

    Attributes:
        ok: no output and no cache diverges at any step.
        outputs: every comparison, by step; within a step the caches in layer order and then the outputs.
        tolerance: what was allowed and where it comes from.
        first_divergence: the first comparison that is not ok. Caches come before outputs and in the order of layers,
            so it names the layer where the programs part.
        notes: what was not compared, and why.
        sites: comparisons of what each attention yields, by step and in graph order; empty where none were made.
        first_site: the first attention whose result diverges.
    """

    ok: bool
    outputs: tuple[Comparison, ...]
    tolerance: Tolerance
    first_divergence: Comparison | None
    notes: tuple[str, ...] = ()
    sites: tuple[Comparison, ...] = ()
    first_site: Comparison | None = None

    @property
    def largest(self) -> dict[str, tuple[float, float]]:
        """Of each output, the largest absolute difference of all steps and the largest relative one."""
        found: dict[str, tuple[float, float]] = {}
        for result in self.outputs:
            if result.kind == "output":
                most, relative = found.get(result.name, (0.0, 0.0))
                found[result.name] = (max(most, result.max_abs), max(relative, result.max_rel))
        return found

    def __bool__(self) -> bool:
        return self.ok

    def to_json(self, indent: int | None = 2) -> str:
        """The same as JSON. An infinite difference is written as the text "inf"."""
        largest = {name: {"max_abs": one, "max_rel": two} for name, (one, two) in self.largest.items()}
        document = {**asdict(self), "largest": largest, "summary": self.summary()}
        return json.dumps(_finite(document), indent=indent, allow_nan=False)

    def summary(self) -> str:
        """One line: equal, or where the programs part first."""
        steps = len({result.step for result in self.outputs})
        if self.first_divergence is None:
            return f"equal within the tolerance over {steps} step{'s' if steps != 1 else ''}"
        first = self.first_divergence
        text = f"not equal: {first.kind} {first.name!r} diverges first, at step {first.step}: {first.reason}"
        if self.first_site is not None:
            text += f"; the first attention to diverge is {self.first_site.name!r}, at step {self.first_site.step}"
        elif self.sites:
            text += "; no attention diverges, so the programs part outside of them"
        return text

    def print(self, console: Console | None = None) -> None:
        """Writes the outputs and what diverges to a console, by default to standard output."""
        (console or Console()).print(self, soft_wrap=True)

    def __rich__(self) -> RenderableType:
        table = Table("Step", Column("Output", overflow="fold"), "Max abs", "Max rel", "Allowed", "Same argmax", "")
        for result in self.outputs:
            if result.kind == "output" or not result.ok:
                agreement = "" if result.argmax_agreement is None else f"{result.argmax_agreement:.1%}"
                numbers = (f"{value:.2e}" for value in (result.max_abs, result.max_rel, result.allowed))
                verdict = Text("ok", "green") if result.ok else Text("differs", "red")
                table.add_row(str(result.step), Text(result.name), *numbers, agreement, verdict)
        caches = [result for result in self.outputs if result.kind == "cache"]
        lines = [
            f"largest difference of {name!r} over all steps: {most:.2e}, relative {relative:.2e}"
            for name, (most, relative) in self.largest.items()
        ]
        lines += [f"caches: {sum(result.ok for result in caches)} of {len(caches)} comparisons equal"] if caches else []
        if self.sites:
            lines.append(
                f"attentions: {sum(result.ok for result in self.sites)} of {len(self.sites)} comparisons equal"
            )
        lines += [f"tolerance: {self.tolerance.derivation}", *(f"note: {note}" for note in self.notes)]
        return Group(table, *map(Text, lines), Text(self.summary(), style="bold green" if self.ok else "bold red"))


def verify(
    before: ModelLike,
    after: ModelLike,
    inputs: Sequence[Mapping[str, Any] | Sequence[Any]] | None = None,
    *,
    steps: int = 4,
    rtol: float | None = None,
    atol: float | None = None,
    seed: int = 0,
    sites: bool | None = None,
) -> Verification:
    """Runs two programs on the same inputs, step after step with their caches carried along, and compares them.

    Each may be a torch.export program, an ONNX model, or the path of one; the two need not be of one kind. Neither is
    changed: a torch program runs on copies of its buffers. The caches of an ONNX model are those that its metadata
    names; one without is a function of its inputs.

    Args:
        before: the program that is right.
        after: the program in question.
        inputs: one entry for each step: a dict by input name (of `before`) or a tuple in its order, without caches.
            None makes random ones from the signature of `before` (see `graphrewrite.verification.inputs`).
        steps: number of steps when inputs are made.
        rtol: relative tolerance, of each element before; with `atol`, as in `numpy.allclose`. When neither is given
            the tolerance is derived (see `graphrewrite.verification.differences`).
        atol: absolute tolerance.
        seed: of the random inputs.
        sites: compare what each attention yields too, which takes a second run. None does it where the programs are not
            equal, to say which attention is the first to diverge.

    Returns:
        the comparisons. NaN or infinity on one side only, another shape or another number of outputs is a divergence.

    Raises:
        InputError: one of the two is not a model or fails to run, their inputs do not correspond, none can be made, or
            a bad argument.
    """
    steps, seed = whole_number("steps", steps, 1), whole_number("seed", seed, 0)
    rtol, atol = checked_tolerance("rtol", rtol), checked_tolerance("atol", atol)
    if sites not in (None, True, False):
        raise InputError(f"sites is {sites!r}; give True, False or None")
    first, second = _Program(before), _Program(after)
    one, two = first.runner(), second.runner()
    order = _correspondence(one, two)
    fed = made_steps(one, steps, seed) if inputs is None else given_steps(one, inputs)
    tolerance = None if rtol is None and atol is None else given_tolerance(rtol, atol)
    codes = CodeCount()
    results: list[Comparison] = []
    notes: dict[str, None] = {}
    for index, values in enumerate(fed):
        left = one.step(values)
        right = two.step([values[i] for i in order])
        if tolerance is None:
            tolerance = _derived(one, two, values, left)
        results += _compare_step(index, left, right, tolerance, codes, notes)
    assert tolerance is not None  # there is at least one step
    diverging = next((result for result in results if not result.ok), None)
    found: tuple[Comparison, ...] = ()
    if sites or (sites is None and diverging is not None):
        found = tuple(_compare_sites(first, second, fed, order, tolerance, notes))
    first_site = next((result for result in found if not result.ok), None)
    return Verification(diverging is None, tuple(results), tolerance, diverging, tuple(notes), found, first_site)


class _Program:
    """One of the two programs, from which runners are made: each with caches of its own."""

    def __init__(self, model: ModelLike) -> None:
        self.loaded: LoadedModel = load(model)
        # The file itself where there is one: onnxruntime maps its weights.
        self._model = model if isinstance(model, (str, os.PathLike)) else self.loaded

    @property
    def onnx_model(self) -> ir.Model | None:
        """The ONNX model; None for a torch program."""
        if is_exported_program(self.loaded):
            return None
        return ir.from_proto(self.loaded) if isinstance(self.loaded, onnx.ModelProto) else cast("ir.Model", self.loaded)

    def runner(self, watch: Sequence[str] = ()) -> Runner:
        if is_exported_program(self.loaded):
            return TorchRunner(cast("Any", self.loaded), watch=watch)
        return OnnxRunner(cast("Any", self._model), cast("Any", self.loaded), watch=watch)

    def sites(self) -> list[Site]:
        model = self.onnx_model
        return torch_sites(cast("Any", self.loaded).module()) if model is None else onnx_sites(model)


def _site_pairs(first: _Program, second: _Program, notes: dict[str, None]) -> list[tuple[Site, Site]]:
    one, two = first.onnx_model, second.onnx_model
    if one is not None and two is not None and (pairs := by_name(one, two)) is not None:
        return pairs
    before, after = first.sites(), second.sites()
    if len(before) != len(after):
        notes[f"attentions are not compared one by one: {len(before)} before, {len(after)} after"] = None
        return []
    return list(zip(before, after, strict=True))


def _compare_sites(
    first: _Program,
    second: _Program,
    fed: Sequence[list[Any]],
    order: Sequence[int],
    tolerance: Tolerance,
    notes: dict[str, None],
) -> Iterator[Comparison]:
    pairs = _site_pairs(first, second, notes)
    if not pairs:
        return
    one = first.runner([before.value for before, _ in pairs])
    two = second.runner([after.value for _, after in pairs])
    for index, values in enumerate(fed):
        left, right = one.step(values), two.step([values[i] for i in order])
        codes = CodeCount()
        for name, before, after in _cache_pairs(left.caches, right.caches, {}):
            compare(name, "cache", index, before, after, tolerance, codes)
        for site, other in pairs:
            arrays = comparable(left.sites[site.value], site.layout), comparable(right.sites[other.value], other.layout)
            yield compare(site.name, "site", index, *arrays, tolerance, codes)


def _correspondence(before: Runner, after: Runner) -> list[int]:
    """Returns which input of `before` each one of `after` is: by name where they have the same, else by order."""
    names, others = [spec.name for spec in before.inputs], [spec.name for spec in after.inputs]
    if set(names) == set(others):
        return [names.index(name) for name in others]
    if len(names) == len(others):
        return list(range(len(names)))
    raise InputError(f"the inputs do not correspond: {names} before, {others} after")


def _derived(before: Runner, after: Runner, values: list[Any], outputs: StepResult) -> Tolerance:
    capacities = [max(spec.shape[1:3]) for spec in (*before.caches, *after.caches) if len(spec.shape) == 4]
    widths = [value.shape[-1] for value in values if isinstance(value, np.ndarray) and value.ndim >= 3]
    types = [array.dtype for array in outputs.outputs.values()]
    return derive_tolerance([*before.weights(), *after.weights()], max([1, *capacities, *widths]), types)


def _compare_step(
    step: int, before: StepResult, after: StepResult, tolerance: Tolerance, codes: CodeCount, notes: dict[str, None]
) -> Iterator[Comparison]:
    for name, one, two in _cache_pairs(before.caches, after.caches, notes):
        yield compare(name, "cache", step, one, two, tolerance, codes)
    if len(before.outputs) != len(after.outputs):
        reason = f"{len(before.outputs)} outputs before, {len(after.outputs)} after"
        yield Comparison("outputs", "output", step, math.inf, math.inf, 0.0, None, reason)
        return
    for (_, one), (name, two) in zip(before.outputs.items(), after.outputs.items(), strict=True):
        yield compare(name, "output", step, one, two, tolerance, codes)


def _cache_pairs(
    before: dict[str, Array], after: dict[str, Array], notes: dict[str, None]
) -> Iterator[tuple[str, Array, Array]]:
    """Pairs caches by name, in the order of `before`."""
    for name, array in before.items():
        partner = after.get(name)
        if partner is not None and partner.dtype == array.dtype and partner.shape == array.shape:
            yield name, array, partner
        else:
            notes[f"cache {name!r} has no counterpart of its name, type and shape and is not compared"] = None
    for name in (name for name in after if name not in before):
        notes[f"cache {name!r} has no counterpart of its name, type and shape and is not compared"] = None


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value
