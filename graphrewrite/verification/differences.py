"""How far two arrays are apart, and how far they may be.

Floats. Two programs that mean the same differ in the order of their sums. A sum of n terms in random order is off by
about ``u * sqrt(n)`` of its size, u the unit roundoff of the type; W matrix products in a row add such errors with
random signs, which gives ``sqrt(W)`` of them. So::

    rtol = 4 * u * sqrt(n) * sqrt(W)            4: the tail, and sums that cancel

of the largest magnitude of the output: an element near zero is a sum that cancelled and has the error of its terms. n
is the longest sum (the capacity of a cache; four times the smaller side of the largest weight, the usual inner width).

Codes. Values that lie next to a rounding boundary may be quantized to the neighbouring code on one side only: a cache
of int8 codes is equal when no code is off by more than one and at most 1 in 100 is off. Each such code moves what is
read back by one step, 1/255 of its row's range. Where a fraction f of the codes is off, outputs are given
``sqrt(f / 0.01) / 255`` more.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import ml_dtypes
import numpy as np

from graphrewrite.ort_tensors import Array

_UNIT_ROUNDOFF = {"float64": 2.0**-53, "float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
_MOST_CODES_OFF = 0.01
_CODE_STEP = 1 / 255


@dataclass(frozen=True)
class Tolerance:
    """An element may be off by ``atol + rtol * magnitude``.

    Attributes:
        rtol: relative part.
        atol: absolute part.
        of_largest: True, `rtol` is of the largest magnitude in the tensor; False, of each element's own.
        derivation: where the numbers come from.
    """

    rtol: float
    atol: float
    of_largest: bool
    derivation: str


@dataclass(frozen=True)
class Comparison:
    """One output or cache at one step.

    Attributes:
        name: its name, that of the program after where the two differ.
        kind: "output", "cache", or "site" for the result of an attention.
        step: step it was compared at, from 0.
        max_abs: largest difference; infinity where one side is NaN or infinite and the other is not.
        max_rel: `max_abs` over the largest finite magnitude before.
        allowed: largest difference that an element could have had and pass.
        argmax_agreement: part of the rows whose largest element is at the same place, for float outputs of rank 2 and
            more whose rows have more than one element; else None.
        reason: why it diverges, None when it does not.
    """

    name: str
    kind: str
    step: int
    max_abs: float
    max_rel: float
    allowed: float
    argmax_agreement: float | None
    reason: str | None

    @property
    def ok(self) -> bool:
        return self.reason is None


@dataclass
class CodeCount:
    """How many int8 codes of the caches have been found off, out of those that are written (not the fill value)."""

    off: int = 0
    written: int = 0

    def allowance(self) -> float:
        """What outputs are given more, relative to their largest magnitude."""
        if not self.off:
            return 0.0
        return _CODE_STEP * min(1.0, math.sqrt(self.off / max(self.written, 1) / _MOST_CODES_OFF))


def is_float(dtype: np.dtype[np.generic]) -> bool:
    """Whether a type is floating point, bfloat16 included."""
    return dtype.kind == "f" or dtype == ml_dtypes.bfloat16


def derive_tolerance(
    weights: Iterable[tuple[str, tuple[int, ...]]], longest: int, outputs: Iterable[np.dtype[np.generic]]
) -> Tolerance:
    """Returns the tolerance of the module's text.

    Args:
        weights: numpy type name and shape of every weight of the programs.
        longest: longest sum that is no matrix product with a weight: the capacity, the head size.
        outputs: types of the outputs.
    """
    floats = [(dtype, shape) for dtype, shape in weights if dtype in _UNIT_ROUNDOFF]
    matrices = [shape for _, shape in floats if len(shape) >= 2]
    roundoff = max(
        (_UNIT_ROUNDOFF.get(name, 0.0) for name in [*(d for d, _ in floats), *(d.name for d in outputs)]), default=0.0
    )
    terms = max([longest, 16, *(4 * min(shape[-2:]) for shape in matrices)])
    products = len(matrices) + 4  # scores, weighted values, quantization and its inverse
    rtol = 4 * roundoff * math.sqrt(terms) * math.sqrt(products)
    text = (
        f"an element may be off by {rtol:.1e} of the largest magnitude in its output; that is 4 times the rounding of "
        f"one operation ({roundoff:.1e}) times sqrt({terms}), for the longest sum, times sqrt({products}), for the "
        "matrix products in a row. An int8 code in a cache may be off by one, in at most 1 of 100; where codes are, "
        "outputs may be off by up to 1/255 more"
    )
    return Tolerance(rtol, 0.0, True, text)


def given_tolerance(rtol: float | None, atol: float | None) -> Tolerance:
    """Returns a tolerance as numpy.allclose has it; one of the two that is not given is 0."""
    text = f"given: an element may be off by {atol or 0.0:g}, and by {rtol or 0.0:g} of its own magnitude more"
    return Tolerance(rtol or 0.0, atol or 0.0, False, text)


def compare(
    name: str, kind: str, step: int, before: Array, after: Array, tolerance: Tolerance, codes: CodeCount
) -> Comparison:
    """Compares one output or cache. Adds what it finds of a cache's codes to `codes`."""
    if before.shape != after.shape or is_float(before.dtype) != is_float(after.dtype):
        what = f"{before.dtype}{list(before.shape)} before, {after.dtype}{list(after.shape)} after"
        return Comparison(name, kind, step, math.inf, math.inf, 0.0, None, what)
    if not is_float(before.dtype):
        return _compare_integers(name, kind, step, before, after, codes)
    wide = (before.astype(np.float64), after.astype(np.float64))
    difference = _difference(*wide)
    finite = np.abs(wide[0][np.isfinite(wide[0])])
    largest = float(finite.max(initial=0.0))
    rtol = tolerance.rtol + (codes.allowance() if tolerance.of_largest else 0.0)
    magnitude = np.full((), largest) if tolerance.of_largest else np.where(np.isfinite(wide[0]), np.abs(wide[0]), 0.0)
    allowed = tolerance.atol + rtol * magnitude
    worst = float(difference.max(initial=0.0))
    wrong = difference > allowed
    reason = None
    if wrong.any():
        at = np.unravel_index(np.argmax(np.where(wrong, difference, -1.0)), difference.shape)
        place = f"[{', '.join(str(int(index)) for index in at)}]"
        values = f"{wide[0][at]:g} became {wide[1][at]:g}"
        reason = f"{int(wrong.sum())} of {wrong.size} elements off, most at {place}: {values}"
    relative = worst / largest if largest else (math.inf if worst else 0.0)
    agreement = _argmax_agreement(*wide) if kind == "output" else None
    return Comparison(name, kind, step, worst, relative, float(np.max(allowed, initial=0.0)), agreement, reason)


def _difference(before: Array, after: Array) -> Array:
    """Absolute differences: 0 for equal infinities and NaN on both sides, infinity for anything else not finite."""
    with np.errstate(invalid="ignore"):
        difference = np.abs(before - after)
    same = (before == after) | (np.isnan(before) & np.isnan(after))
    return np.where(same, 0.0, np.where(np.isnan(difference), np.inf, difference))


def _compare_integers(name: str, kind: str, step: int, before: Array, after: Array, codes: CodeCount) -> Comparison:
    difference = np.abs(before.astype(np.int64) - after.astype(np.int64))
    worst = int(difference.max(initial=0))
    off = int(np.count_nonzero(difference))
    allowed = 0
    if kind == "cache" and before.dtype == np.int8:
        written = int(np.count_nonzero((before != 0) | (after != 0)))
        codes.off += off
        codes.written += written
        # One code is never too many: a small cache may have fewer than a hundred.
        allowed = 1 if off <= max(1.0, _MOST_CODES_OFF * written) else 0
    largest = int(np.abs(before.astype(np.int64)).max(initial=0))
    reason = f"{off} of {difference.size} elements off, by up to {worst}" if worst > allowed else None
    return Comparison(name, kind, step, worst, worst / max(largest, 1), allowed, None, reason)


def _argmax_agreement(before: Array, after: Array) -> float | None:
    if before.ndim < 2 or before.shape[-1] < 2 or before.size == 0:
        return None
    return float(np.mean(np.argmax(before, axis=-1) == np.argmax(after, axis=-1)))
