"""Reading what an attention attends to back to a cache: of floats, or of codes with scales and zero points."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Generic

from graphrewrite.graph import Graph
from graphrewrite.report import Mismatch
from graphrewrite.site import Cache, Shaped
from graphrewrite.vocabulary import Attention, Dequantize, Dim, Layout, Leading, Operand, Parameter, Position, V
from graphrewrite.walk import dequantize, narrow, peel


@dataclass(frozen=True)
class CacheRead(Generic[V]):
    """A cache as an attention reads it, the layout it lies in, and how many of its slots are read; None: all."""

    cache: Cache[V]
    layout: Layout
    end: Position[V] | None = None


def read_caches(
    graph: Graph[V], attention: Attention[V], key: Operand[V], value: Operand[V]
) -> tuple[CacheRead[V], CacheRead[V]] | Mismatch | None:
    """Both quantized caches; None when neither is a dequantized copy, a refusal when one is not, or cannot be fused."""
    core = graph.name(attention.output.value)
    dtype = graph.dtype(attention.query.value) or ""
    reads = (read_cache(graph, key, core, dtype), read_cache(graph, value, core, dtype))
    for read, other, operand in ((reads[0], reads[1], key), (reads[1], reads[0], value)):
        if isinstance(read, Mismatch):
            return read
        if read is None and other is not None:
            floating = graph.name(operand.value)
            return Mismatch(
                "half-quantized", f"one cache is dequantized and the other, {floating}, is not", (core, floating)
            )
    read_key, read_value = reads
    if isinstance(read_key, CacheRead) and isinstance(read_value, CacheRead):
        return read_key, read_value
    return None


def read_cache(graph: Graph[V], operand: Operand[V], core: str, query_dtype: str) -> CacheRead[V] | Mismatch | None:
    """The quantized cache that `operand` is the dequantized copy of; None when it is not a dequantized value.

    core: the name of the attention, for the refusal. query_dtype: to which the dequantized values may be rounded.
    """
    operand, end = unsliced(graph, operand, query_dtype)
    found = dequantize(graph, operand.value)
    return None if found is None else read_codes(graph, found, operand, end, core, query_dtype)


def read_codes(
    graph: Graph[V],
    found: Dequantize[V],
    operand: Operand[V],
    end: Position[V] | None,
    core: str,
    query_dtype: str,
) -> CacheRead[V] | Mismatch:
    """The cache of a dequantization that makes `operand`, of which `end` slots are read."""
    where = (core, graph.name(operand.value))
    refusal = _check_arithmetic(found, query_dtype, where)
    if refusal is not None:
        return refusal
    codes = peel(graph, Operand(found.codes, operand.layout), casts=())
    if graph.dtype(codes.value) != "int8":
        return Mismatch("codes-dtype", f"the codes are {graph.dtype(codes.value)}; the kernel reads int8", where)
    parameters = []
    for parameter, reader in ((found.scales, _read_scales), (found.zero_points, _read_zero_points)):
        read = None if parameter is None else reader(graph, parameter, found, operand.layout, codes, where)
        if isinstance(read, Mismatch):
            return read
        parameters.append(read)
    read_whole = CacheRead(Cache(codes.value, *parameters), codes.layout, end)
    return _sliced_codes(graph, read_whole, where) if end is None else read_whole


def unsliced(graph: Graph[V], operand: Operand[V], query_dtype: str) -> tuple[Operand[V], Position[V] | None]:
    """The operand without transposes, repeated heads and casts, and the number of leading slots cut out of it."""
    operand = peel(graph, operand, casts=(query_dtype,), heads=True)
    concept = graph.concept(operand.value)
    if not isinstance(concept, Leading) or concept.axis != operand.layout.sequence_axis:
        return operand, None
    return peel(graph, replace(operand, value=concept.input), casts=(query_dtype,), heads=True), concept.end


def _check_arithmetic(found: Dequantize[V], query_dtype: str, where: tuple[str, ...]) -> Mismatch | None:
    if found.wraps:
        return Mismatch(
            "zero-point-wraps",
            "the zero points are subtracted in int8, where 127 - (-128) is -1; the fused operator does not wrap",
            where,
            remedy="cast codes and zero points to a wider type before subtracting",
        )
    if found.dtype not in ("float32", query_dtype):
        message = f"the cache is dequantized to {found.dtype}; the kernel computes in float32"
        return Mismatch("dequantized-dtype", message, where)
    return None


def _read_scales(
    graph: Graph[V],
    scales: Parameter[V],
    found: Dequantize[V],
    layout: Layout,
    codes: Operand[V],
    where: tuple[str, ...],
) -> Shaped[V] | Mismatch:
    return _read_parameter(graph, scales, found, layout, codes, where, ("float32",), ("float32", "float64"))


def _read_zero_points(
    graph: Graph[V],
    zero_points: Parameter[V],
    found: Dequantize[V],
    layout: Layout,
    codes: Operand[V],
    where: tuple[str, ...],
) -> Shaped[V] | Mismatch | None:
    if graph.number(narrow(graph, zero_points.value)) == 0:
        return None
    return _read_parameter(graph, zero_points, found, layout, codes, where, ("int8",), ("int8",))


def _read_parameter(
    graph: Graph[V],
    parameter: Parameter[V],
    found: Dequantize[V],
    layout: Layout,
    codes: Operand[V],
    where: tuple[str, ...],
    row_dtypes: tuple[str, ...],
    static_dtypes: tuple[str, ...],
) -> Shaped[V] | Mismatch:
    """Scales or zero points as the operators take them: for each row or group, or static."""
    is_scale = parameter is found.scales
    what = "scale" if is_scale else "zero point"
    shape = graph.shape(found.codes)
    static = None if shape is None else static_shape(parameter.shape, shape, layout)
    if shape is None or (static is None and not _belongs_to_rows(parameter.shape, shape)):
        message = f"a {what} of shape {parameter.shape} for a cache of shape {shape}; one for each row or group of a "
        return Mismatch("scale-granularity", f"{message}row, or the same for every token is fused", where)
    dtypes = row_dtypes if static is None else static_dtypes
    value, read_layout = _of_dtype(graph, Operand(parameter.value, layout), dtypes, permute=static is None)
    dtype = graph.dtype(value)
    if dtype not in dtypes:
        message = f"{what}s are {dtype}; the kernel reads {' or '.join(dtypes)}"
        return Mismatch("scale-dtype", message, where) if is_scale else Mismatch("zero-point-dtype", message, where)
    if static is not None:
        return shaped(graph, value, static)
    if read_layout is not codes.layout:
        return Mismatch("scale-layout", f"codes and {what}s are transposed differently", where)
    if graph.shape(parameter.value) == parameter.shape:
        return Shaped(value)
    wanted = tuple(size for size in parameter.shape if isinstance(size, int))
    if len(wanted) < 4 or layout is not codes.layout:
        return Mismatch("scale-granularity", f"the {what}s have another shape than {parameter.shape}", where)
    return Shaped(value, wanted)


def _of_dtype(graph: Graph[V], operand: Operand[V], dtypes: tuple[str, ...], *, permute: bool) -> tuple[V, Layout]:
    """The operand behind casts, or before them, wherever it has one of the types. permute: also behind transposes."""
    if not permute:
        behind = narrow(graph, operand.value)
        return (behind if graph.dtype(behind) in dtypes else operand.value), operand.layout
    for casts in ((), None):
        peeled = peel(graph, operand, casts=casts)
        if graph.dtype(peeled.value) in dtypes:
            break
    return peeled.value, peeled.layout


def _belongs_to_rows(parameter: tuple[Dim, ...], codes: tuple[Dim, ...]) -> bool:
    """Whether parameters [B,C,H,n] belong to n groups of each row of codes [B,C,H,D]."""
    groups, size = parameter[3], codes[3]
    divides = groups == 1 or (isinstance(groups, int) and isinstance(size, int) and size % groups == 0)
    return parameter[:3] == codes[:3] and divides


def static_shape(parameter: tuple[Dim, ...], rows: tuple[Dim, ...], layout: Layout) -> tuple[int, ...] | None:
    """The shape [], [D], [H,1] or [H,D] of parameters that are the same for every sequence and slot, else None.

    parameter: of the rank of rows [B,S,H,D], in the same `layout`.
    """
    if parameter[0] != 1 or parameter[layout.sequence_axis] != 1 or len(rows) != 4:
        return None
    heads, size = parameter[layout.heads_axis], parameter[3]
    if heads not in (1, rows[layout.heads_axis]) or size not in (1, rows[3]):
        return None
    if not isinstance(heads, int) or not isinstance(size, int):
        return None
    if heads == 1:
        return () if size == 1 else (size,)
    return (heads, size)


def shaped(graph: Graph[V], value: V, shape: tuple[int, ...]) -> Shaped[V]:
    """Static parameters in the shape that the operators take."""
    now = graph.shape(value)
    return Shaped(value) if now == shape or (shape == () and now == (1,)) else Shaped(value, shape)


def _sliced_codes(graph: Graph[V], read: CacheRead[V], where: tuple[str, ...]) -> CacheRead[V] | Mismatch:
    """The read of the whole cache where codes, and the scales and zero points of its rows, are its leading slots."""
    cache, axis = read.cache, read.layout.sequence_axis
    codes = graph.concept(cache.data)
    if not isinstance(codes, Leading) or codes.axis != axis:
        return read
    parameters = []
    for parameter in (cache.scales, cache.zero_points):
        concept = None if parameter is None else graph.concept(parameter.value)
        is_cut = isinstance(concept, Leading) and concept.axis == axis and concept.end == codes.end
        if parameter is None or parameter.shape is not None or len(graph.shape(parameter.value) or ()) != 4:
            parameters.append(parameter)
        elif isinstance(concept, Leading) and is_cut:
            parameters.append(Shaped(_whole(graph, concept.input, read.layout)))
        else:
            return Mismatch("slices-differ", "codes and scales are cut off at different slots", where)
    return CacheRead(Cache(_whole(graph, codes.input, read.layout), *parameters), read.layout, codes.end)


def _whole(graph: Graph[V], value: V, layout: Layout) -> V:
    """The value behind no-ops in the same layout."""
    peeled = peel(graph, Operand(value, layout))
    return peeled.value if peeled.layout is layout else value
