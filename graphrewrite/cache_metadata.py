"""What an exported model says of its caches: the JSON list in the model's metadata under ``graphrewrite.caches``."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from graphrewrite.errors import InputError

METADATA_KEY = "graphrewrite.caches"


@dataclass(frozen=True)
class CacheEntry:
    """One cache of a model: the graph input that holds it and the graph output that carries it on.

    Attributes:
        input: graph input the cache is read from. Its shape and element type are the cache's.
        output: graph output that holds the cache after the run.
        fill: value of every element before the first token.
        axis: axis of the positions; None for state that has none, or whose axis is not known.
        capacity: number of positions, the size of `axis`; None without an axis.
        in_place: the input is read by nothing but its own write, so one buffer may serve as input and output.
    """

    input: str
    output: str
    fill: float
    axis: int | None
    capacity: int | None
    in_place: bool


_KINDS: dict[str, tuple[type, ...]] = {
    "input": (str,),
    "output": (str,),
    "fill": (int, float),
    "axis": (int, type(None)),
    "capacity": (int, type(None)),
    "in_place": (bool,),
}


def read_caches(metadata: Mapping[str, str]) -> tuple[CacheEntry, ...]:
    """Returns the caches that a model's metadata declares, in the model's order; empty when it declares none.

    Raises:
        InputError: the entry is there and is not the list that the export writes, or two caches share an input or an
            output.
    """
    text = metadata.get(METADATA_KEY)
    if text is None:
        return ()
    try:
        entries = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"the model's metadata {METADATA_KEY!r} is not JSON: {error}") from error
    if not isinstance(entries, list):
        raise InputError(f"the model's metadata {METADATA_KEY!r} is not a list but {type(entries).__name__}")
    caches = tuple(_entry(index, entry) for index, entry in enumerate(entries))
    for kind in ("input", "output"):
        names = [getattr(cache, kind) for cache in caches]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise InputError(f"the model's metadata {METADATA_KEY!r} has the {kind} {twice!r} twice")
    return caches


def check_fill(entry: CacheEntry, dtype: np.dtype[Any]) -> None:
    """Raises InputError unless the fill value is one that an element of the cache can have."""
    fill = entry.fill
    if dtype.kind == "b":
        fits = fill in (0, 1)
    elif dtype.kind in "iu":
        fits = math.isfinite(fill) and int(fill) == fill and np.iinfo(dtype).min <= fill <= np.iinfo(dtype).max
    else:
        limits: Any = ml_dtypes.finfo  # numpy's has no bfloat16; this one has no annotations
        fits = math.isinf(fill) or abs(fill) <= float(limits(dtype).max)
    if not fits:
        raise InputError(f"cache {entry.input!r} is filled with {fill}, which {dtype} does not have")


def _entry(index: int, entry: Any) -> CacheEntry:
    where = f"the model's metadata {METADATA_KEY!r}, entry {index}"
    if not isinstance(entry, dict):
        raise InputError(f"{where} is not an object but {type(entry).__name__}")
    for key, kinds in _KINDS.items():
        value = entry.get(key)
        # bool is an int in Python: a flag must not pass for a number.
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            raise InputError(f"{where}: {key!r} is {value!r}, expected {' or '.join(kind.__name__ for kind in kinds)}")
    if not _is_number(entry["fill"]):
        raise InputError(f"{where}: 'fill' is not a number that a float holds")
    if (entry.get("axis") is None) != (entry.get("capacity") is None):
        raise InputError(f"{where} has one of 'axis' and 'capacity'; it needs both or neither")
    values: dict[str, Any] = {key: entry.get(key) for key in _KINDS}
    return CacheEntry(**values)


def _is_number(fill: float) -> bool:
    try:
        return not math.isnan(fill)
    except OverflowError:  # an int of more digits than a float has
        return False
