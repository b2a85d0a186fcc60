"""A pytest plugin: the fixture `golden_graph` compares a graph with a file that is kept under review.

    def test_my_fusion(golden_graph):
        golden_graph(my_fusion(model))

The file is `golden/<test module>.<test>.txt` beside the test; `golden_graph(graph, "name")` takes `golden/name.txt`.
The ini option `golden_folder` names another folder. `pytest --update-golden` writes the files.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

UPDATE_OPTION = "--update-golden"
FOLDER_OPTION = "golden_folder"
MARKER = "golden"

GoldenGraph = Callable[..., None]
"""`golden_graph(graph, name=None)`."""

_LONGEST_DIFF = 200  # lines


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("graphrewrite")
    group.addoption(UPDATE_OPTION, action="store_true", help="write the golden graphs from what the tests produce")
    parser.addini(
        FOLDER_OPTION,
        "folder of the golden graphs, relative to that of the test file; {rootdir} stands for pytest's root folder",
        default="golden",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", f"{MARKER}: compares a graph with a golden file (set by the golden_graph fixture)"
    )
    if config.getoption(UPDATE_OPTION) and os.environ.get("CI"):
        raise pytest.UsageError(f"{UPDATE_OPTION} is for a person who reads the change; CI only compares")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "golden_graph" in getattr(item, "fixturenames", ()):
            item.add_marker(MARKER)


@pytest.fixture
def golden_graph(request: pytest.FixtureRequest) -> GoldenGraph:
    """`golden_graph(graph, name=None)` fails, and shows the difference, unless the graph's text is that of its file.

    graph: as for `graphrewrite.graph_text.graph_text`. name: the file's, without suffix; None takes the test's name,
    and is for one graph of a test.
    """
    config = request.config
    relative = config.getini(FOLDER_OPTION).format(rootdir=config.rootpath)
    folder = Path(os.path.normpath(request.path.parent / relative))
    update = bool(config.getoption(UPDATE_OPTION))
    compared: set[str] = set()

    def compare(graph: object, name: str | None = None) -> None:
        from graphrewrite.graph_text import graph_text

        chosen = _name_of(request.node, request.path) if name is None else name
        if chosen in compared:
            pytest.fail(
                f"golden_graph: {chosen!r} is compared twice in one test; give each graph a name", pytrace=False
            )
        compared.add(chosen)
        path = Path(os.path.normpath(folder / f"{chosen}.txt"))
        if folder not in path.parents:
            pytest.fail(f"golden_graph: {chosen!r} is not the name of a file in {folder}", pytrace=False)
        text = graph_text(graph)
        if update:
            _write(path, text)
            return
        problem = _problem(path, text, os.path.relpath(path, config.rootpath))
        if problem is not None:
            pytest.fail(f"{problem}\n{_hint(request.node)}", pytrace=False)

    return compare


def _name_of(item: pytest.Item, path: Path) -> str:
    """The test's own name as a file name: test_it[O1 mask] of test_fusion.py is test_fusion.test_it-O1-mask."""
    inside = item.nodeid.partition("::")[2].replace("::", ".")
    return re.sub(r"[^\w.-]+", "-", f"{path.stem}.{inside}").strip("-")


def _write(path: Path, text: str) -> None:
    if path.exists() and path.read_text(encoding="utf-8") == text:
        return  # an unchanged file keeps its time
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def _problem(path: Path, text: str, label: str) -> str | None:
    if not path.exists():
        return f"{label} does not exist, so there is nothing to compare this graph with."
    expected = path.read_text(encoding="utf-8")
    if text == expected:
        return None
    lines = list(
        difflib.unified_diff(
            expected.splitlines(), text.splitlines(), f"{label} (expected)", f"{label} (produced)", lineterm=""
        )
    )
    left_out = len(lines) - _LONGEST_DIFF
    if left_out > 0:
        lines[_LONGEST_DIFF:] = [f"... and {left_out} more lines"]
    return "\n".join([f"{label} differs.", *lines])


def _hint(item: pytest.Item) -> str:
    return f"If this is what is meant, write it with `pytest {UPDATE_OPTION} '{item.nodeid}'`, and read it."
