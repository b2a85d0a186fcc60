"""Writes the documentation of the operators, one page each, from what the kernel library declares.

python -m graphrewrite.custom_ops.documentation docs/operators
"""

from __future__ import annotations

import sys
from importlib.resources import files
from pathlib import Path

from jinja2 import Environment, StrictUndefined

from graphrewrite.custom_ops.functions.signature import DOMAIN
from graphrewrite.custom_ops.onnx_schema import onnx_schema
from graphrewrite.custom_ops.schema import operators

__all__ = ["pages"]


def pages() -> dict[str, str]:
    """The text of each page by file name."""
    environment = Environment(undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, autoescape=False)
    template = environment.from_string(files(__package__).joinpath("operator.md.j2").read_text(encoding="utf-8"))
    texts = {
        f"{schema.name}.md": template.render(operator=schema, schema=onnx_schema(schema), domain=DOMAIN)
        for schema in operators().values()
    }
    index = environment.from_string(files(__package__).joinpath("operators.md.j2").read_text(encoding="utf-8"))
    return {"README.md": index.render(operators=list(operators().values()), domain=DOMAIN), **texts}


def main(folder: Path) -> None:
    """Writes the pages into `folder`, and removes those of operators that are no more."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*.md"):
        if old.name not in pages():
            old.unlink()
    for name, text in pages().items():
        (folder / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
