"""What a rewrite found, and why it left the rest alone."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Generic, TypeVar

M = TypeVar("M")


@dataclass(frozen=True)
class Mismatch:
    """Why an attention core was not rewritten.

    code: stable and documented, for programs. message: a sentence, for people. nodes: the nodes it speaks of, the
    attention core first. pattern: the pattern that came nearest. remedy: what the user can do, where something can be.
    """

    code: str
    message: str
    nodes: tuple[str, ...]
    pattern: str | None = None
    remedy: str | None = None


@dataclass(frozen=True)
class SiteSummary:
    """One attention that is (or, in a dry run, would be) rewritten, in the reader's terms.

    updates: "key+value" when both cache writes became one UpdateQuantizedCache each, else "none".
    """

    name: str
    pattern: str
    layout: str
    query_heads: int | str
    kv_heads: int | str
    head_size: int | str
    capacity: int | str
    current_tokens: str
    updates: str
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Report:
    """Sites and refusals, each in graph order. `already_fused` counts attentions that are our own operator."""

    sites: tuple[SiteSummary, ...]
    refusals: tuple[Mismatch, ...]
    already_fused: int = 0

    @property
    def attention_cores(self) -> int:
        return len(self.sites) + len(self.refusals) + self.already_fused

    def summary(self) -> str:
        """One line: how many sites of how many attention cores."""
        if not self.attention_cores:
            return "no attention found in this model"
        fused = f", {self.already_fused} already fused" if self.already_fused else ""
        return f"{len(self.sites)} of {self.attention_cores} attention sites matched{fused}"

    def to_json(self, indent: int | None = 2) -> str:
        document = {"summary": self.summary(), "attention_cores": self.attention_cores, **asdict(self)}
        return json.dumps(document, indent=indent)

    def to_html(self) -> str:
        """One self-contained page."""
        from graphrewrite.render import report_html

        return report_html(self)

    def print(self) -> None:
        """Write the report to the terminal."""
        from graphrewrite.render import print_report

        print_report(self)


@dataclass(frozen=True)
class RewriteResult(Generic[M]):
    """The rewritten model, of the kind given, and the report. In a dry run the model is the one given."""

    model: M
    report: Report = field(repr=False)
