"""Inputs for a program, step by step: those the caller gives, or some made from the program's signature.

Made inputs know three roles. The position is the one integer input of rank 0 or 1, or the one of them with "pos" in its
name: it counts the positions filled. Any other such input counts them with the new tokens: a valid length. The tokens
are the one integer input of rank 2: they are drawn from the vocabulary (the last size of the first output). A program
with a position is first given several new tokens and then one at a time, where it leaves their number open, and as many
as it fixes otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from graphrewrite.errors import InputError
from graphrewrite.ort_tensors import Array
from graphrewrite.verification.differences import is_float
from graphrewrite.verification.runners import CacheSpec, InputSpec, Runner

# New tokens of the first step: odd, so that it fills no tile of a kernel.
_FIRST_TOKENS = 7
_OTHER_OPEN_SIZE = 3


def given_steps(runner: Runner, steps: Sequence[Mapping[str, Any] | Sequence[Any]]) -> list[list[Any]]:
    """Returns the caller's inputs in the order of the runner's.

    Raises:
        InputError: a step lacks an input, has one too many, or is neither a mapping nor a sequence.
    """
    if isinstance(steps, Mapping) or not isinstance(steps, Sequence) or not steps:
        raise InputError("inputs is a sequence of steps, each a dict by name or a tuple; for one step give [step]")
    return [_given_step(runner, index, step) for index, step in enumerate(steps)]


def _given_step(runner: Runner, index: int, step: Any) -> list[Any]:
    names = [spec.name for spec in runner.inputs]
    if isinstance(step, Mapping):
        if set(step) != set(names):
            raise InputError(f"inputs, step {index}: the program takes {names}, given are {sorted(map(str, step))}")
        values = [step[name] for name in names]
    elif isinstance(step, (tuple, list)):
        if len(step) != len(names):
            raise InputError(f"inputs, step {index}: the program takes {len(names)} {names}, given are {len(step)}")
        values = list(step)
    else:
        raise InputError(f"inputs, step {index} is a {type(step).__name__}; give a dict by input name or a tuple")
    return [_convert(spec, value) for spec, value in zip(runner.inputs, values, strict=True)]


def _convert(spec: InputSpec, value: Any) -> Any:
    if spec.dtype is None:
        return value
    detach = getattr(value, "detach", None)  # a torch tensor, without importing torch
    array = np.asarray(detach().cpu() if detach is not None else value)
    if array.dtype != spec.dtype and not np.can_cast(array.dtype, spec.dtype, casting="same_kind"):
        raise InputError(f"input {spec.name!r} is {spec.dtype}, given is {array.dtype}")
    return array.astype(spec.dtype, copy=False)


def made_steps(runner: Runner, steps: int, seed: int) -> list[list[Any]]:
    """Returns at most `steps` steps of made inputs, fewer where the caches have no room for more.

    Raises:
        InputError: the signature has something for which no value can be guessed.
    """
    rng = np.random.default_rng(seed)
    counts = [spec for spec in runner.inputs if _is_integer(spec) and len(spec.shape) <= 1]
    position = _only(counts) or _only([spec for spec in counts if "pos" in spec.name.lower()])
    tokens = _only([spec for spec in runner.inputs if _is_integer(spec) and len(spec.shape) == 2])
    count, capacity = _sequence(runner, tokens, position)
    made: list[list[Any]] = []
    filled = 0
    for index in range(steps):
        new = _new_tokens(count, runner, first=index == 0 and position is not None)
        if capacity is not None and filled + new > capacity:
            if index:
                break
            new = capacity
        sizes: dict[str, int] = {count: new} if isinstance(count, str) else {}
        vocabulary = _vocabulary(runner, tokens)
        values = []
        for spec in runner.inputs:
            if position is not None and spec in counts:
                count_now = filled if spec is position else filled + new
                values.append(_count(spec, count_now, _shape(spec, sizes, runner)))
            elif spec is tokens:
                values.append(rng.integers(0, vocabulary, _shape(spec, sizes, runner)).astype(spec.dtype))
            else:
                values.append(_value(spec, _shape(spec, sizes, runner), rng))
        made.append(values)
        filled += new
    return made


def _only(specs: list[InputSpec]) -> InputSpec | None:
    return specs[0] if len(specs) == 1 else None


def _is_integer(spec: InputSpec) -> bool:
    if spec.dtype is None:
        return isinstance(spec.example, int) and not isinstance(spec.example, bool)
    return spec.dtype.kind in "iu" and spec.dtype.itemsize >= 4


def _sequence(runner: Runner, tokens: InputSpec | None, position: InputSpec | None) -> tuple[int | str, int | None]:
    """Returns the number of new tokens, or the name of the open dimension it is, and the capacity if there is one."""
    if tokens is not None:
        known = [spec.shape[spec.axis] for spec in runner.caches if spec.axis is not None]
        guessed = [max(spec.shape[1:-1]) for spec in runner.caches if spec.axis is None and len(spec.shape) >= 3]
        sizes = known or guessed
        return tokens.shape[1], min(sizes) if sizes and position is not None else None
    # Keys and values come in: an input that is as a cache but for one axis has the new tokens there.
    for spec in runner.inputs:
        for cache in runner.caches:
            axis = _new_tokens_axis(spec, cache, runner)
            if axis is not None:
                return spec.shape[axis], cache.shape[axis] if position is not None else None
    return 1, None


def _new_tokens_axis(spec: InputSpec, cache: CacheSpec, runner: Runner) -> int | None:
    """Returns the one axis where an input and a cache differ; None where they differ in none or in several."""
    if not len(spec.shape) == len(cache.shape) > 2:
        return None
    axes = [i for i, (a, b) in enumerate(zip(spec.shape, cache.shape, strict=True)) if a != b]
    if len(axes) > 1:
        # An open batch is no difference where it is given the cache's.
        axes = [i for i in axes if i == cache.axis or _size(spec, i, runner) != cache.shape[i]]
    return axes[0] if len(axes) == 1 else None


def _new_tokens(count: int | str, runner: Runner, *, first: bool) -> int:
    if isinstance(count, int):
        return count
    least, most = runner.bounds.get(count, (1, 1 << 62))
    return min(max(_FIRST_TOKENS if first else 1, least, 1), most)


def _vocabulary(runner: Runner, tokens: InputSpec | None) -> int:
    if runner.vocabulary is not None:
        return runner.vocabulary
    return int(np.max(tokens.example)) + 1 if tokens is not None and tokens.example is not None else 2


def _shape(spec: InputSpec, sizes: dict[str, int], runner: Runner) -> tuple[int, ...]:
    shape = []
    for axis, size in enumerate(spec.shape):
        if isinstance(size, str) and size in sizes:
            shape.append(sizes[size])
        elif isinstance(size, str) and not size.replace(".", "_").isidentifier():
            raise InputError(f"input {spec.name!r} has the size {size!r}, for which no value is known; give inputs=...")
        else:
            shape.append(_size(spec, axis, runner))
    return tuple(shape)


def _size(spec: InputSpec, axis: int, runner: Runner) -> int:
    """Returns the size of an axis: its own, or the one it is given where it is open and not the new tokens."""
    size = spec.shape[axis]
    if isinstance(size, int):
        return size
    example = getattr(spec.example, "shape", None)
    least, most = runner.bounds.get(size, (1, 1 << 62))
    # A batch of 1 is what caches mostly have.
    wanted = int(example[axis]) if example is not None else 1 if axis == 0 else _OTHER_OPEN_SIZE
    return min(max(wanted, least), most)


def _count(spec: InputSpec, count: int, shape: tuple[int, ...]) -> Any:
    return count if spec.dtype is None else np.full(shape, count, spec.dtype)


def _value(spec: InputSpec, shape: tuple[int, ...], rng: np.random.Generator) -> Any:
    if spec.dtype is None:
        return spec.example
    if is_float(spec.dtype):
        return rng.standard_normal(shape).astype(spec.dtype)
    if spec.dtype.kind == "b":
        # Mostly true, and the first of each row always: a mask that hides a whole row means different things in
        # different source forms.
        chosen: Array = rng.random(shape) < 0.75
        chosen[..., :1] = True
        return chosen
    if spec.example is not None and spec.example.shape == shape:
        return spec.example
    return rng.integers(0, 2, shape).astype(spec.dtype)
