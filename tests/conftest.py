"""Fixtures that every test may use. `golden_graph` comes from the package's own pytest plugin."""

from __future__ import annotations

from collections.abc import Callable

import pytest

pytest_plugins = ["pytester"]


@pytest.fixture
def golden(golden_graph: Callable[..., None]) -> Callable[[str, object], None]:
    """`golden(name, graph)` compares a graph, or its text, with tests/golden/<name>.txt."""
    return lambda name, graph: golden_graph(graph, name)
