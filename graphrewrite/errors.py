"""Exceptions graphrewrite raises. An ordinary non-match is never an exception: it is a `Mismatch` in the report."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from graphrewrite.report import Report

_LONGEST_REASON = 200  # characters; some errors print the whole model


class GraphRewriteError(Exception):
    """Base of every error raised on purpose."""


class InputError(GraphRewriteError):
    """A bad argument, file, model or tensor. The message says what, where and which values, and what to do next."""


class RequirementNotMet(GraphRewriteError):
    """Fewer sites were rewritten than `require` asked for. Nothing was changed; `report` says why."""

    def __init__(self, message: str, report: Report) -> None:
        super().__init__(message)
        self.report = report


class KernelError(GraphRewriteError):
    """An operator of the kernel library refused its arguments. Nothing was written."""


class LibraryError(GraphRewriteError):
    """The kernel library is missing or cannot be loaded."""


def reason(error: BaseException) -> str:
    """One line of what went wrong first: an outer error often says no more than where."""
    # onnx_ir 1.1 raises a TypeError of its own while it says where a tensor's error is; its context is that error.
    while inner := error.__cause__ or (error.__context__ if isinstance(error, TypeError) else None):
        error = inner
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:_LONGEST_REASON]}" if lines else type(error).__name__
