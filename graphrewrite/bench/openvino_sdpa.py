"""OpenVINO's CPU plugin: a stateful scaled dot product attention over a cache in float32, or in its own 8-bit form.

The plugin appends to its state, so the context grows by the rows of every decode step that is measured.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from graphrewrite.bench.case import Case, Layer
from graphrewrite.bench.contender import Contender, Step, Unavailable, buffers_for
from graphrewrite.bench.data import Array, Data

PRECISIONS = ("f32", "u8")
_PARAMETER_BYTES = 8  # of a row in 8 bits: its scale and zero point, float32 both
_MOST_BUFFERS = 16  # each one is an inference request with memory of its own


def contender(precision: str) -> Contender:
    """A cache of a precision in `PRECISIONS`."""
    return Contender(f"OpenVINO {precision}", False, functools.partial(_step, precision=precision))


def _step(data: Data, threads: int, precision: str) -> Step:
    try:
        import openvino
    except ImportError:
        raise Unavailable("not installed (openvino)") from None
    case, layer = data.case, data.case.layer
    if case.ragged:
        raise Unavailable("one length for all sequences")
    settings = {
        "INFERENCE_NUM_THREADS": threads,
        "KV_CACHE_PRECISION": precision,
        "INFERENCE_PRECISION_HINT": "f32",
        "PERFORMANCE_HINT": "LATENCY",
    }
    compiled = openvino.Core().compile_model(_model(layer), "CPU", settings)
    row_bytes = 4 * layer.head_size if precision == "f32" else layer.head_size + _PARAMETER_BYTES
    bytes_read = case.bytes_of(row_bytes)
    count = 1 if not case.starts[0] else min(_MOST_BUFFERS, buffers_for(bytes_read))
    requests = [_Request(compiled.create_infer_request(), data) for _ in range(count)]
    return Step(requests, lambda: requests[0].output, None, bytes_read)


class _Request:
    """A request with the state of a case before its step."""

    def __init__(self, request: Any, data: Data) -> None:
        import openvino

        self._request, self._case = request, data.case
        rows = {"query": data.query, "key": data.key, "value": data.value}
        self._inputs = {name: _bnsh(array) for name, array in rows.items()}
        self._inputs["beam"] = np.arange(data.case.layer.batch, dtype=np.int32)
        self._length = start = data.case.starts[0]
        if start:
            caches = {"keys": data.keys, "values": data.values}
            for state in request.query_state():
                state.state = openvino.Tensor(_bnsh(caches[state.name][:, :start]))
        self._mask = _mask(data.case, start)

    def __call__(self) -> None:
        if self._case.starts[0] == 0:
            self._request.reset_state()
        elif self._length + self._case.rows > self._mask.shape[-1]:
            self._mask = _mask(self._case, self._length)
        self._request.infer({**self._inputs, "mask": self._mask})
        if self._case.starts[0]:
            self._length += self._case.rows

    @property
    def output(self) -> Array:
        data: Array = self._request.get_output_tensor(0).data
        return _bnsh(data)


def _mask(case: Case, start: int) -> Array:
    """What is added to the scores, [B,1,S,n]: 0 or -inf."""
    seen = np.arange(start + case.rows) <= start + np.arange(case.rows)[:, None]
    mask = np.where(seen, 0, -np.inf).astype(np.float32)
    return np.tile(mask, (case.layer.batch, 1, 1, 1))


def _bnsh(array: Array) -> Array:
    """[B,S,H,D] as [B,H,S,D], and the other way."""
    return np.ascontiguousarray(array.transpose(0, 2, 1, 3))


def _model(layer: Layer) -> Any:
    """Queries, keys and values [B,H,S,D]; the plugin fuses state, concatenation, repeated heads and attention."""
    import openvino
    from openvino import opset13 as op
    from openvino.op.util import Variable, VariableInfo

    heads = layer.kv_heads

    def rows(name: str, count: int) -> Any:
        return op.parameter([-1, count, -1, layer.head_size], np.float32, name=name)

    query, key, value = rows("query", layer.query_heads), rows("key", heads), rows("value", heads)
    beam = op.parameter([-1], np.int32, name="beam")
    mask = op.parameter([-1, 1, -1, -1], np.float32, name="mask")
    batch = op.gather(op.shape_of(query, output_type="i64"), op.constant([0]), op.constant(0))
    empty = op.concat([batch, op.constant(np.array([heads, 0, layer.head_size], np.int64))], 0)
    assigned, attended = [], []
    for name, new in (("keys", key), ("values", value)):
        info = VariableInfo()
        info.data_shape = openvino.PartialShape([-1, heads, -1, layer.head_size])
        info.data_type, info.variable_id = openvino.Type.f32, name
        variable = Variable(info)
        past = op.read_value(op.broadcast(op.constant(np.float32(0)), empty), variable)
        whole = op.concat([op.gather(past, beam, op.constant(0)), new], 2)
        assigned.append(op.assign(whole, variable))
        attended.append(_repeated(op, whole, layer) if layer.group > 1 else whole)
    result = op.result(op.scaled_dot_product_attention(query, *attended, mask, causal=False))
    return openvino.Model([result], assigned, [query, key, value, beam, mask], "layer")


def _repeated(op: Any, whole: Any, layer: Layer) -> Any:
    """Every KV head as often as query heads share it."""
    times = op.constant(np.array([1, 1, layer.group, 1, 1], np.int64))
    wide = op.broadcast(op.unsqueeze(whole, op.constant(2)), times, broadcast_spec="BIDIRECTIONAL")
    return op.reshape(wide, op.constant(np.array([0, layer.query_heads, -1, layer.head_size], np.int64)), True)
