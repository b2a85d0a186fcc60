"""Token-by-token decoding of an exported model, its caches held in place.

The caches are described by the model's metadata (`cache_metadata`). Each is allocated once. One that the model reads
only to write it (`in_place`) is bound as input and as output with one and the same buffer, so a step costs its new rows
and not the capacity. The others alternate between two buffers.

Only positions before `position` have meaning: a run that fails part way may leave rows behind it, and the next run
writes those positions again. That is why caches need no undoing after an error. State without positions does: it always
alternates, so that a failed run leaves what was there, and is kept aside while a prompt runs in several chunks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime

from graphrewrite import ort_tensors
from graphrewrite.arguments import whole_number
from graphrewrite.cache_metadata import METADATA_KEY, CacheEntry, check_fill, read_caches
from graphrewrite.errors import InputError, KernelError
from graphrewrite.ort_tensors import Array
from graphrewrite.sessions import runtime_message

_INTEGERS = ("tensor(int64)", "tensor(int32)")


@dataclass
class _Cache:
    """The buffer that holds a cache now and the one that receives the next run's; one and the same in place."""

    entry: CacheEntry
    present: onnxruntime.OrtValue
    following: onnxruntime.OrtValue

    def fill(self) -> None:
        ort_tensors.view(self.present)[...] = self.entry.fill


@dataclass
class _Run:
    """A binding for a fixed number of new tokens, with the tensors whose contents change from run to run.

    Nothing is bound twice, and with that number all shapes are fixed: the logits of the first run are the buffer of the
    later ones.
    """

    binding: Any
    tokens: onnxruntime.OrtValue
    position: onnxruntime.OrtValue


class Decoder:
    """Runs a model with caches: `prefill` a prompt, then `step` token by token.

    The model takes tokens ``[B,S]`` and a position (a scalar or ``[B]``, the number of positions already filled); B is
    fixed in the model. Its logits are ``[B,S,V]``, ``[B,1,V]`` (of the last token) or ``[B,V]``.

    Args:
        session: an onnxruntime session of a model exported with `gr.export_onnx`.
        tokens: name of the tokens input. Default: the one integer input of rank 2 that is not a cache.
        position: name of the position input. Default: the one integer input of rank 0 or 1 that is not a cache.
        logits: name of the logits output. Default: the first output that is not a cache.

    Raises:
        InputError: not a session, the model declares no caches, or its inputs and outputs do not fit the above.
    """

    def __init__(
        self,
        session: onnxruntime.InferenceSession,
        tokens: str | None = None,
        position: str | None = None,
        logits: str | None = None,
    ) -> None:
        if not isinstance(session, onnxruntime.InferenceSession):
            raise InputError(
                f"a {type(session).__name__} is not an onnxruntime.InferenceSession; make one with gr.session(model)"
            )
        entries = read_caches(session.get_modelmeta().custom_metadata_map)
        if not entries:
            raise InputError(
                f"the model declares no caches: its metadata has no {METADATA_KEY!r}; export it with gr.export_onnx, "
                "which writes it, or run the session yourself"
            )
        inputs = {value.name: value for value in session.get_inputs()}
        outputs = {value.name: value for value in session.get_outputs()}
        for entry in entries:
            _check_cache(entry, inputs, outputs)
        if all(entry.capacity is None for entry in entries):
            raise InputError(f"the metadata {METADATA_KEY!r} gives no cache a capacity: no telling when it is full")
        cache_inputs = {entry.input for entry in entries}
        cache_outputs = {entry.output for entry in entries}
        free = {name: value for name, value in inputs.items() if name not in cache_inputs}
        self._tokens = _pick(free, tokens, "tokens", lambda rank: rank == 2)
        self._position = _pick(free, position, "position", lambda rank: rank <= 1)
        others = [name for name in free if name not in (self._tokens.name, self._position.name)]
        if others:
            raise InputError(
                f"the model has inputs besides tokens, position and caches: {', '.join(map(repr, others))}; "
                "a Decoder has no values for them, so run the session yourself"
            )
        self._logits = _pick_logits({key: out for key, out in outputs.items() if key not in cache_outputs}, logits)
        self._batch, self._fixed_tokens = _batch_and_tokens(self._tokens, self._position)
        self._session = session
        self._capacity = min(entry.capacity for entry in entries if entry.capacity is not None)
        self._caches = [_allocate(entry, inputs[entry.input]) for entry in entries]
        # Bindings for one new token, by which of the alternating buffers are the present ones; made once each.
        self._step_runs: dict[int, _Run] = {}
        self._parity = 0
        self._filled = 0
        self.reset()

    @property
    def position(self) -> int:
        """Number of positions filled so far; the next token goes there."""
        return self._filled

    @property
    def capacity(self) -> int:
        """Number of positions the caches have room for."""
        return self._capacity

    @property
    def caches(self) -> dict[str, Array]:
        """Copies of the caches by input name, all positions. For inspection; takes time and memory."""
        return {cache.entry.input: ort_tensors.view(cache.present).copy() for cache in self._caches}

    def reset(self) -> None:
        """Forgets all tokens: every cache is filled anew, in the buffers there are."""
        for cache in self._caches:
            cache.fill()
        self._filled = 0

    def prefill(self, tokens: npt.ArrayLike, chunk: int = 512) -> Array:
        """Appends tokens and returns the logits of the last one.

        Args:
            tokens: integers ``[S]`` or ``[B,S]``, S of at least 1; ``[B,S]`` when B is not 1.
            chunk: most tokens in one run. It bounds the memory for activations. A model with a fixed S ignores it.
                Where the model reads the current tokens exactly and earlier ones from a quantized cache, the logits
                depend on it, by about the quantization error.

        Returns:
            ``[V]``, or ``[B,V]`` when the model's B is not 1.

        Raises:
            InputError: more tokens than the caches have room for, found out before anything runs, or a bad argument.
            KernelError: an operator refused its input. `position` is what it was, and decoding can go on from there.
        """
        rows = self._rows(tokens)
        count = rows.shape[1]
        chunk = whole_number("chunk", chunk, 1)
        if self._fixed_tokens is not None:
            chunk = self._fixed_tokens
            if count % chunk:
                raise InputError(f"the model takes exactly {chunk} tokens a run; {count} is no multiple of it")
        if self._filled + count > self._capacity:
            raise InputError(
                f"position {self._filled} + {count} new tokens exceeds the cache capacity {self._capacity}; "
                "reset the decoder, or export the model with a larger capacity"
            )
        start = self._filled
        state = [cache for cache in self._caches if cache.entry.axis is None and count > chunk]
        kept = [ort_tensors.view(cache.present).copy() for cache in state]
        try:
            for first in range(0, count, chunk):
                logits = self._run(rows[:, first : first + chunk])
        except BaseException:
            self._filled = start
            for cache, contents in zip(state, kept, strict=True):
                ort_tensors.view(cache.present)[...] = contents
            raise
        return logits

    def step(self, token: npt.ArrayLike) -> Array:
        """Appends one token (an integer; ``[B]`` when B is not 1) and returns its logits, as `prefill` does."""
        row = _as_array(token)
        if row.size != self._batch:
            raise InputError(f"step takes {self._batch} token(s), one for each sequence; got shape {list(row.shape)}")
        return self.prefill(row.reshape(self._batch, 1))

    def _rows(self, tokens: npt.ArrayLike) -> Array:
        rows = _as_array(tokens)
        if rows.size == 0:
            raise InputError(f"no tokens given (shape {list(rows.shape)}); at least one is needed for logits")
        if not np.issubdtype(rows.dtype, np.integer):
            raise InputError(f"tokens are {rows.dtype}; give integers")
        if rows.min() < 0:  # the embedding would count it from the end
            raise InputError(f"token {rows.min()} is negative")
        if rows.ndim == 1 and self._batch == 1:
            rows = rows[np.newaxis]
        if rows.ndim != 2 or rows.shape[0] != self._batch:
            raise InputError(f"tokens have shape {list(rows.shape)}; the model takes [{self._batch}, S]")
        return rows

    def _run(self, rows: Array) -> Array:
        run = self._prepare(rows.shape[1])
        ort_tensors.view(run.tokens)[...] = rows
        ort_tensors.view(run.position)[...] = self._filled
        try:
            self._session.run_with_iobinding(run.binding)
        except Exception as error:  # onnxruntime's exceptions have no common base but Exception
            raise KernelError(f"at position {self._filled}: {runtime_message(error)}") from error
        logits = _last_row(ort_tensors.view(run.binding.get_outputs()[0]), self._batch)
        for cache in self._caches:
            cache.present, cache.following = cache.following, cache.present
        self._parity ^= 1
        self._filled += rows.shape[1]
        return logits

    def _prepare(self, count: int) -> _Run:
        run = self._step_runs.get(self._parity) if count == 1 else None
        if run is not None:
            return run
        binding = self._session.io_binding()
        binding.bind_output(self._logits)  # first, so that it is output 0
        tokens = ort_tensors.empty((self._batch, count), self._tokens.type)
        position = ort_tensors.empty(tuple(_sizes(self._position.shape, self._batch)), self._position.type)
        binding.bind_ortvalue_input(self._tokens.name, tokens)
        binding.bind_ortvalue_input(self._position.name, position)
        for cache in self._caches:
            binding.bind_ortvalue_input(cache.entry.input, cache.present)
            binding.bind_ortvalue_output(cache.entry.output, cache.following)
        run = _Run(binding, tokens, position)
        if count == 1:
            self._step_runs[self._parity] = run
        return run


def _as_array(tokens: npt.ArrayLike) -> Array:
    try:
        return np.asarray(tokens)
    except ValueError as error:
        raise InputError(f"tokens are no array, every row must have the same length: {error}") from error


def _check_cache(entry: CacheEntry, inputs: dict[str, Any], outputs: dict[str, Any]) -> None:
    for name, present, kind in ((entry.input, inputs, "input"), (entry.output, outputs, "output")):
        if name not in present:
            raise InputError(f"the metadata {METADATA_KEY!r} names the {kind} {name!r}, which the model does not have")
    value = inputs[entry.input]
    if not all(isinstance(size, int) for size in value.shape):
        raise InputError(
            f"cache {entry.input!r} has the open shape {value.shape}: a Decoder allocates it once, so every size must "
            "be fixed; a dynamic batch is not supported, export the model with a fixed one"
        )
    axis = entry.axis
    if axis is not None and (not 0 <= axis < len(value.shape) or value.shape[axis] != entry.capacity):
        raise InputError(
            f"cache {entry.input!r} of shape {value.shape} does not have capacity {entry.capacity} on axis {entry.axis}"
        )
    dtype = ort_tensors.numpy_dtype(value.type)
    if dtype is None:
        raise InputError(f"cache {entry.input!r} has the element type {value.type}, which a Decoder cannot allocate")
    check_fill(entry, dtype)
    after = outputs[entry.output]
    if after.type != value.type or not _may_be(after.shape, value.shape):
        raise InputError(
            f"output {entry.output!r} ({after.type}, shape {after.shape}) does not carry on the cache {entry.input!r} "
            f"({value.type}, shape {value.shape})"
        )


def _may_be(shape: list[Any], fixed: list[int]) -> bool:
    """Whether a shape, whose open sizes are no numbers and which is empty when not known at all, may be `fixed`."""
    return not shape or (
        len(shape) == len(fixed) and all(a == b for a, b in zip(shape, fixed, strict=True) if isinstance(a, int))
    )


def _pick(free: dict[str, Any], name: str | None, role: str, fits: Any) -> Any:
    found = {key: value for key, value in free.items() if value.type in _INTEGERS and fits(len(value.shape))}
    if name is not None:
        if name not in found:
            raise InputError(f"{role}={name!r} is not among the inputs that can be it: {_names(found)}")
        return found[name]
    if len(found) != 1:
        raise InputError(f"cannot tell which input is the {role}: {_names(found)}; pass {role}=...")
    return next(iter(found.values()))


def _pick_logits(free: dict[str, Any], name: str | None) -> str:
    if not free:
        raise InputError("the model has no output besides its caches, so there are no logits")
    chosen = next(iter(free)) if name is None else name
    if chosen not in free:
        raise InputError(f"logits={chosen!r} is not among the outputs that can be it: {_names(free)}")
    value = free[chosen]
    if ort_tensors.numpy_dtype(value.type) is None or len(value.shape) not in (2, 3):
        raise InputError(
            f"output {chosen!r} ({value.type}, shape {value.shape}) is not logits [B,S,V] or [B,V]; pass logits=..."
        )
    return chosen


def _names(names: Any) -> str:
    return ", ".join(repr(name) for name in names) or "there is none"


def _batch_and_tokens(tokens: Any, position: Any) -> tuple[int, int | None]:
    """Returns B and, where the model fixes it, S."""
    batch, count = tokens.shape
    if not isinstance(batch, int):
        raise InputError(
            f"input {tokens.name!r} has the open batch size {batch!r}: a dynamic batch is not supported; export the "
            "model with a fixed one"
        )
    sizes = list(_sizes(position.shape, batch))
    if sizes not in ([], [1], [batch]):
        raise InputError(f"position input {position.name!r} has shape {position.shape}; expected [], [1] or [{batch}]")
    return batch, count if isinstance(count, int) else None


def _sizes(shape: list[Any], batch: int) -> list[int]:
    return [size if isinstance(size, int) else batch for size in shape]


def _allocate(entry: CacheEntry, value: Any) -> _Cache:
    shape = tuple(value.shape)
    present = ort_tensors.empty(shape, value.type)
    together = entry.in_place and entry.axis is not None
    return _Cache(entry, present, present if together else ort_tensors.empty(shape, value.type))


def _last_row(logits: Array, batch: int) -> Array:
    """Returns a copy: the memory belongs to the binding, which writes the next run's logits there."""
    last = logits[:, -1] if logits.ndim == 3 else logits
    return np.array(last.reshape(-1) if batch == 1 else last)
