"""Source forms of attention over a KV cache, each written once for every graph format.

A pattern is a module of this package with a `NAME` and a function

    match(attention, graph) -> SdpaSite | Mismatch | None

None says that the attention is not of this form at all; a `Mismatch` says that it is, and what stopped it. A pattern
belongs to the pass that its attribute `PASS` names, by default "fuse_quantized_sdpa". Modules whose name starts with an
underscore are shared parts. Other packages add patterns through entry points of the group "graphrewrite.patterns", each
naming such a module.
"""

from __future__ import annotations

import importlib
import pkgutil
from functools import cache
from importlib.metadata import entry_points
from typing import Protocol

from graphrewrite.graph import Graph
from graphrewrite.report import Mismatch
from graphrewrite.site import SdpaSite
from graphrewrite.vocabulary import Attention, V

DEFAULT_PASS = "fuse_quantized_sdpa"


class Pattern(Protocol):
    NAME: str

    def match(self, attention: Attention[V], graph: Graph[V]) -> SdpaSite[V] | Mismatch | None: ...


@cache
def load_patterns(passes: tuple[str, ...] = (DEFAULT_PASS,)) -> tuple[Pattern, ...]:
    """The patterns of these passes: those of this package by name, then those of other packages."""
    names = sorted(module.name for module in pkgutil.iter_modules(__path__) if not module.name.startswith("_"))
    own = [importlib.import_module(f"{__name__}.{name}") for name in names]
    others = [entry.load() for entry in sorted(entry_points(group="graphrewrite.patterns"), key=lambda e: e.name)]
    return tuple(pattern for pattern in (*own, *others) if getattr(pattern, "PASS", DEFAULT_PASS) in passes)
