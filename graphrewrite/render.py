"""A report for people: as terminal text and as one self-contained HTML page. (Its JSON form is `Report.to_json`.)

A decoder has the same attention in every layer, so the terminal shows equal sites once with their number; the page
lists each.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich.console import Console, Group, RenderableType
from rich.text import Text

from graphrewrite.report import Mismatch, Report, SiteSummary

if TYPE_CHECKING:
    from jinja2 import Environment

SITE_COLUMNS = (
    ("pattern", "Pattern"),
    ("query_heads", "Query heads"),
    ("kv_heads", "KV heads"),
    ("head_size", "Head size"),
    ("capacity", "Capacity"),
    ("layout", "Layout"),
    ("current_tokens", "Current tokens"),
    ("updates", "Updates"),
)
"""Fields of a site and their headings, in the order of the page's table."""


def print_report(report: Report, console: Console | None = None) -> None:
    """Writes the report to a console, by default to standard output."""
    # Left to the terminal to wrap: what is piped on keeps its lines.
    (console or Console()).print(report_view(report), soft_wrap=True)


def report_view(report: Report) -> RenderableType:
    """Returns the report as something rich can print."""
    parts: list[RenderableType] = []
    parts.extend(_sites(report.sites))
    parts.extend(Text(f"note: {note}") for note in dict.fromkeys(note for site in report.sites for note in site.notes))
    parts.extend(_refusals(report.refusals))
    parts.append(Text(report.summary(), style="bold"))
    return Group(*parts)


def report_html(report: Report) -> str:
    """Returns the report as one HTML page that refers to no other file."""
    template = _environment().get_template("report.html.j2")
    return template.render(report=report, columns=SITE_COLUMNS)


def _sites(sites: tuple[SiteSummary, ...]) -> Iterator[Text]:
    groups: dict[tuple[str, ...], list[SiteSummary]] = defaultdict(list)
    for site in sites:
        groups[tuple(str(getattr(site, field)) for field, _ in SITE_COLUMNS)].append(site)
    for members in groups.values():
        site = members[0]
        yield Text.assemble(
            ("matched ", "green"),
            (f"{len(members)} x {site.pattern}", "bold"),
            f"  {_span([member.name for member in members])}\n"
            f"  {site.query_heads} query heads, {site.kv_heads} KV heads of size {site.head_size}, capacity "
            f"{site.capacity}, {site.layout}; current tokens {site.current_tokens}; fused updates: {site.updates}",
        )


def _refusals(refusals: tuple[Mismatch, ...]) -> Iterator[RenderableType]:
    """Yields a paragraph for each kind of refusal: the first one's words, and how many more there are like it."""
    groups: dict[tuple[str, str | None, str | None], list[Mismatch]] = defaultdict(list)
    for refusal in refusals:
        groups[refusal.code, refusal.pattern, refusal.remedy].append(refusal)
    for (code, pattern, remedy), members in groups.items():
        first = members[0]
        text = Text.assemble(("not rewritten ", "yellow"), (f"[{code}] ", "bold"), first.message)
        for label, value in (
            ("nodes", ", ".join(first.nodes)),
            ("nearest pattern", pattern),
            ("remedy", remedy),
            ("likewise", _span([", ".join(member.nodes[:1]) for member in members[1:]]) if members[1:] else None),
        ):
            if value:
                text.append(f"\n  {label}: {value}")
        if len(members) > 2:
            text.append(f" ({len(members) - 1} more)")
        yield text


def _span(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} .. {names[-1]}"


def _environment() -> Environment:
    import jinja2

    return jinja2.Environment(
        loader=jinja2.PackageLoader("graphrewrite"), autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True
    )
