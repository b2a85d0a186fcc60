"""What a reader of a graph format offers to everything that is written once for all formats."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Protocol

from graphrewrite.report import Mismatch
from graphrewrite.vocabulary import Attention, Concept, Dim, V


class Graph(Protocol[V]):
    """What a reader offers. Values are handles of the format's own; a value read twice is the same handle."""

    def attentions(self) -> Iterable[Attention[V] | Mismatch]:
        """Every attention core, in graph order; a `Mismatch` for one that the vocabulary cannot express."""

    def already_fused(self) -> int:
        """How many attentions are this project's own operator."""

    def concept(self, value: V) -> Concept[V] | None:
        """What produced `value`; None when it is an input, a constant, or an operation with no meaning here."""

    def shape(self, value: V) -> tuple[Dim, ...] | None:
        """The sizes of `value`, None when its rank is unknown."""

    def dtype(self, value: V) -> str | None:
        """The element type as numpy names it, None when unknown."""

    def scope(self, value: V) -> Hashable:
        """The graph, main or of a branch, in which `value` is made; None for an input."""

    def key(self, value: V) -> Hashable:
        """Equal for values that are the same computation of the same inputs, wherever it is written down.

        The only element of an integer tensor has the key of the tensor.
        """

    def number(self, value: V) -> float | None:
        """The only element of a constant; None for what is no constant or has more elements."""

    def users(self, value: V) -> Iterable[V]:
        """The results of the operations that read `value`."""

    def name(self, value: V) -> str:
        """The name by which a user finds the node that produced `value`."""
