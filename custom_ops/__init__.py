"""The kernel library of graphrewrite: one shared library that onnxruntime, torch and ctypes load.

`library_path()` is what `onnxruntime.SessionOptions.register_custom_ops_library` wants; `graphrewrite.custom_ops.capi`
binds the same library's C interface through ctypes.
"""

from __future__ import annotations

import sys
from importlib.resources import files
from pathlib import Path

from graphrewrite.errors import LibraryError

__all__ = ["library_path"]

_FILE_NAMES = {"win32": "graphrewrite_ops.dll", "darwin": "libgraphrewrite_ops.dylib"}


def library_path() -> Path:
    """Returns the path of the shared library that holds the kernels.

    Raises:
        LibraryError: the package was installed without the library, for example from a source tree put on the path.
    """
    name = _FILE_NAMES.get(sys.platform, "libgraphrewrite_ops.so")
    # In an editable installation the library lies in site-packages and not beside this file, so the package's
    # resources are asked and not `__file__`.
    path = Path(str(files(__name__).joinpath(name)))
    if not path.is_file():
        raise LibraryError(
            f"the kernel library {name} is not installed with graphrewrite.custom_ops (looked for {path}); "
            "install the package with pip so that it is built"
        )
    return path
