"""The kinds of model the public functions take, and how each is read."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, Union

import onnx
import onnx_ir as ir

from graphrewrite.errors import InputError, reason
from graphrewrite.external_data import check_external_data, external_tensors

if TYPE_CHECKING:
    from torch.export import ExportedProgram

ModelLike: TypeAlias = Union["ExportedProgram", onnx.ModelProto, ir.Model, str, "os.PathLike[str]"]
LoadedModel: TypeAlias = Union["ExportedProgram", onnx.ModelProto, ir.Model]

SUFFIXES = (".onnx", ".pt2")


def load(model: ModelLike) -> LoadedModel:
    """The model itself, read when a path is given: an `onnx_ir.Model` from .onnx, an ExportedProgram from .pt2.

    Raises InputError when the file is missing, is of neither kind, or cannot be read; or the object is no model.
    """
    if isinstance(model, (str, os.PathLike)):
        return _load_file(Path(model))
    if isinstance(model, (onnx.ModelProto, ir.Model)) or is_exported_program(model):
        return model
    raise InputError(
        f"a {type(model).__module__}.{type(model).__qualname__} is not a model: give a torch.export.ExportedProgram, "
        "an onnx.ModelProto, an onnx_ir.Model, or the path of a .onnx or .pt2 file"
    )


def is_exported_program(model: object) -> bool:
    """Whether `model` is a torch.export.ExportedProgram, found out without importing torch."""
    return any(
        base.__qualname__ == "ExportedProgram" and base.__module__.startswith("torch.export")
        for base in type(model).__mro__
    )


def check_model_path(path: Path) -> None:
    """Raises InputError unless `path` is a file that exists and has the suffix of a model."""
    if path.suffix not in SUFFIXES:
        raise InputError(f"{path}: unknown suffix {path.suffix!r}; give a .onnx or a .pt2 file")
    check_is_file(path)


def check_is_file(path: Path) -> None:
    """Raises InputError unless `path` is a file that exists."""
    try:
        exists, is_file = path.exists(), path.is_file()
    except (OSError, ValueError) as error:  # a name longer than the system allows, a NUL in it, a folder closed to us
        raise InputError(f"{path}: {getattr(error, 'strerror', None) or error}") from error
    if not exists:
        raise InputError(f"{path}: no such file")
    if not is_file:
        raise InputError(f"{path}: not a file")


def _load_file(path: Path) -> LoadedModel:
    check_model_path(path)
    return load_onnx(path) if path.suffix == ".onnx" else load_exported_program(path)


def load_onnx(path: Path) -> ir.Model:
    """Read an ONNX file; external data is checked to be there and later mapped, not read."""
    try:
        model = ir.load(path)
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror or error}") from error
    except Exception as error:  # protobuf and onnx_ir raise many types for a file that is not a model
        raise InputError(f"{path}: not an ONNX model ({reason(error)})") from error
    if not model.graph.outputs:
        raise InputError(f"{path}: not an ONNX model (its graph has no outputs)")
    for tensor in external_tensors(model):
        tensor.base_dir = os.path.dirname(path)  # onnx_ir leaves out those in functions
    check_external_data(model, str(path), path.parent)
    return model


def load_exported_program(path: Path) -> ExportedProgram:
    """Read a .pt2 file, with the operators it may name defined."""
    try:
        import torch
    except ImportError as error:
        raise InputError(f"{path}: reading a .pt2 file needs torch; install graphrewrite[torch]") from error
    import graphrewrite.custom_ops.torch_ops  # noqa: F401  (a rewritten program names torch.ops.graphrewrite)
    from graphrewrite import source_ops

    source_ops.register()
    try:
        program: Any = torch.export.load(path)
    except Exception as error:  # torch raises many types for a file that is not a program
        raise InputError(f"{path}: not a torch.export program ({reason(error)})") from error
    return program  # type: ignore[no-any-return]
