"""What the passes have in common, whatever they work on: options, and a report of every run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, cast

from graphrewrite.errors import InputError, RequirementNotMet
from graphrewrite.report import Mismatch, Report

CurrentTokens = Literal["exact", "quantized"]


class ReportingPass:
    """A pass that says what it found.

    Args:
        current_tokens: how the keys and values of the current tokens are read where the source reads them exactly:
            "exact" keeps that (the result equals the source), "quantized" reads them back from the cache (lossy).
        require: the least number of attentions that must be fused in the result of a run.

    Attributes:
        PASS: which patterns it tries, by the name of their pass.
        reports: the report of each run, in order. One pass object may run on several models, and a pass manager may
            run it several times on one.

    Raises:
        InputError: an argument out of range.
    """

    PASS = "fuse_quantized_sdpa"

    def __init__(self, *, current_tokens: CurrentTokens = "exact", require: int | None = None) -> None:
        if current_tokens not in ("exact", "quantized"):
            raise InputError(f'current_tokens: {current_tokens!r} is neither "exact" nor "quantized"')
        if require is not None and (isinstance(require, bool) or not isinstance(require, int) or require < 0):
            raise InputError(f"require: {require!r} is not a number of sites")
        self.current_tokens: CurrentTokens = current_tokens
        self.require = require
        self.reports: list[Report] = []

    @property
    def report(self) -> Report:
        """All runs as one report.

        Raises:
            InputError: the pass has not run.
        """
        if not self.reports:
            raise InputError(f"{type(self).__name__} has not run, so there is nothing to report")
        return joined(self.reports)

    def _record(self, report: Report) -> None:
        """Notes the report of a run that has decided everything and changed nothing yet."""
        check_requirement(report, self.require)
        self.reports.append(report)


def check_requirement(report: Report, require: int | None) -> None:
    """Raises RequirementNotMet when fewer than `require` attentions are fused."""
    fused = len(report.sites) + report.already_fused
    if require is not None and fused < require:
        raise RequirementNotMet(
            f"{require} fused attentions are required and {fused} found: {report.summary()}", report
        )


def joined(reports: Sequence[Report]) -> Report:
    """The report of several passes over one model: what all of them fused, and what none of them did.

    Of two refusals of one attention the one stays that names more nodes: its pass has followed the graph further.
    """
    if len(reports) == 1:
        return reports[0]
    sites = tuple(site for report in reports for site in report.sites)
    nearest: dict[str, Mismatch] = {}
    for refusal in (refusal for report in reports for refusal in report.refusals):
        other = nearest.get(refusal.nodes[0])
        if other is None or len(refusal.nodes) > len(other.nodes):
            nearest[refusal.nodes[0]] = refusal
    left = [nearest[refusal.nodes[0]] for refusal in reports[-1].refusals]
    fused = {site.name for site in sites}
    refusals = tuple(refusal for refusal in left if refusal.nodes[0] not in fused)
    return Report(sites, refusals, reports[0].already_fused)


def checked_names(names: object, known: Sequence[str]) -> tuple[str, ...]:
    """Returns the names of the passes to run, each once.

    Raises:
        InputError: not a sequence of known names, or an empty one.
    """
    if not isinstance(names, Sequence) or isinstance(names, str) or not names or any(n not in known for n in names):
        raise InputError(f"passes: {names!r} is not a non-empty sequence of names out of {', '.join(known)}")
    return tuple(dict.fromkeys(cast("Sequence[str]", names)))
