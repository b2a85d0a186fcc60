"""Passes for pipelines of your own.

    import onnx_ir as ir
    from graphrewrite.passes import FuseQuantizedSdpa

    fuse = FuseQuantizedSdpa()
    ir.passes.Sequential(fuse, ...)(model)
    fuse.report.print()

One pass in the form that each library's pipelines take:

| pass | works on | goes into |
|---|---|---|
| `FuseQuantizedSdpa` | `onnx_ir.Model` | `onnx_ir.passes.Sequential`, `PassManager` |
| `FuseQuantizedSdpaInProgram` | `torch.export.ExportedProgram` | a loop over passes, executorch's `transform` |
| `FuseQuantizedSdpaInGraphModule` | a functional `torch.fx.GraphModule` | the `PassManager` of `torch.fx.passes` |
| `SeparateCacheUpdate`, `SeparateCacheUpdateInProgram` | the same | the same; for float caches |
| `CompileBackend` | what `torch.compile` traces | `torch.compile(model, backend=CompileBackend())` |

`graphrewrite.rewrite` runs the same ones. All but those for `onnx_ir` need torch, imported when one is asked for.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from graphrewrite.fx.backend import CompileBackend
    from graphrewrite.fx.passes import (
        FuseQuantizedSdpaInGraphModule,
        FuseQuantizedSdpaInProgram,
        SeparateCacheUpdateInProgram,
    )
    from graphrewrite.passes.fuse_quantized_sdpa import FuseQuantizedSdpa, SeparateCacheUpdate

_EXPORTS = {
    "CompileBackend": "graphrewrite.fx.backend",
    "FuseQuantizedSdpa": "graphrewrite.passes.fuse_quantized_sdpa",
    "FuseQuantizedSdpaInGraphModule": "graphrewrite.fx.passes",
    "FuseQuantizedSdpaInProgram": "graphrewrite.fx.passes",
    "SeparateCacheUpdate": "graphrewrite.passes.fuse_quantized_sdpa",
    "SeparateCacheUpdateInProgram": "graphrewrite.fx.passes",
}

__all__ = [
    "CompileBackend",
    "FuseQuantizedSdpa",
    "FuseQuantizedSdpaInGraphModule",
    "FuseQuantizedSdpaInProgram",
    "SeparateCacheUpdate",
    "SeparateCacheUpdateInProgram",
]


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_EXPORTS[name]), name)
    globals()[name] = value
    return value
