"""Writing files so that a reader never meets a half-written one: beside the target, then renamed over it."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, cast

import onnx
import onnx_ir as ir

from graphrewrite.errors import InputError
from graphrewrite.models import LoadedModel, is_exported_program

if TYPE_CHECKING:
    from torch.export import ExportedProgram

EXTERNAL_DATA_FROM = 128 << 20
"""Weights of this many bytes and more go to a second file, ``NAME.onnx.data``, which a runtime maps into memory."""

# Tensors of this many bytes and less stay in the model: shape inference needs the small ones (axes, shapes).
_INLINE_UP_TO = 1024


def check_output(path: Path, source: Path | None = None, *, overwrite_input: bool = False) -> None:
    """Checks that a file can be written at `path`, before the work that makes its content.

    Args:
        path: the file to be written.
        source: the file the content is made from.
        overwrite_input: allows `path` to be `source`.

    Raises:
        InputError: the folder is missing or not writable, `path` is a folder, or `path` is `source`.
    """
    folder = path.parent
    if not folder.is_dir():
        raise InputError(f"{path}: the folder {folder} does not exist; create it first")
    if path.is_dir():
        raise InputError(f"{path} is a folder; give the name of a file in it")
    if source is not None and not overwrite_input and path.exists() and path.samefile(source):
        raise InputError(f"{path} is the input itself; give another name for the output")
    if not os.access(folder, os.W_OK):
        raise InputError(f"{path}: no permission to write in {folder}")


def save(
    model: LoadedModel,
    path: str | os.PathLike[str],
    *,
    source: str | os.PathLike[str] | None = None,
    overwrite_input: bool = False,
    external_data_from: int = EXTERNAL_DATA_FROM,
) -> None:
    """Writes a model whole or not at all.

    Args:
        model: an ONNX model for a ``.onnx`` file, an ExportedProgram for a ``.pt2`` file. It is left as it was.
        path: the file to write. An older file there is replaced.
        source: the file the model was read from; it is not overwritten unless `overwrite_input`.
        external_data_from: total bytes of an ONNX model's weights from which they go to ``NAME.data`` beside it.

    Raises:
        InputError: the suffix does not fit the model, as `check_output`, the system refuses the file, or the weights
            file would replace one that the model still reads from.
    """
    target = Path(path)
    program = is_exported_program(model)
    suffix = ".pt2" if program else ".onnx"
    if target.suffix != suffix:
        raise InputError(f"{target}: the model is written as a {suffix} file; give a name that ends so")
    check_output(target, None if source is None else Path(source), overwrite_input=overwrite_input)
    if program:
        import torch

        with _staging(target) as folder:
            torch.export.save(cast("ExportedProgram", model), folder / target.name)
            os.replace(folder / target.name, target)
    else:
        onnx_model = ir.from_proto(model) if isinstance(model, onnx.ModelProto) else cast("ir.Model", model)
        _save_onnx(onnx_model, target, overwrite_input, external_data_from)


def _save_onnx(model: ir.Model, target: Path, overwrite_input: bool, external_data_from: int) -> None:
    tensors = list(initializer_tensors(model))
    separate = sum(tensor.nbytes for tensor in tensors) >= external_data_from
    data = target.with_name(f"{target.name}.data")
    if separate and not overwrite_input:
        read = {Path(tensor.path).resolve() for tensor in tensors if isinstance(tensor, ir.ExternalTensor)}
        if data.resolve() in read:
            raise InputError(f"{data} holds weights of the input; give another name for the output")
    with _staging(target) as folder:
        # Without `external_data`, weights that lie in a file now would still be looked for there.
        threshold = _INLINE_UP_TO if separate else sys.maxsize
        ir.save(model, folder / target.name, external_data=data.name, size_threshold_bytes=threshold)
        if separate:
            os.replace(folder / data.name, data)
        os.replace(folder / target.name, target)


def initializer_tensors(model: ir.Model) -> Iterator[ir.TensorProtocol]:
    """Yields the weights of a model, those in the bodies of If and Loop too."""
    for graph in model.graphs():
        for value in graph.initializers.values():
            if value.const_value is not None:
                yield value.const_value


def save_text(text: str, path: str | os.PathLike[str]) -> None:
    """Writes a text file in UTF-8, whole or not at all.

    Raises:
        InputError: as `check_output`, or the system refuses the file.
    """
    target = Path(path)
    check_output(target)
    with _staging(target) as folder:
        (folder / target.name).write_text(text, encoding="utf-8")
        os.replace(folder / target.name, target)


@contextmanager
def _staging(target: Path) -> Iterator[Path]:
    """A folder beside the target, so that a rename stays within one file system; gone afterwards, whatever happens."""
    folder: Path | None = None
    try:
        folder = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
        yield folder
    except OSError as error:
        raise InputError(f"{target} cannot be written: {error.strerror or error}") from error
    finally:
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
