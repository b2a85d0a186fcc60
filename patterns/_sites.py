"""The site of an attention whose two caches have been read, and what the operators ask of its operands."""

from __future__ import annotations

from dataclasses import replace

from graphrewrite.graph import Graph
from graphrewrite.patterns._caches import CacheRead, unsliced
from graphrewrite.patterns._updates import find_float_update, find_update, same_slots
from graphrewrite.positions import Sum, every_slot, same_position, slots_of, total
from graphrewrite.report import Mismatch
from graphrewrite.site import CacheUpdate, SdpaSite
from graphrewrite.vocabulary import Attention, Mask, Operand, Position, Slots, V
from graphrewrite.walk import peel, written

FLOATS = ("float32", "float16", "bfloat16")
_Rows = tuple[Operand[V], Operand[V]]


def build_site(
    graph: Graph[V],
    attention: Attention[V],
    pattern: str,
    key: CacheRead[V],
    value: CacheRead[V],
    start: Position[V] | None,
    recent: _Rows[V] | None = None,
    recent_slots: Slots[V] | None = None,
) -> SdpaSite[V] | Mismatch:
    """The site, or what stops it. start: None when only the mask decides. recent: the exact rows of the new tokens."""
    core = graph.name(attention.output.value)
    refusal = _check_operands(graph, attention, key, value, recent, core)
    if refusal is not None:
        return refusal
    # Position 0 bounds nothing where the mask decides.
    begin = _start_of_slice(graph, attention, start or Position(None), (key, value), core)
    if isinstance(begin, Mismatch):
        return begin
    find = find_float_update if key.cache.scales is None else find_update
    return SdpaSite(
        pattern=pattern,
        name=core,
        layout=key.layout,
        query=attention.query if attention.codes is not None else peel(graph, attention.query),
        key=key.cache,
        value=value.cache,
        start=begin,
        is_causal=attention.is_causal,
        mask=attention.mask,
        scale=attention.scale,
        output=attention.output,
        softcap=attention.softcap,
        window=attention.window,
        sinks=attention.sinks,
        query_codes=_query_codes(attention),
        recent_key=None if recent is None else peel(graph, recent[0]),
        recent_value=None if recent is None else peel(graph, recent[1]),
        recent_slots=recent_slots,
        key_update=find(graph, key),
        value_update=find(graph, value),
        notes=_notes(attention, begin),
    )


def _query_codes(attention: Attention[V]) -> tuple[Operand[V], Operand[V] | None] | None:
    if attention.codes is None:
        return None
    codes, layout = attention.codes[0], attention.query.layout
    return Operand(codes.scales, layout), None if codes.zero_points is None else Operand(codes.zero_points, layout)


def _notes(attention: Attention[V], start: Position[V]) -> tuple[str, ...]:
    notes = []
    if attention.mask is not None:
        notes.append("a row whose mask hides every key yields zeros")
    if start.minus_new and (start.value is not None or start.slots_of is not None):
        notes.append("a valid length of less than the number of new tokens is an error")
    return tuple(notes)


def _check_operands(
    graph: Graph[V],
    attention: Attention[V],
    key: CacheRead[V],
    value: CacheRead[V],
    recent: _Rows[V] | None,
    core: str,
) -> Mismatch | None:
    """What CustomSdpa asks of its operands, as far as the graph says it."""
    if key.layout is not value.layout:
        return Mismatch("cache-layout", f"keys lie in {key.layout.value}, values in {value.layout.value}", (core,))
    shapes = graph.shape(key.cache.data), graph.shape(value.cache.data)
    if shapes[0] != shapes[1] and not _is_unknown(shapes[0], shapes[1]):
        return Mismatch("cache-shapes", f"the caches of keys {shapes[0]} and values {shapes[1]} differ", (core,))
    dtype, result = graph.dtype(attention.query.value), graph.dtype(attention.output.value)
    if attention.codes is None and dtype not in FLOATS:
        return Mismatch("query-dtype", f"the query is {dtype}; the kernel takes {', '.join(FLOATS)}", (core,))
    if attention.codes is None and result not in (None, dtype):
        return Mismatch(
            "query-dtype", f"the query is {dtype} and the output {result}; the kernel keeps the type", (core,)
        )
    for rows in recent or ():
        if not _may_be_recent(graph, rows, attention.query):
            message = f"{graph.name(rows.value)} does not have one row of the query's type for each row of the query"
            return Mismatch("recent-rows", message, (core, graph.name(rows.value)))
    return None if attention.mask is None else _check_mask(graph, attention, attention.mask, core)


def _is_unknown(left: tuple[object, ...] | None, right: tuple[object, ...] | None) -> bool:
    """Whether two shapes differ only where both sizes are symbolic, which may be equal under different names."""
    if left is None or right is None or len(left) != len(right):
        return False
    return all(a == b or (isinstance(a, str) and isinstance(b, str)) for a, b in zip(left, right, strict=True))


def _check_mask(graph: Graph[V], attention: Attention[V], mask: Mask[V], core: str) -> Mismatch | None:
    dtype, shape = graph.dtype(mask.value), graph.shape(mask.value)
    if dtype not in ("bool", *FLOATS) or shape is None or not 2 <= len(shape) <= 4:
        message = f"the mask is {dtype} of shape {shape}; the kernel takes bool or floats of 2 to 4 dimensions"
        return Mismatch("mask-type", message, (core, graph.name(mask.value)))
    slots = slots_of(graph, attention.key)
    if shape[-1] == 1 and slots != 1:
        message = f"the mask of shape {shape} is one value for all of a row's {slots} keys"
        return Mismatch("mask-shape", message, (core, graph.name(mask.value)))
    return None


def _may_be_recent(graph: Graph[V], rows: Operand[V], query: Operand[V]) -> bool:
    """Whether `rows` has as many rows as the query; two symbolic sizes may be equal under different names."""
    shapes = graph.shape(rows.value), graph.shape(query.value)
    if graph.dtype(rows.value) != graph.dtype(query.value) or shapes[0] is None or shapes[1] is None:
        return False
    sizes = shapes[0][rows.layout.sequence_axis], shapes[1][query.layout.sequence_axis]
    return sizes[0] == sizes[1] or (isinstance(sizes[0], str) and isinstance(sizes[1], str))


def _start_of_slice(
    graph: Graph[V], attention: Attention[V], start: Position[V], reads: tuple[CacheRead[V], CacheRead[V]], core: str
) -> Position[V] | Mismatch:
    """The position of the first new token, where the attention sees only the leading slots of its caches."""
    ends = [_total(graph, read.end, attention) for read in reads]
    if ends[0] != ends[1]:
        return Mismatch("slices-differ", "keys and values are cut off at different slots", (core,))
    end = reads[0].end
    if end is None or attention.mask is not None:
        return start  # the mask covers what is left
    if not attention.is_causal:
        is_whole = attention.start == every_slot(graph, attention.key)
        return replace(end, minus_new=True) if is_whole else start
    new = slots_of(graph, attention.query)
    if same_position(graph, replace(end, minus_new=True), start, (new, new)):
        return start
    return Mismatch(
        "causal-over-slice",
        "a causal attention over part of a cache: nothing says that the part ends with the new tokens",
        (core,),
        remedy="give a mask, or let the part end at the first position plus the number of new tokens",
    )


def _total(graph: Graph[V], end: Position[V] | None, attention: Attention[V]) -> Sum | None:
    return None if end is None else total(graph, end, slots_of(graph, attention.query))


def holds_floats(graph: Graph[V], attention: Attention[V]) -> bool:
    """Whether keys and values are caches of floats: rows are written into both, or a joint operator does so."""
    if attention.new_key is not None:
        return True
    dtype = graph.dtype(attention.query.value) or ""
    operands = (unsliced(graph, operand, dtype)[0] for operand in (attention.key, attention.value))
    return all(written(graph, operand) is not None for operand in operands)


def with_current_tokens(graph: Graph[V], site: SdpaSite[V], current_tokens: str) -> SdpaSite[V] | Mismatch:
    """The site with the exact rows of the current tokens ("exact"), or without ("quantized")."""
    if site.recent_key is None or site.recent_value is None:
        return site
    if current_tokens == "quantized":
        return _read_back(graph, site, site.recent_key, site.recent_value)
    if site.recent_slots is None:
        return site
    return Mismatch(
        "recent-slots",
        "the exact rows of the current tokens go to slots that are no run from the first position on",
        (site.name,),
        site.pattern,
        'rewrite with current_tokens="quantized", which reads them back from the cache',
    )


def _read_back(
    graph: Graph[V], site: SdpaSite[V], recent_key: Operand[V], recent_value: Operand[V]
) -> SdpaSite[V] | Mismatch:
    """The current tokens read back from the cache, provided the cache holds just those tokens by then."""
    slots = site.recent_slots or Slots(site.start)
    for update, recent in ((site.key_update, recent_key), (site.value_update, recent_value)):
        if update is None or not _holds(graph, update, recent, slots):
            return Mismatch(
                "current-tokens-not-cached",
                "the cache that is read does not hold the quantized current tokens at start_pos",
                (site.name,),
                site.pattern,
                'rewrite with current_tokens="exact"',
            )
    return replace(site, recent_key=None, recent_value=None, recent_slots=None)


def _holds(graph: Graph[V], update: CacheUpdate[V], recent: Operand[V], slots: Slots[V]) -> bool:
    """Whether the update writes the quantized `recent` rows to `slots`."""
    rows, recent = (peel(graph, operand, casts=()) for operand in (update.value, recent))
    is_same = rows.layout is recent.layout and graph.key(rows.value) == graph.key(recent.value)
    return is_same and same_slots(graph, (update.slots, rows), (slots, recent))
