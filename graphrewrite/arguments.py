"""Checks of plain arguments that several public functions share."""

from __future__ import annotations

import math
import operator
from numbers import Real
from typing import Any

from graphrewrite.errors import InputError


def whole_number(name: str, value: Any, least: int, most: int | None = None) -> int:
    """Returns an argument that must be a whole number, Python's or numpy's, as an int. A bool is none.

    Raises:
        InputError: it is something else, or outside `least` to `most`.
    """
    wanted = f"a whole number from {least} {'on' if most is None else f'to {most}'}"
    try:
        if isinstance(value, bool):
            raise TypeError
        number = operator.index(value)
    except TypeError:
        raise InputError(f"{name} is {value!r}; give {wanted}") from None
    if number < least or (most is not None and number > most):
        raise InputError(f"{name} is {number}; give {wanted}")
    return number


def tolerance(name: str, value: Any) -> float | None:
    """Returns a tolerance as a float; None stays None.

    Raises:
        InputError: it is no number, negative or not finite.
    """
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, Real):
        raise InputError(f"{name} is {value!r}; give a finite number from 0 on")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not (number >= 0 and math.isfinite(number)):
        raise InputError(f"{name} is {number}; give a finite number from 0 on")
    return number
