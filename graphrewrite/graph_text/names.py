"""Names that are counted in the order of a graph."""

from __future__ import annotations

import re
from collections.abc import Iterable

_ADDRESS = re.compile(r"\b0x[0-9a-fA-F]{6,}\b")
# Names of torch for open sizes, which torch.onnx passes on.
_SYMBOL = re.compile(r"\b(zuf|zf|s|u)\d+\b")


class Names:
    """Gives out names; none is given twice, and none that was `taken` before."""

    def __init__(self, taken: Iterable[str] = ()) -> None:
        self._taken = set(taken)
        self._counts: dict[str, int] = {}

    def new(self, base: str) -> str:
        """Returns `base`, or `base_1`, `base_2` and so on."""
        while True:
            count = self._counts.get(base, 0)
            self._counts[base] = count + 1
            name = f"{base}_{count}" if count else base
            if name not in self._taken:
                self._taken.add(name)
                return name


def stable(lines: Iterable[str]) -> str:
    """Joins lines, without addresses of memory and with torch's symbols counted in the order in which they appear."""
    text = _ADDRESS.sub("0x...", "\n".join(lines)) + "\n"
    numbers: dict[str, dict[str, int]] = {}

    def numbered(match: re.Match[str]) -> str:
        seen = numbers.setdefault(match[1], {})
        return f"{match[1]}{seen.setdefault(match[0], len(seen))}"

    return _SYMBOL.sub(numbered, text)
