"""The text of a graph, under the names that the tests of both formats use."""

from __future__ import annotations

from graphrewrite.graph_text import graph_text as fx_text
from graphrewrite.graph_text import graph_text as onnx_text

__all__ = ["fx_text", "onnx_text"]
