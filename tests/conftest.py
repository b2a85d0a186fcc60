"""Fixtures that every test may use: `golden`, which compares text with a file that is kept under review."""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable
from pathlib import Path

import pytest

pytest_plugins = ["pytester"]

GOLDEN_FOLDER = Path(__file__).parent / "golden"
UPDATE_OPTION = "--update-golden"
UPDATE_COMMAND = f"`make golden` (pytest -m golden {UPDATE_OPTION})"

Golden = Callable[[str, str], None]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(UPDATE_OPTION, action="store_true", help="write tests/golden/*.txt from what the tests produce")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption(UPDATE_OPTION) and os.environ.get("CI"):
        raise pytest.UsageError(f"{UPDATE_OPTION} is for a person who reads the change; CI only compares")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "golden" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.golden)


def compare_with_golden(name: str, text: str, folder: Path, *, update: bool) -> None:
    """Fail unless `text` is what `folder/name.txt` holds, or write it there when `update` is set.

    Line ends at the end of the text are not compared: every file ends in exactly one.
    """
    path = folder / f"{name}.txt"
    actual = text.rstrip("\n") + "\n"
    if update:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(actual, encoding="utf-8")
        return
    label = f"golden/{name}.txt"
    if not path.exists():
        pytest.fail(f"{label} does not exist. Write it with {UPDATE_COMMAND} and read it.", pytrace=False)
    expected = path.read_text(encoding="utf-8")
    if actual != expected:
        lines = difflib.unified_diff(
            expected.splitlines(), actual.splitlines(), f"{label} (expected)", f"{label} (produced)", lineterm=""
        )
        hint = f"If the change is meant, write it with {UPDATE_COMMAND}."
        pytest.fail("\n".join([f"{label} differs.", *lines, hint]), pytrace=False)


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Golden:
    """`golden(name, text)` compares `text` with tests/golden/<name>.txt and shows the difference when it fails."""
    update = bool(request.config.getoption(UPDATE_OPTION))

    def compare(name: str, text: str) -> None:
        compare_with_golden(name, text, GOLDEN_FOLDER, update=update)

    return compare
