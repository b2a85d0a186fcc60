"""torch's own attention operator."""

from __future__ import annotations

from torch.fx import Node

from graphrewrite.fx.calls import Call
from graphrewrite.graph import Graph
from graphrewrite.positions import every_slot
from graphrewrite.report import Mismatch
from graphrewrite.vocabulary import Attention, Layout, Mask, Operand, Position

SDPA = "aten.scaled_dot_product_attention"


def attention_of_sdpa(graph: Graph[Node], node: Node, call: Call) -> Attention[Node] | Mismatch:
    """scaled_dot_product_attention over [B,H,S,D]. Its causal mask is aligned at the top left: row i sees j <= i."""
    args = call.arguments
    name = graph.name(node)
    query, key, value, mask, is_causal = (args[each] for each in ("query", "key", "value", "attn_mask", "is_causal"))
    if args["dropout_p"]:
        return Mismatch(
            "attention-attribute", f"attention drops out weights: dropout_p is {args['dropout_p']}", (name,)
        )
    if any(len(graph.shape(operand) or ()) != 4 for operand in (query, key, value)):
        return Mismatch("attention-rank", "query, keys and values do not all have 4 dimensions", (name,))
    if mask is not None and is_causal:
        return Mismatch("causal-with-mask", "scaled_dot_product_attention is given a mask and is_causal", (name,))
    keys = Operand(key, Layout.BNSH)
    start: Position[Node] | None = None
    if is_causal:
        start = Position(None)
    elif mask is None:
        start = every_slot(graph, keys)
    return Attention(
        output=Operand(node, Layout.BNSH),
        query=Operand(query, Layout.BNSH),
        key=keys,
        value=Operand(value, Layout.BNSH),
        start=start,
        is_causal=is_causal,
        mask=None if mask is None else Mask(mask),
        scale=args["scale"],
    )
