"""graphrewrite: attention over a quantized KV cache, read in place.

Finds, in exported graphs (torch.export programs and ONNX models), attention that reads a KV cache through a full
dequantized copy, and replaces it with fused operators that an onnxruntime custom-op library runs.

    import graphrewrite as gr

    result = gr.rewrite("decoder.onnx")          # or an ExportedProgram, a ModelProto, an onnx_ir.Model
    print(result.report.summary())
    decoder = gr.Decoder(gr.session(result.model))
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from graphrewrite.decoder import Decoder
    from graphrewrite.errors import GraphRewriteError, InputError, KernelError, LibraryError, RequirementNotMet
    from graphrewrite.export import export_onnx
    from graphrewrite.files import save
    from graphrewrite.report import Mismatch, Report, RewriteResult
    from graphrewrite.rewriting import explain, rewrite
    from graphrewrite.sessions import ops_library_path, session
    from graphrewrite.verification import Verification, verify

__version__ = "0.1.0"

# Imported on first use: the command line starts fast, and nothing needs torch before an ExportedProgram is at hand.
_EXPORTS = {
    "Decoder": "decoder",
    "GraphRewriteError": "errors",
    "InputError": "errors",
    "KernelError": "errors",
    "LibraryError": "errors",
    "Mismatch": "report",
    "Report": "report",
    "RequirementNotMet": "errors",
    "RewriteResult": "report",
    "Verification": "verification",
    "explain": "rewriting",
    "export_onnx": "export",
    "ops_library_path": "sessions",
    "rewrite": "rewriting",
    "save": "files",
    "session": "sessions",
    "verify": "verification",
}

__all__ = [
    "Decoder",
    "GraphRewriteError",
    "InputError",
    "KernelError",
    "LibraryError",
    "Mismatch",
    "Report",
    "RequirementNotMet",
    "RewriteResult",
    "Verification",
    "explain",
    "export_onnx",
    "ops_library_path",
    "rewrite",
    "save",
    "session",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_EXPORTS[name]}"), name)
    globals()[name] = value
    return value
