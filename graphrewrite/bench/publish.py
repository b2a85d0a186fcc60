"""Figures in a Markdown page, between marks that a later run finds again."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from graphrewrite.bench.tables import Grid, markdown
from graphrewrite.errors import InputError
from graphrewrite.files import check_output, save_text

BEGIN, END = "<!-- figures: {key} -->", "<!-- end of figures: {key} -->"


def check(path: Path) -> None:
    """Raises InputError unless a page can be written there."""
    if path.suffix != ".md":
        raise InputError(f"{path}: unknown suffix {path.suffix!r}; the figures go to a .md file")
    check_output(path)


def publish(path: Path, key: str, introduction: str, grids: Sequence[Grid], notes: Sequence[str]) -> None:
    """Writes figures to a page: in the place of an earlier run of the same key, else at the end; or to a new page.

    Raises:
        InputError: as `check`, or the page has a begin of this key without an end.
    """
    check(path)
    begin, end = BEGIN.format(key=key), END.format(key=key)
    parts = [begin, introduction + "\n", *(markdown(grid) for grid in grids)]
    if notes:
        parts.append("\n".join(f"- {note}" for note in notes) + "\n")
    section = "\n".join([*parts, end])
    page = path.read_text(encoding="utf-8") if path.exists() else ""
    if begin not in page:
        save_text(f"{page}\n{section}\n" if page else f"{section}\n", path)
        return
    before, _, rest = page.partition(begin)
    _, found, after = rest.partition(end)
    if not found:
        raise InputError(f"{path} has {begin} and not {end}; it is left as it is")
    save_text(f"{before}{section}{after}", path)
