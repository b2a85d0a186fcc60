"""The text of MLIR modules."""

from __future__ import annotations

import re
from typing import Any

# Between parentheses: anything that is none, texts, and parentheses again, as deep as locations are nested.
_INSIDE = r"(?:[^()\"]|\"[^\"]*\")*"
for _ in range(4):
    _INSIDE = rf"(?:[^()\"]|\"[^\"]*\"|\({_INSIDE}\))*"
_LOCATION = re.compile(rf"\s*\bloc\({_INSIDE}\)")
_LOCATION_ALIAS = re.compile(r"^#loc\d*\s*=")
_VALUE = re.compile(r"%(\d+)\b")
_BLOB = re.compile(r"(dense(?:_resource)?)<(?:\"0x[0-9A-Fa-f]*\"|__[^>]*)>")
_RESOURCES = "{-#"


def operation_text(graph: Any) -> str:
    """The text of an operation, or of what has one, as a module has. Weights are left out."""
    operation = getattr(graph, "operation", graph)
    return mlir_text(operation.get_asm(enable_debug_info=False, large_elements_limit=16))


def mlir_text(text: str) -> str:
    """The text of a module without positions in source files and without the bytes of its weights.

    The numbered values of each function are counted from 0 in the order in which they appear.
    """
    lines: list[str] = []
    numbers: dict[str, int] = {}

    def numbered(match: re.Match[str]) -> str:
        return f"%{numbers.setdefault(match[1], len(numbers))}"

    for line in text.split(_RESOURCES, 1)[0].splitlines():
        if _LOCATION_ALIAS.match(line):
            continue
        if "func.func" in line:
            numbers.clear()
        plain = _BLOB.sub(r"\1<...>", _LOCATION.sub("", line)).rstrip()
        lines.append(_VALUE.sub(numbered, plain))
    return "\n".join(lines).strip("\n") + "\n"
